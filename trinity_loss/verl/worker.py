"""The training worker: exchanges the loss, counts once per mini-batch what the engine does not.

verl keeps the class of an actor's training worker in ``ActorRolloutRefWorker.actor_worker_cls``;
:func:`install` puts a subclass there. It does nothing for a loss that is not ours.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import Metric

from trinity_loss.batch import is_padding_row, prompt_keys
from trinity_loss.errors import ConfigError
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.metric_set import finish_metrics
from trinity_loss.tokens import ResponseTokens, jagged_parts

logger = logging.getLogger(__name__)
# The line that names the loss belongs in a run's log at verl's default level.
logger.setLevel(logging.INFO)


def install() -> None:
    """Puts our training worker in the place that verl keeps for one. A second call changes nothing."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if not issubclass(ActorRolloutRefWorker.actor_worker_cls, TrinityWorkerMixin):
        ActorRolloutRefWorker.actor_worker_cls = make_training_worker(ActorRolloutRefWorker.actor_worker_cls)


def engine_loss(loss_fn: Any) -> EnginePolicyLoss | None:
    """Our loss for the loss that verl bound to an actor configuration; None if it is not to be exchanged.

    Args:
        loss_fn: What verl passes to ``set_loss_fn``.

    Raises:
        ConfigError: A distillation loss is bound to our configuration.
    """
    from verl.workers.utils.losses import ppo_loss

    from trinity_loss.verl.config import PolicyLossConfig, loss_config

    actor: Any = getattr(loss_fn, "keywords", {}).get("config")
    if not isinstance(getattr(actor, "policy_loss", None), PolicyLossConfig):
        return None
    if loss_fn.func is not ppo_loss:
        raise ConfigError(
            f"actor.policy_loss is {PolicyLossConfig.__module__}.{PolicyLossConfig.__name__}, but verl computes "
            f"{loss_fn.func.__module__}.{loss_fn.func.__name__}, which goes around it: switch the distillation off, "
            "or take the _target_ of policy_loss away"
        )
    return EnginePolicyLoss(loss_config(actor))


class TrinityWorkerMixin:
    """What our training worker adds to verl's; see :func:`make_training_worker`."""

    engine: Any
    loss_fn: Any
    _rows_per_prompt: Counter[bytes] | None = None
    _warned_of_partial_groups = False

    @property
    def _needs_prompt_groups(self) -> bool:
        modes = self.loss_fn.config.aggregation_modes.values()
        return any(mode.needs_prompt_groups for mode in modes)

    def _attach_counts(self, data: TensorDict) -> None:
        """Counts over the mini-batch and all ranks, in one collective, and attaches the counts."""
        mask = data["response_mask"]
        tokens = ResponseTokens.from_jagged(*jagged_parts(mask)) if mask.is_nested else ResponseTokens.from_padded(mask)
        uids = tu.get(data, "uid")
        synthetic = 0 if uids is None else sum(map(is_padding_row, uids))
        counts = torch.stack([tokens.num_tokens, tokens.num_nonempty_sequences, tokens.num_sequences - synthetic])
        group = self.engine.get_data_parallel_group()
        if self._needs_prompt_groups:
            self._attach_prompt_groups(data, tokens, counts, group)
            return
        counts = counts.to(get_device_id())
        torch.distributed.all_reduce(counts, group=group)
        _assign_counts(data, counts.tolist())

    def _attach_prompt_groups(self, data: TensorDict, tokens: ResponseTokens, counts: torch.Tensor, group: Any) -> None:
        keys = hashed_prompts(data)
        tokens_per_prompt: Counter[bytes] = Counter()
        for key, count in zip(keys, tokens.counts.tolist(), strict=True):
            tokens_per_prompt[key] += count
        everyone = _all_gather((counts.tolist(), tokens_per_prompt, Counter(keys)), group)
        totals = [sum(column) for column in zip(*(theirs for theirs, _, _ in everyone), strict=True)]
        sizes: Counter[bytes] = Counter()
        rows: Counter[bytes] = Counter()
        for _, their_tokens, their_rows in everyone:
            sizes.update(their_tokens)
            rows.update(their_rows)
        _assign_counts(data, totals)
        # A synthetic row is no prompt, unless it is to count as one.
        config = self.loss_fn.config
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
            super().set_loss_fn(ours or loss_fn)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_mini_batch(self, data: TensorDict) -> TensorDict:
            self._rows_per_prompt = None
            if isinstance(self.loss_fn, EnginePolicyLoss) and self._needs_prompt_groups:
                everyone = _all_gather(Counter(hashed_prompts(data)), self.engine.get_data_parallel_group())
                self._rows_per_prompt = sum(everyone, Counter())
            return super().train_mini_batch(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_batch(self, data: TensorDict) -> TensorDict:
            if not isinstance(self.loss_fn, EnginePolicyLoss):
                return super().train_batch(data)
            self._attach_counts(data)
            output = super().train_batch(data)
            if output is not None:  # None on ranks that hold no output, as in a pipeline
                reduce_over_ranks(tu.get(output, "metrics"))
            return output

    return TrinityTrainingWorker
