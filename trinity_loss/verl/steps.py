"""Which training step of a run it is."""

from __future__ import annotations

import re
from functools import wraps
from typing import Any


class Steps:
    """Counts training steps as verl logs them, and the mini-batches within each.

    No trainer tells a worker the step of a batch. But before the first step and after every one it sends the weights
    to the rollout, with the step that they are of: a batch belongs to the next. Where nobody does, every batch is a
    step, from that of the checkpoint on.

    Attributes:
        step: Of the batch at hand, from 1.
        mini_batch: Of the mini-batch at hand within the step, from 1.
    """

    def __init__(self) -> None:
        self.step = self.mini_batch = 0
        self._of_weights: int | None = None

    def follow(self, worker: Any) -> None:
        """Listens to the weights that verl's ``ActorRolloutRefWorker`` sends."""
        send = worker.update_weights

        @wraps(send)
        def sending(global_steps: int | None = None, *args: Any, **named: Any) -> Any:
            if global_steps is not None:
                self._of_weights = int(global_steps)
            return send(global_steps, *args, **named)

        worker.update_weights = sending

    def resume(self, checkpoint: str) -> None:
        """Goes on from a checkpoint in verl's folder ``global_step_N``."""
        found = re.findall(r"global_step_(\d+)", str(checkpoint))
        if found:
            self.step = int(found[-1])

    def next_batch(self) -> None:
        """A batch begins, of this step or of the next."""
        step = self.step + 1 if self._of_weights is None else self._of_weights + 1
        if step != self.step:
            self.step, self.mini_batch = step, 0

    def next_mini_batch(self) -> None:
        """A mini-batch begins."""
        self.mini_batch += 1
