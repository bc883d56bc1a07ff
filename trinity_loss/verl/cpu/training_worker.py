"""verl's training worker on gloo, with an engine for a CPU; for demonstration and tests."""

import importlib
from typing import Any

from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

ENGINES = {
    "fsdp": "trinity_loss.verl.cpu.fsdp_engine",
    "fsdp2": "trinity_loss.verl.cpu.fsdp_engine",
    "megatron": "trinity_loss.verl.cpu.megatron_engine",
}
"""By ``engine_config.strategy``: the module that registers the engine with verl. Megatron's changes the process."""


class CpuTrainingWorker(TrainingWorker):
    """The stock training worker, with its process group made first, and its engine known to verl.

    verl names the backends ``cpu:gloo,<device>:<backend>``, which on this platform names the CPU twice, and torch
    refuses that; it leaves a group alone that is already there.
    """

    def __init__(self, config: Any) -> None:
        initialize_global_process_group_ray(backend="cpu:gloo")
        strategy = config.engine_config.strategy
        if strategy not in ENGINES:
            raise ValueError(f"strategy is {strategy!r}; on a CPU verl's engines are {sorted(ENGINES)}")
        importlib.import_module(ENGINES[strategy])
        super().__init__(config)


def register_workers() -> None:
    """Put `CpuTrainingWorker` where verl's own stands; a worker class that somebody else has set is kept."""
    for attribute in ("actor_worker_cls", "ref_worker_cls"):
        if getattr(ActorRolloutRefWorker, attribute) is TrainingWorker:
            setattr(ActorRolloutRefWorker, attribute, CpuTrainingWorker)
