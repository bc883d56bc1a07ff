"""What share of a whole step of verl's training worker a loss is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trinity_loss.bench.peers import LossFn, make_losses
from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

_METRIC = "bench/seconds"
_WARM_UP_STEPS = 2
_ROWS = 32


@dataclass(frozen=True)
class StepShare:
    """Medians over steps of the FSDP engine, with a tiny model on a CPU.

    Attributes:
        loss_seconds: Forward + backward of the loss alone.
        step_seconds: The step: forward, loss, backward, clipping, optimizer.
        parameters: Size of the model.
    """

    loss_seconds: float
    step_seconds: float
    parameters: int

    @property
    def share(self) -> float:
        return self.loss_seconds / self.step_seconds


@dataclass(frozen=True)
class Timed:
    """A loss that runs its own backward at once and takes the time of both.

    What it returns has the gradient that the loss has, so that the model's backward is the same.
    """

    loss: LossFn

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        from verl.utils.metric import AggregationType, Metric

        names = [name for name in ("log_probs", "entropy") if model_output.get(name) is not None]
        flat = {name: model_output[name].values() for name in names}
        leaves = {name: values.detach().requires_grad_() for name, values in flat.items()}
        outputs = {
            name: torch.nested.nested_tensor_from_jagged(leaf, offsets=model_output[name].offsets())
            for name, leaf in leaves.items()
        }
        start = time.perf_counter()
        loss, metrics = self.loss(model_output=outputs, data=data, dp_group=dp_group)
        loss.backward()
        seconds = time.perf_counter() - start
        surrogate = sum((flat[name] * leaf.grad).sum() for name, leaf in leaves.items() if leaf.grad is not None)
        return surrogate, {**metrics, _METRIC: Metric(AggregationType.SUM, seconds)}


def measure_shares(names: Sequence[str], steps: int) -> dict[str, StepShare]:
    """Runs each loss through verl's FSDP engine in a process of its own, steps in turn.

    Raises:
        EngineError: The engine failed.
    """
    batch = BatchSpec(rows=_ROWS, layout="nested", empty_rows=())
    losses = {name: Timed(make("token-mean")) for name, make in make_losses(names).items()}
    cases = [
        EngineCase(loss=loss, label=name, batch=batch)
        for _ in range(_WARM_UP_STEPS + steps)
        for name, loss in losses.items()
    ]
    results = run_cases("fsdp", cases)[_WARM_UP_STEPS * len(losses) :]
    shares = {}
    for name in losses:
        mine = [result for result in results if result.case.label == name]
        shares[name] = StepShare(
            statistics.median(result.metrics[_METRIC] for result in mine),
            statistics.median(result.seconds for result in mine),
            mine[0].gradient.numel(),
        )
    return shares
