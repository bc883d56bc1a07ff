"""Metrics that are exact under any cut: a numerator with a count, a minimum, a maximum, or summed moments.

A mean of means depends on the cut. What is collected here leaves the device in one piece (one host read
per micro-batch) and becomes verl ``Metric`` objects whose sum, minimum or maximum over micro-batches and
ranks is the value of the whole mini-batch. A standard deviation is none of these: its moments are sums,
and :func:`finish_metrics` divides once per mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from trinity_loss.aggregation import Ratio
from trinity_loss.errors import ConfigError
from trinity_loss.totals import VALID_TOKENS, Totals

Kind = Literal["ratio", "max", "min"]
#: The largest and the smallest of nothing, which any number replaces.
_NOTHING: Mapping[str, float] = {"max": -math.inf, "min": math.inf}

_MOMENTS_PREFIX = "trinity_loss/moments/"
_MOMENT_NAMES = ("count", "sum", "square")


def _std(n: float, total: float, square: float) -> float:
    return math.sqrt(max(square / n - (total / n) ** 2, 0.0))


#: What can be made of moments, by name: functions of count, sum and sum of squares. The last two take those of a pair
#: of vectors: the square of the first, the product, the square of the second.
STATISTICS: Mapping[str, Callable[[float, float, float], float]] = {
    "mean": lambda n, total, square: total / n,
    "std": _std,
    "unbiased_std": lambda n, total, square: _std(n, total, square) * math.sqrt(n / (n - 1)) if n > 1 + 1e-6 else 0.0,
    "effective_sample_size": lambda n, total, square: total**2 / (n * square) if square else 0.0,
    "norm_ratio": lambda first, product, second: math.sqrt(second / first),
    "cosine": lambda first, product, second: product / math.sqrt(first * second) if second else 0.0,
}


def moment_key(statistic: str, moment: str, name: str) -> str:
    """Key under which a moment of metric ``name`` travels until :func:`finish_metrics`."""
    return f"{_MOMENTS_PREFIX}{statistic}/{moment}/{name}"


def prefix_key(prefix: str, key: str) -> str:
    """The key of a metric, or of one of its moments, with ``prefix`` before the metric's name."""
    if not key.startswith(_MOMENTS_PREFIX):
        return prefix + key
    statistic, moment, name = key.removeprefix(_MOMENTS_PREFIX).split("/", 2)
    return moment_key(statistic, moment, prefix + name)


def check_metric_name(name: str, kind: Kind) -> None:
    """Raises :class:`ConfigError` where verl's driver would reduce ``name`` as something else than ``kind``.

    Across mini-batches verl takes the maximum of keys that contain ``max``, the minimum of those that
    contain ``min``, the mean of the others. verl's own keys of its statistics ``seq_max_k2`` and ``seq_max_k3`` are
    the one exception: they keep their names, and of several mini-batches verl reports the largest value of each.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of a metric is {name!r}; expected a text")
    if "rollout_rs_seq_max_k" in name:
        return
    expected = "max" if "max" in name else "min" if "min" in name else "ratio"
    if kind != expected:
        raise ConfigError(
            f"metric {name!r} is a {kind}, but verl reduces a key of this name as a {expected}: a name contains "
            "'max' or 'min' exactly when the metric is one"
        )


def extreme_of(values: Tensor, counted: Tensor, kind: Literal["max", "min"]) -> Tensor:
    """The largest or smallest of values [n] where ``counted`` bool [n], 0-d; ∓inf if of nothing."""
    nothing = _NOTHING[kind]
    if values.numel() == 0:
        return torch.full((), nothing, dtype=values.dtype, device=values.device)
    candidates = torch.where(counted, values, nothing)
    return candidates.amax() if kind == "max" else candidates.amin()


@dataclass(frozen=True)
class Entry:
    """One metric of a micro-batch on the device.

    Attributes:
        kind: How pieces combine.
        value: 0-d tensor: the numerator, or the extreme.
        denominator: 0-d tensor: this micro-batch's count (``ratio`` only).
        total: Name of the count of the whole mini-batch, see :mod:`trinity_loss.totals`; None for a plain sum.
    """

    kind: Kind
    value: Tensor
    denominator: Tensor | None = None
    total: str | None = None


@dataclass
class MetricSet:
    """Metrics and checks of one micro-batch, read to the host together."""

    entries: dict[str, Entry] = field(default_factory=dict)
    moments: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    statistics: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    checks: dict[str, Tensor] = field(default_factory=dict)

    def add_ratio(self, name: str, ratio: Ratio, total: str | None) -> None:
        """A mean: ``ratio`` holds this micro-batch's part, ``total`` names the mini-batch's count."""
        check_metric_name(name, "ratio")
        self.entries[name] = Entry("ratio", ratio.numerator, ratio.denominator, total)

    def add_extreme(self, name: str, kind: Literal["max", "min"], extreme: Tensor) -> None:
        """The largest or smallest of something, 0-d; -inf, or inf, if of nothing."""
        check_metric_name(name, kind)
        self.entries[name] = Entry(kind, extreme)

    def add_extremes(self, name: str, values: Tensor, counted: Tensor) -> None:
        """The largest and the smallest of values [n] where ``counted`` bool [n], as ``…_max`` and ``…_min``."""
        self.add_extreme(f"{name}_max", "max", extreme_of(values, counted, "max"))
        self.add_extreme(f"{name}_min", "min", extreme_of(values, counted, "min"))

    def add_moments(self, values: Tensor, weights: Tensor, statistics: Mapping[str, str]) -> None:
        """Statistics of values [n] that weigh ``weights`` [n].

        Args:
            values: Finite everywhere.
            weights: 0 or more; those of all micro-batches together sum to how many values there are.
            statistics: Names of the metrics and which of :data:`STATISTICS` each is.
        """
        weights = weights.to(torch.float64)
        weighted = values.to(torch.float64) * weights
        first = next(iter(statistics))
        self.moments[first] = (weights.sum(), weighted.sum(), (weighted * values).sum())
        for name, statistic in statistics.items():
            check_metric_name(name, "ratio")
            self.statistics[name] = (statistic, first)

    def read(self) -> dict[str, float]:
        """Moves everything to the host at once.

        Returns:
            Numbers by name: of a metric, ``name#`` of its denominator, ``name#count`` and so on of moments, of checks.
        """
        scalars: dict[str, Tensor] = dict(self.checks)
        for name, entry in self.entries.items():
            scalars[name] = entry.value
            if entry.denominator is not None:
                scalars[name + "#"] = entry.denominator
        for name, moments in self.moments.items():
            scalars |= {f"{name}#{kind}": moment for kind, moment in zip(_MOMENT_NAMES, moments, strict=True)}
        if not scalars:
            return {}
        # Type by type, since stacking types together converts one number at a time; float64 holds every count and flag.
        by_type: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, scalar in scalars.items():
            by_type.setdefault(scalar.dtype, {})[name] = scalar
        parts = [torch.stack([*part.values()]).to(torch.float64) for part in by_type.values()]
        names = [name for part in by_type.values() for name in part]
        return dict(zip(names, torch.cat(parts).tolist(), strict=True))

    def local(self, numbers: dict[str, float]) -> dict[str, float]:
        """Plain floats of this micro-batch alone; 0 where nothing counts."""
        metrics = dict(self.constants)
        for name, entry in self.entries.items():
            metrics[name] = _local(name, entry, numbers)
        for name, (statistic, source) in self.statistics.items():
            metrics[name] = _statistic(statistic, *(numbers[f"{source}#{kind}"] for kind in _MOMENT_NAMES))
        return metrics

    def engine(self, numbers: dict[str, float], totals: Totals, share: float | None = None) -> dict[str, Any]:
        """verl ``Metric`` objects: exact for the mini-batch once verl has reduced them.

        Without verl, :class:`PlainMetric` objects.

        Args:
            numbers: What :meth:`read` returned.
            totals: What was counted over the mini-batch.
            share: What the tokens of this micro-batch are of those of the mini-batch, before rejection: weighs its
                means of tokens where nobody counted the tokens after rejection.
        """
        make, dp_size = _metric_class(), totals.dp_size or 1
        metrics: dict[str, Any] = dict(self.constants)
        for name, entry in self.entries.items():
            if entry.kind != "ratio":
                metrics[name] = make(entry.kind, 0.0 if totals.nothing_counts else numbers[name])
                continue
            whole = totals.get(entry.total)
            if whole is None and share is not None and entry.total == VALID_TOKENS:
                metrics[name] = make("sum", _local(name, entry, numbers) * share * dp_size)
            elif whole is None:
                # Nobody counted the mini-batch: verl's own mean over micro-batches is all there is.
                metrics[name] = make("mean", _local(name, entry, numbers))
            else:
                metrics[name] = make("sum", numbers[name] * dp_size / whole if whole else 0.0)
        for name, (statistic, source) in self.statistics.items():
            for kind in _MOMENT_NAMES:
                # verl averages over ranks before it sums over micro-batches.
                moment = numbers[f"{source}#{kind}"] * dp_size
                metrics[moment_key(statistic, kind, name)] = make("sum", moment)
        return metrics


@dataclass(frozen=True)
class PlainMetric:
    """What stands for verl's ``Metric`` where verl is not installed.

    Attributes:
        aggregation: How values of micro-batches are put together: ``sum``, ``mean``, ``min`` or ``max``.
        value: Of this micro-batch.
    """

    aggregation: str
    value: float

    def aggregate(self) -> float:
        """The value, as of a mini-batch in one piece."""
        return self.value


def _metric_class() -> Callable[[str, float], Any]:
    try:
        from verl.utils.metric import Metric
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise
        return PlainMetric
    return cast(Callable[[str, float], Any], Metric)


def _local(name: str, entry: Entry, numbers: dict[str, float]) -> float:
    if entry.kind == "ratio":
        count = numbers[name + "#"]
        return numbers[name] / count if count else 0.0
    return 0.0 if numbers[name] == _NOTHING[entry.kind] else numbers[name]


def _statistic(statistic: str, count: float, total: float, square: float) -> float:
    return STATISTICS[statistic](count, total, square) if count else 0.0


def finish_metrics(metrics: dict[str, Any]) -> None:
    """Turns summed moments into statistics, in place, and extremes over nothing into 0.

    Args:
        metrics: Metrics of one whole mini-batch, reduced over micro-batches and ranks to one number each.

    Raises:
        ConfigError: A moment is missing, so the metrics are not those of one contract.

    Example:
        >>> metrics = {"trinity_loss/moments/std/%s/spread" % k: v for k, v in
        ...            {"count": 2.0, "sum": 4.0, "square": 10.0}.items()}
        >>> finish_metrics(metrics)
        >>> metrics
        {'spread': 1.0}
    """
    for key in [key for key in metrics if key.startswith(_MOMENTS_PREFIX)]:
        statistic, kind, name = key.removeprefix(_MOMENTS_PREFIX).split("/", 2)
        if kind != "count":
            continue
        keys = [moment_key(statistic, moment, name) for moment in _MOMENT_NAMES]
        missing = [moment for moment in keys if moment not in metrics]
        if missing:
            raise ConfigError(f"metric {name!r} lacks {', '.join(missing)}; metrics of two contracts were mixed")
        metrics[name] = _statistic(statistic, *(metrics.pop(moment) for moment in keys))
    for key, value in metrics.items():
        if any(kind in key and isinstance(value, float) and value == nothing for kind, nothing in _NOTHING.items()):
            metrics[key] = 0.0
