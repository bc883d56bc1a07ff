"""What forward + backward of a loss costs: time, peak memory, operations, host reads."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trinity_loss.bench.cases import Case, MeasuredBatch, make_micro_batch
from trinity_loss.bench.peers import LossFn

AGREEMENT = 1e-6
WARM_UP_RUNS = 2

#: What waits for the device. Boolean indexing and `repeat_interleave` without a size end in one of them.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_consecutive"}


@dataclass(frozen=True)
class Cost:
    """What one loss costs in one case.

    Attributes:
        seconds: Median of forward + backward.
        speedup: Median over the runs of the first loss's time over this one's, of runs next to each other.
        operations: Calls of ATen operations, as torch's profiler sees them, those made by others included.
        host_reads: Times the host waits for a number of the device.
        peak_bytes: Most memory in use during the call above what was in use before.
        traffic_bytes: Read and written by all operations together, if each reads its inputs and writes its outputs
            once; within an operation of a jagged tensor only its values are seen.
        loss_error: Distance of the loss from the first one's, relative to the sum of the gradient's magnitudes: the
            loss itself may be next to nothing where its tokens cancel.
        gradient_error: Relative distance of the gradients by log-probs and entropies.
    """

    seconds: float
    speedup: float
    operations: int
    host_reads: int
    peak_bytes: int
    traffic_bytes: int
    loss_error: float
    gradient_error: float


@dataclass(frozen=True)
class Result:
    """Costs in one case by the name of the loss; the first is what the others are compared with."""

    case: Case
    num_tokens: int
    costs: Mapping[str, Cost]

    @property
    def agrees(self) -> bool:
        """Whether all losses gave the same value and gradient."""
        return all(max(cost.loss_error, cost.gradient_error) <= AGREEMENT for cost in self.costs.values())


def measure(case: Case, losses: Mapping[str, LossFn], *, device: str = "cpu", runs: int = 9, seed: int = 0) -> Result:
    """Measures losses on one micro-batch, in turn, so that a disturbance meets all of them.

    The model output is made anew for each run, outside the time taken: that is the engine's work.

    Args:
        case: The micro-batch.
        losses: By name; the first is what the others are compared with.
        device: ``"cpu"`` or ``"cuda"``.
        runs: Timed runs of each, after two that are not.
        seed: Of the micro-batch.
    """
    batch = make_micro_batch(case, device=device, seed=seed)
    times: dict[str, list[float]] = {name: [] for name in losses}
    for run in range(WARM_UP_RUNS + runs):
        for name, loss_fn in losses.items():
            seconds = _time(loss_fn, batch, device)
            if run >= WARM_UP_RUNS:
                times[name].append(seconds)
    outcomes = {name: _outcome(loss_fn, batch) for name, loss_fn in losses.items()}
    first = next(iter(losses))
    costs = {}
    for name, loss_fn in losses.items():
        operations, host_reads, peak = _count(loss_fn, batch, device)
        model_output = batch.model_output()
        with _Traffic() as traffic:
            _step(loss_fn, model_output, batch)
        costs[name] = Cost(
            seconds=statistics.median(times[name]),
            speedup=statistics.median(a / b for a, b in zip(times[first], times[name], strict=True)),
            operations=operations,
            host_reads=host_reads,
            peak_bytes=peak,
            traffic_bytes=traffic.bytes,
            loss_error=float((outcomes[name][0] - outcomes[first][0]).abs() / outcomes[first][1].abs().sum()),
            gradient_error=float((outcomes[name][1] - outcomes[first][1]).norm() / outcomes[first][1].norm()),
        )
    return Result(case, batch.num_tokens, costs)


def _now(device: str) -> float:
    if device == "cpu":
        # Time of this thread: what other processes take from it is not counted.
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _step(loss_fn: LossFn, model_output: dict[str, Tensor], batch: MeasuredBatch) -> Tensor:
    loss, _ = loss_fn(model_output=model_output, data=batch.data)
    loss.backward()
    return loss.detach()


def _time(loss_fn: LossFn, batch: MeasuredBatch, device: str) -> float:
    model_output = batch.model_output()
    gc.disable()
    try:
        start = _now(device)
        _step(loss_fn, model_output, batch)
        return _now(device) - start
    finally:
        gc.enable()


def _outcome(loss_fn: LossFn, batch: MeasuredBatch) -> tuple[Tensor, Tensor]:
    """Loss and gradients in float64."""
    loss = _step(loss_fn, batch.model_output(), batch)
    gradients: list[Any] = [batch.log_probs.grad, batch.entropy.grad]
    return loss.double(), torch.cat(gradients).double()


def _count(loss_fn: LossFn, batch: MeasuredBatch, device: str) -> tuple[int, int, int]:
    """Operations, host reads and peak extra bytes of one call."""
    # The profiler's own log announces every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    model_output = batch.model_output()
    plain, lists = Tensor.tolist, 0

    def tolist(self: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return plain(self)

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # No operation is recorded for `tolist`.
    with (
        mock.patch.object(Tensor, "tolist", tolist),
        profile(activities=[ProfilerActivity.CPU], profile_memory=device == "cpu") as profiler,
    ):
        _step(loss_fn, model_output, batch)
    # The list that `profiler.events()` is made of, with each allocation as it came.
    events = profiler.profiler.kineto_results.events()
    names = [event.name() for event in events]
    reads = sum(name in _READS for name in names) + lists
    operations = sum(name.startswith("aten::") for name in names)
    if device == "cuda":
        return operations, reads, torch.cuda.max_memory_allocated() - before
    in_use = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return operations, reads, peak


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of what operations take and return."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in (*read.values(), *written))
        return result
