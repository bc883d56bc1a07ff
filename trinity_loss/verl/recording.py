"""Which mini-batches of a run are saved; see :mod:`trinity_loss.recorder` for what is saved of one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from trinity_loss.loss_config import LossConfig
from trinity_loss.recorder import Provenance, Recorder
from trinity_loss.verl.diagnostic import only_warning
from trinity_loss.verl.policy_options import PolicyLossOptions


class RunRecording:
    """Saves the mini-batches of chosen training steps. What goes wrong is a warning, and training goes on.

    Args:
        steps: Training steps as verl logs them.
        folder: Where.
        max_bytes: Of one rank's part.
    """

    def __init__(self, steps: Collection[int], folder: Path, max_bytes: int) -> None:
        self.steps, self.folder, self.max_bytes = frozenset(steps), folder, max_bytes
        self._run = f"{datetime.now():%Y-%m-%d-%H%M%S}-{uuid.uuid4().hex[:6]}"

    @classmethod
    def of(cls, policy_loss: PolicyLossOptions) -> RunRecording | None:
        """What a configuration says of recording; None: nothing is saved."""
        if not policy_loss.record_steps or policy_loss.record_dir is None:
            return None
        max_bytes = int(policy_loss.record_max_megabytes * 2**20)
        return cls(policy_loss.record_steps, Path(policy_loss.record_dir).expanduser(), max_bytes)

    @contextmanager
    def around(
        self, loss_fn: Callable[..., Any], config: LossConfig, engine: Any, step: int, mini_batch: int
    ) -> Iterator[Callable[..., Any]]:
        """The loss to train a mini-batch (counted from 1 within the step) with, saved then if its step is chosen."""
        if step not in self.steps:
            yield loss_fn
            return
        rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        mine = Provenance(self._run, step, mini_batch, rank, ranks)
        run, folder = self._agree(mine, engine.get_data_parallel_group())
        what = f"recording {folder}"
        loss = config.policy_loss
        recorder: Recorder | None = Recorder(
            self.max_bytes, config.row_weights, loss.fields, expert_rows=loss.mixture is not None
        )

        def record_and_compute(*, data: Any, model_output: Any = None, dp_group: Any = None, **of_logits: Any) -> Any:
            nonlocal recorder
            if model_output is None:  # In an engine's logits processor, as distillation is.
                return loss_fn(data=data, **of_logits)
            kept, recorder = recorder, None
            with only_warning(what):
                if kept is not None:
                    kept.add(model_output, data)
                    recorder = kept
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        yield record_and_compute
        # Ranks that share their data, as the stages of a pipeline do, need one copy.
        if recorder is not None and engine.is_mp_src_rank_with_outputs():
            with only_warning(what):
                recorder.write(folder, replace(mine, run=run), config)

    def _agree(self, provenance: Provenance, group: Any) -> tuple[str, Path]:
        """Name of the run and folder of the mini-batch, those of the first rank for all: a free one."""
        folder = self.folder / provenance.folder
        with only_warning(f"looking for {folder}"):
            if folder.exists():
                folder = folder.with_name(f"{folder.name}-{self._run}")
        chosen: list[Any] = [(self._run, folder)]
        if group is not None and torch.distributed.is_initialized():
            chosen = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(chosen, (self._run, folder), group=group)
        self._run = chosen[0][0]
        return chosen[0]
