"""What a training worker of Trinity-RFT needs on a CPU; verl imports it there (``model.external_lib``).

Beside verl's platform ``cpu`` that is an answer to Trinity-RFT's question for the GPU's generation, which it asks
without having one. And for the table of the run every update reports the number of its micro-batches.
"""

from typing import Any

import torch
import verl.workers.config.engine
from verl.workers.engine_workers import TrainingWorker

import trinity_loss.verl.cpu.register  # noqa: F401  (the import registers)
from trinity_loss.verl.cpu.megatron_config import CpuMcoreEngineConfig

# Trinity-RFT's configuration of verl names that class by its path and lets nobody name another.
verl.workers.config.engine.McoreEngineConfig = CpuMcoreEngineConfig
torch.cuda.get_device_capability = lambda device=None: (0, 0)
_postprocess_output = TrainingWorker._postprocess_output


def _count_micro_batches(self: TrainingWorker, output: dict[str, Any], **options: Any) -> Any:
    if not options["forward_only"]:
        output["metrics"]["micro_batches"] = [float(len(output["loss"]))]
    return _postprocess_output(self, output, **options)


TrainingWorker._postprocess_output = _count_micro_batches
