"""Choosing among the tokens of a whole mini-batch: the largest, a quantile, what keeps a mean below a bound, a draw.

Every function here gets the tokens of one rank and a :class:`Ranks` that adds tensors up over the others, and says of
each of its own tokens whether it is chosen. Order statistics are found digit by digit in histograms, so no rank ever
holds the tokens of another, and the result does not depend on who holds what. Where values are equal, and where a
choice is random, a number that belongs to the token decides (:func:`token_numbers`), not a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_DIGIT_BITS = 16
_DIGITS = 2**_DIGIT_BITS
_SIGN = -(2**63)


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a mini-batch together; alone by default.

    Attributes:
        add_up: Adds a tensor up over the ranks, in place or not, and returns it.
        rank: This one.
        size: How many there are.
    """

    add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor
    rank: int = 0
    size: int = 1

    def total(self, *numbers: Tensor) -> list[float]:
        """Each 0-d tensor summed over the ranks, in float64, on the host."""
        return self.add_up(torch.stack([number.to(torch.float64) for number in numbers])).tolist()

    def before(self, count: int, device: torch.device) -> int:
        """The sum of ``count`` over the ranks before this one."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = count
        return int(self.add_up(counts)[: self.rank].sum())


def token_numbers(rows: Tensor, places: Tensor, *salts: int) -> Tensor:
    """A number for each token that is as good as random and belongs to it.

    Args:
        rows: int64 [n], what tells the row of each token, equal wherever the row is.
        places: int64 [n], the place of each token in its row.
        *salts: What else changes all numbers, such as a seed and a step.

    Returns:
        int64 [n].

    Example:
        >>> rows, places = torch.tensor([7, 7, 9]), torch.tensor([0, 1, 0])
        >>> numbers = token_numbers(rows, places, 42, 1)
        >>> bool((token_numbers(rows[2:], places[2:], 42, 1) == numbers[2:]).all()), numbers.unique().numel()
        (True, 3)
    """
    state = torch.zeros_like(rows)
    for salt in salts:
        state = _mix(state + salt)
    return _mix(_mix(state + rows) + places)


def row_numbers(token_ids: Tensor, offsets: Tensor) -> Tensor:
    """A number for each row that is as good as random and belongs to its tokens, int64 [S].

    Args:
        token_ids: int64 [n], of all rows, one row after the other.
        offsets: int64 [S + 1], where each row begins.

    Example:
        >>> numbers = row_numbers(torch.tensor([5, 6, 5, 6, 7]), torch.tensor([0, 2, 4, 5]))
        >>> bool(numbers[0] == numbers[1]), bool(numbers[1] == numbers[2])
        (True, False)
    """
    rows = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())
    places = torch.arange(token_ids.numel(), device=offsets.device) - offsets[rows]
    zeros = torch.zeros(offsets.numel() - 1, dtype=torch.int64, device=offsets.device)
    return zeros.index_add_(0, rows, token_numbers(token_ids.to(torch.int64), places))


def _mix(value: Tensor) -> Tensor:
    """SplitMix64, https://doi.org/10.1145/2714064.2660195; integers wrap around."""
    value = value - 0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        value = (value ^ _shifted(value, shift)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shifted right, zeros moving in."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _ordered_bits(values: Tensor) -> Tensor:
    """int64 [n] whose bits, read without a sign, are in the order of the values (float or int64)."""
    if values.is_floating_point():
        bits = (values.to(torch.float64) + 0.0).view(torch.int64)  # -0.0 is 0.0
        bits = bits ^ ((bits >> 63) & ~_SIGN)
    else:
        bits = values
    return bits ^ _SIGN


def _digit(bits: Tensor, shift: int) -> Tensor:
    return (bits >> shift) & (_DIGITS - 1)


def largest(values: Tensor, count: int, numbers: Tensor, ranks: Ranks = Ranks()) -> Tensor:
    """Which tokens have the ``count`` largest values of all ranks together.

    Args:
        values: Finite, float or int64 [n], of this rank's candidates.
        count: How many are chosen, or all where there are fewer.
        numbers: :func:`token_numbers` [n]; where the last of several equal values is in question, the smallest
            numbers are chosen.
        ranks: Who else has candidates.

    Returns:
        bool [n].

    Example:
        >>> numbers = torch.arange(4)
        >>> largest(torch.tensor([1.0, 3.0, 2.0, 2.0]), 2, numbers).tolist()
        [False, True, True, False]
    """
    chosen, tied, wanted, equal = _split(_ordered_bits(values), torch.ones_like(values, dtype=torch.bool), count, ranks)
    return chosen | _some_of(tied, wanted, equal, numbers, ranks)


def _split(bits: Tensor, inside: Tensor, count: int, ranks: Ranks) -> tuple[Tensor, Tensor, int, int]:
    """The ``count`` largest of those ``inside`` [n], up to equal ones.

    Returns:
        What is chosen [n], what ties for the rest [n], how many of these are still wanted, how many all ranks have.
    """
    chosen, wanted, equal = torch.zeros_like(inside), count, 0
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = _digit(bits, shift)
        histogram = ranks.add_up(torch.bincount(digits[inside], minlength=_DIGITS))
        from_above = histogram.flip(0).cumsum(0)
        if wanted <= 0 or int(from_above[-1]) <= wanted:
            # All or none of them: on every rank alike, since these numbers are.
            return chosen | (inside if wanted > 0 else chosen), torch.zeros_like(inside), 0, 0
        # The digit in which the last one wanted is.
        border = _DIGITS - 1 - int(torch.searchsorted(from_above, wanted))
        wanted -= int(from_above[_DIGITS - 2 - border]) if border < _DIGITS - 1 else 0
        chosen |= inside & (digits > border)
        inside = inside & (digits == border)
        equal = int(histogram[border])
    return chosen, inside, wanted, equal


def _some_of(tied: Tensor, wanted: int, equal: int, numbers: Tensor, ranks: Ranks) -> Tensor:
    """``wanted`` of the ``equal`` tokens that tie on all ranks, those with the smallest numbers."""
    if wanted >= equal or wanted <= 0:
        return tied if wanted > 0 else torch.zeros_like(tied)
    chosen, same, wanted, _ = _split(_ordered_bits(~numbers), tied, wanted, ranks)
    # These have one number: they are one token several times over, and it does not matter which is chosen.
    first = ranks.before(int(same.sum()), tied.device)
    return chosen | (same & (same.cumsum(0) + first <= wanted))


def top_quantile(values: Tensor, share: float, numbers: Tensor, ranks: Ranks = Ranks()) -> Tensor:
    """Which tokens are at or above the ``1 - share`` quantile of all values, equal ones all included.

    The quantile is the linearly interpolated one of ``torch.quantile``, as TRL takes it of entropies
    (``top_entropy_quantile``).

    Args:
        values: Finite [n].
        share: Above 0, at most 1.
        numbers: :func:`token_numbers` [n].
        ranks: Who else has values.

    Example:
        >>> top_quantile(torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.5, torch.arange(4)).tolist()
        [False, False, True, True]
    """
    (total,) = (int(n) for n in ranks.total(torch.tensor(values.numel(), device=values.device)))
    if not total:
        return torch.zeros_like(values, dtype=torch.bool)
    place = (1 - share) * (total - 1)
    count = total - min(int(-(-place // 1)), total - 1)
    chosen = largest(values, count, numbers, ranks)
    lowest = torch.where(chosen, values.to(torch.float64), torch.inf)
    smallest = torch.zeros(ranks.size, dtype=torch.float64, device=values.device)
    smallest[ranks.rank] = lowest.amin() if values.numel() else torch.inf
    # One number of each rank, added up with zeros: infinity where a rank has none.
    return values >= ranks.add_up(smallest).amin()


def smallest_with_mean_below(values: Tensor, bound: float, numbers: Tensor, ranks: Ranks = Ranks()) -> Tensor:
    """Which tokens stay if the largest are dropped until the mean of those that stay is below ``bound``.

    At least one stays, as in AReaL's M2PO (https://arxiv.org/abs/2510.01161).

    Args:
        values: Finite, 0 or more [n].
        bound: Above 0.
        numbers: :func:`token_numbers` [n].
        ranks: Who else has values.

    Returns:
        bool [n].

    Example:
        >>> smallest_with_mean_below(torch.tensor([0.0, 0.1, 0.5, 0.1]), 0.08, torch.arange(4)).tolist()
        [True, True, False, True]
    """
    values = values.to(torch.float64)
    bits = _ordered_bits(values)
    inside = torch.ones_like(values, dtype=torch.bool)
    kept = torch.zeros_like(inside)
    count, total = 0.0, 0.0
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = _digit(bits, shift)
        sums = torch.zeros(2, _DIGITS, dtype=torch.float64, device=values.device)
        sums[0] = torch.bincount(digits[inside], minlength=_DIGITS)
        sums[1] = torch.bincount(digits[inside], weights=values[inside], minlength=_DIGITS)
        sums = ranks.add_up(sums)
        counts, totals = sums.cumsum(1) + torch.tensor([[count], [total]], dtype=torch.float64, device=values.device)
        too_much = torch.nonzero((totals >= bound * counts) & (sums[0] > 0)).reshape(-1)
        if not too_much.numel():
            return kept | inside
        border = int(too_much[0])
        kept |= inside & (digits < border)
        inside &= digits == border
        if border:
            count, total = float(counts[border - 1]), float(totals[border - 1])
        equal, of_equal = int(sums[0, border]), float(sums[1, border])
    value = of_equal / equal
    room = (bound * count - total) / (value - bound) if value > bound else 0.0
    wanted = max(int(-(-room // 1)) - 1, 0) if count else 1
    return kept | _some_of(inside, wanted, equal, numbers, ranks)
