"""The counts of a whole mini-batch: each declared once, for the worker, the loss and the instrument.

A denominator belongs to the whole mini-batch, which no micro-batch sees. A :class:`Count` says how the rows of one rank
give it, and then all ranks add up; a :class:`GroupCount` counts rows that belong together, which ranks merge by what
tells the groups. :func:`register_count` adds one, and a mode names it as its ``total``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from trinity_loss.errors import ConfigError, FieldShapeError, MissingFieldError, TotalsError
from trinity_loss.jagged import is_jagged, jagged_parts
from trinity_loss.row_values import MicroBatchData, get_value, row_values
from trinity_loss.tokens import ResponseTokens

#: The field that marks an expert's rows.
EXPERT_MASK = "expert_mask"
#: What metrics are averaged over: the tokens that count, after rejection.
VALID_TOKENS = "batch_num_valid_tokens"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a mini-batch, of one rank or of all of them: what a count looks at.

    Attributes:
        tokens: The response tokens, a sequence per row.
        data: Fields by name; ``loss_mask``, where it is there, lies as the response tokens do.
        count_empty_sequences: Whether a group without any token that counts is a group.
        count_padding_rows: Whether a group of synthetic rows is a group.
    """

    tokens: ResponseTokens
    data: MicroBatchData
    count_empty_sequences: bool = True
    count_padding_rows: bool = True

    def values(self, name: str) -> list[Any] | None:
        """One value per row, None if missing, see :func:`trinity_loss.row_values.row_values`."""
        return row_values(self.data, name, self.tokens.num_slots)

    def required(self, name: str) -> list[Any]:
        """:meth:`values` of a field that has to be there; else a :class:`MissingFieldError`."""
        values = self.values(name)
        if values is None:
            raise MissingFieldError(f"the mini-batch has no {name!r}, which tells its groups; expected one per row")
        return values

    @cached_property
    def loss_tokens(self) -> ResponseTokens:
        """The tokens before rejection: those of ``loss_mask``, which an engine counts, where there is one.

        Raises:
            FieldShapeError: It does not lie as the response tokens do.
        """
        mask = get_value(self.data, "loss_mask")
        if not isinstance(mask, Tensor):
            return self.tokens
        values = (jagged_parts(mask)[0] if is_jagged(mask) else mask).reshape(-1)
        if values.shape != self.tokens.mask.shape:
            raise FieldShapeError(
                f"loss_mask holds {values.numel()} values; expected {self.tokens.size}, as response_mask"
            )
        return replace(self.tokens, mask=values != 0)

    @cached_property
    def name(self) -> str:
        """What no other rows are called, on any rank."""
        return uuid4().hex

    @cached_property
    def synthetic(self) -> list[bool]:
        """Which rows verl's v1 trainer made up, to make the batch divide evenly."""
        try:
            uids = self.values("uid")
        except FieldShapeError:
            if not self.count_padding_rows:
                raise
            uids = None  # Nothing asks for it.
        return [False] * self.tokens.num_slots if uids is None else [str(uid).startswith("pad") for uid in uids]


@dataclass(frozen=True)
class Count:
    """A whole number that adds up over rows and ranks.

    Attributes:
        name: Its field of the micro-batch.
        counted_by: Who counts it over the mini-batch and all ranks: the engine, the trainer, or our training worker.
        of_rows: What rows of one rank give, int64 0-d.
        of_mixture: Whether it is counted for a loss alone that takes an expert's rows apart.
    """

    name: str
    counted_by: Literal["engine", "trainer", "worker"]
    of_rows: Callable[[Rows], Tensor]
    of_mixture: bool = False


class PairCount:
    """Pairs of sequences, half of the sequences; nobody sends it."""

    name = "batch_num_pairs"

    def total(self, counts: Mapping[str, int]) -> int | None:
        """The pairs of the mini-batch, None where the sequences were not counted; odd: a :class:`TotalsError`."""
        sequences = counts.get("global_batch_size")
        if sequences is not None and sequences % 2:
            raise TotalsError(f"global_batch_size is {sequences}; a loss of pairs needs an even number")
        return None if sequences is None else sequences // 2


@dataclass(frozen=True)
class GroupCount:
    """A number of groups of rows, which other rows and other ranks may belong to as well; our worker counts it.

    Attributes:
        name: Its field of the micro-batch.
        per_row: The field [rows] with the tokens of each row's group over the whole mini-batch.
        ids: The field that names the groups where only a micro-batch is looked at: integers [rows], for packed
            rows [rows, T].
        keys: What tells the group of each row, equal on every rank.
        told_by: Fields without which a row is a group by itself, and a warning says so; none: then that is an error.
        exact: Whether fewer groups than one micro-batch holds are an error; else that is divided by, with a warning.
    """

    name: str
    per_row: str
    ids: str
    keys: Callable[[Rows], Sequence[Hashable]]
    told_by: tuple[str, ...] = ()
    exact: bool = False

    def row_is_group(self, data: MicroBatchData) -> bool:
        """Whether nothing tells the groups of this batch, so that every row is one; a warning says so, once."""
        alone = bool(self.told_by) and all(get_value(data, name) is None for name in self.told_by)
        if alone:
            _warn_of_rows(self.noun, self.told_by)
        return alone

    @property
    def noun(self) -> str:
        """What the rows of a group have in common, for errors."""
        return self.per_row.removesuffix("_num_tokens")


def prompt_keys(rows: Rows) -> Sequence[Hashable]:
    """What tells the prompt of each row: its ``uid``, else the prompt's tokens (read to the host).

    Raises:
        MissingFieldError: There is neither.
    """
    uids, prompts = rows.values("uid"), get_value(rows.data, "prompts")
    if uids is not None:
        return uids
    if not isinstance(prompts, Tensor):
        raise MissingFieldError("prompt groups need 'uid' or 'prompts'")
    return [tuple(row.tolist()) for row in prompts.unbind()]


def _num_positive_tokens(rows: Rows) -> Tensor:
    tokens, advantages = rows.tokens, get_value(rows.data, "advantages")
    if not isinstance(advantages, Tensor):
        return torch.zeros_like(tokens.num_tokens)
    values = jagged_parts(advantages)[0] if is_jagged(advantages) else advantages.reshape(-1)
    if values.shape == (tokens.num_slots,) and values.shape != tokens.mask.shape:  # [rows, 1]
        values = tokens.per_token(values)
    if values.shape != tokens.mask.shape:
        raise FieldShapeError(f"advantages holds {values.numel()} values; expected {tokens.size}, as response_mask")
    return ((values > 0) & tokens.mask).count_nonzero()


def expert_values(tokens: ResponseTokens, data: MicroBatchData) -> Tensor | None:
    """The field :data:`EXPERT_MASK`, which marks an expert's rows: [S], of packed rows [N]; None where it is missing.

    Raises:
        FieldShapeError: It does not have one number per row, or per token of packed rows.
    """
    value = get_value(data, EXPERT_MASK)
    if value is None:
        return None
    packed = tokens.offsets is None
    size, each = (tokens.size, "token") if packed else (tokens.num_slots, "row")
    expected = f"expected one number, 0 or 1, per {each}, {size} in all"
    if not isinstance(value, Tensor):
        numbers = row_values(data, EXPERT_MASK, size)
        if not all(isinstance(number, Real) for number in numbers or ()):
            raise FieldShapeError(f"{EXPERT_MASK} has entries that are no numbers; {expected}")
        value = torch.tensor(numbers)
    if value.is_nested or value.numel() != size or value.is_complex():
        shape = "is jagged" if value.is_nested else f"has shape {list(value.shape)}"
        raise FieldShapeError(f"{EXPERT_MASK} {shape}; {expected}")
    return value.reshape(-1).to(tokens.mask.device)


def expert_rows(tokens: ResponseTokens, data: MicroBatchData) -> Tensor | None:
    """Which sequences are an expert's, bool [S]; None and errors as of :func:`expert_values`."""
    values = expert_values(tokens, data)
    if values is None or tokens.offsets is not None:
        return None if values is None else values != 0
    flags = torch.zeros(tokens.num_slots, dtype=torch.bool, device=values.device)
    return flags.scatter_(0, tokens.sequence, values != 0)


def _counts_of_rows(kind: Literal["usual", "expert"]) -> list[Count]:
    """The counts of one kind of rows; where nothing marks an expert's, all are usual."""

    def of(tokens: ResponseTokens, rows: Rows) -> ResponseTokens:
        flags = expert_rows(tokens, rows.data)
        if flags is None:
            flags = torch.zeros(tokens.num_slots, dtype=torch.bool, device=tokens.mask.device)
        return tokens.restrict_sequences(flags if kind == "expert" else ~flags)

    def real(rows: Rows) -> Tensor:
        synthetic = torch.tensor(rows.synthetic, dtype=torch.bool, device=rows.tokens.mask.device)
        return of(rows.tokens, rows).restrict_sequences(~synthetic).num_sequences

    counts: dict[str, Callable[[Rows], Tensor]] = {
        "tokens": lambda rows: of(rows.loss_tokens, rows).num_tokens,
        "valid_tokens": lambda rows: of(rows.tokens, rows).num_tokens,
        "rows": lambda rows: of(rows.tokens, rows).num_sequences,
        "nonempty_rows": lambda rows: of(rows.tokens, rows).num_nonempty_sequences,
        "real_rows": real,
    }
    return [Count(f"batch_num_{kind}_{what}", "worker", count, of_mixture=True) for what, count in counts.items()]


@cache
def _warn_of_rows(noun: str, told_by: tuple[str, ...]) -> None:
    warnings.warn(f"the batch has no {' and no '.join(told_by)}: every row is a {noun} of its own", stacklevel=4)


def trajectory_keys(rows: Rows) -> Sequence[Hashable]:
    """What tells the trajectory of each row: ``trajectory_ids``, else ``uid`` with ``session_id``, else the row itself.

    verl's agent loops may give several rows for one session of a prompt.

    Raises:
        MissingFieldError: There is a ``session_id``, but no ``uid`` of the prompt that it is a session of.
        FieldShapeError: ``trajectory_ids`` are no integers.
    """
    given = get_value(rows.data, "trajectory_ids")
    if isinstance(given, Tensor) and given.is_floating_point():
        raise FieldShapeError(f"trajectory_ids has dtype {given.dtype}; expected integers")
    ids, sessions, uids = (rows.values(name) for name in ("trajectory_ids", "session_id", "uid"))
    if ids is not None:
        return ids
    if sessions is None:
        return [(rows.name, row) for row in range(rows.tokens.num_slots)]
    if uids is None:
        raise MissingFieldError(
            "the batch has 'session_id', but no 'uid' of the prompt that it is a session of; verl's trainers send "
            "both, and 'trajectory_ids' takes the place of both"
        )
    return list(zip(uids, sessions, strict=True))


_BUILT_IN: tuple[Count | PairCount | GroupCount, ...] = (
    Count("batch_num_tokens", "engine", lambda rows: rows.loss_tokens.num_tokens),
    Count("global_batch_size", "trainer", lambda rows: rows.tokens.num_sequences),
    PairCount(),
    Count(VALID_TOKENS, "worker", lambda rows: rows.tokens.num_tokens),
    Count("batch_num_positive_tokens", "worker", _num_positive_tokens),
    Count("batch_num_nonempty_sequences", "worker", lambda rows: rows.tokens.num_nonempty_sequences),
    Count("batch_num_real_sequences", "worker", lambda rows: rows.tokens.num_sequences - sum(rows.synthetic)),
    *_counts_of_rows("usual"),
    *_counts_of_rows("expert"),
    GroupCount("batch_num_prompts", "prompt_num_tokens", "prompt_ids", prompt_keys),
    GroupCount(
        "batch_num_trajectories",
        "trajectory_num_tokens",
        "trajectory_ids",
        trajectory_keys,
        told_by=("trajectory_ids", "session_id"),
        exact=True,
    ),
)
_COUNTS = {count.name: count for count in _BUILT_IN}


def register_count(count: Count | GroupCount) -> None:
    """Adds a count of your own, which a mode may then name as its ``total``.

    Raises:
        ConfigError: The name is taken.
    """
    if count.name in _COUNTS or count.name == "dp_size":
        raise ConfigError(f"count {count.name!r} exists already")
    _COUNTS[count.name] = count


def find_count(name: str) -> Count | PairCount | GroupCount:
    """The count of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _COUNTS:
        raise ConfigError(f"total is {name!r}; expected one of {', '.join(_COUNTS)}, see register_count")
    return _COUNTS[name]


def count_names() -> tuple[str, ...]:
    """Names that a mode's ``total`` may have."""
    return tuple(_COUNTS)


@dataclass(frozen=True)
class Totals:
    """What the engine, the trainer and our training worker said of the mini-batch.

    Attributes:
        dp_size: Ranks that the engine averages gradients over, None where it did not say.
        counts: Counts by name, those that were sent.
    """

    dp_size: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.dp_size is not None or bool(self.counts)

    def get(self, name: str | None) -> int | None:
        """The count of that name over the mini-batch, None where nobody counted it; 1 where a sum has none.

        Raises:
            TotalsError: It is one of pairs, and the number of sequences is odd.
        """
        if name is None:
            return 1
        count = find_count(name)
        return count.total(self.counts) if isinstance(count, PairCount) else self.counts.get(name)

    @property
    def nothing_counts(self) -> bool:
        """Whether the mini-batch has no token that counts."""
        return self.counts.get(VALID_TOKENS, self.counts.get("batch_num_tokens")) == 0


def read_totals(data: MicroBatchData) -> Totals:
    """Reads what was counted over the mini-batch.

    Args:
        data: Micro-batch; each count may be an int, a NonTensorData or a one-element tensor, or missing.

    Raises:
        TotalsError: A value is negative or not a whole number.
    """
    sent = data.keys()
    read = {name: _whole_number(name, get_value(data, name)) for name in ("dp_size", *_COUNTS) if name in sent}
    dp_size = read.pop("dp_size", None)
    return Totals(dp_size, {name: count for name, count in read.items() if count is not None})


def _whole_number(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and value > 0):
        return value
    if isinstance(value, Tensor | np.generic | np.ndarray) and np.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral | Real) or value != value or value < 0:
        raise TotalsError(f"{name} is {value!r}; expected a whole number, 0 or more")
    whole = int(value) if math.isfinite(value) else None  # type: ignore[call-overload]
    if whole != value or (name == "dp_size" and value == 0):
        raise TotalsError(f"{name} is {value!r}; expected a whole number{' above 0' if name == 'dp_size' else ''}")
    return whole


class Group(NamedTuple):
    """Rows that belong together: their tokens that count, how many there are, and whether all of them are made up."""

    num_tokens: int
    num_rows: int
    synthetic: bool


#: Groups of some rows by what tells them, short and equal on every rank.
Groups = dict[bytes, Group]


def find_groups(count: GroupCount, rows: Rows) -> Groups:
    """The groups of these rows (read to the host)."""
    parts = zip(_hashed_keys(count, rows), rows.tokens.counts.tolist(), rows.synthetic, strict=True)
    return merge_groups({key: Group(num_tokens, 1, synthetic)} for key, num_tokens, synthetic in parts)


def merge_groups(parts: Iterable[Groups]) -> Groups:
    """The groups of several lots of rows as those of all of them."""
    merged: Groups = {}
    for part in parts:
        for key, (tokens, rows, synthetic) in part.items():
            known = merged.get(key, Group(0, 0, True))
            merged[key] = Group(known.num_tokens + tokens, known.num_rows + rows, known.synthetic and synthetic)
    return merged


def _hashed_keys(count: GroupCount, rows: Rows) -> list[bytes]:
    return [hashlib.sha256(repr(key).encode()).digest() for key in count.keys(rows)]


def fields_of_groups(rows: Rows, groups: Mapping[str, Groups]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """What rows are sent of the groups of the mini-batch.

    Args:
        rows: The rows.
        groups: Groups of the whole mini-batch, by the name of their count.

    Returns:
        Numbers of groups by name, and fields int64 [rows] by name.
    """
    numbers, per_row = {}, {}
    for name, found in groups.items():
        count = find_count(name)
        assert isinstance(count, GroupCount)
        numbers[name] = sum(
            (group.num_tokens > 0 or rows.count_empty_sequences) and (rows.count_padding_rows or not group.synthetic)
            for group in found.values()
        )
        sizes = [found[key].num_tokens for key in _hashed_keys(count, rows)]
        per_row[count.per_row] = torch.tensor(sizes, dtype=torch.int64)
    return numbers, per_row


def count_rows(rows: Rows) -> tuple[dict[str, int], dict[str, Tensor]]:
    """What engine, trainer and worker attach to a mini-batch that consists of these rows alone.

    Groups that nothing tells are left out, as nothing would count them.
    """
    numbers, groups = {}, {}
    for name, count in _COUNTS.items():
        if isinstance(count, Count):
            numbers[name] = int(count.of_rows(rows))
        elif isinstance(count, GroupCount):
            with contextlib.suppress(MissingFieldError):
                groups[name] = find_groups(count, rows)
    of_groups, per_row = fields_of_groups(rows, groups)
    return numbers | of_groups, per_row
