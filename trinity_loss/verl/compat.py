"""The points of verl, and the private names of torch, that this package leans on, each with the file that does.

Imports nothing of verl itself: ``policy_loss_config.py`` imports this while a worker starts.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trinity_loss.errors import ConfigError

TESTED = ("0.9.0", "0.9.1")


@dataclass(frozen=True)
class Point:
    """Something of verl or torch that has to be where it is and as it is.

    Attributes:
        where: ``module:name``, the name with dots.
        used_by: Our file, below ``trinity_loss/``.
        has: Parameters of a function, in this order; fields of a dataclass; attributes of anything else.
        says: What stands in the source of a function: keys that it sets.
        needs: A module besides verl without which it cannot be imported, and is not used.
    """

    where: str
    used_by: str
    has: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    needs: str | None = None

    @property
    def owner(self) -> str:
        """Whose it is: ``verl`` or ``torch``."""
        return self.where.partition(":")[0].partition(".")[0]

    def problem(self) -> str | None:
        """What moved, in a sentence; None if nothing did."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return None
        module, _, name = self.where.partition(":")
        found: Any
        try:
            found = importlib.import_module(module)
            for part in filter(None, name.split(".")):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{self.owner} has no {self.where} any more, which trinity_loss/{self.used_by} uses: {error}"
        unsaid = [text for text in self.says if text not in inspect.getsource(found)]
        if unsaid:
            return (
                f"{self.owner}'s {self.where} says nothing of {', '.join(unsaid)} any more, which "
                f"trinity_loss/{self.used_by} relies on"
            )
        names = _names_of(found, self.has)
        missing = [wanted for wanted in self.has if wanted not in names]
        moved = not missing and inspect.isroutine(found) and [n for n in names if n in self.has] != list(self.has)
        if not (missing or moved):
            return None
        what = f"has no {', '.join(missing)}" if missing else f"takes its arguments as {', '.join(names)}"
        return f"{self.owner}'s {self.where} {what}; trinity_loss/{self.used_by} expects {', '.join(self.has)}"


def _names_of(found: Any, wanted: tuple[str, ...]) -> list[str]:
    if inspect.isroutine(found):
        return list(inspect.signature(found).parameters)
    if is_dataclass(found):
        return [field.name for field in fields(found)]
    return [name for name in wanted if hasattr(found, name)]


_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine.base:BaseEngine"
_FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_DECORATOR = "verl.single_controller.base.decorator"
_DISTILLATION = "verl.trainer.distillation"
_PPO = "verl.trainer.ppo"
_TRAINING_WORKER = f"{_WORKERS}:TrainingWorker"
_JAGGED = "torch.nested._internal.nested_tensor:NestedTensor"
POINTS = (
    # What a jagged tensor holds, which its own methods take 8 to 100 µs to say.
    Point(f"{_JAGGED}.__init__", "jagged.py", says=("self._values = values", "self._offsets = offsets")),
    Point(_JAGGED, "jagged.py", ("values", "offsets", "lengths", "contiguous")),
    # How the loss is selected, and exchanged in the worker.
    Point(f"{_WORKERS}:ActorRolloutRefWorker", "verl/worker.py", ("actor_worker_cls", "init_model")),
    Point(f"{_WORKERS}:ActorRolloutRefWorker.update_weights", "verl/steps.py", ("self", "global_steps")),
    Point(f"{_TRAINING_WORKER}.load_checkpoint", "verl/worker.py", ("self", "local_path")),
    Point(f"{_TRAINING_WORKER}.set_loss_fn", "verl/worker.py", ("self", "loss_fn")),
    Point(f"{_TRAINING_WORKER}.train_batch", "verl/worker.py", ("self", "data")),
    Point(f"{_TRAINING_WORKER}.train_mini_batch", "verl/worker.py", ("self", "data")),
    Point("verl.workers.utils.losses:ppo_loss", "verl/choice.py", ("config", "model_output", "data", "dp_group")),
    Point(
        f"{_DISTILLATION}.losses:distillation_ppo_loss",
        "verl/choice.py",
        ("config", "distillation_config", "student_logits", "data_format"),
    ),
    # What the engines make of the logits, and call the loss with there.
    Point(
        f"{_DISTILLATION}.fsdp.losses:compute_forward_kl_topk",
        "distillation.py",
        says=('"distillation_losses":', '"student_mass":', '"teacher_mass":', '"overlap_count":'),
    ),
    Point(f"{_FSDP}.prepare_model_outputs", "verl/distilling.py", says=("logits_processor_func(student_logits=",)),
    Point(f"{_DECORATOR}:register", "verl/worker.py", ("dispatch_mode", "execute_mode", "blocking")),
    Point(f"{_DECORATOR}:Dispatch", "verl/worker.py", ("ONE_TO_ALL",)),
    Point(f"{_DECORATOR}:make_nd_compute_dataproto_dispatch_fn", "verl/worker.py", ("mesh_name",)),
    Point(
        _ENGINE,
        "verl/worker.py",
        ("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_size", "is_mp_src_rank_with_outputs"),
    ),
    Point(_ENGINE, "verl/harness/rank.py", ("forward_backward_batch", "optimizer_step")),
    # What the audit calls in the worker's place, and reads of an engine.
    Point(
        f"{_TRAINING_WORKER}._postprocess_output",
        "verl/audit.py",
        ("self", "output", "global_token_num", "delta_time", "forward_only", "images_seqlens"),
    ),
    Point(
        f"{_TRAINING_WORKER}.train_batch",
        "verl/audit_passes.py",
        says=("use_remove_padding=", "use_dynamic_bsz=", "max_token_len_per_gpu=", "micro_batch_size_per_gpu="),
    ),
    Point(f"{_ENGINE}.forward_backward_batch", "verl/audit.py", ("self", "data", "loss_function", "forward_only")),
    Point(_ENGINE, "verl/audit.py", ("train_mode", "optimizer_zero_grad")),
    Point(f"{_FSDP}._build_fsdp_module", "verl/audit.py", says=("self._autocast_dtype = param_dtype",)),
    Point("verl.utils.tensordict_utils:index_select_tensor_dict", "verl/audit_passes.py", ("batch", "indices")),
    Point("verl.utils.metric:reduce_metrics", "verl/audit.py", ("metrics",)),
    Point(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        "verl/gradients.py",
        says=("self.param_index_map", "self.buckets", "self.data_parallel_group"),
        needs="megatron",
    ),
    # What the trainers and the engines write into a micro-batch.
    Point(f"{_PPO}.ray_trainer:RayPPOTrainer._update_actor", "totals.py", says=("global_batch_size=",)),
    Point(f"{_PPO}.v1.trainer_base:PPOTrainer._update_actor", "totals.py", says=('"global_batch_size":',)),
    Point(f"{_PPO}.padding_utils:upsample_batch_to_divisible_size", "totals.py", says=('f"pad{', '["uid"] = pad_uid')),
    Point(f"{_FSDP}.forward_backward_batch", "totals.py", says=("batch_num_tokens=", "dp_size=")),
    Point(
        f"{_MEGATRON}.forward_backward_batch",
        "totals.py",
        says=("batch_num_tokens=", "dp_size=", "num_micro_batch="),
        needs="megatron",
    ),
    Point(
        f"{_MEGATRON}.postprocess_micro_batch_func",
        "loss.py",
        says=('loss * data["num_micro_batch"]',),
        needs="megatron",
    ),
    Point(f"{_FSDP}.prepare_model_inputs", "verl/harness/rank.py", ("self", "micro_batch")),
    Point("verl.utils.config:omega_conf_to_dataclass", "verl/composed.py", ("config",)),
    # What policy_options.py reads.
    Point(
        "verl.workers.config:ActorConfig",
        "verl/policy_options.py",
        (
            *("policy_loss", "loss_agg_mode", "loss_scale_factor", "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
            *("clip_ratio_c", "tau_pos", "tau_neg", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
        ),
    ),
    Point(
        "verl.workers.config:PolicyLossConfig",
        "verl/policy_options.py",
        ("loss_mode", "dro_beta", "rollout_correction"),
    ),
    Point(
        "verl.trainer.config:RolloutCorrectionConfig",
        "verl/policy_options.py",
        (
            *("loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
            *("rollout_rs", "rollout_rs_threshold"),
        ),
    ),
    # How metrics travel, and how data does.
    Point("verl.utils.metric:Metric.__init__", "metric_set.py", ("self", "aggregation", "value")),
    Point("verl.utils.metric:Metric.aggregate_dp", "verl/metric_reduction.py", ("metric_lists",)),
    Point("verl.utils.metric:AggregationType", "metric_set.py", ("SUM", "MEAN", "MIN", "MAX")),
    Point("verl.utils.metric:reduce_metrics", "verl/harness/rank.py", ("metrics",)),
    Point("verl.utils.tensordict_utils:get", "verl/worker.py", ("tensordict", "key", "default")),
    Point("verl.utils.tensordict_utils:assign_non_tensor", "verl/counting.py", ("tensor_dict", "kwargs")),
    Point("verl.utils.device:get_device_id", "verl/counting.py"),
    Point("verl.utils.seqlen_balancing:rearrange_micro_batches", "invariance/cuts.py", ("batch", "max_token_len")),
    Point(f"{_PPO}.core_algos:POLICY_LOSS_REGISTRY", "losses_by_name.py"),
    # verl on a CPU.
    Point("verl.plugin.platform:PlatformRegistry.register", "verl/cpu/platform.py", ("platform",)),
    Point(
        "verl.workers.engine:EngineRegistry.register", "verl/cpu/fsdp_engine.py", ("model_type", "backend", "device")
    ),
    Point("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "verl/cpu/rollout.py", ("name", "loader")),
    Point("verl.workers.rollout.base:_ROLLOUT_REGISTRY", "verl/cpu/rollout.py", ("__setitem__",)),
    Point(f"{_FSDP}._build_fsdp_module", "verl/cpu/fsdp_engine.py", ("self", "module")),
    Point("verl.workers.config:McoreEngineConfig", "verl/cpu/megatron_config.py", ("dtype", "vanilla_mbridge")),
    Point(f"{_PPO}.v1.replay_buffer:ReplayBuffer._materialize_batch", "verl/cpu/sampler.py", ("self", "partition_id")),
)


def problems() -> Iterator[str]:
    """A sentence for each point that is no longer what it was."""
    return filter(None, (point.problem() for point in POINTS))


def installed(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed, by name."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def check_version() -> None:
    """Raises :class:`ConfigError` where verl is too old."""
    verls = installed("verl").get("verl", "")
    found = re.match(r"(\d+)\.(\d+)", verls)
    if found and tuple(map(int, found.groups())) < (0, 9):
        raise ConfigError(f"verl {verls} is too old: trinity_loss needs verl 0.9.0 or later")


def warn_if_untested() -> None:
    """Says beside which verl this package was tested, if that is not the one that is installed."""
    verls = installed("verl").get("verl", "of no known version")
    if verls not in TESTED:
        warnings.warn(
            f"trinity_loss was tested beside verl {' and '.join(TESTED)}; this is verl {verls}. "
            "`python -m trinity_loss.verl.compat` says whether what it leans on has moved",
            stacklevel=2,
        )


if __name__ == "__main__":
    moved = list(problems())
    print("\n".join(moved) or f"all {len(POINTS)} points are where they were")
    raise SystemExit(bool(moved))
