"""verl's Megatron engine on gloo, for demonstration and tests.

Importing this makes CUDA mean the CPU in this process, and in this thread: only a training worker whose configuration
asks for Megatron does.
"""

from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from trinity_loss.verl.cpu import megatron_shim

megatron_shim.redirect()
megatron_shim.register_bridge()
# Megatron compiles small functions at their first call, which takes longer than ten steps of a toy model.
torch.compiler.set_stance("force_eager")


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class CpuMegatronEngineWithLMHead(MegatronEngineWithLMHead):
    """The stock engine, but for two steps that work with CUDA or Transformer Engine alone."""

    def _routed_num_tokens(self, data: Any) -> torch.Tensor:
        # The engine adds the ranks' counts in place. What it adds into is a copy on a GPU; here it would be the last
        # offset of the batch itself.
        return super()._routed_num_tokens(data).clone()

    @torch.no_grad()  # In float32 the optimizer's own weights are views of the model's, and loading writes to them.
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # The distributed optimizer expects of torch's Adam what Transformer Engine's has: a state before the first
        # step, and one step for a whole group. So it finds no state in a new process, and writes 0 over the step that
        # it has loaded: weights and moments are right then, and the next update is too large.
        for adam, parameters in self._adams():
            for parameter in parameters:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **moments}
        super().load_checkpoint(*args, **kwargs)
        for adam, _ in self._adams():
            for group in adam.param_groups:
                for parameter in group["params"]:
                    adam.state[parameter]["step"] = torch.tensor(float(group["step"]))

    def _adams(self) -> list[tuple[torch.optim.Optimizer, list[torch.Tensor]]]:
        """The torch optimizers within Megatron's distributed ones, each with its parameters."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        adams = [part.optimizer for part in parts if isinstance(part, DistributedOptimizer)]
        return [(adam, [p for group in adam.param_groups for p in group["params"]]) for adam in adams]
