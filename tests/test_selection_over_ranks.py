"""Choosing among the tokens of a mini-batch, on one rank and on several, against sorting all of them."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trinity_loss.invariance.ranks import on_ranks as played
from trinity_loss.selection import Ranks, largest, smallest_with_mean_below, token_numbers, top_quantile


def on_ranks(parts: list[tuple[Tensor, Tensor]], choose: Callable[[Tensor, Tensor, Ranks], Tensor]) -> Tensor:
    """What threads that play ranks choose, in the order of the parts."""
    return torch.cat(played(len(parts), lambda ranks: choose(*parts[ranks.rank], ranks)))


def cut(values: Tensor, numbers: Tensor, edges: list[int]) -> list[tuple[Tensor, Tensor]]:
    ends = [0, *sorted(min(edge, len(values)) for edge in edges), len(values)]
    return [(values[a:b], numbers[a:b]) for a, b in pairwise(ends)]


@st.composite
def cases(draw):
    """Values with ties, the numbers of their tokens, and where ranks begin; a rank may be empty."""
    size = draw(st.integers(1, 40))
    value = st.sampled_from([-2.0, -0.0, 0.0, 0.1, 0.1 + 1e-9, 3.0]) | st.floats(-1e3, 1e3)
    values = torch.tensor(draw(st.lists(value, min_size=size, max_size=size)), dtype=torch.float64)
    rows = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    places = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    return values, token_numbers(rows, places, 7), draw(st.lists(st.integers(0, 40), max_size=3))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 45))
def test_the_largest(case, count):
    values, numbers, edges = case
    got = on_ranks(cut(values, numbers, edges), lambda v, n, ranks: largest(v, count, n, ranks))
    order = sorted(range(len(values)), key=lambda i: (-float(values[i]), int(numbers[i])))[:count]
    chosen = sorted(zip(values[got].tolist(), numbers[got].tolist(), strict=True))
    assert chosen == sorted((float(values[i]), int(numbers[i])) for i in order)


@settings(max_examples=150, deadline=None)
@given(cases(), st.floats(0.01, 1.0))
def test_a_quantile(case, share):
    values, numbers, edges = case
    got = on_ranks(cut(values, numbers, edges), lambda v, n, ranks: top_quantile(v, share, n, ranks))
    ordered = values.sort().values
    lowest = ordered[min(int(-(-(1 - share) * (len(values) - 1) // 1)), len(values) - 1)]
    assert torch.equal(got, values >= lowest)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1e-3, 0.04, 1.0, 50.0]))
def test_the_mean_of_the_rest(case, bound):
    values, numbers, edges = case
    squares = values.square()
    got = on_ranks(cut(squares, numbers, edges), lambda v, n, ranks: smallest_with_mean_below(v, bound, n, ranks))
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    below = torch.nonzero(means < bound * (1 - 1e-12)).reshape(-1)
    count = int(below[-1]) + 1 if len(below) else 1
    assert torch.equal(squares[got].sort().values, ordered[:count])


def test_numbers_belong_to_the_token_and_look_drawn():
    rows, places = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    numbers = token_numbers(rows, places, 42, 3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_numbers(rows[order], places[order], 42, 3), numbers[order])
    assert numbers.unique().numel() == len(rows)
    assert not torch.equal(numbers, token_numbers(rows, places, 42, 4))
    # Each of 16 equal ranges of int64 gets about its share: 256 with a standard deviation of 16.
    shares = torch.bincount((numbers >> 60) + 8, minlength=16)
    assert (shares - 256).abs().max() < 80


@pytest.mark.parametrize("choose", [largest, top_quantile, smallest_with_mean_below])
def test_of_nothing(choose):
    nothing = torch.zeros(0, dtype=torch.float64)
    assert choose(nothing, 1, torch.zeros(0, dtype=torch.int64)).shape == (0,)
