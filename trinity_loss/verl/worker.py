"""The training worker: exchanges the loss, has the mini-batch counted before it trains, and finishes its metrics.

verl keeps the class of an actor's training worker in ``ActorRolloutRefWorker.actor_worker_cls``;
:func:`install` puts a subclass there. It does nothing for a loss that is not ours, but says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from trinity_loss.loss import TrinityPolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.verl.audit_settings import AuditSettings
from trinity_loss.verl.choice import config_of, engine_loss, name_of, selecting_actor
from trinity_loss.verl.compat import check_version
from trinity_loss.verl.counting import Counting
from trinity_loss.verl.diagnostic import only_warning
from trinity_loss.verl.metric_reduction import reduce_over_ranks
from trinity_loss.verl.policy_options import PolicyLossOptions, say_bypassed, unread_corrections
from trinity_loss.verl.recording import RunRecording
from trinity_loss.verl.selecting import attach_selection, infer
from trinity_loss.verl.shadow import ShadowLoss
from trinity_loss.verl.steps import Steps

logger = logging.getLogger(__name__)
# The line that names the loss belongs in a run's log at verl's default level.
logger.setLevel(logging.INFO)


class _WorkerClass:
    """What stands in ``actor_worker_cls``: the class of the training worker, made within verl's own worker.

    Only that one has the whole configuration of the run, and is told the step of its weights.
    """

    def __init__(self, worker_class: type[Any]) -> None:
        self.worker_class = worker_class

    def __get__(self, outer: Any, owner: type[Any] | None = None) -> Callable[..., Any]:
        if outer is None:
            return self.worker_class
        worker_class = vars(outer).get("actor_worker_cls", self.worker_class)
        if isinstance(worker_class, type) and issubclass(worker_class, TrinityWorkerMixin):
            return partial(_make_within, worker_class, outer)
        if _selected_by(outer):
            say_bypassed(f"{type(outer).__name__} trains with {name_of(worker_class)}, which goes around it")
        return worker_class

    def __set__(self, outer: Any, worker_class: Any) -> None:
        vars(outer)["actor_worker_cls"] = worker_class


def _make_within(worker_class: type[Any], outer: Any, *values: Any, **named: Any) -> Any:
    worker = worker_class(*values, **named)
    worker.rollout_correction = _select(outer, "algorithm.rollout_correction", of_run=True)
    worker.selected = _selected_by(outer)
    worker.steps.follow(outer, int(_select(outer, "trainer.critic_warmup", of_run=True) or 0))
    return worker


def _selected_by(outer: Any) -> bool:
    """Whether the configuration of verl's worker selects our loss."""
    target = _select(outer, "actor.policy_loss._target_")
    return target is not None and issubclass(get_class(target), PolicyLossOptions)


def _select(outer: Any, key: str, *, of_run: bool = False) -> Any:
    """A value of the configuration of verl's worker, or of the run that it is a part of; None where it has none."""
    config = getattr(outer, "config", None)
    if not isinstance(config, DictConfig):
        return None
    return OmegaConf.select(config._get_root() if of_run else config, key)


def install() -> None:
    """Puts our training worker in the place that verl keeps for one. A second call changes nothing.

    Raises:
        ConfigError: verl is too old to have one.
    """
    check_version()
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if not issubclass(ActorRolloutRefWorker.actor_worker_cls, TrinityWorkerMixin):
        ours = make_training_worker(ActorRolloutRefWorker.actor_worker_cls)
        _put(ActorRolloutRefWorker, ours)
    for worker in subclasses(ActorRolloutRefWorker):
        own = vars(worker).get("actor_worker_cls")
        if isinstance(own, type) and not issubclass(own, TrinityWorkerMixin):
            _put(worker, own)


def _put(worker: Any, training_worker: type[Any]) -> None:
    worker.actor_worker_cls = _WorkerClass(training_worker)


def subclasses(of: type[Any]) -> list[type[Any]]:
    """All classes that inherit from one, directly or not."""
    return [found for direct in of.__subclasses__() for found in (direct, *subclasses(direct))]


def _warn(what: str) -> None:
    """A line in the log of the driver, once for all ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning("trinity_loss: %s", what)


class TrinityWorkerMixin:
    """What our training worker adds to verl's; see :func:`make_training_worker`.

    Attributes:
        rollout_correction: ``algorithm.rollout_correction`` of the run, None where it is not known.
        selected: Whether the configuration selects our loss.
        recording: What saves mini-batches, None where none is to be saved.
        auditing: What the configuration says of the audit, None where no step is to be audited.
    """

    engine: Any
    optimizer_config: Any
    rank: int
    loss_fn: Any
    rollout_correction: Mapping[str, Any] | None = None
    recording: RunRecording | None = None
    auditing: AuditSettings | None = None
    selected = False
    _audits_told = False

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.steps, self.counting = Steps(), Counting()

    def choose(self, loss_fn: Any) -> Any:
        """The loss to train with instead of what verl hands over; a line of the log says which."""
        ours = engine_loss(loss_fn, self.rollout_correction)
        actor = selecting_actor(loss_fn)
        self.selected = self.selected or actor is not None
        if actor is not None:
            self._warn_of_unread(actor.policy_loss)
            self.recording = RunRecording.of(actor.policy_loss)
            self.auditing = AuditSettings.of(actor.policy_loss)
        if ours is not None:
            logger.info("trinity_loss: training with %s", ours)
        elif self.selected and config_of(loss_fn) is None:
            self._say_another(loss_fn)
        self._known = loss_fn if ours is None else ours
        return self._known

    def _say_another(self, loss_fn: Any) -> None:
        say_bypassed(
            f"a trainer set {name_of(loss_fn)} as the loss (if that calls it after all, let it have its .config)"
        )

    def training_config(self) -> LossConfig | None:
        """What the loss of ours that trains computes; None where another does, which the log names."""
        config = config_of(self.loss_fn)
        if self.selected and config is None and self.loss_fn is not self._known:
            self._known = self.loss_fn  # It came by another way than set_loss_fn.
            self._say_another(self.loss_fn)
        return config

    def _warn_of_unread(self, policy_loss: PolicyLossOptions) -> None:
        """Says what is asked of rollout correction where nothing reads it, and where a folder gets no steps."""
        for what in ("record", "audit"):
            if getattr(policy_loss, f"{what}_dir") and not getattr(policy_loss, f"{what}_steps"):
                _warn(f"policy_loss.{what}_dir is set, but {what}_steps is not: nothing is {what}ed")
        own = policy_loss.rollout_correction
        asked = {} if own == type(own)() else {f.name: getattr(own, f.name) for f in fields(own)}
        for text in unread_corrections(policy_loss.loss_mode, asked, self.rollout_correction or asked):
            _warn(text)

    def count(self, data: TensorDict, config: LossConfig, *, whole_batch: bool = False) -> None:
        """Counts what the engine does not, over the ranks."""
        count = self.counting.begin if whole_batch else self.counting.attach
        with only_warning("counting for shadow mode") if self._in_shadow else nullcontext():
            count(data, config, self.engine.get_data_parallel_group())
        if not whole_batch and config.group_size > 1:
            self._keep_together(data, config.group_size)

    def _keep_together(self, data: TensorDict, size: int) -> None:
        """Has verl cut between groups of so many rows only."""
        own = getattr(self, "engine_config", None)
        by_length, rows = (
            tu.get(data, name, default=getattr(own, name, None))
            for name in ("use_dynamic_bsz", "micro_batch_size_per_gpu")
        )
        # verl multiplies a fixed number of rows by the size of the groups; one that divides evenly is kept as it is.
        if by_length or not rows or rows % size:
            tu.assign_non_tensor(data, force_group_size=size)

    def audit(self, data: TensorDict, config: LossConfig) -> dict[str, float]:
        """Audits a mini-batch, if it is the first of a step that was chosen; the ``audit/…`` metrics."""
        if self.auditing is None:
            return {}
        if not self._audits_told and self.rank == 0:
            last = int(getattr(self.optimizer_config, "total_training_steps", None) or 0)
            for notice in self.auditing.notices(self.steps.step, last):
                _warn(notice)
        self._audits_told = True
        if self.steps.step not in self.auditing.steps or self.steps.mini_batch != 1:
            return {}
        from trinity_loss.verl.audit import audit

        return audit(self, data, self.auditing, self.steps.step, config.group_size)

    def tell_step(self, data: TensorDict, config: LossConfig) -> None:
        """Attaches the training step, as verl logs it, where the loss depends on it and nobody said it."""
        mixture = config.policy_loss.mixture
        arguments = {**config.policy_loss.arguments, **config.policy_arguments}
        if mixture is not None and mixture.needs_step(arguments) and "step" not in data:
            tu.assign_non_tensor(data, step=self.steps.step)

    def select(self, data: TensorDict, config: LossConfig) -> None:
        """Chooses among the tokens of the mini-batch, over the ranks, where the loss asks for it."""
        loss = TrinityPolicyLoss(config)
        if not loss.over_mini_batch:
            return
        with only_warning("choosing tokens for shadow mode") if self._in_shadow else nullcontext():
            attach_selection(data, loss, partial(infer, self), self.engine.get_data_parallel_group(), self.steps)

    @contextmanager
    def recorded(self, config: LossConfig) -> Iterator[None]:
        """Saves the mini-batch that is trained within, where its step was chosen."""
        if self.recording is None:
            yield
            return
        loss_fn, steps = self.loss_fn, self.steps
        with self.recording.around(loss_fn, config, self.engine, steps.step, steps.mini_batch) as self.loss_fn:
            try:
                yield
            finally:
                self.loss_fn = loss_fn

    @property
    def _in_shadow(self) -> bool:
        return isinstance(self.loss_fn, ShadowLoss)


def make_training_worker(base: type[Any]) -> type[Any]:
    """A subclass of verl's ``TrainingWorker``, or of a subclass of it, that trains with our loss.

    Args:
        base: The class that stood in verl's place so far.
    """

    class TrinityTrainingWorker(TrinityWorkerMixin, base):
        """verl's training worker with the loss of trinity_loss."""

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
        def set_loss_fn(self, loss_fn: Any) -> None:
            super().set_loss_fn(self.choose(loss_fn))

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
        def load_checkpoint(self, local_path: str, *values: Any, **named: Any) -> Any:
            self.steps.resume(local_path)
            return super().load_checkpoint(local_path, *values, **named)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_mini_batch(self, data: TensorDict) -> TensorDict:
            with self.steps.batch():
                config = config_of(self.loss_fn)
                if config is not None:
                    self.count(data, config, whole_batch=True)
                return super().train_mini_batch(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_batch(self, data: TensorDict) -> TensorDict:
            self.steps.next_mini_batch()
            config = self.training_config()
            if config is None:
                return super().train_batch(data)
            self.count(data, config)
            self.tell_step(data, config)
            self.select(data, config)
            audited = self.audit(data, config)
            with self.recorded(config):
                output = super().train_batch(data)
            if output is not None:  # None on ranks that hold no output, as in a pipeline
                reduce_over_ranks(tu.get(output, "metrics"))
                tu.get(output, "metrics").update(audited)
            return output

    return TrinityTrainingWorker
