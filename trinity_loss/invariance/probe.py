"""Why a loss depends on the cut: experiments on one micro-batch, each of which one cause answers to.

All of them keep the totals of the mini-batch, so a loss that keeps the contract is a plain sum over the
sequences of a micro-batch: what a sequence contributes does not ask who else is there. Then

- the micro-batch twice over gives twice the gradient; a mean over it gives the same again;
- one more sequence without a valid token changes nothing; a share that counts it does;
- a sequence alone gives what it gave in company, times one factor for all of its tokens where a mean or a
  share counts the others, times different ones where tokens are chosen or normalised by what else is there;
- twice the ranks give twice the gradient, since the engine averages over them;
- a wider padding changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_loss.invariance.cuts import Cut, Layout
from trinity_loss.invariance.measure import Subject, describe, variant
from trinity_loss.invariance.minibatch import MiniBatch

_SAME = 1e-3
_MOST_ALONE = 6


@dataclass(frozen=True)
class Cause:
    """Why one term depends on the cut.

    Attributes:
        name: One of :data:`trinity_loss.invariance.rows.CAUSES`.
        why: What follows the colon of the sentence; ``{}`` stands for who does it.
    """

    name: str
    why: str


def with_masked(subject: Subject, *lengths: int) -> tuple[MiniBatch, list[int]]:
    """The mini-batch and further fully masked sequences, and the numbers of these; totals stay as they were."""
    sequences, size = subject.batch.num_sequences, subject.batch.group_size
    batch = variant(subject.batch, "with_masked_sequences", *(length for length in lengths for _ in range(size)))
    return batch, list(range(sequences, batch.num_sequences))


def causes(subject: Subject, term: str) -> list[Cause]:
    """What makes this term depend on the cut; never empty."""
    try:
        return _causes(Probe(subject, term))
    except Exception as error:
        # A loss may refuse an experiment, as ours does twice as many tokens as the totals say there are.
        return [Cause("unexplained", f"{{}} raises where it is looked into: {describe(error)}")]


def _causes(probe: Probe) -> list[Cause]:
    found = []
    width = probe.width()
    if abs(width - 1) > _SAME:
        found.append(Cause("padded width as the norm", "{} divides by the padded width, which differs between cuts"))
    company = probe.company()
    if company is not None:
        found.append(company)
    elif abs(probe.twice() - 2) <= _SAME:
        ranks = probe.two_ranks()
        if abs(ranks - 1) <= _SAME:
            found.append(
                Cause("missing dp_size", "{} is not multiplied by dp_size, and the engine averages over ranks")
            )
        elif abs(ranks - 2) > _SAME:
            found.append(Cause("missing dp_size", f"{{}} grows by {ranks:.3g} instead of 2 when the ranks double"))
        pieces = probe.more_micro_batches()
        if abs(pieces - 1) > _SAME:
            found.append(
                Cause("number of micro-batches", "{} multiplies by num_micro_batch, and so does the engine already")
            )
        if not found and probe.order_matters():
            found.append(
                Cause("order of the sequences", "what a sequence adds to {} depends on where in the micro-batch it is")
            )
    return found or [Cause("unexplained", "{} is not a sum over the micro-batch's sequences")]


class Probe:
    """Experiments on the whole mini-batch as one micro-batch, for one term."""

    def __init__(self, subject: Subject, term: str) -> None:
        self.subject, self.term = subject, term
        # Padded to one width throughout, so that the width cannot pass for something else.
        self.layout: Layout = "padded" if "padded" in subject.layouts else subject.base
        longest = int(subject.batch.response_lengths.max())
        self.fixed = longest + 8 if self.layout == "padded" else None
        self.rows = tuple(range(subject.batch.num_sequences))
        self.together = self.gradient(self.rows)

    def gradient(
        self,
        rows: Sequence[int],
        batch: MiniBatch | None = None,
        *,
        layout: Layout | None = None,
        width: int | None = None,
        **totals: int,
    ) -> Tensor:
        cut = Cut(
            "even",
            ((tuple(rows),),),
            layout or self.layout,
            width or (self.fixed if layout in (None, "padded") else None),
            engine="megatron" if "num_micro_batch" in totals else "fsdp",
        )
        gradient = self.subject.term(self.term, cut, batch, totals)
        return gradient if batch is None else gradient[: self.subject.batch.num_tokens]

    def factor(self, gradient: Tensor, reference: Tensor | None = None) -> float:
        """The number that, times ``reference``, comes nearest to ``gradient``; 1 if not finite."""
        reference = self.together if reference is None else reference
        factor = float(gradient @ reference / (reference @ reference).clamp(min=1e-300))
        return factor if math.isfinite(factor) else 1.0

    def width(self) -> float:
        """Factor that a different width makes."""
        if self.layout == "padded":
            assert self.fixed is not None
            padded = self.factor(self.gradient(self.rows, width=self.fixed + 7))
            if abs(padded - 1) > _SAME:
                return padded
        # Two more sequences without a valid token: one long one makes the padding wider, a second one does not.
        longest = int(self.subject.batch.response_lengths.max()) + 7
        narrow, wide, wider = (
            self._with_two(first, second) for first, second in ((1, 1), (longest, 1), (longest,) * 2)
        )
        counts_masked_tokens = abs(self.factor(wider, wide) - 1) > _SAME
        return 1.0 if counts_masked_tokens else self.factor(wide, narrow)

    def _with_two(self, *lengths: int) -> Tensor:
        batch, masked = with_masked(self.subject, *lengths)
        return self.gradient([*self.rows, *masked], batch, layout=self.subject.base)

    def twice(self) -> float:
        return self.factor(self.gradient(self.rows + self.rows))

    def one_more_masked(self) -> float:
        batch, masked = with_masked(self.subject, 2)
        return self.factor(self.gradient([*self.rows, *masked], batch))

    def two_ranks(self) -> float:
        return self.factor(self.gradient(self.rows, dp_size=2))

    def more_micro_batches(self) -> float:
        three, one = (self.gradient(self.rows, num_micro_batch=n) for n in (3, 1))
        return self.factor(three, one)

    def order_matters(self) -> bool:
        turned = self.gradient([i for group in self.subject.batch.groups[::-1] for i in group])
        return float((turned - self.together).norm()) > _SAME * float(self.together.norm())

    def company(self) -> Cause | None:
        """Whether and how a sequence's part depends on the others of its micro-batch."""
        factors: dict[tuple[int, ...], float] = {}
        for few in self._few():
            here = self._tokens(few)
            apart, together = self.gradient(few)[here], self.together[here]
            factors[few] = self.factor(apart, together)
            if float((apart - factors[few] * together).norm()) > _SAME * float(apart.norm()):
                return Cause(
                    "selection inside the micro-batch",
                    "{} chooses, ranks or normalises tokens among those of the micro-batch",
                )
        if all(abs(factor - 1) <= _SAME for factor in factors.values()) and abs(self.one_more_masked() - 1) <= _SAME:
            return None
        twice = self.twice()
        if abs(twice - 1) <= _SAME:
            return Cause("local mean", f"{{}} averages over its own micro-batch{self._over(factors)}")
        masked = self.one_more_masked()
        differ = max(factors.values(), default=1.0) - min(factors.values(), default=1.0) > _SAME
        if abs(twice - 2) <= _SAME and abs(masked - 1) > _SAME and not differ:
            return Cause(
                "rows counted in one place and not in the other",
                "a fully masked sequence changes the weight that {} gives to the others",
            )
        if abs(twice - 2) <= _SAME:
            return Cause(
                "mean and share count different things",
                "{} averages over one count and weights that mean by the share of another",
            )
        return None

    def _tokens(self, rows: Sequence[int]) -> Tensor:
        starts = self.subject.batch.starts
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])

    def _few(self) -> list[tuple[int, ...]]:
        """Smaller micro-batches: every second sequence, in which a selection shows that needs different ones;
        then single sequences, the longest ones first, which show it best, and the shortest, which show what a
        mean is over."""
        batch = self.subject.batch
        moving = [group for group in batch.groups if bool(self.together[self._tokens(group)].any())]
        moving.sort(key=lambda group: -sum(batch.valid_counts[i] for i in group))
        halves = [tuple(i for group in moving[k::2] for i in group) for k in (0, 1)]
        few = [half for half in halves if half] + moving[:_MOST_ALONE] + moving[_MOST_ALONE:][-3:]
        return list(dict.fromkeys(few))

    def _over(self, factors: dict[tuple[int, ...], float]) -> str:
        """What the mean is over: the factor between alone and together is its count over that of the few."""
        counts = self.subject.batch.valid_counts
        ways = {
            "'s tokens": counts,
            "'s sequences": [1] * len(counts),
            "'s sequences with a valid token": [int(count > 0) for count in counts],
        }
        for what, weights in ways.items():
            if all(
                abs(factor * sum(weights[i] for i in group) / sum(weights) - 1) <= _SAME
                for group, factor in factors.items()
            ):
                return what
        return ""
