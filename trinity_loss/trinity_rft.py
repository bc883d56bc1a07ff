"""Engine scaling for Trinity-RFT's own ``TrinityPolicyLoss``, without a fork.

Trinity-RFT 0.6.0 computes local means, and verl's engines add them up: the gradient grows with the number of
micro-batches, and metrics are means of means. :func:`install` puts :class:`ScaledTrinityPolicyLoss` where Trinity-RFT
builds its loss. The call belongs in a plugin file, in a directory that ``--plugin-dir`` or TRINITY_PLUGIN_DIRS names::

    # plugins/engine_scaling.py
    import trinity_loss.trinity_rft
    trinity_loss.trinity_rft.install()

Trinity-RFT loads it where it validates a configuration, which is refused there if it cannot be exact, and in the
process of its trainer. The training workers, which build the loss, load no plugins: they get
:class:`ScaledActorRolloutRefWorker` from there, and with it this module.

This module needs Trinity-RFT; everything else here does without.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import MixEntropyLossFn
from trinity.algorithm.policy_loss_fn.chord_policy_loss import MIXCHORDPolicyLossFn
from trinity.algorithm.policy_loss_fn.dpo_loss import DPOLossFn
from trinity.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn
from trinity.common import config_validator
from trinity.trainer.verl import config as trinity_config
from trinity.trainer.verl import losses, workers
from trinity.utils.log import get_logger
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from trinity_loss.errors import BatchError, ConfigError, TotalsError
from trinity_loss.jagged import is_jagged
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.trinity_audit import Audits
from trinity_loss.trinity_terms import EXPERT_COUNTS, Mixture, ScaledTerm, mean_over_pairs, read_shares, summed

_StockLoss = losses.TrinityPolicyLoss
_StockWorker = workers.TrinityActorRolloutRefWorker


class ScaledTrinityPolicyLoss(_StockLoss):  # type: ignore[misc, valid-type]
    """Trinity-RFT's loss with each term, and each metric, weighted by its share of the mini-batch × ``dp_size``.

    What each is an average over is found by trial when the loss is made, for a loss of a user's own too. Metrics are
    verl's ``Metric``, which its reduction makes those of the mini-batch. Where the engine gives no totals, loss and
    metrics are Trinity-RFT's own.

    Args:
        algo_config: Trinity-RFT's ``AlgorithmConfig``.

    Raises:
        ConfigError: A term or a metric is no average over tokens or rows, or its function fails.
    """

    policy_loss_fn: Any
    entropy_loss_fn: Any
    kl_loss_fn: Any

    def __init__(self, algo_config: Any) -> None:
        super().__init__(algo_config)
        self._wrap()

    @classmethod
    def of(cls, loss: Any) -> ScaledTrinityPolicyLoss:
        """The same loss as one that Trinity-RFT has built already, scaled."""
        scaled = cls.__new__(cls)
        scaled.__dict__.update(loss.__dict__)
        scaled._wrap()
        return scaled

    def _wrap(self) -> None:
        policy, entropy, kl, mode = self.policy_loss_fn, self.entropy_loss_fn, self.kl_loss_fn, self.loss_agg_mode
        fields = policy.select_keys
        self.mixed = isinstance(policy, MIXPolicyLossFn | MIXCHORDPolicyLossFn)
        self.paired = isinstance(policy, DPOLossFn)
        if self.mixed:
            self.policy_loss_fn = Mixture(policy)
        elif self.paired:
            self.policy_loss_fn = ScaledTerm(policy, fields, partial(mean_over_pairs, policy), kinds=("rows",))
        else:
            self.policy_loss_fn = ScaledTerm(policy, fields)
        self.terms = [self.policy_loss_fn.usual, self.policy_loss_fn.expert] if self.mixed else [self.policy_loss_fn]
        if self.calculate_entropy:
            names, rows = (
                ["entropy", "action_mask", *fields],
                "usual" if isinstance(entropy, MixEntropyLossFn) else "all",
            )
            self.entropy_loss_fn = ScaledTerm(entropy, names, partial(entropy, loss_agg_mode=mode), rows)
            self.terms.append(self.entropy_loss_fn)
        if self.use_kl_loss:
            names = ["ref_logprob", "old_logprob", "response_mask"]
            self.kl_loss_fn = ScaledTerm(kl, names, partial(kl.calculate_kl_loss, loss_agg_mode=mode))
            self.terms.append(self.kl_loss_fn)

    def __call__(
        self, model_output: dict[str, Any], data: MicroBatchData, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss and metrics of a micro-batch, as Trinity-RFT's engine calls it.

        Raises:
            TotalsError: ``dp_size`` is above 1 and a count that a term needs is missing, or that of the expert rows is.
            BatchError: A pair of DPO is cut.
        """
        shares = read_shares(data, self.mixed)
        for term in self.terms:
            term.shares = shares[term.rows]
            self._check(term, data)
        loss, metrics = super().__call__(model_output, data, dp_group)
        metrics["final_loss"] = summed(loss, shares["all"])
        return loss, metrics

    @staticmethod
    def _check(term: ScaledTerm, data: MicroBatchData) -> None:
        kind, dp_size = term.averages[""], term.shares.sum
        if dp_size is None:
            return
        if getattr(term.shares, kind) is None and dp_size > 1:
            name = {"tokens": "batch_num_tokens", "rows": "global_batch_size"}[kind]
            raise TotalsError(f"dp_size is {dp_size:g} and {name} is missing; with several ranks it is needed")
        if (
            kind == "sum"
            and is_jagged(get_value(data, "response_mask"))
            and get_value(data, "max_response_len") is None
        ):
            raise BatchError(
                "loss_agg_mode 'seq-mean-token-sum-norm' divides by the width that responses are padded to, and in a "
                "jagged micro-batch that is its own longest one: give all micro-batches the same max_response_len"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.terms))})"


def prepare_mini_batch(data: Any, loss: ScaledTrinityPolicyLoss, group: Any, keep_pairs: bool = True) -> None:
    """Finds out and attaches what a loss has to know of a mini-batch before it is cut, in one collective.

    Args:
        data: This rank's rows of the mini-batch.
        loss: The loss. One that mixes rows gets the counts of the expert's; one of pairs keeps these together.
        group: The data-parallel group; None where this rank holds all rows.
        keep_pairs: Whether verl has to be told to (``force_group_size``).

    Raises:
        BatchError: On every rank, if the rows of one of them are no pairs.
    """
    if loss.mixed:
        expert = data["expert_mask"].bool()
        found = [data["response_mask"][expert].count_nonzero(), expert.count_nonzero()]
    elif loss.paired:
        prompts = data["prompts"]
        found = [torch.tensor(len(prompts) % 2 or not torch.equal(prompts[::2], prompts[1::2]))]
    else:
        return
    counts = torch.stack(found).to(torch.int64)
    if group is not None:
        counts = counts.to(get_device_id())
        torch.distributed.all_reduce(counts, group=group)
    if loss.mixed:
        tu.assign_non_tensor(data, **dict(zip(EXPERT_COUNTS, counts.tolist(), strict=True)))
    elif broken := counts.item():
        raise BatchError(
            f"the rows of a mini-batch of DPO are no pairs on {broken} ranks; expected chosen and rejected in turn, "
            "two answers to one prompt"
        )
    elif keep_pairs:
        tu.assign_non_tensor(data, force_group_size=2)


def _make_training_worker(base: type[Any]) -> type[Any]:
    class ScaledTrainingWorker(base):
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            self.audits = Audits()

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_mini_batch(self, data: Any) -> Any:
            self.audits.next_batch()
            return super().train_mini_batch(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
        def train_batch(self, data: Any) -> Any:
            if isinstance(self.loss_fn, ScaledTrinityPolicyLoss):
                engine, config = self.engine, self.engine_config
                # verl multiplies a fixed number of rows by the size of the groups; an even one keeps pairs as it is.
                by_length = tu.get(data, "use_dynamic_bsz", default=config.use_dynamic_bsz)
                rows = tu.get(data, "micro_batch_size_per_gpu", default=config.micro_batch_size_per_gpu)
                keep_pairs = by_length or rows % 2 == 1
                prepare_mini_batch(data, self.loss_fn, engine.get_data_parallel_group(), keep_pairs)
            audited = self.audits.of(self, data, 2 if getattr(self.loss_fn, "paired", False) else 1)
            output = super().train_batch(data)
            if output is not None:  # None on ranks that hold no output, as in a pipeline
                tu.get(output, "metrics").update(audited)
            return output

    return ScaledTrainingWorker


class _ScaledWorkerClass:
    """What verl trains the actor with: the class that stands in its place when the worker is made, with our counts."""

    def __get__(self, worker: Any, owner: type[Any]) -> type[Any]:
        base = _StockWorker.actor_worker_cls
        return base if worker is None else _make_training_worker(base)


class ScaledActorRolloutRefWorker(_StockWorker):  # type: ignore[misc, valid-type]
    """Trinity-RFT's training worker, which builds the scaled loss."""

    actor_worker_cls = _ScaledWorkerClass()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def set_trinity_config(self, algo_config: Any, rollout_engine_type: str, ray_namespace: str) -> None:
        losses.TrinityPolicyLoss = ScaledTrinityPolicyLoss
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            name, of = ScaledTrinityPolicyLoss.__name__, algo_config.policy_loss_fn
            get_logger(__name__).info("trinity_loss: training with %s, policy_loss_fn %s", name, of)
        super().set_trinity_config(algo_config, rollout_engine_type, ray_namespace)


class EngineScalingValidator(config_validator.ConfigValidator):
    """Refuses what cannot be exact, where Trinity-RFT validates a configuration: before it starts anything."""

    def validate(self, config: Any) -> None:
        """Warns of a trainer that does not compute Trinity-RFT's loss.

        Raises:
            ConfigError: The loss cannot be scaled, or verl would take pairs of DPO apart.
        """
        if config.mode not in ("train", "both", "colocate") or config.model.external_model.enable:
            return
        if config.trainer.trainer_type != "verl":
            self.logger.warning(
                "trinity_loss: trainer.trainer_type is %r, which goes around the scaled loss",
                config.trainer.trainer_type,
            )
        elif ScaledTrinityPolicyLoss(config.algorithm).paired:
            self._check_pairs(config)

    def _check_pairs(self, config: Any) -> None:
        actor, sizes, batch = (
            trinity_config.build_verl_config(config).actor,
            config.trainer.megatron,
            config.buffer.train_batch_size,
        )
        if fsdp := config.trainer.trainer_strategy.startswith("fsdp"):
            parallel = config.trainer.ulysses_sequence_parallel_size
        else:
            parallel = (
                sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
            )
        ranks = config.cluster.trainer_gpu_num // parallel or 1
        wrong = {
            f"buffer.train_batch_size is {batch} on {ranks} data-parallel ranks": batch // ranks % 2,
            "trainer_config's actor.shuffle is true": actor.shuffle,
            "trainer_config's dynamic_context_parallel is true": not fsdp
            and actor.megatron.get("dynamic_context_parallel"),
        }
        for what in filter(wrong.get, wrong):
            raise ConfigError(
                f"{what}, which takes pairs of DPO apart; expected an even number of rows a rank, in order"
            )


def install() -> None:
    """Makes Trinity-RFT build :class:`ScaledTrinityPolicyLoss`, in this process and in the training workers that it
    starts from here on, and refuse a configuration for which it cannot be exact. A second call changes nothing.
    """
    losses.TrinityPolicyLoss = ScaledTrinityPolicyLoss
    # Trinity-RFT's trainer, which imports the name, may be imported already.
    for name in (workers.__name__, "trinity.trainer.verl.trainer"):
        if name in sys.modules:
            setattr(sys.modules[name], _StockWorker.__name__, ScaledActorRolloutRefWorker)
    if not any(isinstance(validator, EngineScalingValidator) for validator in config_validator.validators):
        config_validator.validators.append(EngineScalingValidator())
