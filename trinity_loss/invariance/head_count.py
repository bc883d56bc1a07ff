"""What a sequence's part counts, where how many others there are matters and what they hold does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from trinity_loss.invariance.company import COMPARES, MOST_ALONE, Company
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.probe import Cause, with_masked
from trinity_loss.invariance.variants import with_fewer_valid

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


class HeadCount(Company):
    """Experiments on how many are around a sequence."""

    def count(self) -> Cause | None:
        """What a sequence's part counts, where it depends on company but not on what that holds."""
        changes = {few: self.change(few) for few in self._few()}
        batch, masked = with_masked(self.subject, 2)
        changes[self.rows + tuple(masked)] = self.gradient([*self.rows, *masked], batch) - self.together
        changes[self.rows + self.rows] = self.gradient(self.rows + self.rows) / 2 - self.together
        moved = {rows for rows, change in changes.items() if self.moves(rows, change)}
        if not moved:
            return None
        if self.within_prompts():
            return Cause("prompt group inside the micro-batch", COMPARES)
        if self._rounded():
            return Cause("counts in low precision", "{} counts in a type that does not hold the number exactly")
        return self._counted(changes, batch)

    def _rounded(self) -> bool:
        """Whether few sequences are right with each other, and many are off by less than 2 %."""
        batch, few, tokens = self.subject.batch, list[int](), 0
        for group in sorted(self.groups, key=lambda group: sum(batch.valid_counts[i] for i in group)):
            tokens += sum(batch.valid_counts[i] for i in group)
            if tokens > 100:
                break
            few += group
        together, here = self.gradient(few), self.tokens(few)
        apart = sum((self.gradient([i]) for i in few), torch.zeros_like(together))
        off = self.factor(self.together[here], together[here])
        return (
            not self.differ(apart, together)
            and abs(off - 1) < 0.02
            and self._by_one_number(self.together[here] - together[here], together[here])
        )

    @staticmethod
    def _by_one_number(change: Tensor, gradient: Tensor) -> bool:
        """Whether a change is the gradient times a number, as that of a rounded count is."""
        along = float(change @ gradient / (gradient @ gradient).clamp(min=1e-300)) * gradient
        return float((change - along).norm()) <= 0.1 * float(change.norm())

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
            places = {rows: self.tokens([i for i in set(rows) if i < sequences]) for rows in by}
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
        rounded = all(self._by_one_number(change, self.together * (change != 0)) for change in changes.values())
        if rounded and max(map(abs, off)) < 2**-8 and min(off) < 0 < max(off):
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
        (changed, watched), *_ = [*self.pairs(self.groups), ((), ())]
        fewer = with_fewer_valid(self.subject.batch, changed)
        here = self.tokens(watched)
        answers: dict[str, tuple[Tensor, Tensor, Any]] = {
            "sequences": (self.with_two(2), self.with_two(1, 1), slice(None)),
            "valid tokens": (self.gradient(self.rows, fewer), self.together, here),
            "response positions": (self.with_two(1), self.with_two(4), slice(None)),
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

    @cached_property
    def _halves(self) -> list[tuple[int, ...]]:
        return [tuple(i for group in self.moving[k::2] for i in group) for k in (0, 1)]

    def _few(self) -> list[tuple[int, ...]]:
        """Smaller micro-batches: every second sequence; then single sequences, the longest ones first, which show
        it best, and the shortest, which show what a mean is over."""
        few = [half for half in self._halves if half]
        # Between them and single ones: what all single ones have in common is no count.
        few += [tuple(i for group in lot for i in group) for lot in (self.moving[::4], self.moving[:3]) if len(lot) > 1]
        few += self.moving[:MOST_ALONE] + self.moving[MOST_ALONE:][-3:]
        return list(dict.fromkeys(few))
