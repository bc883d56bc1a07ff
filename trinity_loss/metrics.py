"""Metrics that are exact under any cut: a numerator with a count, or a minimum, or a maximum.

A mean of means depends on the cut. What is collected here leaves the device in one piece (one host read
per micro-batch) and becomes verl ``Metric`` objects whose sum, minimum or maximum over micro-batches and
ranks is the value of the whole mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trinity_loss.aggregation import Ratio
from trinity_loss.errors import ConfigError
from trinity_loss.tokens import ResponseTokens

Kind = Literal["ratio", "max", "min"]


def check_metric_name(name: str, kind: Kind) -> None:
    """Raises :class:`ConfigError` where verl's driver would reduce ``name`` as something else than ``kind``.

    Across mini-batches verl takes the maximum of keys that contain ``max``, the minimum of those that
    contain ``min``, the mean of the others.
    """
    expected = "max" if "max" in name else "min" if "min" in name else "ratio"
    if kind != expected:
        raise ConfigError(
            f"metric {name!r} is a {kind}, but verl reduces a key of this name as a {expected}: a name contains "
            "'max' or 'min' exactly when the metric is one"
        )


@dataclass(frozen=True)
class Entry:
    """One metric of a micro-batch on the device.

    Attributes:
        kind: How pieces combine.
        value: 0-d tensor: the numerator, or the extreme.
        denominator: 0-d tensor: this micro-batch's count (``ratio`` only).
        total: The count of the whole mini-batch, None where nobody counted it.
    """

    kind: Kind
    value: Tensor
    denominator: Tensor | None = None
    total: int | None = None


@dataclass
class MetricSet:
    """Metrics and checks of one micro-batch, read to the host together."""

    entries: dict[str, Entry] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    checks: dict[str, Tensor] = field(default_factory=dict)

    def add_ratio(self, name: str, ratio: Ratio, total: int | None) -> None:
        """A mean: ``ratio`` holds this micro-batch's part, ``total`` the mini-batch's count."""
        check_metric_name(name, "ratio")
        self.entries[name] = Entry("ratio", ratio.numerator, ratio.denominator, total)

    def add_extreme(self, name: str, kind: Literal["max", "min"], values: Tensor, tokens: ResponseTokens) -> None:
        """The largest or smallest of values [N] at counted tokens."""
        check_metric_name(name, kind)
        extreme = tokens.maximum(values) if kind == "max" else -tokens.maximum(-values)
        self.entries[name] = Entry(kind, extreme)

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Moves everything to the host at once.

        Returns:
            Numbers of the entries, with ``name#`` for the denominator of a ratio, and those of the checks.
        """
        names: list[str] = []
        scalars: list[Tensor] = []
        for name, entry in self.entries.items():
            names.append(name)
            scalars.append(entry.value)
            if entry.denominator is not None:
                names.append(name + "#")
                scalars.append(entry.denominator)
        names.extend(self.checks)
        scalars.extend(self.checks.values())
        if not scalars:
            return {}, {}
        numbers = torch.stack([scalar.detach().to(torch.float64) for scalar in scalars]).tolist()
        values = dict(zip(names, numbers, strict=True))
        return {n: values[n] for n in names if n not in self.checks}, {n: values[n] for n in self.checks}

    def local(self, numbers: dict[str, float]) -> dict[str, float]:
        """Plain floats of this micro-batch alone; 0 where nothing counts."""
        return self.constants | {name: self._local(name, entry, numbers) for name, entry in self.entries.items()}

    def _local(self, name: str, entry: Entry, numbers: dict[str, float]) -> float:
        if entry.kind == "ratio":
            count = numbers[name + "#"]
            return numbers[name] / count if count else 0.0
        return 0.0 if abs(numbers[name]) >= _nothing(entry) else numbers[name]

    def engine(self, numbers: dict[str, float], dp_size: int) -> dict[str, Any]:
        """verl ``Metric`` objects: exact for the mini-batch once verl has reduced them."""
        from verl.utils.metric import AggregationType, Metric

        metrics: dict[str, Any] = dict(self.constants)
        for name, entry in self.entries.items():
            if entry.kind == "ratio" and entry.total is None:
                # Nobody counted the mini-batch: verl's own mean over micro-batches is all there is.
                metrics[name] = Metric(AggregationType.MEAN, self._local(name, entry, numbers))
            elif entry.kind == "ratio":
                share = numbers[name] * dp_size / entry.total if entry.total else 0.0
                metrics[name] = Metric(AggregationType.SUM, share)
            else:
                kind = AggregationType.MAX if entry.kind == "max" else AggregationType.MIN
                number = numbers[name]
                if abs(number) >= _nothing(entry):
                    number = -math.inf if entry.kind == "max" else math.inf
                metrics[name] = Metric(kind, number)
        return metrics


def _nothing(entry: Entry) -> float:
    """An extreme at least this large stands for no token at all."""
    return torch.finfo(entry.value.dtype).max
