"""Whether what a sequence adds depends on the values, the lengths or the prompts of the others around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from trinity_loss.invariance.measure import variant
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.probe import Cause, Probe
from trinity_loss.invariance.variants import (
    with_field_moved,
    with_other_lengths,
    with_policy_that_agrees,
    with_prompts_of_one,
)

#: Sequences that are tried alone.
MOST_ALONE = 6
COMPARES = "{} compares or averages the answers of a prompt that the micro-batch holds, and a cut takes them apart"
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


class Company(Probe):
    """Experiments on what is around a sequence."""

    def crossed(self) -> Cause | None:
        """:meth:`content` with values that cross thresholds, of all fields or of one."""
        found = next(filter(None, map(self.content, (0.1, 4.0, -4.0, 40.0))), None)
        if found is not None:
            return found
        fields = self._fields(self.pairs(self.groups), (0.7, -0.7, 5.0, -5.0)) or self._drifts()
        return self._within(self._cause(set().union(*fields.values()), [*fields]), True) if fields else None

    def _drifts(self) -> dict[str, set[str]]:
        """How the shortest sequences change where another policy agrees with the current one in all others, by the
        policy: a sum of what they differ by is then below what it is in any half."""
        few = {i for group in self.moving[-max(1, len(self.moving) // 6) :] for i in group}
        most = tuple(i for i in self.rows if i not in few)
        names = [name for name in self.subject.batch.token_fields if "log_prob" in name] if few and most else []
        others = {name: with_policy_that_agrees(self.subject.batch, name, most) for name in names}
        moved = {name: self._moved(other, tuple(sorted(few))) for name, other in others.items()}
        return {name: how for name, how in moved.items() if how}

    def silenced(self) -> Cause | None:
        """Whether a sequence without a gradient has one where it is alone."""
        quiet = [group for group in self.groups if group not in self.moving]
        valid = self.subject.batch.valid_counts
        for group in sorted(quiet, key=lambda group: -sum(valid[i] for i in group))[:MOST_ALONE]:
            if float(self.gradient(group).norm()) > self.same * float(self.together.norm()):
                return self._within(self._cause({"chosen"}), True)
        return None

    def _within(self, cause: Cause, prompts: bool) -> Cause:
        """A cause that is about prompts, where they are by themselves what they are in company."""
        if not (prompts and self.within_prompts()):
            return cause
        return Cause("prompt group inside the micro-batch", COMPARES)

    def content(self, scale: float = 1.7) -> Cause | None:
        """Whether a sequence's part depends on what the others hold, masks and lengths apart."""
        moved = self._moved_by_halves(self.groups, scale)
        if not moved:
            return None
        if moved & {"factor", "tokens"} and self._has_two_forms():
            moved = {"switch"}
        fields = self._fields(self.pairs(self.groups), (5.0, -5.0))
        return self._within(
            self._cause(moved, [*fields]), bool(self._prompts) and not self._moved_by_halves(self._prompts, scale)
        )

    def _has_two_forms(self) -> bool:
        """Whether whatever changes in the others makes of a sequence one of two things."""
        moved = []
        for changed, watched in self.pairs(self.groups):
            here, batch = self.tokens(watched), self.subject.batch
            others = [variant(batch, "with_other_content", scale, *changed) for scale in (0.1, 1.7, 4.0, 40.0)]
            answers = [self.gradient(self.rows, other)[here] for other in others]
            moved = [answer for answer in answers if self.differ(answer, self.together[here])]
            if any(self.differ(answer, moved[0]) for answer in moved):
                return False
        return bool(moved)

    def _cause(self, moved: set[str], fields: Sequence[str] = ()) -> Cause:
        """What it means that sequences change with other values in others, and by which fields."""
        named = [_FIELDS.get(name, name) for name in fields]
        of = " and ".join(named) if len(named) <= _MOST_FIELDS else ""
        factor, choice = "statistic of the micro-batch as a factor", "selection inside the micro-batch"
        if moved == {"switch"}:
            return Cause(
                factor, "{} takes another form or coefficient where the micro-batch's {of} cross a threshold", of
            )
        if moved == {"gate"}:
            return Cause(factor, "{} is all or nothing in a micro-batch, by its {of}", of)
        if not moved & {"tokens", "chosen"}:
            return Cause(factor, "{} multiplies all tokens of a micro-batch by a number computed from its {of}", of)
        how = "normalises, ranks, chooses" if "tokens" in moved else "chooses"
        return Cause(choice, f"{{}} {how} or clips tokens by the {{of}} of all of the micro-batch", of)

    def _moved_by_halves(self, lots: Sequence[tuple[int, ...]], scale: float) -> set[str]:
        """How either half of the lots changes with other values in the other half."""
        moved = set[str]()
        for changed, watched in self.pairs(lots):
            moved |= self._moved(variant(self.subject.batch, "with_other_content", scale, *changed), watched)
        return moved

    @staticmethod
    def pairs(lots: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        halves = [tuple(i for rows in lots[k::2] for i in rows) for k in (0, 1)]
        return [(halves[0], halves[1]), (halves[1], halves[0])] if all(halves) else []

    def _fields(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], moves: Sequence[float]
    ) -> dict[str, set[str]]:
        """How the second lot of a pair changes where one field moves in the first, by field, of those that matter."""
        batch, found = self.subject.batch, dict[str, set[str]]()
        fields = {"log_probs": batch.log_probs, "entropy": batch.entropy, **batch.token_fields}
        for name in (name for name, values in fields.items() if values is not None and values.is_floating_point()):
            for by, (changed, watched) in product(moves, pairs):
                other = with_field_moved(batch, name, by, changed)
                if not self.differ(self.gradient(self.rows, other), self.together):
                    continue
                if how := self._moved(other, watched):
                    found[name] = how
                    break
        return found

    def _moved(self, batch: MiniBatch, watched: tuple[int, ...]) -> set[str]:
        """How ``watched`` changes in another mini-batch, in which it is what it was: by one ``factor``; by a ``gate``,
        which is all or nothing; ``chosen``, which is that for each token; otherwise ``tokens``; empty: not at all."""
        here = self.tokens(watched)
        everything = self.gradient(self.rows, batch)
        before, after = self.together[here], everything[here]
        if not self.differ(after, before):
            return set()
        if not bool(everything.any()) or not bool(self.together.any()):
            return {"gate"}
        if not bool(after.any()) or not bool(before.any()):
            return {"chosen"}
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
            why = (
                "{} multiplies all tokens of a micro-batch by a count of some of its tokens, or by another number that "
            )
            return Cause("local count as a factor", why + "the lengths of its sequences give")
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

    def within_prompts(self) -> bool:
        """Whether the answers of a prompt are by themselves what they are in company."""
        if not self._prompts or any(self.moves(rows, self.change(rows)) for rows in self._prompts):
            return False
        # Whoever compares answers asks whose they are.
        return self.differ(self.gradient(self.rows, with_prompts_of_one(self.subject.batch)), self.together)

    def change(self, rows: tuple[int, ...]) -> Tensor:
        """What changes in the tokens of these rows where they are alone, [N], 0 elsewhere."""
        here = self.tokens(rows)
        change = torch.zeros_like(self.together)
        change[here] = self.gradient(rows)[here] - self.together[here]
        return change

    def moves(self, rows: Sequence[int], change: Tensor) -> bool:
        here = self.tokens([i for i in set(rows) if i < self.subject.batch.num_sequences])
        return float(change.norm()) > self.same * float(self.together[here].norm())
