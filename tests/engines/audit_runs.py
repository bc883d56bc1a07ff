"""Trains a few steps in verl's real engines with planted faults, audits some, and returns what was found.

Run as ``python -m audit_runs FOLDER`` by ``launch``; the faults are by name, since what is planted lives in the ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity_loss.verl.harness.engine_case import EngineCase, load


@dataclass(frozen=True)
class AuditRun:
    """A run of some steps on one mini-batch, cut as the case says.

    Attributes:
        case: Engine, layout and loss.
        fault: Of :data:`FAULTS`; empty: none.
        steps: How many.
        audited: Which of them.
        lr: Learning rate.
        bound: Overrides of verl's configuration that bind the loss in place of the case's.
        trinity: ``stock`` or ``scaled``: Trinity-RFT's PPO loss, in the training worker that its plugin makes.
        shadow: A ``loss_mode`` and ``loss_agg_mode`` of verl's loss, which trains in place of the case's, or a loss.
    """

    case: EngineCase
    fault: str = ""
    steps: int = 1
    audited: tuple[int, ...] = (1,)
    lr: float = 0.0
    shadow: Any = None
    bound: tuple[str, ...] = ()
    trinity: str = ""


@dataclass(frozen=True)
class AuditResult:
    """What a run left.

    Attributes:
        reports: As JSON, by step.
        texts: The Markdown of each.
        metrics: Of each step, without times and memory.
        state: Digest of weights, optimizer, buffers and random states after the last step, per rank.
        warnings: Of rank 0, those that tell of an audit.
    """

    reports: dict[int, dict[str, Any]]
    texts: dict[int, str]
    metrics: list[dict[str, float]]
    state: list[str]
    warnings: list[str] = field(default_factory=list)


def digest(worker: Any) -> str:
    """Of everything that a step depends on."""
    engine = worker.engine
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    content = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            content.update(local.detach().float().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, np.ndarray):
            content.update(value.tobytes())
        elif isinstance(value, torch.Generator):
            add(value.get_state())
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            content.update(repr(value).encode())

    for module in modules:
        add(dict(module.named_parameters()))
        add(dict(module.named_buffers()))
        add([p.grad for p in module.parameters() if p.grad is not None])
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    add([getattr(optimizer, "optimizer", optimizer).state_dict() for optimizer in optimizers])
    add(engine.lr_scheduler.state_dict())
    add([torch.get_rng_state(), random.getstate(), np.random.get_state()])
    parallel = sys.modules.get("megatron.core.tensor_parallel.random")
    add(parallel.get_cuda_rng_tracker().get_states() if parallel else {})
    add(worker.profiled)
    return content.hexdigest()


def run_rank(runs: list[AuditRun], engine: str, model: str, store: str, folder: str) -> list[AuditResult]:
    """One rank of runs that share an engine; each starts from the same weights."""
    import warnings

    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu

    from trinity_loss.losses_by_name import bind_loss
    from trinity_loss.verl.audit_settings import AuditSettings
    from trinity_loss.verl.harness.rank import cut

    global trinity_audit, trinity_rft
    if runs[0].trinity:
        from trinity_loss import trinity_audit, trinity_rft
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    harness = importlib.import_module(f"trinity_loss.verl.harness.{engine}")
    fault = FAULTS[runs[0].fault]
    original = harness.worker_config

    def worker_config(case: EngineCase, path: str) -> Any:
        config = original(case, path)
        object.__setattr__(config.optimizer_config, "lr", runs[0].lr)
        fault.configure(config)
        return config

    if runs[0].trinity:
        from trinity_loss.verl import worker as workers

        workers.make_training_worker = trinity_rft._make_training_worker
    harness.worker_config = worker_config
    harness.read_gradients = harness.read_layout = lambda engine: {}  # Which nobody looks at here.
    results = []
    for number, run in enumerate(runs):
        if run.trinity:
            audited = ",".join(map(str, run.audited))
            os.environ.update({trinity_audit.STEPS: audited, trinity_audit.FOLDER: str(Path(folder) / str(number))})
        worker = harness.build(run.case, model)
        torch.manual_seed(1)
        worker.reset()
        worker.profiled, worker.profiler.step = [], lambda worker=worker: worker.profiled.append(1)
        random.seed(2)
        np.random.seed(3)
        fault.plant(worker)
        size, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
        loss_fn = bind_loss("ours:vanilla", *run.bound).loss_fn if run.bound else load(run.case.loss)
        worker.set_loss_fn(trinity_loss_fn(run.trinity) if run.trinity else loss_fn)
        if run.shadow is not None:
            worker.loss_fn = shadow_loss(run.shadow)
        reports = Path(folder) / str(number)
        if getattr(worker, "audit_file", False):
            Path(folder).mkdir(exist_ok=True)
            reports.touch()
        worker.auditing = AuditSettings(frozenset(run.audited), reports) if run.audited else None
        metrics, said = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(run.steps):
                output = worker.train_mini_batch(tu.chunk_tensordict(cut(run.case, size), size)[rank])
                mine = None if output is None else tu.get(output, "metrics")
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, mine)
                metrics.append(next(part for part in everyone if part is not None))
        said = [str(w.message) for w in caught if "audit" in str(w.message)]
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, digest(worker))
        results.append(result_of(reports, metrics, states, said))
    return results


def result_of(folder: Path, metrics: list[dict[str, Any]], states: list[str], warned: list[str]) -> AuditResult:
    import json

    from verl.utils.metric import reduce_metrics

    files = {int(path.stem.split("-")[-1]): path for path in folder.glob("*.json")} if folder.is_dir() else {}
    plain = [
        {k: float(v) for k, v in reduce_metrics(dict(m)).items() if not k.startswith("perf/") and k != "mfu"}
        for m in metrics
    ]
    reports = {step: json.loads(path.read_text()) for step, path in files.items()}
    texts = {step: path.with_suffix(".md").read_text() for step, path in files.items()}
    return AuditResult(reports, texts, plain, states, warned)


def trinity_loss_fn(kind: str) -> Any:
    """Trinity-RFT's PPO loss with a KL term, as it is or scaled."""
    from trinity.algorithm import KL_FN, POLICY_LOSS_FN
    from trinity.common.config import AlgorithmConfig
    from trinity.trainer.verl import losses

    algorithm = AlgorithmConfig(
        policy_loss_fn="ppo",
        policy_loss_fn_args=POLICY_LOSS_FN.get("ppo").default_args(),
        kl_loss_fn="k2",
        kl_loss_fn_args={**KL_FN.get("k2").default_args(), "kl_coef": 0.1},
        entropy_loss_fn="none",
        entropy_loss_fn_args={"entropy_coef": 0.0},
        loss_agg_mode="token-mean",
    )
    return {"stock": losses.TrinityPolicyLoss, "scaled": trinity_rft.ScaledTrinityPolicyLoss}[kind](algorithm)


def shadow_loss(loss: Any) -> Any:
    """Shadow mode with verl's own loss, as a configuration would make it, or with another in its place."""
    from verl.workers.config import ActorConfig
    from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from trinity_loss import EnginePolicyLoss, LossConfig
    from trinity_loss.verl.shadow import ShadowLoss

    ours = EnginePolicyLoss(LossConfig())
    if callable(loss):
        return ShadowLoss(loss, ours)
    loss_mode, loss_agg_mode = loss
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=loss_agg_mode,
        policy_loss=VerlPolicyLossConfig(loss_mode=loss_mode),
    )
    return ShadowLoss(partial(ppo_loss, config=actor), ours)


@dataclass(frozen=True)
class Fault:
    """How a fault is planted: in the worker's configuration, or in the worker once its engine stands."""

    configure: Callable[[Any], None] = lambda config: None
    plant: Callable[[Any], None] = lambda worker: None


def _dropout(worker: Any) -> None:
    for module in worker.engine.module.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def _dropout_in_megatron(config: Any) -> None:
    config.engine_config.override_transformer_config.update({"hidden_dropout": 0.1})


def _leak(worker: Any) -> None:
    """A mask of ones keeps transformers from finding the sequences in a packed row."""

    def attend_to_all(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}

    worker.engine.module.register_forward_pre_hook(attend_to_all, with_kwargs=True)


def _reduce_in_bf16(config: Any) -> None:
    config.engine_config.mixed_precision["reduce_dtype"] = "bf16"


def _drop_num_micro_batch(worker: Any) -> None:
    original = worker.engine.postprocess_micro_batch_func

    def without_factor(output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        loss, found = original(output, data, *args, **kwargs)
        return loss / data["num_micro_batch"], found

    worker.engine.postprocess_micro_batch_func = without_factor


def _router_loss(config: Any) -> None:
    """A mixture of experts, whose router is trained to use them evenly: in every micro-batch by itself."""
    from mbridge.core import Bridge
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": False}
    experts["moe_token_dispatcher_type"] = "alltoall"
    router = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
    config.engine_config.override_transformer_config.update(experts | router)
    moe_utils.te_general_gemm = None  # Megatron looks for it where there is no Transformer Engine, too.
    # Nothing is copied beside what a CPU computes; numbers of tokens are wanted as NumPy's, though.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()

    def on_host(self: Any, point: str, counts: Any = None) -> Any:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(getattr(self, name), torch.Tensor):
                setattr(self, name, getattr(self, name).numpy())
        return counts

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = on_host
    # The saved model has no experts: the weights stay as they are drawn.
    Bridge.load_weights = lambda *args, **kwargs: None


def _expert_bias(config: Any) -> None:
    """A mixture of experts that is balanced by a bias, which every reduction of gradients moves."""
    _router_loss(config)
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0}
    config.engine_config.override_transformer_config.update(bias | {"moe_router_load_balancing_type": "none"})


def _experts_over_ranks(config: Any) -> None:
    from mbridge.core import LLMBridge

    _router_loss(config)
    original = LLMBridge._build_base_config
    # Before anything of override_transformer_config is known to it.
    LLMBridge._build_base_config = lambda self, **kwargs: original(self, **kwargs | {"num_moe_experts": 4})
    object.__setattr__(config.engine_config, "expert_model_parallel_size", 2)
    config.engine_config.override_transformer_config["moe_aux_loss_coeff"] = 0.0


def _experts(config: Any, **options: Any) -> None:
    _router_loss(config)
    config.engine_config.override_transformer_config.update({"moe_aux_loss_coeff": 0.0} | options)


def _lora(config: Any) -> None:
    object.__setattr__(config.model_config, "lora_rank", 4)
    object.__setattr__(config.model_config, "target_modules", "all-linear")


def _fsdp1(config: Any) -> None:
    object.__setattr__(config.engine_config, "strategy", "fsdp")


def _offload(config: Any) -> None:
    object.__setattr__(config.engine_config, "param_offload", True)
    object.__setattr__(config.engine_config, "optimizer_offload", True)
    if config.engine_config.strategy == "megatron":
        object.__setattr__(config.engine_config, "grad_offload", True)


def _little_memory(worker: Any) -> None:
    from trinity_loss.verl import audit

    audit.free_host_memory = lambda: 1000


def _full_device(worker: Any) -> None:
    """On one rank, what the first pass took is there once more and no oftener."""
    from trinity_loss.verl import audit_room

    if worker.rank == 1:
        gib = 2**30
        numbers = {"memory_allocated": gib, "max_memory_allocated": 3 * gib, "memory_reserved": 3 * gib}
        device = {name: lambda number=number: number for name, number in numbers.items()}
        device["mem_get_info"] = lambda: (gib, 80 * gib)
        audit_room.get_torch_device = lambda: type("device", (), {n: staticmethod(f) for n, f in device.items()})


def _one_rank_fails(path: str, when: Callable[..., bool] = lambda *args: True) -> Callable[[Any], None]:
    """A function of the audit, by ``module`` or ``module:Class`` and its name, raises on one rank."""

    def plant(worker: Any) -> None:
        holder, _, name = path.rpartition(".")
        module, _, owner = holder.partition(":")
        place: Any = importlib.import_module(f"trinity_loss.verl.{module}")
        place = getattr(place, owner) if owner else place
        original = getattr(place, name)

        def failing(*args: Any, **named: Any) -> Any:
            if when(*args):
                raise RuntimeError("no room at /home/me/x")
            return original(*args, **named)

        if worker.rank == 1:
            setattr(place, name, failing)

    return plant


def _no_report(worker: Any) -> None:
    from trinity_loss.invariance import audit_report

    def explain(*args: Any) -> Any:
        raise RuntimeError("no room at /home/me/x")

    audit_report.explain = explain


def _no_train_mode(worker: Any) -> None:
    """On one rank the audit, and it alone, cannot have the parameters loaded."""
    original, calls = worker.engine.train_mode, []

    def train_mode(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if worker.rank == 1 and len(calls) == 2:
            raise RuntimeError("no room at /home/me/x")
        return original(*args, **named)

    worker.engine.train_mode = train_mode


def _fails_at_logits(worker: Any) -> None:
    """On one rank, memory ends where logits become log-probs, in micro-batches of one row."""
    original = worker.engine.prepare_model_outputs

    def prepare_model_outputs(*, micro_batch: Any, **named: Any) -> Any:
        if len(micro_batch) == 1 and "audit_row" in set(micro_batch.keys()) and worker.rank == 1:
            raise RuntimeError("no room at /home/me/x")
        return original(micro_batch=micro_batch, **named)

    worker.engine.prepare_model_outputs = prepare_model_outputs


def _engine_fails(worker: Any, fails: Callable[[Any], bool]) -> None:
    """The engine refuses some of the audit's micro-batches."""
    original = worker.engine.prepare_model_inputs

    def prepare_model_inputs(*args: Any, **named: Any) -> Any:
        (micro_batch,) = (*args, *named.values())
        if "audit_row" in set(micro_batch.keys()) and fails(micro_batch):
            raise RuntimeError("no room at /home/me/x")
        return original(*args, **named)

    worker.engine.prepare_model_inputs = prepare_model_inputs


def _fails_in_a_pass(worker: Any, rank: int | None = None) -> None:
    """The engine refuses micro-batches of one row, before or after it has begun."""
    calls = count(1)
    _engine_fails(worker, lambda rows: len(rows) == 1 and rank in (None, worker.rank) and next(calls) % 4 == 2)


def _fails_at_first(worker: Any) -> None:
    """The engine fails on every rank, once it has begun with the first pass."""
    calls = count(1)
    _engine_fails(worker, lambda rows: next(calls) == 2)


def _fails_on_one_rank(worker: Any) -> None:
    from trinity_loss.verl import audit

    audit._SECONDS = 1
    _fails_in_a_pass(worker, 1)


def _unwritable(worker: Any) -> None:
    """A file stands where the folder of reports should be made."""
    worker.audit_file = True


FAULTS = {
    "": Fault(),
    "dropout": Fault(plant=_dropout),
    "dropout in Megatron": Fault(configure=_dropout_in_megatron),
    "leak": Fault(plant=_leak),
    "bf16 reduction": Fault(configure=_reduce_in_bf16),
    "router loss": Fault(configure=_router_loss),
    "expert bias": Fault(configure=_expert_bias),
    "experts": Fault(configure=_experts),
    "experts over ranks": Fault(configure=_experts_over_ranks),
    "offload": Fault(configure=_offload),
    "capacity": Fault(configure=partial(_experts, moe_expert_capacity_factor=0.75)),
    "fsdp1": Fault(configure=_fsdp1),
    "fsdp1 lora": Fault(configure=lambda config: (_fsdp1(config), _lora(config))),
    "lora": Fault(configure=_lora),
    "tied": Fault(),
    "fsdp1 tied": Fault(configure=_fsdp1),
    "little memory": Fault(plant=_little_memory),
    "full device": Fault(plant=_full_device),
    "no train mode": Fault(plant=_no_train_mode),
    "no room for logits": Fault(plant=_fails_at_logits),
    "no shares": Fault(plant=_one_rank_fails("audit.gradient_shares")),
    "no comparison": Fault(plant=_one_rank_fails("audit.Comparison")),
    "no report": Fault(plant=_no_report),
    "no cut": Fault(plant=_one_rank_fails("audit_passes:Pass.cut", lambda one, *_: one.name == "half")),
    "engine error": Fault(plant=_fails_in_a_pass),
    "engine error at first": Fault(plant=_fails_at_first),
    "engine error on one rank": Fault(plant=_fails_on_one_rank),
    "unwritable": Fault(plant=_unwritable),
    "no num_micro_batch": Fault(plant=_drop_num_micro_batch),
}


def run_all(job: tuple[str, list[AuditRun]]) -> list[AuditResult]:
    from trinity_loss.verl.harness.launch import fork_ranks
    from trinity_loss.verl.harness.model import save_tiny_model

    engine, runs = job
    importlib.import_module("verl.workers.engine_workers")
    importlib.import_module("verl.workers.engine")
    results: list[AuditResult] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (_, group) in enumerate(
            groupby(runs, key=lambda r: (r.case.engine_options, r.fault, r.lr, r.trinity))
        ):
            some = list(group)
            layers = max(2, some[0].case.pipeline * (some[0].case.virtual_pipeline or 1))
            model = f"{folder}/model{number}"
            save_tiny_model(model, layers, tied="tied" in some[0].fault)
            run = partial(run_rank, some, engine, model, f"{folder}/store{number}", f"{folder}/{number}")
            results += fork_ranks(run, some[0].case.world_size)
    return results


def audit_all(engine: str, runs: list[AuditRun], timeout: float = 500.0) -> list[AuditResult]:
    """What the runs found, in order; runs that share an engine stand next to each other."""
    from trinity_loss.verl.harness import ON_CPU
    from trinity_loss.verl.harness.launch import launch

    runs = [replace(run, case=replace(run.case, trinity_worker=True)) for run in runs]
    return launch("audit_runs", (engine, runs), environment=ON_CPU, timeout=timeout)


if __name__ == "__main__":
    from audit_runs import run_all as run

    from trinity_loss.verl.harness.launch import main

    assert sys.argv[1:]
    main(run)
