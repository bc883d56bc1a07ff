"""The training worker: exchanges the loss, counts once per mini-batch what the engine does not.

verl keeps the class of an actor's training worker in ``ActorRolloutRefWorker.actor_worker_cls``;
:func:`install` puts a subclass there. It does nothing for a loss that is not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from trinity_loss.errors import ConfigError
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.metric_set import finish_metrics
from trinity_loss.recorder import Recorder
from trinity_loss.verl.counting import Counting
from trinity_loss.verl.shadow import ShadowLoss

logger = logging.getLogger(__name__)
# The line that names the loss belongs in a run's log at verl's default level.
logger.setLevel(logging.INFO)


def install() -> None:
    """Puts our training worker in the place that verl keeps for one. A second call changes nothing."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if not issubclass(ActorRolloutRefWorker.actor_worker_cls, TrinityWorkerMixin):
        ActorRolloutRefWorker.actor_worker_cls = make_training_worker(ActorRolloutRefWorker.actor_worker_cls)


def engine_loss(loss_fn: Any) -> EnginePolicyLoss | ShadowLoss | None:
    """Our loss for the loss that verl bound to an actor configuration; None if it is not to be exchanged.

    In shadow mode it is verl's loss with ours beside it.

    Args:
        loss_fn: What verl passes to ``set_loss_fn``.

    Raises:
        ConfigError: A distillation loss is bound to our configuration.
    """
    from verl.workers.utils.losses import ppo_loss

    from trinity_loss.verl.policy_loss_config import PolicyLossConfig, loss_config

    actor: Any = getattr(loss_fn, "keywords", {}).get("config")
    if not isinstance(getattr(actor, "policy_loss", None), PolicyLossConfig):
        return None
    if loss_fn.func is not ppo_loss:
        raise ConfigError(
            f"actor.policy_loss is {PolicyLossConfig.__module__}.{PolicyLossConfig.__name__}, but verl computes "
            f"{loss_fn.func.__module__}.{loss_fn.func.__name__}, which goes around it: switch the distillation off, "
            "or take the _target_ of policy_loss away"
        )
    ours = EnginePolicyLoss(loss_config(actor))
    return ShadowLoss(loss_fn, ours) if actor.policy_loss.shadow else ours


@dataclass(frozen=True)
class Recording:
    """Which mini-batches are saved, and where.

    Attributes:
        steps: Training steps, counted from 1 at the start of the worker.
        folder: Where.
        max_bytes: Of one rank's part.
    """

    steps: frozenset[int]
    folder: Path
    max_bytes: int


def recording_of(loss_fn: Any) -> Recording | None:
    """What the configuration that verl bound its loss to says of recording; None: nothing is saved."""
    policy_loss = loss_fn.keywords["config"].policy_loss
    if not policy_loss.record_steps:
        return None
    max_bytes = int(policy_loss.record_max_megabytes * 2**20)
    return Recording(frozenset(policy_loss.record_steps), Path(policy_loss.record_dir), max_bytes)


class TrinityWorkerMixin:
    """What our training worker adds to verl's; see :func:`make_training_worker`."""

    engine: Any
    loss_fn: Any
    recording: Recording | None = None
    _counting: Counting | None = None
    _step = 0
    _mini_batch = 0

    @property
    def our_loss(self) -> EnginePolicyLoss | None:
        """Our loss, whether it trains or stands beside verl's; None where neither."""
        if isinstance(self.loss_fn, ShadowLoss):
            return self.loss_fn.ours
        return self.loss_fn if isinstance(self.loss_fn, EnginePolicyLoss) else None

    @property
    def counting(self) -> Counting:
        """What counts the mini-batches of this worker."""
        if self._counting is None:
            self._counting = Counting()
        return self._counting

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Saves the mini-batch that is trained within, where the configuration chose this step."""
        recording, loss = self.recording, self.our_loss
        if recording is None or loss is None or self._step not in recording.steps:
            yield
            return
        recorder, loss_fn = Recorder(recording.max_bytes), self.loss_fn

        def record_and_compute(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            recorder.add(model_output, data)
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        self.loss_fn = record_and_compute
        try:
            yield
        finally:
            self.loss_fn = loss_fn
        # Ranks that share their data, as the stages of a pipeline do, need one copy.
        if self.engine.is_mp_src_rank_with_outputs():
            folder = recording.folder / f"step-{self._step}" / f"mini-batch-{self._mini_batch}"
            recorder.write(folder, self.engine.get_data_parallel_rank(), loss.config)


def reduce_over_ranks(metrics: dict[str, Any]) -> None:
    """Reduces a mini-batch's ``Metric`` objects to numbers, in place, and finishes what only the whole tells.

    Args:
        metrics: As ``TrainingWorker.train_batch`` returns them: lists over ranks of verl ``Metric`` objects.

    Raises:
        ConfigError: The metrics of the ranks do not belong together.
    """
    for key, value in metrics.items():
        per_rank = value if isinstance(value, list) else [value]
        if not all(isinstance(metric, Metric) for metric in per_rank):
            continue
        if len({metric.aggregation for metric in per_rank}) > 1:
            raise ConfigError(f"metric {key!r} is reduced as {[m.aggregation.value for m in per_rank]} on the ranks")
        metrics[key] = float(Metric.aggregate_dp(per_rank))
        # Every micro-batch appends one value to every metric, and every rank has as many micro-batches.
        micro_batches = len(per_rank[0].values)
    metrics["actor/micro_batches"] = micro_batches
    finish_metrics(metrics)


def make_training_worker(base: type[Any]) -> type[Any]:
    """A subclass of verl's ``TrainingWorker``, or of a subclass of it, that trains with our loss.

    Args:
        base: The class that stood in verl's place so far.
    """

    class TrinityTrainingWorker(TrinityWorkerMixin, base):
        """verl's training worker with the loss of trinity_loss."""

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
        def set_loss_fn(self, loss_fn: Any) -> None:
            ours = engine_loss(loss_fn)
            if ours is not None:
                logger.info("trinity_loss: training with %s", ours)
                self.recording = recording_of(loss_fn)
            super().set_loss_fn(ours or loss_fn)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_mini_batch(self, data: TensorDict) -> TensorDict:
            self._step, self._mini_batch = self._step + 1, 0
            if self.our_loss is not None:
                self.counting.begin(data, self.our_loss.config, self.engine.get_data_parallel_group())
            return super().train_mini_batch(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_batch(self, data: TensorDict) -> TensorDict:
            if self.our_loss is None:
                return super().train_batch(data)
            self.counting.attach(data, self.our_loss.config, self.engine.get_data_parallel_group())
            self._mini_batch += 1
            with self._recording():
                output = super().train_batch(data)
            if output is not None:  # None on ranks that hold no output, as in a pipeline
                reduce_over_ranks(tu.get(output, "metrics"))
            return output

    return TrinityTrainingWorker
