"""What was measured as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trinity_loss.bench.cost import Result
from trinity_loss.tables import print_table

if TYPE_CHECKING:
    from trinity_loss.bench.engine_share import StepShare

_HEADERS = (
    "case",
    "loss",
    "mode",
    "tokens",
    "ms",
    "faster",
    "goal",
    "peak MB",
    "of verl's",
    "B/token",
    "ops",
    "reads",
    "differs by",
)


def print_report(results: Sequence[Result], shares: Mapping[str, StepShare], device: str, runs: int) -> None:
    """Prints a row per case and loss, and what the columns mean."""
    print_table(_HEADERS, [row for result in results for row in _rows(result)])
    clock = "time of the thread" if device == "cpu" else "synchronized wall time"
    print(
        f"forward + backward of ppo, KL and entropy terms with all metrics; one thread, {clock}, medians of "
        f"{runs} interleaved runs; torch {torch.__version__}, {device}\n"
        "faster: median of ratios to the first loss. peak: memory in use above what was before the call.\n"
        "B/token: bytes that all operations together read and write, per token. ops: ATen calls. reads: waits for\n"
        "the device. "
        "differs by: relative distance of loss or gradient, whichever is larger, from the first loss's."
    )
    for name, share in shares.items():
        print(
            f"{name}: {share.loss_seconds * 1e3:.2f} of {share.step_seconds * 1e3:.1f} ms, {share.share:.1%}, of a "
            f"step of verl's training worker with a model of {share.parameters} parameters on a CPU"
        )


def _rows(result: Result) -> list[list[str]]:
    rows = []
    case, first = result.case, next(iter(result.costs))
    for name, cost in result.costs.items():
        base = result.costs[first]
        rows.append(
            [
                case.title if name == first else "",
                name,
                case.mode if name == first else "",
                str(result.num_tokens) if name == first else "",
                f"{cost.seconds * 1e3:.2f}",
                f"{cost.speedup:.2f}",
                f"{case.goal:g}" if case.goal is not None and name == "ours" else "",
                f"{cost.peak_bytes / 1e6:.2f}",
                f"{cost.peak_bytes / base.peak_bytes:.2f}",
                f"{cost.traffic_bytes / result.num_tokens:.0f}",
                str(cost.operations),
                str(cost.host_reads),
                f"{max(cost.loss_error, cost.gradient_error):.0e}",
            ]
        )
    return rows


def as_dict(results: Sequence[Result], shares: Mapping[str, StepShare], device: str, runs: int) -> dict[str, Any]:
    """Everything that was measured, in seconds and bytes."""
    return {
        "device": device,
        "torch": torch.__version__,
        "threads": 1,
        "runs": runs,
        "cases": [
            {
                **dataclasses.asdict(result.case),
                "tokens": result.num_tokens,
                "losses": {name: dataclasses.asdict(cost) for name, cost in result.costs.items()},
            }
            for result in results
        ],
        "engine_share": {name: {**dataclasses.asdict(s), "share": s.share} for name, s in shares.items()},
    }
