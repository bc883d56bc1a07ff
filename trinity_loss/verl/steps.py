"""Which training step of a run it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class Steps:
    """Counts training steps as verl logs them, and the mini-batches within each.

    No trainer tells a worker the step of a batch. But before the first step and after every one it sends the weights
    to the rollout, with the step that they are of: a batch belongs to the next. Where nobody does, every batch is a
    step, from that of the checkpoint on, or from the first that trains the actor. A mini-batch that is trained by
    itself, outside of a batch, is one.

    Attributes:
        step: Of the batch at hand, from 1.
        mini_batch: Of the mini-batch at hand within the step, from 1.
    """

    def __init__(self) -> None:
        self.step = self.mini_batch = 0
        self._of_weights: int | None = None
        self._first, self._within = 1, False

    def follow(self, worker: Any, first: int = 1) -> None:
        """Listens to the weights that verl's ``ActorRolloutRefWorker`` sends.

        Args:
            worker: The worker.
            first: The first step that trains the actor, as verl's ``trainer.critic_warmup`` says.
        """
        self._first = first
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

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A batch, of this step or of the next, which lasts as long as what is within."""
        step = max(self.step + 1, self._first) if self._of_weights is None else self._of_weights + 1
        if step != self.step:
            self.step, self.mini_batch = step, 0
        self._within = True
        try:
            yield
        finally:
            self._within = False

    def next_mini_batch(self) -> None:
        """A mini-batch begins."""
        if not self._within:
            with self.batch():
                pass
        self.mini_batch += 1
