"""Whether a machine has room for an audit: the host for a copy of the gradient, the device for larger micro-batches."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
from verl.utils.device import get_torch_device

from trinity_loss.verl.audit_passes import Pass

#: Of a container, in the two versions of control groups: its limit, what it uses, and a file's pages that may go.
_CONTAINER = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_host_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that are free on this host, or in the container that this process runs in.

    Args:
        groups: Where the control groups are.
    """
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, reclaimable in _CONTAINER:
        with suppress(OSError, ValueError, KeyError):  # There is none, or it has no limit.
            pages = dict(line.split() for line in (groups / stat).read_text().splitlines())
            left = int((groups / limit).read_text()) - int((groups / used).read_text()) + int(pages[reclaimable])
            free = min(free, left)
    return free


def check_room(one: Pass) -> None:
    """Whether this rank's device has room for a pass with more rows at once than any before.

    Raises:
        MemoryError: The most that was in use beside what stays, taken as often as there are more rows, does not fit.
    """
    if one.growth <= 1:
        return
    device = get_torch_device()
    free, total = device.mem_get_info()
    held, highest = device.memory_allocated(), device.max_memory_allocated()
    needed, there = held + one.growth * (highest - held), 0.9 * min(total, free + device.memory_reserved())
    if needed > there:
        raise MemoryError(f"it takes {needed / 2**30:.1f} GiB of a device that has {there / 2**30:.1f} for it")
