"""One micro-batch to try things on: its padding, the order of its sequences, what it is told of ranks."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trinity_loss.invariance.cuts import Cut, Layout
from trinity_loss.invariance.measure import Subject, variant
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.ranks import as_rank
from trinity_loss.invariance.variants import tokens_of

#: Largest deviation between experiments that are taken for the same, where the fault itself is a large one.
_SAME = 1e-3
#: Sequences of different lengths that say something of the order.
_FEW = 4


@dataclass(frozen=True)
class Cause:
    """Why one term depends on the cut.

    Attributes:
        name: One of :data:`trinity_loss.invariance.rows.CAUSES`.
        why: What follows the colon of the sentence; ``{}`` stands for who does it, ``{of}`` for the fields.
        of: Fields by which it does that, in words; empty: many, or not known.
    """

    name: str
    why: str
    of: str = ""

    def said_of(self, who: str) -> str:
        """The sentence, of the loss or of a term."""
        return self.why.format(who, of=self.of or "values")

    def with_other(self, other: Cause) -> Cause | None:
        """One cause for two terms that do the same by other fields; None where these are two things."""
        vague = [cause for cause in (self, other) if cause.why.startswith("how many")]
        if self.name == other.name and vague:
            return other if vague[0] is self else self
        if self.name != other.name or not all("{of}" in cause.why for cause in (self, other)):
            return None
        if self.why != other.why and self.name != "selection inside the micro-batch":
            return None
        return Cause(self.name, max(self.why, other.why, key=len), self.of if self.of == other.of else "")


def with_masked(subject: Subject, *lengths: int) -> tuple[MiniBatch, list[int]]:
    """The mini-batch and further fully masked sequences, and the numbers of these; totals stay as they were."""
    sequences, size = subject.batch.num_sequences, subject.batch.group_size
    batch = variant(subject.batch, "with_masked_sequences", *(length for length in lengths for _ in range(size)))
    return batch, list(range(sequences, batch.num_sequences))


class Probe:
    """Experiments on the whole mini-batch as one micro-batch, for one term."""

    def __init__(
        self, subject: Subject, term: str, layout: Layout, deviation: float, pieces: Iterable[Sequence[int]]
    ) -> None:
        self.subject, self.term, self.layout = subject, term, layout
        rounding = 1e-9 if subject.batch.log_probs.dtype == torch.float64 else 1e-5
        self.same = max(rounding, min(_SAME, deviation / 30))
        # Padded to one width throughout, so that the width cannot pass for something else.
        longest = int(subject.batch.response_lengths.max())
        self.fixed = longest + 8 if layout == "padded" else None
        for rows in (range(subject.batch.num_sequences), *pieces):
            self.rows = tuple(rows)
            self.together = self.gradient(self.rows)
            if bool(self.together.any()):
                break
        here = set(self.rows)
        self.groups = [group for group in subject.batch.groups if here.issuperset(group)]
        #: Whether the order matters only where several sequences are equally long.
        self.ties = False

    def gradient(
        self,
        rows: Sequence[int],
        batch: MiniBatch | None = None,
        *,
        layout: Layout | None = None,
        width: int | None = None,
        totals: Mapping[str, int] | None = None,
    ) -> Tensor:
        cut = Cut(
            "even",
            ((tuple(rows),),),
            layout or self.layout,
            width or (self.fixed if layout in (None, "padded") else None),
            engine="megatron" if "num_micro_batch" in (totals or {}) else "fsdp",
        )
        gradient = self.subject.term(self.term, cut, batch, totals or {})
        return gradient if batch is None else gradient[: self.subject.batch.num_tokens]

    def factor(self, gradient: Tensor, reference: Tensor | None = None) -> float:
        """The number that, times ``reference``, comes nearest to ``gradient``; 1 if not finite."""
        reference = self.together if reference is None else reference
        factor = float(gradient @ reference / (reference @ reference).clamp(min=1e-300))
        return factor if math.isfinite(factor) else 1.0

    def ratio(self, **totals: tuple[int, int]) -> float:
        """Factor between two values of one total."""
        ((name, values),) = totals.items()
        one, other = (self.gradient(self.rows, totals={name: value}) for value in values)
        return self.factor(one, other)

    def differ(self, one: Tensor, other: Tensor) -> bool:
        return float((one - other).norm()) > self.same * float(other.norm())

    def tokens(self, rows: Sequence[int]) -> Tensor:
        return tokens_of(self.subject.batch, rows)

    @cached_property
    def moving(self) -> list[tuple[int, ...]]:
        """Groups with a gradient, the longest first."""
        valid = self.subject.batch.valid_counts
        moving = [group for group in self.groups if bool(self.together[self.tokens(group)].any())]
        return sorted(moving, key=lambda group: -sum(valid[i] for i in group))

    def width(self) -> Cause | None:
        """Whether another padded width changes it, and how."""
        if self.layout == "padded":
            assert self.fixed is not None
            at = {w: self.gradient(self.rows, width=w) for w in (self.fixed, self.fixed + 7, self.fixed + 19)}
            if self.differ(*list(at.values())[1::-1]):
                return self._of_width(at)
        # Two more sequences without a valid token: one long one makes the padding wider, a second one does not.
        longest = max(int(self.subject.batch.response_lengths[i]) for i in self.rows)
        beyond = int(self.subject.batch.response_lengths.max()) + 7
        at = {w: self.with_two(w, 1) for w in (longest, beyond, beyond + 12)}
        counts_masked_tokens = self.differ(self.with_two(beyond, beyond), at[beyond])
        if counts_masked_tokens or not self.differ(at[beyond], at[longest]):
            return None
        return self._of_width(at)

    def _of_width(self, at: Mapping[int, Tensor]) -> Cause:
        """How gradients at three widths differ."""
        (w, one), (v, other), (u, third) = at.items()
        change, expected = third - one, (1 / u - 1 / w) / (1 / v - 1 / w) * (other - one)
        if float((change - expected).norm()) <= 1e-6 * float(change.norm()):
            why = "{} divides by the padded width, which differs between cuts"
        elif self.differ(other, self.factor(other, one) * one):
            why = (
                "what a token adds to {} depends on the padded width, which is taken for a length or a position, or on "
            )
            why += "the padding itself"
        else:
            why = "{} multiplies by a number that depends on the padded width, which differs between cuts"
        return Cause("padded width as the norm", why)

    def with_two(self, *lengths: int) -> Tensor:
        batch, masked = with_masked(self.subject, *lengths)
        # Room for the longest of them too: a response that does not fit its row is no micro-batch of any engine.
        width = int(batch.response_lengths.max()) + 1 if self.subject.base == "padded" else None
        return self.gradient([*self.rows, *masked], batch, layout=self.subject.base, width=width)

    def order(self) -> Cause | None:
        """Whether another order changes it, in rows of equal width and in rows as long as the longest; sets
        :attr:`ties` where it does so among sequences of one length only."""
        why = "what a sequence adds to {} depends on where in the micro-batch it is, and next to which"
        cause = Cause("order of the sequences", why)
        # An even number of sequences, and an odd one.
        for groups in (self.groups, self.groups[:-1]):
            if not self._order_matters(groups):
                continue
            apart = self._of_different_lengths()
            self.ties = len(apart) > _FEW and not any(map(self._order_matters, (apart, apart[:-1])))
            return cause
        return None

    def _order_matters(self, groups: Sequence[tuple[int, ...]]) -> bool:
        rows = [i for group in groups for i in group]
        turned = [i for group in random.Random(1).sample(groups, len(groups)) for i in group]
        for layout in dict.fromkeys((self.layout, self.subject.base)):
            one, other = (self.gradient(order, layout=layout) for order in (turned, rows))
            if self.differ(one, other):
                # A term is what is left where another batch is subtracted, on which ties may be broken by place.
                width = self.fixed if layout == "padded" else None
                cuts = (Cut("even", ((tuple(order),),), layout, width) for order in (turned, rows))
                all_of_it, same = (self.subject.run(cut).gradient for cut in cuts)
                return float((all_of_it - same).norm()) > self.same * float(other.norm())
        return False

    def _of_different_lengths(self) -> list[tuple[int, ...]]:
        """Groups in which no two sequences have as many tokens, or as many valid ones."""
        batch, lengths, valid, apart = self.subject.batch, set[int](), {0}, []
        for group in self.groups:
            of_group = [int(batch.response_lengths[i]) for i in group], [batch.valid_counts[i] for i in group]
            if all(
                len({*new, *old}) == len(new) + len(old) for new, old in zip(of_group, (lengths, valid), strict=True)
            ):
                lengths.update(of_group[0])
                valid.update(of_group[1])
                apart.append(group)
        return apart

    def of_the_ranks(self) -> list[Cause]:
        """Whether the gradient grows with ``dp_size`` as it has to."""
        ranks = self.ratio(dp_size=(2, 1))
        if abs(ranks - 2) <= 2 * self.same:
            return []
        with contextlib.suppress(Exception):  # A loss that calls a collective has no answer.
            run, rows = self.subject.run, (self.rows,)
            cut = Cut("ranks", (rows, rows), self.subject.base)
            played, alone = (run(cut, identity=identity).gradient for identity in (as_rank, None))
            if float((played - alone).norm()) > self.same * float(alone.norm()):
                asked = "{} asks the process group or the environment for the number of ranks, which is not always "
                return [Cause("missing dp_size", asked + 'that of data["dp_size"]: sequence and model parallelism')]
        if abs(ranks - 1) <= self.same:
            return [Cause("missing dp_size", "{} is not multiplied by dp_size, and the engine averages over ranks")]
        return [Cause("missing dp_size", f"{{}} grows by {ranks:.3g} instead of 2 when the ranks double")]
