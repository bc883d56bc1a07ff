"""verl's FSDP2 engine on gloo, for demonstration and tests."""

from dataclasses import replace

from torch import nn
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


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
