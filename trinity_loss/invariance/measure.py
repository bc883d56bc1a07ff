"""A loss under measurement: its gradient term by term, on any cut of one mini-batch.

The terms of a callable nobody can look into are told apart by what they answer to. The entropy term is what
has a gradient with respect to the entropy. What is left of the gradient with respect to the log-probs when
there is nothing to gain (advantages 0, the old policy equal to the current one) is the KL term, if it answers
to the reference policy; what went away is the policy gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from trinity_loss.invariance.cuts import ENGINE_LAYOUTS, Cut, Layout, whole
from trinity_loss.invariance.engine import Builder, LossFn, Outcome, run
from trinity_loss.invariance.layouts import build
from trinity_loss.invariance.minibatch import MiniBatch


@lru_cache(maxsize=64)
def variant(batch: MiniBatch, method: str, *arguments: Any) -> MiniBatch:
    """What a method of a mini-batch returns; the same object each time, so that its micro-batches are built once."""
    changed: MiniBatch = getattr(batch, method)(*arguments)
    return changed


#: A term smaller than this share of the gradient is rounding.
_NOTHING = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True, eq=False)
class Measurement:
    """What came of one cut.

    Attributes:
        outcome: The run with everything in it.
        terms: Gradient of each term: [N], and [2 N] (log-probs, entropy) for ``gradient``, all of it.
    """

    outcome: Outcome
    terms: Mapping[str, Tensor]


class Subject:
    """A loss and the mini-batch it is measured on.

    Args:
        loss_fn: Callable of verl's engine contract.
        batch: The mini-batch.
        layouts: Layouts in which it may be called; the first one that works is the one of the whole.
        seed: Of torch's generator, for losses that draw.
        build: Makes micro-batches.

    Raises:
        Exception: What the loss raises on the whole mini-batch, where no layout works.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        batch: MiniBatch,
        layouts: tuple[Layout, ...],
        seed: int,
        build: Builder = build,
    ) -> None:
        self.loss_fn = loss_fn
        self.build = build
        self.batch = batch
        self.seed = seed
        self.skipped: list[tuple[str, str]] = []
        self._healthy: dict[Layout, Outcome] = {}
        self.layouts, self.outcome = self._try(layouts)

    def _try(self, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], Outcome]:
        work: dict[Layout, Outcome] = {}
        first: Exception | None = None
        for layout in layouts:
            try:
                work[layout] = self.run(whole(self.batch, layout))
            except Exception as error:
                first = first or error
                self.skipped.append((f"{layout} layout", f"the loss does not take it: {describe(error)}"))
        # What fails in every layout that verl's engines get would fail there, whatever it does with others.
        needed = set(ENGINE_LAYOUTS) & set(layouts) or set(layouts)
        if not needed & set(work):
            assert first is not None
            raise first
        base = next(iter(work))
        if "packed" in work and base != "packed" and self._ignores_segments(work["packed"], work[base]):
            del work["packed"]
            self.skipped.append(("packed layout", "the loss does not read segment_ids"))
        self._healthy = work
        return tuple(work), work[base]

    def _ignores_segments(self, packed: Outcome, base: Outcome) -> bool:
        """Whether packed rows come out wrong, and equally wrong without their segment ids."""
        if torch.allclose(packed.log_prob_gradient, base.log_prob_gradient, rtol=1e-6, atol=1e-12):
            return False

        def blindfolded(model_output, data, dp_group):  # type: ignore[no-untyped-def]
            return self.loss_fn(model_output=model_output, data=data.exclude("segment_ids"), dp_group=dp_group)

        try:
            blind = run(blindfolded, self.batch, whole(self.batch, "packed"), seed=self.seed)
        except Exception:
            return False
        return torch.equal(blind.log_prob_gradient, packed.log_prob_gradient)

    def run(self, cut: Cut, batch: MiniBatch | None = None, totals: Mapping[str, int] | None = None) -> Outcome:
        """Runs the loss on a cut of the mini-batch, or of a variant of it."""
        return run(self.loss_fn, batch or self.batch, cut, totals=totals, seed=self.seed, build=self.build)

    @property
    def base(self) -> Layout:
        """Layout of the whole."""
        return self.layouts[0]

    def healthy(self, layout: Layout) -> Outcome:
        """The whole mini-batch in that layout."""
        if layout not in self._healthy:
            self._healthy[layout] = self.run(whole(self.batch, layout))
        return self._healthy[layout]

    @cached_property
    def calm(self) -> MiniBatch:
        """The mini-batch without a policy gradient."""
        return variant(self.batch, "without_policy_gradient")

    @cached_property
    def rest(self) -> str | None:
        """Name of what is left without the policy gradient: ``kl``, ``rest``, or None for nothing."""
        left = self.run(whole(self.calm, self.base), self.calm).log_prob_gradient
        if float(left.norm()) <= _NOTHING[self.batch.log_probs.dtype] * float(self.outcome.log_prob_gradient.norm()):
            return None
        reference = self.calm.token_fields.get("ref_log_prob")
        if reference is None:
            return "rest"
        moved = self.calm.with_fields(ref_log_prob=reference - 0.1)
        answers = self.run(whole(moved, self.base), moved).log_prob_gradient
        return "rest" if torch.equal(answers, left) else "kl"

    @cached_property
    def whole(self) -> Measurement:
        """The whole mini-batch in one piece: what every cut is compared with."""
        return self._separate(whole(self.batch, self.base), self.outcome, None)

    def measure(self, cut: Cut, batch: MiniBatch | None = None, totals: Mapping[str, int] | None = None) -> Measurement:
        """Measures a cut, term by term.

        Args:
            cut: The cut.
            batch: A variant of the mini-batch.
            totals: What the micro-batches say of the mini-batch instead of the truth.
        """
        return self._separate(cut, self.run(cut, batch, totals), batch, totals)

    def term(self, name: str, cut: Cut, batch: MiniBatch | None, totals: Mapping[str, int]) -> Tensor:
        """Gradient [N] of one term on a cut, with no more runs than that takes."""
        if name == self.rest:
            calm = self.calm if batch is None else variant(batch, "without_policy_gradient")
            return self.run(cut, calm, totals).log_prob_gradient
        if name == "entropy":
            return self.run(cut, batch, totals).entropy_gradient
        return self.measure(cut, batch, totals).terms[name]

    def _separate(
        self, cut: Cut, outcome: Outcome, batch: MiniBatch | None, totals: Mapping[str, int] | None = None
    ) -> Measurement:
        log_probs, entropy = outcome.log_prob_gradient, outcome.entropy_gradient
        terms = {"gradient": torch.cat([log_probs, entropy])}
        if self.rest is None:
            terms["pg"] = log_probs
        else:
            calm = self.calm if batch is None else variant(batch, "without_policy_gradient")
            left = self.run(cut, calm, totals).log_prob_gradient
            terms |= {"pg": log_probs - left, self.rest: left}
        terms["entropy"] = entropy
        nothing = _NOTHING[self.batch.log_probs.dtype]
        present = self._present if "whole" in self.__dict__ else _not_nothing(terms, nothing)
        return Measurement(outcome, {name: terms[name] for name in terms if name in present})

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self.whole.terms)


def _not_nothing(terms: Mapping[str, Tensor], nothing: float) -> frozenset[str]:
    norm = nothing * float(terms["gradient"].norm())
    return frozenset(name for name, gradient in terms.items() if name == "gradient" or float(gradient.norm()) > norm)


def describe(error: Exception) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:79] + '…' if len(text) > 80 else text}"
