"""torch's jagged nested tensors: what is asked of them here, and how without a cost.

A question to a jagged tensor itself is dispatched in Python, at 8 to 100 µs each; the attributes behind it, which are
private names of torch, cost nothing. :mod:`trinity_loss.verl.compat` watches them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import FieldShapeError


def is_jagged(tensor: Any) -> bool:
    """Whether a tensor is a jagged nested tensor."""
    return hasattr(tensor, "_offsets")


def check_tensor(name: str, value: Any) -> None:
    """Raises :class:`FieldShapeError`, with the name of the field, unless it is a tensor, dense or jagged."""
    if not isinstance(value, Tensor):
        raise FieldShapeError(f"{name} is a {type(value).__name__}; expected a tensor")
    if not is_jagged(value) and value.is_nested:
        raise FieldShapeError(f"{name} is a nested tensor of layout torch.strided; expected torch.jagged")


def jagged_parts(tensor: Any) -> tuple[Tensor, Tensor]:
    """Values [N, …] and offsets int64 [S + 1] of a jagged tensor, without its graph.

    The values have no gaps between sequences, which the storage of a narrowed tensor has.
    """
    if tensor.lengths() is not None:
        tensor = tensor.contiguous()
    values, offsets = tensor._values, tensor._offsets
    return (values.detach() if values.requires_grad else values), offsets


def stored_values(tensor: Any) -> Tensor:
    """The storage of a jagged tensor, with its graph, and with the gaps of a narrowed one."""
    values: Tensor = tensor._values
    return values


def dtype_of(tensor: Any) -> torch.dtype:
    """The type of a tensor, jagged or not."""
    return stored_values(tensor).dtype if is_jagged(tensor) else tensor.dtype


def extents(narrowed: Any) -> list[tuple[int, int]]:
    """Where each sequence of a narrowed jagged tensor starts in its storage, and its length (read to the host)."""
    starts = narrowed.offsets()[: narrowed.shape[0]]
    return list(zip(starts.tolist(), narrowed.lengths().tolist(), strict=True))


def num_values(tensor: Any) -> int:
    """Values of a tensor, jagged or not, without gaps."""
    if not is_jagged(tensor):
        return int(tensor.numel())
    if tensor.lengths() is not None:
        return sum(length for _, length in extents(tensor))
    return stored_values(tensor).numel()


def like(jagged: Any, values: Tensor) -> Tensor:
    """A jagged tensor of other values with the sequences of this one."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=jagged.offsets(), lengths=jagged.lengths())
