"""The configuration of verl's Megatron engine on a CPU, for demonstration and tests; imports nothing of Megatron."""

from dataclasses import dataclass

from verl.workers.config import McoreEngineConfig


@dataclass
class CpuMcoreEngineConfig(McoreEngineConfig):
    """verl's configuration with ``dtype: float32``, which its engine takes and its own check refuses."""

    def __post_init__(self) -> None:
        dtype, half = self.dtype, "bfloat16"
        object.__setattr__(self, "dtype", half if dtype == "float32" else dtype)
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)
