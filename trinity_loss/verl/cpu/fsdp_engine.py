"""verl's FSDP engines on gloo, FSDP2 and FSDP1, for demonstration and tests."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend=["fsdp2", "fsdp"], device="cpu")
class CpuFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """The stock engine. In FSDP1 rank 0 spreads the weights by an accelerator; here every rank reads them itself."""

    def _build_module(self) -> nn.Module:
        if self.engine_config.strategy == "fsdp2":
            return super()._build_module()
        with patch.object(transformer_impl, "get_init_weight_context_manager", lambda **_: nullcontext):
            return super()._build_module()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        # A forward-only engine, as of a reference model, is offloaded to pinned memory, and there is none to pin.
        config = self.engine_config
        self.engine_config = replace(config, forward_only=False)
        try:
            with patch.object(transformer_impl, "FSDP", _NotSpread):
                return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


class _NotSpread(FullyShardedDataParallel):
    def __new__(cls, module: nn.Module, **named: Any) -> Any:
        return FullyShardedDataParallel(
            module, **named | {"sync_module_states": False, "device_id": torch.device("cpu")}
        )
