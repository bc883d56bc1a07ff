"""verl's FSDP2 engine and training worker on gloo, for demonstration and tests."""

from dataclasses import replace
from typing import Any

from torch import nn
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class CpuFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """The stock engine; FSDP1 is left out since it wants an accelerator to spread the weights with."""

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        # A forward-only engine, as of a reference model, is offloaded to pinned memory, and there is none to pin.
        config = self.engine_config
        self.engine_config = replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


class CpuTrainingWorker(TrainingWorker):
    """The stock training worker, with its process group made first.

    verl names the backends ``cpu:gloo,<device>:<backend>``, which on this platform names the CPU twice, and torch
    refuses that; it leaves a group alone that is already there.
    """

    def __init__(self, config: Any) -> None:
        initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(config)


def register_workers() -> None:
    """Put `CpuTrainingWorker` where verl's own stands; a worker class that somebody else has set is kept."""
    for attribute in ("actor_worker_cls", "ref_worker_cls"):
        if getattr(ActorRolloutRefWorker, attribute) is TrainingWorker:
            setattr(ActorRolloutRefWorker, attribute, CpuTrainingWorker)
