"""``torch.cpu`` with the names that verl asks of a device module, for demonstration and tests."""

import os
import resource
from typing import Any

import torch
from torch.random import get_rng_state as _get_rng_state
from torch.random import set_rng_state as _set_rng_state


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)


def max_memory_allocated(device: object = None) -> int:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return the machine's free and total memory, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Do nothing: there is no cache."""


def get_device_name(device: object = None) -> str:
    """Return the name by which verl looks up how fast a device is (a CPU is not in its table)."""
    return "CPU"


def is_bf16_supported() -> bool:
    """Return whether bfloat16 works, slowly."""
    return True


def get_rng_state(device: object = None) -> torch.Tensor:
    """Return the state of the only random generator there is, which a checkpoint keeps."""
    return _get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    """Restore what `get_rng_state` returned."""
    _set_rng_state(state)
