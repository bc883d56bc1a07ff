"""Counts, once per mini-batch and over all ranks, what the engine does not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from trinity_loss.errors import BatchError
from trinity_loss.loss_config import LossConfig
from trinity_loss.micro_batch import check_teacher, read_responses
from trinity_loss.row_values import get_value
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import (
    Count,
    GroupCount,
    Groups,
    Rows,
    count_names,
    fields_of_groups,
    find_count,
    find_groups,
    merge_groups,
    read_totals,
)


def read_rows(data: TensorDict, config: LossConfig) -> Rows:
    """This rank's rows of a mini-batch as trainers send it, jagged or padded."""
    tokens = ResponseTokens.of(data["response_mask"])
    return Rows(tokens, data, config.count_empty_sequences, config.count_padding_rows)


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
        self._warned_of: set[str] = set()

    def begin(self, data: TensorDict, config: LossConfig, dp_group: Any) -> None:
        """Looks at a training batch before it is split into mini-batches: how large its groups are."""
        if needed := needed_groups(config):
            self._whole = _count(read_rows(data, config), needed, dp_group)[1]

    def attach(self, data: TensorDict, config: LossConfig, dp_group: Any) -> None:
        """Counts over the mini-batch and all ranks, in one collective, and attaches the counts to ``data``.

        Args:
            data: This rank's rows.
            config: What trains.
            dp_group: The ranks that hold the other rows; None where this rank holds all of them.
        """
        rows, needed = read_rows(data, config), needed_groups(config)
        for count in needed:
            count.row_is_group(data)
        numbers, groups = _count(rows, needed, dp_group, config)
        for name, total in read_totals(data).counts.items():
            if numbers.get(name, 0) > total:
                self._warn_once(
                    name,
                    f"{name} is {total}, but the mini-batch has {numbers[name]}: the loss is a sum over more than it "
                    "divides by (look at who sets it)",
                )
        for name, found in groups.items():
            whole = self._whole.get(name, {})
            cut = sum(group.num_rows < whole[key].num_rows for key, group in found.items() if key in whole)
            if cut:
                self._warn_once(
                    f"parts of {name}",
                    f"{cut} of {len(found)} {name.removeprefix('batch_num_')} of this mini-batch are only a part of "
                    "their group in the training batch; a mean over the group is over the part that is here",
                )
        of_groups, per_row = fields_of_groups(rows, groups)
        tu.assign_non_tensor(data, **{name: n for name, n in numbers.items() if name in _counts("worker")}, **of_groups)
        for name, values in per_row.items():
            data[name] = values

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            warnings.warn(message, stacklevel=3)


def _counts(*by: str) -> dict[str, Count]:
    counts = [count for count in map(find_count, count_names()) if isinstance(count, Count)]
    return {count.name: count for count in counts if count.counted_by in by}


def _count(
    rows: Rows, needed: list[GroupCount], dp_group: Any, config: LossConfig | None = None
) -> tuple[dict[str, int], dict[str, Groups]]:
    """Counts and groups of all ranks, in one collective.

    Raises:
        BatchError: On every rank, where one of them finds rows that cannot be counted, or that lack what the loss of
            ``config`` reads of each row.
    """
    # The engine counts its own later.
    mixture = config is not None and config.policy_loss.mixture is not None
    counts = {name: c for name, c in _counts("worker", "trainer").items() if mixture or not c.of_mixture}
    local, found, error = dict.fromkeys(counts, torch.zeros((), dtype=torch.int64)), {}, None
    try:
        local = {name: count.of_rows(rows) for name, count in counts.items()}
        found = {count.name: find_groups(count, rows) for count in needed}
        if config is not None:
            _check_rows(rows, config)
    except BatchError as raised:
        if dp_group is None:
            raise
        error = raised
    if not needed:
        numbers = torch.stack([next(iter(local.values())).new_tensor(int(error is not None)), *local.values()])
        if dp_group is not None:
            numbers = numbers.to(get_device_id())
            torch.distributed.all_reduce(numbers, group=dp_group)
        failed, *totals = numbers.tolist()
        if failed:
            _raise_of_any_rank(_from_everyone(error, dp_group))
        return dict(zip(local, totals, strict=True)), {}
    mine = (error, {name: int(number) for name, number in local.items()}, found)
    everyone = _from_everyone(mine, dp_group)
    _raise_of_any_rank([error for error, _, _ in everyone])
    groups = {count.name: merge_groups(groups[count.name] for _, _, groups in everyone) for count in needed}
    return {name: sum(theirs[name] for _, theirs, _ in everyone) for name in local}, groups


def _check_rows(rows: Rows, config: LossConfig) -> None:
    """Raises what is wrong with the fields that the loss reads of each row, and where a teacher has said nothing."""
    if config.distillation is not None:
        check_teacher(config.distillation, rows.data)
    batch = read_responses(rows.data, "response_mask")
    if config.row_weights is not None:
        batch = batch.weighted_by(config.row_weights)
    if config.policy_loss.mixture is not None:
        batch = batch.with_expert_rows()
    for fault in batch.faults:
        if fault.found:
            raise fault.error
    _check_together(rows, config)


def _check_together(rows: Rows, config: LossConfig) -> None:
    """Raises :class:`BatchError` where rows that are one for the loss, as pairs are, are answers to other prompts."""
    size, prompts = config.group_size, get_value(rows.data, "prompts")
    if size == 1:
        return
    keys = [row.tolist() for row in prompts.unbind()] if isinstance(prompts, torch.Tensor) else rows.values("uid")
    apart = keys is not None and any(key != keys[row - row % size] for row, key in enumerate(keys))
    if apart or rows.tokens.num_slots % size:
        raise BatchError(
            f"the rows of a mini-batch are no pairs, which loss_mode {config.loss_mode!r} is about; expected chosen "
            "and rejected in turn, two answers to one prompt (trainer.balance_batch=False keeps the order of rows)"
        )


def raise_on_every_rank(error: BatchError | None, dp_group: Any) -> None:
    """Raises the error of this rank or of another, before any of them waits in a collective for one that has failed."""
    _raise_of_any_rank(_from_everyone(error, dp_group))


def _from_everyone(mine: Any, dp_group: Any) -> list[Any]:
    """What each rank gives, in their order."""
    everyone: list[Any] = [mine]
    if dp_group is not None:
        everyone = [None] * torch.distributed.get_world_size(dp_group)
        torch.distributed.all_gather_object(everyone, mine, group=dp_group)
    return everyone


def _raise_of_any_rank(errors: list[BatchError | None]) -> None:
    """Raises the first error, and says which rank it is of: none is left waiting in a collective for another."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise type(error)(f"{error} (on data-parallel rank {rank})") from error
