"""What ``trinity-loss doctor`` looks at: versions, hooks, the loss of a configuration, and its traps."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_loss.audit_forecast import forecast
from trinity_loss.errors import ConfigError
from trinity_loss.kept_twice import option_traps
from trinity_loss.kl import KL_TYPES
from trinity_loss.tables import print_table
from trinity_loss.verl.choice import engine_loss, name_of
from trinity_loss.verl.compat import installed
from trinity_loss.verl.composed import actor_config, distillation_config

PACKAGES = ("trinity-loss", "verl", "torch", "tensordict", "ray", "hydra-core", "transformers", "trinity-rft",
            "megatron-core", "vllm", "sglang")  # fmt: skip
_ENTRY_POINTS, _NAME = "verl.plugins", "trinity_loss"
_TINKER = "verl.workers.engine_workers_tinker"
#: What is loaded only because it was looked at here.
_imported_to_look: set[str] = set()
_ALLOW_LIST, _MODULES, _PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"
_VARIABLES = (_ALLOW_LIST, _MODULES, _PLATFORM)
#: What is wrong with losses of verl that depend on the cut.
VERL_TRAPS = {
    "geo_mean": "averages over its own micro-batch, so its gradient grows with their number",
    "clip_cov": "chooses tokens inside the micro-batch, so what it trains on depends on the cut",
    "kl_cov": "chooses tokens inside the micro-batch, so what it trains on depends on the cut",
}


@dataclass(frozen=True)
class Process:
    """What one process sees.

    Attributes:
        versions: Of packages, by name; those that are not installed are missing.
        entry_point: Whether our entry point loads, or what verl swallows.
        loss: The loss that a worker of the configuration trains with, or why it does not get that far.
        ours: Whether it is one of ours.
        failure: The error that building the actor configuration or its loss ends in, None if none.
        worker_class: What stands in verl's place for the training worker.
        goes_around: Worker classes in use that set a training worker of their own.
        could_go_around: verl's own such classes, which nothing here uses.
        environment: Variables that steer verl's plugins.
    """

    versions: dict[str, str]
    entry_point: str
    loss: str
    ours: bool
    failure: str | None
    worker_class: str
    goes_around: list[str] = field(default_factory=list)
    could_go_around: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def look(
    actor: dict[str, Any], distillation: dict[str, Any] | None, correction: dict[str, Any] | None = None
) -> Process:
    """Looks around in this process; this is what runs in a Ray worker too.

    Args:
        actor: The resolved actor configuration.
        distillation: What the resolved distillation configuration says of the loss; None where it is off.
        correction: The resolved ``algorithm.rollout_correction``.
    """
    loss = _loss(actor, distillation, correction)
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Process(installed(*PACKAGES), _entry_point(), *loss, *_worker_classes(), environment)


def _entry_point() -> str:
    found = [entry for entry in entry_points(group=_ENTRY_POINTS) if entry.name == _NAME]
    if not found:
        return "missing: trinity-loss is not installed as a package here"
    policy = os.environ.get(_ALLOW_LIST, "auto").strip().lower()
    if policy != "auto" and _NAME not in map(str.strip, policy.split(",")):
        return f"left out by {_ALLOW_LIST}={os.environ[_ALLOW_LIST]}"
    try:
        found[0].load()
    except Exception as error:
        return f"fails, which verl logs at DEBUG only: {type(error).__name__}: {error}"
    return "loads"


def _loss(
    actor: dict[str, Any], distillation: dict[str, Any] | None, correction: dict[str, Any] | None
) -> tuple[str, bool, str | None]:
    """The loss of a worker, whether it is ours, and what it fails with."""
    from verl.workers.utils.losses import ppo_loss

    bound: Any = ppo_loss
    selected = "trinity_loss" in str(actor["policy_loss"].get("_target_", ""))
    try:
        made = actor_config(OmegaConf.create({"actor_rollout_ref": {"actor": actor}}))
        arguments = {"config": made}
        teacher = distillation_config(OmegaConf.create({"distillation": distillation}))
        if teacher is not None:
            from verl.trainer.distillation.losses import distillation_ppo_loss

            bound, arguments["distillation_config"] = distillation_ppo_loss, teacher
        ours = engine_loss(partial(bound, **arguments), correction)
    except ConfigError as error:
        return "none: the worker fails", selected, str(error)
    if ours is not None:
        return str(ours), True, None
    name = "" if bound is not ppo_loss else f" ({made.policy_loss.loss_mode}, {made.loss_agg_mode})"
    return f"{bound.__module__}.{bound.__name__}{name}", False, None


def _worker_classes() -> tuple[str, list[str], list[str]]:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from trinity_loss.verl.worker import TrinityWorkerMixin, subclasses

    if _TINKER not in sys.modules:
        importlib.import_module(_TINKER)
        _imported_to_look.add(_TINKER)
    own = [worker for worker in subclasses(ActorRolloutRefWorker) if "actor_worker_cls" in vars(worker)]
    made = ((worker, worker.actor_worker_cls) for worker in own)  # By a class, a property or any callable.
    found = [name_of(w) for w, m in made if not (isinstance(m, type) and issubclass(m, TrinityWorkerMixin))]
    unused = [name for name in found if name.rpartition(".")[0] in _imported_to_look]
    used = [name for name in found if name not in unused]
    return name_of(ActorRolloutRefWorker.actor_worker_cls), used, unused


def look_in_ray_worker(*configuration: Any) -> Process:
    """What a worker of a private Ray on this machine sees; it is given what :func:`look` is.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    from trinity_loss.verl.harness.ray_fsdp import start_ray

    start_ray(1)
    try:
        # By value: what runs there must not depend on how this module was found here.
        remote = ray.remote(num_cpus=1)(look)
        return ray.get(remote.remote(*configuration))
    finally:
        ray.shutdown()


def traps(config: DictConfig, seen: Process) -> list[str]:
    """What is likely to go wrong in a composed configuration, given what the process that runs it sees."""
    found = [seen.failure] if seen.failure is not None else []
    found += [] if seen.ours else _loss_traps(config.actor_rollout_ref.actor)
    if not seen.ours and config.get("distillation") is not None and config.distillation.get("enabled"):
        found.append("distillation.enabled: the actor is trained with distillation_ppo_loss, not with the actor's loss")
    found += _per_token_traps(config)
    found += option_traps(config, ours=seen.ours)
    # The loss itself needs no plugin; what a CPU needs comes through it.
    needed = seen.environment.get(_PLATFORM, "").strip().lower() == "cpu"
    if seen.entry_point.startswith("fails") or (needed and not seen.entry_point.startswith("loads")):
        found.append(f"entry point {_NAME}: {seen.entry_point}")
    if " " in os.environ.get(_MODULES, "").strip():
        found.append(f"{_MODULES} has a blank in it, which verl takes for a part of the name")
    if seen.ours and seen.goes_around:
        found.append(f"{', '.join(seen.goes_around)} sets a training worker of its own, which goes around our loss")
    return found


def notes(seen: Process) -> list[str]:
    """What is no trap, but worth knowing, a sentence each."""
    if not seen.ours:
        return []
    return [f"{name}, wherever it is used, sets a training worker of its own, which goes around our loss"
            for name in seen.could_go_around]  # fmt: skip


def _loss_traps(actor: Any) -> Iterator[str]:
    """What is likely to go wrong in a loss of verl's."""
    loss_mode, mode, scale = actor.policy_loss.loss_mode, actor.loss_agg_mode, actor.loss_scale_factor
    if mode == "seq-mean-token-sum-norm" and scale is None:
        yield (
            "loss_scale_factor is null with seq-mean-token-sum-norm: verl divides by the padded width, "
            "which in the v1 trainer is the longest response of each micro-batch"
        )
    if loss_mode in VERL_TRAPS:
        yield f"policy_loss.loss_mode is {loss_mode}: verl's loss {VERL_TRAPS[loss_mode]}"
    if loss_mode == "sapo" and mode != "seq-mean-token-mean":
        yield f"verl's sapo ignores loss_agg_mode {mode}: its policy gradient is seq-mean-token-mean"
    if loss_mode == "dro" and not actor.policy_loss.dro_beta:
        yield "policy_loss.loss_mode is dro and dro_beta is not set: verl fails at the first step"
    if actor.use_kl_loss and actor.kl_loss_type not in KL_TYPES:
        yield f"kl_loss_type is {actor.kl_loss_type}: verl fails at the first step"
    if scale is not None and scale <= 0:
        yield f"loss_scale_factor is {scale}: verl accepts it, and turns the loss around"


def _per_token_traps(config: DictConfig) -> list[str]:
    """Megatron's per-token regime takes packed rows only, and switches itself on with context parallelism."""
    actor = config.actor_rollout_ref.actor
    megatron = actor.get("megatron")
    if actor.strategy != "megatron" or megatron is None:
        return []
    asked = (megatron.get("override_transformer_config") or {}).get("calculate_per_token_loss", False)
    parallel = megatron.get("context_parallel_size", 1) > 1 or megatron.get("dynamic_context_parallel", False)
    if not (asked or parallel) or config.actor_rollout_ref.model.get("use_remove_padding", False):
        return []
    why = "calculate_per_token_loss is on" if asked else "context parallelism switches calculate_per_token_loss on"
    return [f"{why} and model.use_remove_padding is off: verl raises at the first step"]


def examine(config: DictConfig, *, ray: bool = True, as_json: bool = False) -> bool:
    """Looks around here and in a Ray worker, and prints what was found.

    Args:
        config: A composed verl configuration.
        ray: Whether to start a private Ray and look into a worker.
        as_json: Whether to print JSON.

    Returns:
        Whether nothing is wrong.
    """

    def plain(key: str) -> Any:
        part = OmegaConf.select(config, key)
        return None if part is None else OmegaConf.to_container(part, resolve=True)

    distillation = None
    if OmegaConf.select(config, "distillation.enabled"):  # The rest of it may hold what only a run fills in.
        distillation = {"enabled": True, "distillation_loss": plain("distillation.distillation_loss")}
    asked = (plain("actor_rollout_ref.actor"), distillation, plain("algorithm.rollout_correction"))
    seen = {"driver": look(*asked)}
    if ray:
        seen["Ray worker"] = look_in_ray_worker(*asked)
    last = list(seen.values())[-1]
    found = traps(config, last)
    found += [
        f"{name} is {here} in the driver and {last.versions.get(name, 'missing')} in a Ray worker"
        for name, here in seen["driver"].versions.items()
        if last.versions.get(name) != here
    ]
    if as_json:
        processes = {where: asdict(process) for where, process in seen.items()}
        report = {"processes": processes, "traps": found, "notes": notes(last), "audit": forecast(config)}
        print(json.dumps(report, indent=2))
        return not found
    print_table(["", *seen], _cells(seen))
    print(f"loss: {last.loss}")
    print("".join(f"note: {text}\n" for text in notes(last)), end="")
    print(f"audit: {forecast(config)}")
    print("\n".join(f"trap: {text}" for text in found) or "nothing wrong found")
    return not found


def _cells(seen: dict[str, Process]) -> list[list[str]]:
    processes = list(seen.values())
    cells = [[name, *(p.versions.get(name, "-") for p in processes)] for name in PACKAGES]
    cells.append(["entry point", *(p.entry_point for p in processes)])
    cells.append(["training worker", *(p.worker_class for p in processes)])
    for name in _VARIABLES:
        if any(name in p.environment for p in processes):
            cells.append([name, *(p.environment.get(name, "-") for p in processes)])
    return cells
