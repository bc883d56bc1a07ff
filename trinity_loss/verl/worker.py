"""The training worker: exchanges the loss, counts once per mini-batch what the engine does not.

verl keeps the class of an actor's training worker in ``ActorRolloutRefWorker.actor_worker_cls``;
:func:`install` puts a subclass there. It does nothing for a loss that is not ours.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import Metric

from trinity_loss.errors import ConfigError
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.metric_set import finish_metrics
from trinity_loss.micro_batch import is_padding_row, prompt_keys
from trinity_loss.recorder import Recorder
from trinity_loss.tokens import ResponseTokens, jagged_parts
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
    _rows_per_prompt: Counter[bytes] | None = None
    _warned_of_partial_groups = False
    _step = 0
    _mini_batch = 0

    @property
    def our_loss(self) -> EnginePolicyLoss | None:
        """Our loss, whether it trains or stands beside verl's; None where neither."""
        if isinstance(self.loss_fn, ShadowLoss):
            return self.loss_fn.ours
        return self.loss_fn if isinstance(self.loss_fn, EnginePolicyLoss) else None

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

    def _needs_prompt_groups(self, loss: EnginePolicyLoss) -> bool:
        return any(mode.needs_prompt_groups for mode in loss.config.aggregation_modes.values())

    def _attach_counts(self, data: TensorDict, loss: EnginePolicyLoss) -> None:
        """Counts over the mini-batch and all ranks, in one collective, and attaches the counts."""
        mask = data["response_mask"]
        tokens = ResponseTokens.from_jagged(*jagged_parts(mask)) if mask.is_nested else ResponseTokens.from_padded(mask)
        uids = tu.get(data, "uid")
        synthetic = 0 if uids is None else sum(map(is_padding_row, uids))
        counts = torch.stack([tokens.num_tokens, tokens.num_nonempty_sequences, tokens.num_sequences - synthetic])
        group = self.engine.get_data_parallel_group()
        if self._needs_prompt_groups(loss):
            self._attach_prompt_groups(data, tokens, counts, loss.config)
            return
        counts = counts.to(get_device_id())
        torch.distributed.all_reduce(counts, group=group)
        _assign_counts(data, counts.tolist())

    def _attach_prompt_groups(
        self, data: TensorDict, tokens: ResponseTokens, counts: torch.Tensor, config: LossConfig
    ) -> None:
        keys = hashed_prompts(data)
        tokens_per_prompt: Counter[bytes] = Counter()
        for key, count in zip(keys, tokens.counts.tolist(), strict=True):
            tokens_per_prompt[key] += count
        local = (counts.tolist(), tokens_per_prompt, Counter(keys))
        everyone = _all_gather(local, self.engine.get_data_parallel_group())
        totals = [sum(column) for column in zip(*(theirs for theirs, _, _ in everyone), strict=True)]
        sizes: Counter[bytes] = Counter()
        rows: Counter[bytes] = Counter()
        for _, their_tokens, their_rows in everyone:
            sizes.update(their_tokens)
            rows.update(their_rows)
        _assign_counts(data, totals)
        # A synthetic row is no prompt, unless it is to count as one.
        prompts = [
            key
            for key in rows
            if (sizes[key] or config.count_empty_sequences)
            and (config.count_padding_rows or not key.startswith(_SYNTHETIC))
        ]
        tu.assign_non_tensor(data, batch_num_prompts=len(prompts))
        data["prompt_num_tokens"] = torch.tensor([sizes[key] for key in keys], dtype=torch.int64)
        self._warn_of_partial_groups(rows)

    def _warn_of_partial_groups(self, rows: Counter[bytes]) -> None:
        whole = self._rows_per_prompt
        if whole is None or self._warned_of_partial_groups:
            return
        cut = sum(1 for key, count in rows.items() if count < whole[key])
        if cut:
            self._warned_of_partial_groups = True
            warnings.warn(
                f"{cut} of {len(rows)} prompt groups of this mini-batch are only a part of their group in the "
                "training batch; prompt-mean averages over the part that the mini-batch holds",
                stacklevel=2,
            )


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


_SYNTHETIC = b"synthetic:"


def hashed_prompts(data: TensorDict) -> list[bytes]:
    """What tells the prompt of each row, short and equal on every rank."""
    return [
        (_SYNTHETIC if is_padding_row(key) else b"") + hashlib.sha256(repr(key).encode()).digest()
        for key in prompt_keys(data)
    ]


def _all_gather(item: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, item, group=group)
    return everyone


def _assign_counts(data: TensorDict, counts: list[int]) -> None:
    valid_tokens, nonempty, real = counts
    tu.assign_non_tensor(
        data,
        batch_num_valid_tokens=valid_tokens,
        batch_num_nonempty_sequences=nonempty,
        batch_num_real_sequences=real,
    )


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
            self._rows_per_prompt = None
            if self.our_loss is not None and self._needs_prompt_groups(self.our_loss):
                everyone = _all_gather(Counter(hashed_prompts(data)), self.engine.get_data_parallel_group())
                self._rows_per_prompt = sum(everyone, Counter())
            return super().train_mini_batch(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_batch(self, data: TensorDict) -> TensorDict:
            if self.our_loss is None:
                return super().train_batch(data)
            self._attach_counts(data, self.our_loss)
            self._mini_batch += 1
            with self._recording():
                output = super().train_batch(data)
            if output is not None:  # None on ranks that hold no output, as in a pipeline
                reduce_over_ranks(tu.get(output, "metrics"))
            return output

    return TrinityTrainingWorker
