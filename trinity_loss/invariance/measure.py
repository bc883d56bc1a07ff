"""A loss under measurement: its gradient term by term, on any cut of one mini-batch.

The terms of a callable nobody can look into are told apart by what they answer to. The entropy term is what
has a gradient with respect to the entropy. What is left of the gradient with respect to the log-probs when
there is nothing to gain (advantages 0, the old policy equal to the current one) is the KL term, if it answers
to the reference policy; what went away is the policy gradient.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import BatchError
from trinity_loss.invariance.cuts import ENGINE_LAYOUTS, Cut, Layout, even, whole
from trinity_loss.invariance.engine import Builder, ContractError, LossFn, Outcome, run
from trinity_loss.invariance.layouts import EngineMicroBatch, build
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.ranks import as_rank
from trinity_loss.loss import TrinityPolicyLoss
from trinity_loss.loss_config import LossConfig

#: A term smaller than this share of the gradient is rounding, and a gradient smaller than this is none.
NOTHING = {torch.float64: 1e-12, torch.float32: 1e-6}
#: What values are multiplied by, for a loss that keeps something of them and crosses a threshold by it.
_EXTREMES = (0.02, 40.0)
#: Names of metrics that measure the machine, not the batch.
_OF_THE_MACHINE = re.compile(
    r"(^|[/_.])(time|times|timing|timing_s|seconds|sec|ms|memory|mem|gb|mb|perf|mfu|throughput|lr)([/_.]|$)"
)


@lru_cache(maxsize=64)
def variant(batch: MiniBatch, method: str, *arguments: Any) -> MiniBatch:
    """What a method of a mini-batch returns; the same object each time, so that its micro-batches are built once."""
    changed: MiniBatch = getattr(batch, method)(*arguments)
    return changed


def is_ours(loss_fn: Any) -> bool:
    """Whether a loss is one of this package, alone or beside verl's."""
    return isinstance(loss_fn, TrinityPolicyLoss) or isinstance(getattr(loss_fn, "ours", None), TrinityPolicyLoss)


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
        seed: Of the generators, for losses that draw.
        fresh: Makes the loss anew, as it was before it was ever called; None: a copy of it.

    Raises:
        Exception: What the loss raises on the whole mini-batch, where no layout works.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        batch: MiniBatch,
        layouts: tuple[Layout, ...],
        seed: int,
        fresh: Callable[[], LossFn] | None = None,
    ) -> None:
        config = getattr(loss_fn, "config", None)
        if isinstance(config, LossConfig):  # As our training worker counts for it.
            counted = {name: getattr(config, name) for name in ("count_empty_sequences", "count_padding_rows")}
            batch = replace(batch, **counted)
        self.loss_fn, self.batch, self.seed = loss_fn, batch, seed
        self._untouched = None if fresh is not None else _copied(loss_fn)
        self._fresh = fresh
        self.build: Builder = partial(build, memory={})
        self.worker = is_ours(loss_fn)
        self.identity: Callable[[int, int], contextlib.AbstractContextManager[Any]] | None = None
        self.skipped: list[tuple[str, str]] = []
        self._healthy: dict[Layout, Outcome] = {}
        self.layouts, self.outcome = self._try(layouts)

    def on(self, batch: MiniBatch) -> Subject:
        """The same loss on another mini-batch, in the layout of the whole."""
        other = copy.copy(self)
        other.batch, other.layouts, other._healthy = batch, self.layouts[:1], {}
        for name in ("calm", "rest", "whole", "sizes", "changes_inputs", "noise", "remembers", "_twice"):
            other.__dict__.pop(name, None)
        other.outcome = other.run(whole(batch, self.base))
        return other

    def fresh(self) -> LossFn:
        """The loss as it was before it was ever called, as far as that can be had."""
        if self._fresh is not None:
            return self._fresh()
        return self.loss_fn if self._untouched is None else copy.deepcopy(self._untouched)

    def _try(self, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], Outcome]:
        work: dict[Layout, Outcome] = {}
        first: Exception | None = None
        for layout in layouts:
            try:
                work[layout] = self._first(layout)
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
        if work[base].without_graph:
            raise ContractError("the loss of the whole mini-batch has no graph (detached, or a number): no gradient")
        self._healthy = work
        return tuple(work), work[base]

    def _first(self, layout: Layout) -> Outcome:
        """The whole; where a loss asks for what only our training worker counts, with that."""
        try:
            return self.run(whole(self.batch, layout))
        except (ValueError, RuntimeError) as error:
            if self.identity is None and "process group" in str(error):
                self.identity = as_rank
                self.skipped.append(("process group", "the loss asks for it, and is told of data-parallel ranks alone"))
                return self._first(layout)
            if self.worker or not isinstance(error, BatchError):
                raise
            self.worker = True
            try:
                return self.run(whole(self.batch, layout))
            except Exception:
                self.worker = False
                raise

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

    def run(
        self,
        cut: Cut,
        batch: MiniBatch | None = None,
        totals: Mapping[str, int] | None = None,
        loss_fn: LossFn | None = None,
        seed: int = 0,
        identity: Callable[[int, int], contextlib.AbstractContextManager[Any]] | None = None,
        make: Callable[[], LossFn] | None = None,
    ) -> Outcome:
        """Runs the loss on a cut of the mini-batch, or of a variant of it.

        Args:
            cut: The cut.
            batch: A variant of the mini-batch.
            totals: What the micro-batches say of the mini-batch instead of the truth.
            loss_fn: Another loss instead.
            seed: Added to that of the generators.
            identity: ``as_rank`` of :func:`trinity_loss.invariance.engine.run`.
            make: Likewise.
        """
        return run(
            loss_fn or self.loss_fn,
            batch or self.batch,
            cut,
            totals=totals,
            seed=self.seed + seed,
            build=self.build,
            worker=self.worker,
            as_rank=identity or self.identity,
            make=make,
        )

    @property
    def base(self) -> Layout:
        """Layout of the whole."""
        return self.layouts[0]

    @property
    def nothing(self) -> float:
        """Share of a gradient that is rounding."""
        return NOTHING[self.batch.log_probs.dtype]

    def healthy(self, layout: Layout) -> Outcome:
        """The whole mini-batch in that layout."""
        if layout not in self._healthy:
            self._healthy[layout] = self.run(whole(self.batch, layout))
        return self._healthy[layout]

    @cached_property
    def _twice(self) -> tuple[Outcome, Outcome]:
        return self.run(whole(self.batch, self.base)), self.run(whole(self.batch, self.base))

    @cached_property
    def changes_inputs(self) -> bool:
        """Whether the loss answers otherwise where it is handed the same tensors again; they are not, after this."""
        rows = range(self.batch.num_sequences)
        if all(same(outcome, self.outcome) for outcome in self._twice) or _equal(
            self.build(self.batch, rows, self.base, None), self.batch, self.base
        ):
            return False
        self.build = build
        return True

    @cached_property
    def noise(self) -> str | None:
        """``random numbers`` or ``state between calls`` where the same call twice gives two answers, else None."""
        everything = whole(self.batch, self.base)
        again = [*self._twice]
        with contextlib.suppress(Exception):  # Something else in between, which a running mean would remember.
            self.run(Cut("even", even(self.batch, 2, 1), self.base))
            again.append(self.run(everything))
        if not all(same(outcome, self.outcome) for outcome in again):
            return "state between calls"
        if same(self.run(everything, seed=1), self.outcome):
            return "state between calls" if self.keeps_values else None
        return "random numbers" if same(self.run(everything), self.outcome) else "state between calls"

    @cached_property
    def keeps_values(self) -> bool:
        """Whether a loss made anew answers otherwise on the whole after one of the same shape with other values."""
        every = range(self.batch.num_sequences)
        for scale in _EXTREMES:
            with contextlib.suppress(Exception):  # No answer is no verdict.
                loss_fn = self.fresh()
                for batch in [variant(self.batch, "with_other_content", scale, *every)] * 2:
                    self.run(whole(batch, self.base), batch, loss_fn=loss_fn)
                if not same(self.run(whole(self.batch, self.base), loss_fn=loss_fn), self.outcome):
                    return True
        return False

    @cached_property
    def remembers(self) -> bool:
        """Whether some pieces come out otherwise where the loss is made anew for each of them."""

        pieces = Cut("even", even(self.batch, min(3, len(self.batch.groups)), 1), self.base)
        with contextlib.suppress(Exception):  # No answer is no verdict.
            return not same(self.run(pieces, make=self.fresh), self.run(pieces))
        return False

    @cached_property
    def sizes(self) -> dict[str, float]:
        """What the loss and each metric are measured against, so that nothing vanishes: the sums of absolute
        values over some pieces, and how far they move where every log-prob moves by one, at random."""
        draw = torch.Generator().manual_seed(self.seed)
        step = 1e-3 * torch.randn(self.batch.num_tokens, generator=draw).sign().to(self.batch.log_probs.dtype)
        sizes = {"loss": max(float(self.outcome.gradient.abs().sum()), self.outcome.sizes["loss"])}
        if not self.outcome.metrics:
            return sizes
        # A loss that fails here has no answer, and is judged elsewhere.
        with contextlib.suppress(Exception):
            pieces = even(self.batch, min(12, len(self.batch.groups)), 1)
            sizes = _larger(sizes, self.run(Cut("even", pieces, self.base)).sizes)
        with contextlib.suppress(Exception):
            moved = self.run(whole(self.batch, self.base), replace(self.batch, log_probs=self.batch.log_probs + step))
            metrics = self.outcome.metrics
            slopes = {k: abs(v - metrics[k]) / 1e-3 for k, v in moved.metrics.items() if k in metrics}
            sizes = _larger(sizes, slopes)
        return sizes

    def of_the_batch(self, metric: str) -> bool:
        """Whether a metric says something of the batch, and not of the machine."""
        return _OF_THE_MACHINE.search(metric.lower()) is None

    @cached_property
    def calm(self) -> MiniBatch:
        """The mini-batch without a policy gradient."""
        return variant(self.batch, "without_policy_gradient")

    @cached_property
    def rest(self) -> str | None:
        """Name of what is left without the policy gradient: ``kl``, ``rest``, or None for nothing."""
        advantages = self.batch.token_fields.get("advantages")
        try:
            if advantages is not None:
                indifferent = self.batch.with_fields(advantages=torch.zeros_like(advantages))
                if same(self.run(whole(self.batch, self.base), indifferent), self.outcome):
                    return None
            left = self.run(whole(self.calm, self.base), self.calm).log_prob_gradient
        except Exception:
            return None
        if not float(left.norm()) > self.nothing * float(self.outcome.log_prob_gradient.norm()):
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
        measured = self.measure(cut, batch, totals)
        return measured.terms.get(name, torch.zeros_like(measured.outcome.log_prob_gradient))

    def _separate(
        self, cut: Cut, outcome: Outcome, batch: MiniBatch | None, totals: Mapping[str, int] | None = None
    ) -> Measurement:
        log_probs, entropy = outcome.log_prob_gradient, outcome.entropy_gradient
        terms = {"gradient": outcome.gradient}
        if self.rest is None:
            terms["pg"] = log_probs
        else:
            calm = self.calm if batch is None else variant(batch, "without_policy_gradient")
            left = self.run(cut, calm, totals).log_prob_gradient
            terms |= {"pg": log_probs - left, self.rest: left}
        terms["entropy"] = entropy
        present = _not_nothing(terms, self.nothing) | (set(self.whole.terms) if "whole" in self.__dict__ else set())
        return Measurement(outcome, {name: terms[name] for name in terms if name in present})


def _not_nothing(terms: Mapping[str, Tensor], nothing: float) -> frozenset[str]:
    norm = nothing * float(terms["gradient"].norm())
    return frozenset(name for name, gradient in terms.items() if name == "gradient" or float(gradient.norm()) > norm)


def _copied(loss_fn: LossFn) -> LossFn | None:
    try:
        return copy.deepcopy(loss_fn)
    except Exception:
        return None


def _equal(micro: EngineMicroBatch, batch: MiniBatch, layout: Layout) -> bool:
    """Whether a micro-batch of all rows holds what it held when it was built."""
    made = build(batch, range(batch.num_sequences), layout).fields
    pairs = [(value, made[name]) for name, value in micro.fields.items() if isinstance(value, Tensor)]
    flat = [(a.values(), b.values()) if a.is_nested else (a, b) for a, b in pairs]
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in flat)


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two runs of the same pieces gave the same bits, up to what a library adds in another order."""
    scale = 1e-9 * float(one.gradient.abs().nan_to_num().max())
    return torch.allclose(one.gradient, other.gradient, rtol=1e-7, atol=scale, equal_nan=True)


def _larger(one: dict[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {*one, *other}}


def describe(error: BaseException) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:79] + '…' if len(text) > 80 else text}"
