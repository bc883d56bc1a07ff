"""One cut compared with the whole, and what can be wrong, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_loss.invariance.cuts import Cut

#: Terms in the order of a table; ``rest`` is what stays without advantages and does not look at a reference.
TERMS = {"gradient": "gradient", "pg": "policy gradient", "kl": "KL", "entropy": "entropy", "rest": "other terms"}

#: What a gradient may be compared by besides, in the order of a table: kinds of parameters, and where the weights
#: came in some steps.
PARTS = ("embedding", "attention", "mlp", "experts", "router", "norms", "head", "other", "weights")

#: The names of findings, with what each means.
CAUSES = {
    "local mean": "a mean over the micro-batch's own tokens or sequences instead of a share of the mini-batch's",
    "missing dp_size": "no multiplication by dp_size, though the engine averages over ranks",
    "padded width as the norm": "a division by the padded width, which depends on the longest response around",
    "selection inside the micro-batch": "tokens chosen, clipped or normalised by what the micro-batch holds",
    "statistic of the micro-batch as a factor": "a factor computed from what the micro-batch's tokens hold",
    "prompt group inside the micro-batch": "a statistic of the part of a prompt group that the micro-batch holds",
    "rows counted in one place and not in the other": "fully masked sequences count in the share and not in the mean",
    "mean and share count different things": "a mean over one count, weighted by a share of another",
    "local count as a factor": "a factor that counts the micro-batch's own tokens or sequences",
    "counts in low precision": "a count that its type cannot hold, such as 257 in bfloat16",
    "number of micro-batches": "a factor of the number of micro-batches, which the engine takes care of",
    "empty micro-batch": "NaN, an error or no graph where a micro-batch has no valid token",
    "masked NaN": "what stands at a masked token reaches the loss or the gradient",
    "random numbers": "the loss draws, so that two calls on the same micro-batch differ",
    "state between calls": "the loss keeps something of earlier calls",
    "inputs changed in place": "the loss writes into the tensors it is given, which the next epoch reads again",
    "rank identity": "the loss asks which rank it is on",
    "layout": "the same sequences in another layout give another gradient",
    "totals that do not describe this mini-batch": "totals that contradict the mini-batch they came with",
    "fails on a cut": "an error, NaN or infinity on some cuts only",
    "not finite": "NaN or infinity on the whole mini-batch",
    "order of the sequences": "a sequence's part depends on where in the micro-batch it stands",
    "reported loss": "the gradient is right, the loss that is reported is not",
    "metric depends on the cut": "a logged metric is not that of the whole mini-batch",
    "unexplained": "the cut matters, and no experiment says why",
}


@dataclass(frozen=True)
class Deviation:
    """How far a gradient is from that of the whole mini-batch.

    Attributes:
        ratio: Its norm over the norm of the whole's.
        error: Norm of the difference, over the norm of the whole's; 1 where the whole has none and the cut has one.
        largest: Largest difference of a token, over the largest gradient of a token.
        mean: Mean difference, sign included, over the mean absolute gradient: a bias, where ``largest`` may
            be a single token.
    """

    ratio: float
    error: float
    largest: float
    mean: float

    @classmethod
    def between(cls, gradient: Tensor, reference: Tensor, nothing: float = 0.0) -> Deviation:
        """Compares two gradients [N], the whole's being the reference; infinite on NaN that the whole has not.

        A norm up to ``nothing`` is rounding.
        """
        if not bool(torch.isfinite(gradient).all()):
            if torch.allclose(gradient, reference, equal_nan=True):
                return cls(1.0, 0.0, 0.0, 0.0)
            return cls(math.nan, math.inf, math.inf, math.inf)
        difference = gradient - reference
        norm = float(reference.norm())
        if not bool(difference.any()):
            return cls(1.0, 0.0, 0.0, 0.0)
        if not norm > nothing:
            wrong = 1.0 if float(difference.norm()) > nothing else 0.0
            return cls(math.inf if wrong else 1.0, wrong, wrong, wrong)
        return cls(
            float(gradient.norm()) / norm,
            float(difference.norm()) / norm,
            float(difference.abs().max() / reference.abs().max()),
            float(difference.sum().abs() / reference.abs().sum()),
        )

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.error, self.largest, self.mean)


@dataclass(frozen=True)
class Value:
    """A number of a cut beside that of the whole mini-batch.

    Attributes:
        value: NaN where a metric is missing.
        whole: The same of the whole mini-batch.
        size: The sum or mean of the absolute contributions, which do not cancel.
    """

    value: float
    whole: float
    size: float = 0.0

    @property
    def error(self) -> float:
        """Their difference over the largest of the three; 0 between equals, NaN among them, else infinite on NaN."""
        if self.value == self.whole or (self.value != self.value and self.whole != self.whole):
            return 0.0
        if not (math.isfinite(self.value) and math.isfinite(self.whole)):
            return math.inf
        size = self.size if math.isfinite(self.size) else 0.0
        return abs(self.value - self.whole) / max(abs(self.value), abs(self.whole), size)


@dataclass(frozen=True)
class Row:
    """One cut.

    Attributes:
        cut: The cut.
        gradients: By term, see :data:`TERMS`, or by part, see :data:`PARTS`; ``gradient`` is all of it.
        loss: As verl reports it.
        metrics: As verl reduces them.
        failure: What the loss raised, or why no optimizer step is possible; None if nothing.
    """

    cut: Cut
    gradients: Mapping[str, Deviation] = field(default_factory=dict)
    loss: Value = Value(math.nan, math.nan)
    metrics: Mapping[str, Value] = field(default_factory=dict)
    failure: str | None = None

    @property
    def error(self) -> float:
        """Largest relative deviation of the gradient, of any term's, and of the reported loss."""
        return max(self.gradient_error, self.loss.error)

    @property
    def gradient_error(self) -> float:
        """Largest relative deviation of the gradient and of any term's; infinite where the loss fails."""
        if self.failure is not None:
            return math.inf
        return max((deviation.worst for deviation in self.gradients.values()), default=0.0)

    @property
    def metric_error(self) -> float:
        """Largest relative deviation of a metric."""
        return max((value.error for value in self.metrics.values()), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "cut": self.cut.label,
            "kind": self.cut.kind,
            "micro_batches": self.cut.micro_batches,
            "ranks": len(self.cut.ranks),
            "layout": self.cut.layout,
            "width": self.cut.width,
            "engine": self.cut.engine,
            "gradients": {name: vars(deviation) for name, deviation in self.gradients.items()},
            "loss": {**vars(self.loss), "error": self.loss.error},
            "metrics": {name: {**vars(value), "error": value.error} for name, value in self.metrics.items()},
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, by name.

    Attributes:
        name: Its name, one of :data:`CAUSES`.
        text: One plain sentence.
        counts: Whether it makes the loss fail the check.
    """

    name: str
    text: str
    counts: bool = True
