"""Counts, once per mini-batch and over all ranks, what the engine does not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from trinity_loss.jagged import jagged_parts
from trinity_loss.loss_config import LossConfig
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import (
    Count,
    GroupCount,
    Groups,
    Rows,
    attached_counts,
    count_names,
    find_count,
    find_groups,
    merge_groups,
)


def read_rows(data: TensorDict, config: LossConfig) -> Rows:
    """This rank's rows of a mini-batch as trainers send it, jagged or padded."""
    mask = data["response_mask"]
    tokens = ResponseTokens.from_jagged(*jagged_parts(mask)) if mask.is_nested else ResponseTokens.from_padded(mask)
    return Rows(
        tokens,
        data,
        count_empty_sequences=config.count_empty_sequences,
        count_padding_rows=config.count_padding_rows,
    )


def needed_groups(config: LossConfig) -> list[GroupCount]:
    """The groups that the modes of a configuration divide by."""
    names = dict.fromkeys(mode.total for mode in config.aggregation_modes.values() if mode.total is not None)
    return [count for count in map(find_count, names) if isinstance(count, GroupCount)]


class Counting:
    """The counts of one training worker.

    A group that a mini-batch holds only a part of is averaged over that part; a warning says so, once.
    """

    def __init__(self) -> None:
        self._whole: dict[str, Groups] = {}
        self._warned = False

    def begin(self, data: TensorDict, config: LossConfig, dp_group: Any) -> None:
        """Looks at a training batch before it is split into mini-batches: how large its groups are."""
        needed = needed_groups(config)
        rows = read_rows(data, config) if needed else None
        self._whole = {} if rows is None else _gather_groups(rows, needed, dp_group)[1]

    def attach(self, data: TensorDict, config: LossConfig, dp_group: Any) -> None:
        """Counts over the mini-batch and all ranks, in one collective, and attaches the counts to ``data``.

        Args:
            data: This rank's rows.
            config: What trains.
            dp_group: The ranks that hold the other rows; None where this rank holds all of them.
        """
        rows, needed = read_rows(data, config), needed_groups(config)
        groups: dict[str, Groups] = {}
        if needed:
            numbers, groups = _gather_groups(rows, needed, dp_group)
            self._warn_of_partial_groups(groups)
        else:
            local = _local_counts(rows)
            counts = torch.stack(list(local.values()))
            if dp_group is not None:
                counts = counts.to(get_device_id())
                torch.distributed.all_reduce(counts, group=dp_group)
            numbers = dict(zip(local, counts.tolist(), strict=True))
        totals, per_row = attached_counts(rows, numbers, groups)
        tu.assign_non_tensor(data, **totals)
        for name, values in per_row.items():
            data[name] = values

    def _warn_of_partial_groups(self, groups: dict[str, Groups]) -> None:
        for name, whole in self._whole.items():
            found = groups[name]
            cut = sum(group.num_rows < whole[key].num_rows for key, group in found.items() if key in whole)
            if cut and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{cut} of {len(found)} {name.removeprefix('batch_num_')} of this mini-batch are only a part of "
                    "their group in the training batch; a mean over the group is over the part that is here",
                    stacklevel=3,
                )


def _local_counts(rows: Rows) -> dict[str, torch.Tensor]:
    counts = [find_count(name) for name in count_names()]
    return {c.name: c.of_rows(rows) for c in counts if isinstance(c, Count) and c.counted_by == "worker"}


def _gather_groups(rows: Rows, needed: list[GroupCount], dp_group: Any) -> tuple[dict[str, int], dict[str, Groups]]:
    """Counts and groups of all ranks, in one collective."""
    local = (
        {name: int(count) for name, count in _local_counts(rows).items()},
        {count.name: find_groups(count, rows) for count in needed},
    )
    everyone: list[Any] = [local]
    if dp_group is not None:
        everyone = [None] * torch.distributed.get_world_size(dp_group)
        torch.distributed.all_gather_object(everyone, local, group=dp_group)
    numbers = {name: sum(theirs[name] for theirs, _ in everyone) for name in local[0]}
    return numbers, {name: merge_groups(groups[name] for _, groups in everyone) for name in local[1]}
