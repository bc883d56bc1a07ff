"""How the metrics of a mini-batch become numbers: over micro-batches and ranks, in one place."""

from __future__ import annotations

from typing import Any

from verl.utils.metric import Metric

from trinity_loss.errors import ConfigError
from trinity_loss.metric_set import finish_metrics
from trinity_loss.verl.shadow import PREFIX


def reduce_over_ranks(metrics: dict[str, Any]) -> None:
    """Reduces a mini-batch's ``Metric`` objects to numbers, in place, and finishes what only the whole tells.

    Args:
        metrics: As ``TrainingWorker.train_batch`` returns them: lists over ranks of verl ``Metric`` objects.

    Raises:
        ConfigError: The metrics of the ranks do not belong together.
    """
    lists = {key: value if isinstance(value, list) else [value] for key, value in metrics.items()}
    of_ranks = {key: value for key, value in lists.items() if all(isinstance(metric, Metric) for metric in value)}
    # Every micro-batch appends one value to every metric, and every rank has as many micro-batches.
    sizes = {key: [len(metric.values) for metric in value] for key, value in of_ranks.items()}
    whole = max(sizes.values(), key=sum, default=[0])
    reduced: dict[str, Any] = {}
    for key, per_rank in of_ranks.items():
        del metrics[key]
        if PREFIX in key and sizes[key] != whole:  # It failed somewhere, and a warning said so.
            continue
        if len({metric.aggregation for metric in per_rank}) > 1:
            raise ConfigError(f"metric {key!r} is reduced as {[m.aggregation.value for m in per_rank]} on the ranks")
        reduced[key] = float(Metric.aggregate_dp(per_rank))
    # verl's own numbers, which are none of these, stay as they are.
    finish_metrics(reduced)
    metrics |= reduced | {"actor/micro_batches": whole[0]}
