"""What was measured as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trinity_loss.bench.cost import Cost, Result
from trinity_loss.tables import print_table

if TYPE_CHECKING:
    from trinity_loss.bench.engine_share import StepShare

#: Of each column, what stands in it for a loss, given its cost and that of the first, which says what the case is.
_COLUMNS: dict[str, Callable[[Result, str, Cost, Cost], str]] = {
    "case": lambda result, name, cost, base: result.case.title if cost is base else "",
    "loss": lambda result, name, cost, base: name,
    "mode": lambda result, name, cost, base: result.case.mode if cost is base else "",
    "tokens": lambda result, name, cost, base: str(result.num_tokens) if cost is base else "",
    "ms": lambda result, name, cost, base: f"{cost.seconds * 1e3:.2f}",
    "faster": lambda result, name, cost, base: f"{cost.speedup:.2f}",
    "goal": lambda result, name, cost, base: f"{result.case.goal:g}" if result.case.goal and name == "ours" else "",
    "peak MB": lambda result, name, cost, base: f"{cost.peak_bytes / 1e6:.2f}",
    "of verl's": lambda result, name, cost, base: f"{cost.peak_bytes / base.peak_bytes:.2f}",
    "B/token": lambda result, name, cost, base: f"{cost.traffic_bytes / result.num_tokens:.0f}",
    "ops": lambda result, name, cost, base: str(cost.operations),
    "reads": lambda result, name, cost, base: str(cost.host_reads),
    "differs by": lambda result, name, cost, base: f"{max(cost.loss_error, cost.gradient_error):.0e}",
}


def print_report(results: Sequence[Result], shares: Mapping[str, StepShare], device: str, runs: int) -> None:
    """Prints a row per case and loss, and what the columns mean."""
    rows = []
    for result in results:
        base = next(iter(result.costs.values()))
        rows += [[cell(result, *named, base) for cell in _COLUMNS.values()] for named in result.costs.items()]
    print_table(list(_COLUMNS), rows)
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
