"""What contradicts itself in a micro-batch where only the device can see it: read to the host with everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from trinity_loss.errors import BatchError


@dataclass(frozen=True, eq=False)
class Fault:
    """Something that must not be.

    Attributes:
        found: 0-d tensor, not 0 where it is.
        error: What to raise then.
    """

    found: Tensor
    error: BatchError


def raise_first(faults: Iterable[Fault]) -> None:
    """Raises the error of the first fault there is; it reads to the host."""
    for fault in faults:
        if fault.found:
            raise fault.error
