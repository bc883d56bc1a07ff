"""Why a loss depends on the cut: experiments on one micro-batch, each of which one cause answers to.

All of them keep the totals of the mini-batch, so a loss that keeps the contract is a plain sum over the
sequences of a micro-batch: what a sequence contributes does not ask who else is there. Then

- a wider padding changes nothing, nor does another order of the sequences;
- other values in one half of the sequences change nothing for the other half: where they do, by one factor for
  all its tokens, a statistic is a factor, and where each token changes by its own, tokens are chosen or normalised;
  each field by itself says by what;
- other lengths in some sequences change nothing for the rest, where all counts stay as they were;
- a sequence alone gives what it gave in company: where values do not matter and company does, something is
  counted, and the factors over some micro-batches say what;
- twice the ranks give twice the gradient, since the engine averages over them.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from trinity_loss.invariance.contracts import Played
from trinity_loss.invariance.cuts import Cut, Layout
from trinity_loss.invariance.measure import Subject, describe, variant
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.ranks import as_rank
from trinity_loss.invariance.variants import (
    tokens_of,
    with_fewer_valid,
    with_field_moved,
    with_other_lengths,
    with_prompts_of_one,
)

#: Largest deviation between experiments that are taken for the same, where the fault itself is a large one.
_SAME = 1e-3
_MOST_ALONE = 6
#: What a micro-batch can be counted by, in words; the first that explains the factors is named.
_COUNTED = {
    "tokens": "tokens",
    "sequences": "sequences",
    "valid sequences": "sequences with a valid token",
    "positions": "response positions, masked ones too",
    "prompts": "prompts",
    "all tokens": "tokens, prompts included",
}
#: The tokens of either sign of advantage, each with a mean of its own.
_SIGNS = {"positive": "tokens with a positive advantage", "negative": "tokens with a negative advantage"}
_UNCOUNTED = "how many {what} the micro-batch holds, not what they hold, changes {{}}"
#: Fields in words.
_FIELDS = {
    "log_probs": "log-probs",
    "entropy": "entropies",
    "advantages": "advantages",
    "old_log_probs": "old log-probs",
    "ref_log_prob": "reference log-probs",
    "rollout_log_probs": "rollout log-probs",
    "rollout_is_weights": "importance weights",
}
_MOST_FIELDS = 3
#: Sequences of different lengths that say something of the order.
_FEW = 4


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


def causes(subject: Subject, term: str, deviation: float, pieces: Iterable[Sequence[int]] = ()) -> list[Cause]:
    """What makes this term depend on the cut, the likeliest first; empty where nothing answers.

    Args:
        subject: The loss.
        term: The term.
        deviation: How far off it is where it is worst; a small fault takes a sharper eye.
        pieces: Micro-batches of a cut that shows it, to look at where the whole has no gradient.
    """
    tried: list[str] = []
    for layout in dict.fromkeys(layout for layout in ("padded", subject.base) if layout in subject.layouts):
        try:
            found = _causes(Probe(subject, term, layout, deviation, pieces))
        except Exception as error:
            # A loss may refuse an experiment; that is no answer.
            tried.append(describe(error))
            continue
        if found:
            return found
    if tried:
        return [Cause("unexplained", f"{{}} raises where it is looked into: {tried[0]}")]
    return []


def _causes(probe: Probe) -> list[Cause]:
    quiet = probe.subject.noise is None
    place = probe.order() if quiet else None
    if place is not None and not probe.ties:
        return [place]
    width = probe.width() if quiet else None
    found = [] if width is None else [width]
    inside = probe.content()
    if inside is None and quiet:
        inside = probe.count()
        if inside is not None and inside.name == "local count as a factor":
            # A threshold answers to other values only where they cross it, and a length is no count.
            inside = probe.crossed() or (None if found else probe.lengths()) or inside
    if inside is None and quiet and not found:
        inside = probe.silenced() or probe.crossed() or probe.lengths()
    if inside is not None and found and inside.name == "local count as a factor":
        inside = None
    if inside is not None:
        return [probe.named_by_contract(inside), *found]
    if not quiet:
        return found
    found += probe.of_the_ranks()
    for name, why in (
        ("num_micro_batch", "{} multiplies by num_micro_batch, and so does the engine already"),
        ("micro_batch_size_per_gpu", "{} asks for micro_batch_size_per_gpu, which says nothing of this micro-batch"),
    ):
        if abs(probe.ratio(**{name: (3, 1)}) - 1) > probe.same:
            found.append(Cause("number of micro-batches", why))
    return found if found or place is None else [place]


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

    def named_by_contract(self, cause: Cause) -> Cause:
        """A mean over rows is no fault where all pieces have as many; not dividing by their number is."""
        loss_fn = self.subject.loss_fn
        if not isinstance(loss_fn, Played) or not loss_fn.contract.equal_rows or cause.name != "local mean":
            return cause
        if "sequences" not in cause.why or abs(self.ratio(pieces_per_rank=(3, 1)) - 1) > self.same:
            return cause
        return Cause("number of micro-batches", "{} is a mean over rows, and is not divided by the accumulation steps")

    def differ(self, one: Tensor, other: Tensor) -> bool:
        return float((one - other).norm()) > self.same * float(other.norm())

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
        at = {w: self._with_two(w, 1) for w in (longest, beyond, beyond + 12)}
        counts_masked_tokens = self.differ(self._with_two(beyond, beyond), at[beyond])
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

    def _with_two(self, *lengths: int) -> Tensor:
        batch, masked = with_masked(self.subject, *lengths)
        return self.gradient([*self.rows, *masked], batch, layout=self.subject.base)

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

    def crossed(self) -> Cause | None:
        """:meth:`content` with values that cross thresholds."""
        return next(filter(None, map(self.content, (0.1, 4.0, -4.0, 40.0))), None) or self._by_field()

    def silenced(self) -> Cause | None:
        """Whether a sequence without a gradient has one where it is alone."""
        quiet = [group for group in self.groups if group not in self._moving]
        valid = self.subject.batch.valid_counts
        for group in sorted(quiet, key=lambda group: -sum(valid[i] for i in group))[:_MOST_ALONE]:
            if float(self.gradient(group).norm()) > self.same * float(self.together.norm()):
                return self._within(self._cause({"chosen"}), True)
        return None

    def _within(self, cause: Cause, prompts: bool) -> Cause:
        """A cause that is about prompts, where they are by themselves what they are in company."""
        if not (prompts and self._within_prompts()):
            return cause
        compares = "{} compares the answers of a prompt that the micro-batch holds, and a cut takes them apart"
        return Cause("prompt group inside the micro-batch", compares)

    def content(self, scale: float = 1.7) -> Cause | None:
        """Whether a sequence's part depends on what the others hold, masks and lengths apart."""
        moved = self._moved_by_halves(self.groups, scale)
        if not moved:
            return None
        return self._within(
            self._cause(moved, [name for name, how in self._fields.items() if how]),
            bool(self._prompts) and not self._moved_by_halves(self._prompts, scale),
        )

    def _by_field(self) -> Cause | None:
        """The same with each field moved by itself, further than a factor does."""
        names = [name for name, how in self._fields.items() if how]
        moved = {how for name in names for how in self._fields[name]}
        return self._within(self._cause(moved, names), True) if names else None

    def _cause(self, moved: set[str], fields: Sequence[str] = ()) -> Cause:
        """What it means that sequences change with other values in others, and by which fields."""
        named = [_FIELDS.get(name, name) for name in fields]
        many = not named or len(named) > _MOST_FIELDS
        of = "what its tokens hold" if many else f"its {' and '.join(named)}"
        if moved == {"gate"}:
            name, why = "statistic of the micro-batch as a factor", f"{{}} is all or nothing in a micro-batch, by {of}"
        elif not moved & {"tokens", "chosen"}:
            name = "statistic of the micro-batch as a factor"
            why = f"{{}} multiplies all tokens of a micro-batch by a number computed from {of}"
        elif "tokens" not in moved:
            name = "selection inside the micro-batch"
            why = f"{{}} chooses or clips tokens among those of the micro-batch, by {of}"
        else:
            name = "selection inside the micro-batch"
            why = f"{{}} normalises, ranks, chooses or clips tokens among those of the micro-batch, by {of}"
        return Cause(name, why)

    def _moved_by_halves(self, lots: Sequence[tuple[int, ...]], scale: float) -> set[str]:
        """How either half of the lots changes with other values in the other half."""
        moved = set[str]()
        for changed, watched in self._pairs(lots):
            moved |= self._moved(variant(self.subject.batch, "with_other_content", scale, *changed), watched)
        return moved

    @staticmethod
    def _pairs(lots: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        halves = [tuple(i for rows in lots[k::2] for i in rows) for k in (0, 1)]
        return [(halves[0], halves[1]), (halves[1], halves[0])] if all(halves) else []

    @cached_property
    def _fields(self) -> dict[str, set[str]]:
        """How either half changes where one field moves in the other half, by field."""
        batch, pairs = self.subject.batch, self._pairs(self.groups)
        fields = {"log_probs": batch.log_probs, "entropy": batch.entropy, **batch.token_fields}
        numbers = [name for name, values in fields.items() if values is not None and values.is_floating_point()]
        how: dict[str, set[str]] = {name: set() for name in numbers}
        for name in numbers:
            for by in (0.7, -0.7, 5.0, -5.0):
                for changed, watched in pairs:
                    how[name] |= self._moved(with_field_moved(batch, name, by, changed), watched)
                if how[name]:
                    break
        return how

    def _moved(self, batch: MiniBatch, watched: tuple[int, ...]) -> set[str]:
        """How ``watched`` changes in another mini-batch, in which it is what it was: by one ``factor``; by a ``gate``,
        which is all or nothing; ``chosen``, which is that for each token; otherwise ``tokens``; empty: not at all."""
        here = self._tokens(watched)
        before, after = self.together[here], self.gradient(self.rows, batch)[here]
        if not self.differ(after, before):
            return set()
        if not bool(after.any()) or not bool(before.any()):
            return {"gate"}
        factor = self.factor(after, before)
        if not self.differ(after, factor * before):
            return {"factor"}
        both = (after != 0) & (before != 0)
        if not bool(both.all()) and bool(both.any()) and not self.differ(after[both], before[both]):
            return {"chosen"}
        return {"tokens"}

    def lengths(self) -> Cause | None:
        """Whether a sequence's part depends on how long others are, where no count differs."""
        batch = self.subject.batch
        lots = [
            (i, i + 1)
            for i in range(0, batch.num_sequences - 1, 2)
            if {i, i + 1} <= set(self.rows) and batch.group_size == 1 and self._can_share(i)
        ]
        longest = max(self.rows, key=lambda i: batch.valid_counts[i])
        moved, but_longest = set[str](), set[str]()
        for changed, watched in ((lots[::2], lots[1::2]), (lots[1::2], lots[::2])):
            if changed and watched:
                those = tuple(i for pair in watched for i in pair)
                moved |= self._moved(with_other_lengths(batch, tuple(changed)), those)
                others = tuple(pair for pair in changed if longest not in pair)
                but_longest |= self._moved(with_other_lengths(batch, others), those)
        if not moved:
            return None
        if not but_longest:
            why = "the longest response of the micro-batch changes what the others add to {}"
            return Cause("statistic of the micro-batch as a factor", why)
        if moved <= {"factor", "gate"}:
            why = "{} multiplies all tokens of a micro-batch by a number computed from the lengths of its sequences"
            return Cause("statistic of the micro-batch as a factor", why)
        why = "{} ranks, chooses or weighs sequences by how long the others of the micro-batch are"
        return Cause("selection inside the micro-batch", why)

    def _can_share(self, first: int) -> bool:
        """Whether this sequence and the next one can share their tokens, with a valid one in each before and after."""
        batch, mask = self.subject.batch, self.subject.batch.response_mask
        start, end = batch.starts[first], batch.starts[first + 2]
        middle = start + (end - start) // 2
        halves = (
            mask[start : batch.starts[first + 1]],
            mask[batch.starts[first + 1] : end],
            mask[start:middle],
            mask[middle:end],
        )
        return middle != batch.starts[first + 1] and all(bool((half != 0).any()) for half in halves)

    @cached_property
    def _prompts(self) -> list[tuple[int, ...]]:
        """The sequences of each prompt; empty where there is one prompt, or every sequence has its own."""
        prompts: dict[str, list[int]] = {}
        for i, uid in enumerate(self.subject.batch.uids or ()):
            if i in self.rows:
                prompts.setdefault(uid, []).append(i)
        return [tuple(rows) for rows in prompts.values()] if 1 < len(prompts) < len(self.rows) else []

    def _within_prompts(self) -> bool:
        """Whether the answers of a prompt are by themselves what they are in company."""
        if not self._prompts or any(self._moves(rows, self._change(rows)) for rows in self._prompts):
            return False
        # Whoever compares answers asks whose they are.
        return self.differ(self.gradient(self.rows, with_prompts_of_one(self.subject.batch)), self.together)

    def count(self) -> Cause | None:
        """What a sequence's part counts, where it depends on company but not on what that holds."""
        changes = {few: self._change(few) for few in self._few()}
        batch, masked = with_masked(self.subject, 2)
        changes[self.rows + tuple(masked)] = self.gradient([*self.rows, *masked], batch) - self.together
        changes[self.rows + self.rows] = self.gradient(self.rows + self.rows) / 2 - self.together
        moved = {rows for rows, change in changes.items() if self._moves(rows, change)}
        if not moved:
            return None
        if self._within_prompts():
            return Cause(
                "prompt group inside the micro-batch",
                "{} averages over the part of a prompt's answers that the micro-batch holds",
            )
        if self._rounded():
            return Cause("counts in low precision", "{} counts in a type that does not hold the number exactly")
        return self._counted(changes, batch)

    def _change(self, rows: tuple[int, ...]) -> Tensor:
        """What changes in the tokens of these rows where they are alone, [N], 0 elsewhere."""
        here = self._tokens(rows)
        change = torch.zeros_like(self.together)
        change[here] = self.gradient(rows)[here] - self.together[here]
        return change

    def _moves(self, rows: Sequence[int], change: Tensor) -> bool:
        here = self._tokens([i for i in set(rows) if i < self.subject.batch.num_sequences])
        return float(change.norm()) > self.same * float(self.together[here].norm())

    def _rounded(self) -> bool:
        """Whether few sequences are right with each other, and many are off by less than 2 %."""
        batch, few, tokens = self.subject.batch, list[int](), 0
        for group in sorted(self.groups, key=lambda group: sum(batch.valid_counts[i] for i in group)):
            tokens += sum(batch.valid_counts[i] for i in group)
            if tokens > 100:
                break
            few += group
        together, here = self.gradient(few), self._tokens(few)
        apart = sum((self.gradient([i]) for i in few), torch.zeros_like(together))
        off = self.factor(self.together[here], together[here])
        return not self.differ(apart, together) and abs(off - 1) < 0.02

    def _counted(self, changes: Mapping[tuple[int, ...], Tensor], batch: MiniBatch) -> Cause:
        """The count that explains all changes: each is the same vector, times how much the count's power differs."""
        everything, sequences = self._counts(batch, self.rows), self.subject.batch.num_sequences
        ratios = {
            rows: {by: count / everything[by] if everything[by] else 1.0 for by, count in counts.items()}
            for rows in changes
            for counts in [self._counts(batch, rows)]
        }

        def explained(powers: Mapping[str, float], tolerance: float, where: Tensor | None = None) -> Tensor | None:
            """The vector that each change, at these tokens, is, times what these powers of counts change."""
            by = {
                rows: math.prod(ratios[rows][name] ** n for name, n in powers.items()) - 1
                for rows in changes
                if all(ratios[rows][name] for name in powers)
            }
            places = {rows: self._tokens([i for i in set(rows) if i < sequences]) for rows in by}
            seen = {rows: changes[rows] if where is None else changes[rows] * where for rows in by}
            above, below = torch.zeros_like(self.together), torch.zeros_like(self.together)
            for rows, factor in by.items():
                above[places[rows]] += factor * seen[rows][places[rows]]
                below[places[rows]] += factor**2
            direction = above / below.clamp(min=1e-300)
            for rows, factor in by.items():
                expected, found = factor * direction[places[rows]], seen[rows][places[rows]]
                off = float((found - expected).norm())
                if off > tolerance * max(float(expected.norm()), 0.1 * float(direction[places[rows]].norm())):
                    return None
            alone = [bool(direction[places[rows]].any()) for rows, factor in by.items() if len(rows) == 1 and factor]
            # What changes a few sequences alone is a threshold that they cross.
            return direction if bool(direction.any()) and 2 * sum(alone) >= len(alone) else None

        for tolerance in (1e-3, 0.03):
            for by, what in _COUNTED.items():
                if explained({by: -1}, tolerance) is not None:
                    return Cause("local mean", f"{{}} averages over its own micro-batch's {what}")
            for mean, share in permutations(_COUNTED, 2):
                if (direction := explained({mean: -1, share: 1}, tolerance)) is not None:
                    if {mean, share} == {"tokens", "sequences"} and self._apart(direction):
                        text = "what a token adds to {} depends on how many tokens a sequence of the micro-batch has "
                        text += "on average: a mean length"
                        return Cause("selection inside the micro-batch", text)
                    text = f"{{}} averages over {_COUNTED[mean]} and weighs that mean by the share of {_COUNTED[share]}"
                    if {mean, share} == {"sequences", "valid sequences"}:
                        text += ": a fully masked sequence changes what the others weigh"
                        return Cause("rows counted in one place and not in the other", text)
                    return Cause("mean and share count different things", text)
            for by, what in _COUNTED.items():
                for power, how in (
                    (1, "multiplies by"),
                    (-0.5, "divides by the root of"),
                    (0.5, "multiplies by the root of"),
                ):
                    if explained({by: power}, tolerance) is not None:
                        return Cause("local count as a factor", f"{{}} {how} its own micro-batch's {what}")
        for by in ("tokens", "sequences", "valid sequences"):
            if explained({by: -1, "pieces": 1}, 0.03) is not None:
                text = (
                    f"{{}} averages over its own micro-batch's {_COUNTED[by]} and divides by a number of micro-batches "
                )
                return Cause("local mean", text + "that it works out from its sequences, rounded")
        moved = sum((change.abs() for change in changes.values()), torch.zeros_like(self.together))
        near = self.same * float(moved.norm())
        signs = {sign: at for sign, at in self._signs(batch).items() if float((moved * at).norm()) > near}
        if signs and all(explained({sign: -1}, 1e-3, chosen) is not None for sign, chosen in signs.items()):
            of = " and over its ".join(_SIGNS[sign] for sign in signs)
            return Cause("local mean", f"{{}} averages over its own micro-batch's {of}")
        off = [float(change @ self.together / (self.together @ self.together)) for change in changes.values()]
        if max(map(abs, off)) < 2**-8 and min(off) < 0 < max(off):
            return Cause("counts in low precision", "{} rounds a count or a share to a type of few digits")
        what = " and ".join(self._counts_that_matter()) or "sequences or tokens"
        return Cause("local count as a factor", _UNCOUNTED.format(what=what))

    def _apart(self, direction: Tensor) -> bool:
        """Whether it is another vector than the gradient, at the tokens where it is one."""
        there = direction != 0
        gradient = self.together[there]
        factor = self.factor(direction[there], gradient)
        return float((direction[there] - factor * gradient).norm()) > 0.05 * float(direction.norm())

    def _counts_that_matter(self) -> list[str]:
        """Which of the counts change it, each by itself."""
        (changed, watched), *_ = [*self._pairs(self.groups), ((), ())]
        fewer = with_fewer_valid(self.subject.batch, changed)
        here = self._tokens(watched)
        answers: dict[str, tuple[Tensor, Tensor, Any]] = {
            "sequences": (self._with_two(2), self._with_two(1, 1), slice(None)),
            "valid tokens": (self.gradient(self.rows, fewer), self.together, here),
            "response positions": (self._with_two(1), self._with_two(4), slice(None)),
        }
        return [what for what, (one, other, at) in answers.items() if self.differ(one[at], other[at])]

    def _signs(self, batch: MiniBatch) -> dict[str, Tensor]:
        """The tokens with a gradient by the sign of their advantage; empty where there are no advantages."""
        advantages = batch.token_fields.get("advantages")
        if advantages is None:
            return {}
        values = advantages[: self.together.numel()]
        return {
            name: here
            for name, here in zip(_SIGNS, (values > 0, values < 0), strict=True)
            if (here * self.together).any()
        }

    def _counts(self, batch: MiniBatch, rows: Sequence[int]) -> dict[str, float]:
        uids = batch.uids or [str(i) for i in range(batch.num_sequences)]
        lengths = [int(batch.response_lengths[i]) for i in rows]
        valid = [batch.valid_counts[i] for i in rows]
        advantages = batch.token_fields.get("advantages", torch.zeros_like(batch.log_probs)) * (
            batch.response_mask != 0
        )
        advantages = torch.cat([advantages[batch.starts[i] : batch.starts[i + 1]] for i in rows])
        return {
            "positive": int((advantages > 0).sum()),
            "negative": int((advantages < 0).sum()),
            "pieces": 1 / max(1, self.subject.batch.num_sequences // len(rows)),
            "tokens": sum(valid),
            "sequences": len(rows),
            "valid sequences": sum(count > 0 for count in valid),
            "positions": sum(lengths),
            "prompts": len({uids[i] for i in rows}),
            "all tokens": sum(lengths) + sum(int(batch.prompt_lengths[i]) for i in rows),
        }

    def _tokens(self, rows: Sequence[int]) -> Tensor:
        return tokens_of(self.subject.batch, rows)

    @cached_property
    def _moving(self) -> list[tuple[int, ...]]:
        """Groups with a gradient, the longest first."""
        valid = self.subject.batch.valid_counts
        moving = [group for group in self.groups if bool(self.together[self._tokens(group)].any())]
        return sorted(moving, key=lambda group: -sum(valid[i] for i in group))

    @cached_property
    def _halves(self) -> list[tuple[int, ...]]:
        return [tuple(i for group in self._moving[k::2] for i in group) for k in (0, 1)]

    def _few(self) -> list[tuple[int, ...]]:
        """Smaller micro-batches: every second sequence; then single sequences, the longest ones first, which show
        it best, and the shortest, which show what a mean is over."""
        few = [half for half in self._halves if half]
        # Between them and single ones: what all single ones have in common is no count.
        few += [
            tuple(i for group in lot for i in group) for lot in (self._moving[::4], self._moving[:3]) if len(lot) > 1
        ]
        few += self._moving[:_MOST_ALONE] + self._moving[_MOST_ALONE:][-3:]
        return list(dict.fromkeys(few))
