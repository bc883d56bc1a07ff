"""The values of a micro-batch that are no tensors: numbers, and lists with one entry per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from trinity_loss.errors import FieldShapeError

#: A TensorDict, or any mapping.
MicroBatchData: TypeAlias = Mapping[str, Any]


def get_value(data: MicroBatchData, key: str) -> Any:
    """The value of ``key`` without its NonTensorData wrapping; a stack becomes a list; None if missing."""
    value = data.get(key, None)
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def row_values(data: MicroBatchData, name: str, rows: int) -> list[Any] | None:
    """One plain value per row, in whatever form TensorDict, numpy or torch give them; None if missing.

    Args:
        data: A batch.
        name: Key. Its value is a list, a tuple, an array or a tensor of ``rows`` entries ([rows] or [rows, 1]), a
            stack of them, or one text or number that all rows share.
        rows: How many rows there are.

    Raises:
        FieldShapeError: It is something else, or has another number of entries.

    Example:
        >>> row_values({"uid": NonTensorData("ab", batch_size=[2])}, "uid", 2)
        ['ab', 'ab']
        >>> row_values({"uid": np.array([3, 4])}, "uid", 2)
        [3, 4]
    """
    value = get_value(data, name)
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray):
        shape = None if isinstance(value, Tensor) and value.is_nested else list(value.shape)
        if shape not in ([rows], [rows, 1]):
            what = "jagged" if shape is None else f"an array of shape {shape}"
            raise FieldShapeError(f"{name} is {what}; expected one entry per row, [{rows}]")
        value = value.reshape(-1).tolist()
    if isinstance(value, str | bytes | int | float | np.generic):
        value = [value] * rows
    if not isinstance(value, list | tuple):
        raise FieldShapeError(f"{name} is a {type(value).__name__}; expected one entry per row, {rows} in all")
    if len(value) != rows:
        raise FieldShapeError(f"{name} has {len(value)} entries; expected one per row, {rows}")
    plain = list(map(_unwrapped, value))
    for row, entry in enumerate(plain):
        if not _tells_apart(entry):
            what = repr(entry) if entry is None or isinstance(entry, float) else f"a {type(entry).__name__}"
            raise FieldShapeError(f"{name} of row {row} is {what}; expected one text or number")
    return plain


def _tells_apart(entry: Any) -> bool:
    """Whether a value is one name: the same in every process, and not what stands for a missing one."""
    # NaN is not what it is, and an object says only where it lies.
    one = isinstance(entry, str | bytes) or not isinstance(entry, Iterable | None)
    return one and entry == entry and type(entry).__repr__ is not object.__repr__


def _unwrapped(entry: Any) -> Any:
    if isinstance(entry, NonTensorData):
        entry = entry.data
    if isinstance(entry, np.generic) or (isinstance(entry, Tensor | np.ndarray) and not entry.shape):
        entry = entry.item()
    # A tensor of both makes numbers of all of them.
    whole = isinstance(entry, bool) or (isinstance(entry, float) and entry.is_integer())
    return int(entry) if whole else entry
