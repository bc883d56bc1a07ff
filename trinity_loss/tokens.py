"""Response tokens as one flat vector, whatever layout they came in.

Padded rows with a mask, jagged values with offsets and packed rows with segment ids are three ways to
build a :class:`ResponseTokens`. Nothing after that asks which one it was, and nothing here reads a tensor
back to the host: sizes come from shapes, so on a GPU no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import FieldShapeError, NonFiniteError
from trinity_loss.jagged import check_tensor, jagged_parts


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else (`torch.promote_types` costs as much as ten operations)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in that type; booleans become 0 and 1."""
    # By way of bytes: a conversion of booleans costs four times as much on a CPU.
    return (values.view(torch.uint8) if values.dtype == torch.bool else values).to(dtype)


def above(left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where left > right, else 0.0: a mask that multiplies, as of :func:`at_most` and :func:`equal`.

    On a CPU a boolean mask costs 5 multiplications and ``torch.where`` 30. With both a whole call of ``ppo`` takes
    1.24 times as long, with boolean masks alone 1.15 times.
    """
    return torch.gt(left, right, out=torch.empty_like(left))


def at_most(left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where left <= right, else 0.0: a mask that multiplies."""
    return torch.le(left, right, out=torch.empty_like(left))


def equal(left: Tensor, right: Tensor) -> Tensor:
    """1.0 where left = right, else 0.0: a mask that multiplies."""
    return torch.eq(left, right, out=torch.empty_like(left))


def _numbered(keys: Tensor) -> Tensor:
    """Equal integers [n] as equal numbers below n, without reading anything back to the host; of [rows, n] in each row.

    Keys are ordered, and the runs of equal ones numbered.
    """
    ordered, order = torch.sort(keys, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    runs = first.reshape(-1).cumsum(0).reshape(first.shape) - 1
    return torch.empty_like(runs).scatter_(-1, order, runs)


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """Sequences that belong together, such as the answers to one prompt.

    Attributes:
        num_tokens: int64 [S], tokens of the group of each sequence, over the whole mini-batch.
        num_groups: int64 0-d, groups with a sequence here.
    """

    num_tokens: Tensor
    num_groups: Tensor


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """Flat response tokens and the sequence that each of them belongs to.

    Make one with :meth:`from_padded`, :meth:`from_jagged` or :meth:`from_packed`.

    Attributes:
        mask: bool [N], the tokens that count. Anything may stand at the others, NaN included.
        num_slots: Number of sequence slots S, known on the host. For padded and jagged tokens it is the
            number of sequences; for packed rows it is an upper bound, see ``exists``.
        offsets: int64 [S + 1] where the tokens of each sequence are contiguous and in order, else None.
        labels: int64 [N], the slot of each token, where ``offsets`` is None.
        segment_ids: The ids [rows, T] that packed rows came with, else None.
        exists: bool [S], the slots that count as sequences; None if all do.
        denominator_mask: bool [N], ``mask`` as it was before the loss rejected some tokens; None if it rejected none.
        groups: Groups of sequences that are known, by the name of their count, see :mod:`trinity_loss.totals`.

    Example:
        >>> import torch
        >>> tokens = ResponseTokens.from_padded(torch.tensor([[1, 1, 0], [1, 0, 0]]))
        >>> tokens.counts.tolist(), int(tokens.num_tokens), int(tokens.num_sequences)
        ([2, 1], 3, 2)
        >>> packed = ResponseTokens.from_packed(torch.tensor([[1, 1, 1, 0]]), torch.tensor([[7, 7, 3, 0]]))
        >>> int(packed.num_tokens), int(packed.num_sequences)
        (3, 2)
    """

    mask: Tensor
    num_slots: int
    offsets: Tensor | None = None
    labels: Tensor | None = None
    segment_ids: Tensor | None = None
    exists: Tensor | None = None
    denominator_mask: Tensor | None = None
    groups: Mapping[str, SequenceGroups] = field(default_factory=dict)
    _known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives, made once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @classmethod
    def of(cls, mask: Tensor, segment_ids: Tensor | None = None) -> ResponseTokens:
        """Of a mask in whatever layout: jagged, packed with segment ids, or padded."""
        if mask.is_nested:
            return cls.from_jagged(*jagged_parts(mask))
        return cls.from_padded(mask) if segment_ids is None else cls.from_packed(mask, segment_ids)

    @classmethod
    def from_padded(cls, mask: Tensor) -> ResponseTokens:
        """One sequence per row of a mask [B, T]; any dtype, non-zero counts."""
        if mask.dim() != 2:
            raise FieldShapeError(f"the mask has shape {list(mask.shape)}; expected [rows, T]")
        rows, width = mask.shape
        offsets = torch.arange(rows + 1, device=mask.device) * width
        return cls(mask=mask.reshape(-1) != 0, num_slots=rows, offsets=offsets)

    @classmethod
    def from_jagged(cls, mask: Tensor, offsets: Tensor) -> ResponseTokens:
        """Mask values [N] of jagged sequences whose tokens start at ``offsets`` int [S + 1]."""
        if mask.dim() != 1 or offsets.dim() != 1 or offsets.numel() < 1:
            raise FieldShapeError(
                f"mask values {list(mask.shape)} and offsets {list(offsets.shape)}; expected [N] and [S + 1]"
            )
        # The same as `!= 0`, which costs three times as much on a CPU.
        return cls(mask=mask.to(torch.bool), num_slots=offsets.numel() - 1, offsets=offsets)

    @classmethod
    def from_packed(cls, mask: Tensor, segment_ids: Tensor) -> ResponseTokens:
        """Several sequences per row: tokens of a row with the same id are one sequence, id 0 is padding.

        Ids need not be dense, nor stand together, nor start anew in each row.
        """
        check_tensor("segment_ids", segment_ids)
        if mask.dim() != 2 or mask.shape != segment_ids.shape:
            raise FieldShapeError(
                f"segment_ids has shape {list(segment_ids.shape)}; expected that of the mask, [rows, T], "
                f"here {list(mask.shape)}"
            )
        if segment_ids.is_floating_point() or segment_ids.dtype == torch.bool:
            raise FieldShapeError(f"segment_ids has dtype {segment_ids.dtype}; expected an integer type")
        # Equal ids of one row belong together wherever they stand.
        labels, flat = _numbered(segment_ids).reshape(-1), segment_ids.reshape(-1) != 0
        exists = torch.zeros_like(flat).index_put_((labels,), flat)
        return cls(
            mask=(mask.reshape(-1) != 0) & flat,
            num_slots=flat.numel(),
            labels=labels,
            segment_ids=segment_ids,
            exists=exists,
        )

    @property
    def size(self) -> int:
        """Number of flat tokens N, counted or not."""
        return self.mask.numel()

    @property
    def starts(self) -> Tensor:
        """int64 [S + 1]: :attr:`offsets` of tokens that have them."""
        assert self.offsets is not None
        return self.offsets

    @property
    def lengths(self) -> Tensor:
        """int64 [S]: tokens of each contiguous sequence, counted or not."""
        return self._once("lengths", self.starts.diff)

    @property
    def sequence(self) -> Tensor:
        """int64 [N]: the slot of each token."""
        return self._once("sequence", self._find_sequence) if self.labels is None else self.labels

    @property
    def places(self) -> Tensor:
        """int64 [N]: the place of each token in its sequence; of packed rows that in all of them."""
        flat = torch.arange(self.size, device=self.mask.device)
        return flat if self.offsets is None else flat - self.offsets[self.sequence]

    def _find_sequence(self) -> Tensor:
        slots = torch.arange(self.num_slots, device=self.mask.device)
        return torch.repeat_interleave(slots, self.lengths, output_size=self.size)

    @property
    def counts(self) -> Tensor:
        """int64 [S]: tokens of each sequence that count."""
        return self._once("counts", self._count)

    def _count(self) -> Tensor:
        if self.offsets is None:
            zeros = torch.zeros(self.num_slots, dtype=torch.int64, device=self.mask.device)
            return zeros.index_add_(0, self.sequence, self.mask.to(torch.int64))
        # Integers, so differences of a running sum are exact.
        running = torch.nn.functional.pad(self.mask.cumsum(0), (1, 0))
        return running.index_select(0, self.offsets).diff()

    @property
    def num_tokens(self) -> Tensor:
        """int64 0-d: tokens that count."""
        return self._once("num_tokens", self.mask.count_nonzero)

    @property
    def num_sequences(self) -> Tensor:
        """int64 0-d: sequences, fully masked ones included."""
        if self.exists is not None:
            return self.exists.sum()
        return torch.full((), self.num_slots, dtype=torch.int64, device=self.mask.device)

    @property
    def num_nonempty_sequences(self) -> Tensor:
        """int64 0-d: sequences with at least one token that counts."""
        return (self.counts > 0).sum()

    def differ_within(self, ids: Tensor) -> Tensor:
        """Whether ids [N] of packed rows differ within a segment, bool 0-d; padding has none that matters."""
        assert self.exists is not None
        per_slot = torch.zeros(self.num_slots, dtype=ids.dtype, device=ids.device).scatter_(0, self.sequence, ids)
        return ((per_slot[self.sequence] != ids) & self.exists[self.sequence]).any()

    def group_by(self, ids: Tensor, *, count_empty: bool = True) -> SequenceGroups:
        """The groups of sequences with equal ids.

        Args:
            ids: Integers, [S] per sequence; for packed rows [N] per token.
            count_empty: Whether a group without any token that counts is a group.

        Example:
            >>> import torch
            >>> tokens = ResponseTokens.from_padded(torch.tensor([[1, 1], [1, 0], [1, 1]]))
            >>> tokens.group_by(torch.tensor([5, 5, 9])).num_tokens.tolist()
            [3, 3, 2]
        """
        if self.labels is not None:
            # Any token of a slot names its group: the ids of one sequence are equal.
            per_slot = torch.zeros(self.num_slots, dtype=ids.dtype, device=ids.device)
            ids = per_slot.scatter_(0, self.sequence, ids)
        labels = _numbered(ids)
        zeros = torch.zeros_like(self.counts)
        sizes = zeros.index_add(0, labels, self.counts)
        exists = torch.ones_like(self.counts) if self.exists is None else self.exists.to(torch.int64)
        members = zeros.index_add(0, labels, exists) if count_empty else sizes
        return SequenceGroups(sizes.index_select(0, labels), (members > 0).sum())

    def check_finite(self, name: str, values: Tensor) -> None:
        """Raises :class:`NonFiniteError` naming the first counted token of values [N] that is not finite.

        It reads to the host, so it is called when something is known to be wrong.
        """
        bad = torch.nonzero(~torch.isfinite(values) & self.mask).reshape(-1)
        if bad.numel():
            raise NonFiniteError(
                f"{name} is {values[bad[0]].item()} at response {self._place(int(bad[0]))}, which the mask counts "
                f"({bad.numel()} such tokens); expected finite numbers"
            )

    def _place(self, index: int) -> str:
        slot = int(self.sequence[index])
        position = int((self.sequence[:index] == slot).sum())
        if self.segment_ids is None:
            return f"token {position} of sequence {slot}"
        row, column = divmod(index, self.segment_ids.shape[1])
        return f"token {position} of segment {int(self.segment_ids[row, column])} of row {row}"

    @property
    def before_rejection(self) -> ResponseTokens:
        """The same tokens as they were before the loss rejected some: what the mini-batch's counts were taken of."""
        return (
            self if self.denominator_mask is None else replace(self, mask=self.denominator_mask, denominator_mask=None)
        )

    def reject(self, rejected: Tensor) -> ResponseTokens:
        """The same tokens without those where ``rejected`` bool [N]; a denominator still counts them."""
        before = self.mask if self.denominator_mask is None else self.denominator_mask
        return replace(self, mask=self.mask & ~rejected, denominator_mask=before)

    def restrict(self, where: Tensor) -> ResponseTokens:
        """The same tokens, of which only those where ``where`` bool [N] holds count, in a denominator too."""
        before = self.denominator_mask
        return replace(self, mask=self.mask & where, denominator_mask=None if before is None else before & where)

    def restrict_sequences(self, where: Tensor) -> ResponseTokens:
        """The same tokens, of whose sequences only those where ``where`` bool [S] holds count, in a denominator too."""
        exists = where if self.exists is None else self.exists & where
        return replace(self.restrict(self.per_token(where)), exists=exists)

    def sum_per_sequence(self, values: Tensor) -> Tensor:
        """Sums values [N] over each sequence, [S]; differentiable. Uncounted tokens are summed like others.

        It adds up in float64: one after the other in float32, a million equal numbers are 1 % off.
        """
        wide = values.to(torch.float64)
        if self.offsets is None or values.numel() == 0:
            zeros = torch.zeros(self.num_slots, dtype=torch.float64, device=values.device)
            sums = zeros.index_add(0, self.sequence, wide)
        else:
            sums = torch.segment_reduce(wide, "sum", lengths=self.lengths, unsafe=True)
        return sums.to(values.dtype)

    def mean_per_sequence(self, values: Tensor) -> Tensor:
        """Mean of finite values [N] over the counted tokens of each sequence, [S]; 0 for a masked one."""
        total = self.sum_per_sequence(values * self.mask)
        return total / self.counts.clamp(min=1).to(values.dtype)

    def per_token(self, values: Tensor) -> Tensor:
        """Gives each token the value of its sequence: [S] to [N]; differentiable.

        Its gradient is a sum over each sequence, and adds up as :meth:`sum_per_sequence` does.
        """
        if not values.requires_grad:
            if self.labels is None:
                return torch.repeat_interleave(values, self.lengths, output_size=self.size)
            return values.index_select(0, self.sequence)
        return values.to(torch.float64).index_select(0, self.sequence).to(values.dtype)

    def select(self, values: Tensor) -> Tensor:
        """Values [..., N] with 0 at uncounted tokens: neither value nor gradient comes from there.

        Multiplying by the mask would keep a NaN or an infinity that stands there.
        """
        return torch.where(self.mask, values, 0)

    def indicator(self, dtype: torch.dtype) -> Tensor:
        """The mask [N] as 0.0 and 1.0."""
        return self._once(dtype, lambda: as_numbers(self.mask, dtype))
