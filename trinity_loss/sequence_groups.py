"""The groups of sequences that a mode divides by, such as the answers to one prompt, in a micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from trinity_loss.aggregation import flat_ids
from trinity_loss.errors import Fault, FieldShapeError, MissingFieldError, TotalsError
from trinity_loss.micro_batch import MicroBatch
from trinity_loss.row_values import get_value
from trinity_loss.tokens import ResponseTokens, SequenceGroups
from trinity_loss.totals import GroupCount, Rows


def with_groups(batch: MicroBatch, count: GroupCount, groups: SequenceGroups) -> MicroBatch:
    """The same micro-batch whose tokens know these groups."""
    return replace(batch, tokens=replace(batch.tokens, groups={**batch.tokens.groups, count.name: groups}))


def find_local_groups(batch: MicroBatch, count: GroupCount, *, count_empty: bool) -> MicroBatch:
    """The same micro-batch with the groups that it holds by itself.

    Args:
        batch: The micro-batch.
        count: Which groups: from its ``ids``, else from what tells them.
        count_empty: Whether a group without any token that counts is a group.

    Raises:
        MissingFieldError: Nothing tells the groups.
        FieldShapeError: Not one id per row, or per token of packed rows.
    """
    tokens = batch.tokens
    ids = _local_ids(tokens, batch, count)
    if tokens.offsets is None:
        error = FieldShapeError(f"{count.ids} differs within a segment; expected one id for all of its tokens")
        batch = replace(batch, faults=(*batch.faults, Fault(tokens.differ_within(ids), error)))
    return with_groups(batch, count, tokens.group_by(ids, count_empty=count_empty))


def _local_ids(tokens: ResponseTokens, batch: MicroBatch, count: GroupCount) -> Tensor:
    """Ids of the groups, int64 [S], or [N] for packed rows."""
    ids = get_value(batch.data, count.ids)
    if isinstance(ids, Tensor):
        return flat_ids(count.ids, ids, tokens)
    if tokens.offsets is None:
        if count.row_is_group(batch.data):
            return tokens.sequence
        raise MissingFieldError(f"packed rows need '{count.ids}' [rows, T] to tell {count.noun} groups")
    count.row_is_group(batch.data)
    keys = count.keys(Rows(tokens, batch.data))
    if len(keys) != tokens.num_slots:
        raise FieldShapeError(
            f"there are {len(keys)} keys of {count.noun} groups; expected one per row, {tokens.num_slots}"
        )
    return torch.tensor(number_keys(keys), dtype=torch.int64).to(tokens.mask.device)


def number_keys(keys: Iterable[Hashable]) -> list[int]:
    """Equal keys as equal numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def read_attached_groups(batch: MicroBatch, count: GroupCount, mode: str) -> MicroBatch | None:
    """The same micro-batch with the groups that were counted over the mini-batch; None where no totals were sent.

    Args:
        batch: The micro-batch.
        count: Which groups.
        mode: What needs them, for an error.

    Raises:
        TotalsError: There are totals, but these groups were not counted.
        FieldShapeError: The tokens of the groups are not one whole number per row, or per token of packed rows.
    """
    if batch.totals.get(count.name) is None or not batch.has(count.per_row):
        if batch.totals:
            raise TotalsError(
                f"loss_agg_mode {mode!r} needs {count.name} and {count.per_row}, counted over the whole mini-batch, "
                f"since a {count.noun} group may be cut; trinity_loss.verl.PolicyLossConfig attaches them"
            )
        return None
    tokens = batch.tokens
    num_tokens = _read_per_row(batch, count.per_row)
    smaller = (num_tokens < tokens.counts).any()
    error = FieldShapeError(
        f"{count.per_row} is smaller than the tokens of a sequence here; expected those of its "
        f"{count.noun} group over the whole mini-batch"
    )
    # Which group a sequence belongs to is not said, but no group has more than 1 of such shares.
    shares = (tokens.counts / num_tokens.clamp(min=1).to(torch.float64)).sum()
    fewest = (shares - 1e-6).ceil().to(torch.int64)
    faults = [Fault(smaller, error)]
    if tokens.offsets is None:
        values = cast(Tensor, get_value(batch.data, count.per_row)).reshape(-1)
        within = FieldShapeError(f"{count.per_row} differs within a segment; expected one number for all of its tokens")
        faults.insert(0, Fault(tokens.differ_within(values), within))
    batch = replace(batch, faults=(*batch.faults, *faults))
    return with_groups(batch, count, SequenceGroups(num_tokens, fewest))


def _read_per_row(batch: MicroBatch, name: str) -> Tensor:
    """A whole number per sequence slot, int64 [S], from [rows] or, for packed rows, [rows, T]."""
    value, tokens = get_value(batch.data, name), batch.tokens
    expected = [tokens.num_slots] if tokens.offsets is not None else list(batch.shape or ())
    if not isinstance(value, Tensor) or list(value.shape) != expected:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise FieldShapeError(f"{name} is {shape}; expected {expected}")
    if value.is_floating_point() or value.is_complex():
        raise FieldShapeError(f"{name} has dtype {value.dtype}; expected integers")
    counts = value.to(torch.int64)
    if tokens.offsets is not None:
        return counts
    zeros = torch.zeros(tokens.num_slots, dtype=torch.int64, device=value.device)
    return zeros.scatter_(0, tokens.sequence, counts.reshape(-1))
