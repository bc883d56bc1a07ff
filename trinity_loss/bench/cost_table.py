"""What was measured as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trinity_loss.bench.cost import FLOOR_BYTES_PER_TOKEN, Result
from trinity_loss.tables import print_table

if TYPE_CHECKING:
    from trinity_loss.bench import Options
    from trinity_loss.bench.engine_share import Share

_HEADERS = (
    "case",
    "loss",
    "mode",
    "tokens",
    "ms",
    "faster",
    "goal",
    "× floor",
    "peak MB",
    "of verl's",
    "B/token",
    "ops",
    "reads",
    "differs by",
)


def print_report(results: Sequence[Result], bandwidth: float, shares: Mapping[str, Share], options: Options) -> None:
    """Prints a row per case and loss, and what the columns mean."""
    print_table(_HEADERS, [row for result in results for row in _rows(result, bandwidth)])
    clock = "time of the thread" if options.device == "cpu" else "synchronized wall time"
    print(
        f"forward + backward of ppo, KL and entropy terms with all metrics; one thread, {clock}, medians of "
        f"{options.runs} interleaved runs; torch {torch.__version__}, {options.device}\n"
        f"faster: median of ratios to the first loss. floor: {FLOOR_BYTES_PER_TOKEN} bytes per token at the "
        f"{bandwidth / 1e9:.1f} GB/s of a copy measured in this run.\n"
        "peak: memory in use above what was before the call. B/token: bytes that all operations together read and\n"
        "write, per token. ops: ATen calls. reads: waits for the device.\n"
        "differs by: relative distance of loss or gradient, whichever is larger, from the first loss's."
    )
    for name, share in shares.items():
        print(
            f"{name}: {share.loss_seconds * 1e3:.2f} of {share.step_seconds * 1e3:.1f} ms, {share.share:.1%}, of a "
            f"step of verl's training worker with a model of {share.parameters} parameters on a CPU"
        )


def _rows(result: Result, bandwidth: float) -> list[list[str]]:
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
                f"{cost.seconds / result.floor_seconds(bandwidth):.1f}",
                f"{cost.peak_bytes / 1e6:.2f}",
                f"{cost.peak_bytes / base.peak_bytes:.2f}",
                f"{cost.traffic_bytes / result.num_tokens:.0f}",
                str(cost.operations),
                str(cost.host_reads),
                f"{max(cost.loss_error, cost.gradient_error):.0e}",
            ]
        )
    return rows


def as_dict(
    results: Sequence[Result], bandwidth: float, shares: Mapping[str, Share], options: Options
) -> dict[str, Any]:
    """Everything that was measured, in seconds and bytes."""
    return {
        "device": options.device,
        "torch": torch.__version__,
        "threads": 1,
        "runs": options.runs,
        "bandwidth": bandwidth,
        "floor_bytes_per_token": FLOOR_BYTES_PER_TOKEN,
        "cases": [
            {
                **dataclasses.asdict(result.case),
                "tokens": result.num_tokens,
                "floor_seconds": result.floor_seconds(bandwidth),
                "losses": {name: dataclasses.asdict(cost) for name, cost in result.costs.items()},
            }
            for result in results
        ],
        "engine_share": {name: {**dataclasses.asdict(s), "share": s.share} for name, s in shares.items()},
    }
