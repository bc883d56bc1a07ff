"""Engine scaling for Trinity-RFT's own ``TrinityPolicyLoss``, without a fork.

Trinity-RFT 0.6.0 computes local means, and verl's engines add them up: the gradient grows with the number of
micro-batches. :func:`install` puts :class:`ScaledTrinityPolicyLoss` where Trinity-RFT builds its loss. The call
belongs in a plugin file, in a directory that ``--plugin-dir`` or TRINITY_PLUGIN_DIRS names::

    # plugins/engine_scaling.py
    import trinity_loss.trinity_rft
    trinity_loss.trinity_rft.install()

Trinity-RFT loads it in the process of its trainer. The training workers, which build the loss, load no plugins: they
get :class:`ScaledActorRolloutRefWorker` from there, and with it this module.

This module needs Trinity-RFT; everything else here does without.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import MixEntropyLossFn
from trinity.algorithm.policy_loss_fn.chord_policy_loss import MIXCHORDPolicyLossFn
from trinity.algorithm.policy_loss_fn.dpo_loss import DPOLossFn
from trinity.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn
from trinity.algorithm.policy_loss_fn.rec_policy_loss import RECPolicyLossFn
from trinity.trainer.verl import losses, workers
from verl.single_controller.base.decorator import Dispatch, register

from trinity_loss.errors import BatchError, ConfigError, TotalsError
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.tokens import is_jagged, jagged_parts
from trinity_loss.totals import Totals, read_totals

_StockLoss = losses.TrinityPolicyLoss
_StockWorker = workers.TrinityActorRolloutRefWorker
_PARTS = (
    "it adds an average over the usual rows and one over the expert rows, each with a count of its own that no engine "
    "counts over the mini-batch; train the two parts as two losses"
)


def _mode_of(fn: Any) -> str:
    """The aggregation mode that a policy loss really uses; ``pairs`` for preference pairs."""
    if isinstance(fn, MIXPolicyLossFn | MIXCHORDPolicyLossFn):
        raise ConfigError(f"{type(fn).__name__} cannot be scaled by a share of the mini-batch: {_PARTS}")
    if isinstance(fn, DPOLossFn):
        return "pairs"
    if isinstance(fn, RECPolicyLossFn):
        # It averages over tokens whatever the configuration says, over sequences in one of its modes.
        return "seq-mean-token-mean" if fn.clip_mode == "gspo-one-side" else "token-mean"
    mode = getattr(fn, "loss_agg_mode", None)
    if mode is None:
        raise ConfigError(f"{type(fn).__name__} has no loss_agg_mode, so its share of a mini-batch is not known")
    return str(mode)


class _Share:
    """A part of Trinity-RFT's loss, multiplied by its share of the mini-batch.

    Attributes:
        part: Trinity-RFT's function.
        mode: Its aggregation mode.
        weight: The share × ``dp_size``, set for each micro-batch.
        plain: Its last value before the multiplication.
    """

    def __init__(self, part: Any, mode: str) -> None:
        self.part = part
        self.mode = mode
        self.weight: Tensor | float = 1.0
        self.plain: Tensor | float = 0.0

    @property
    def select_keys(self) -> list[str]:
        return list(self.part.select_keys)

    def __call__(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        compute = self._pairs if self.mode == "pairs" else self.part
        plain, metrics = compute(**inputs)
        self.plain = plain
        return plain * self.weight, metrics

    def calculate_kl_loss(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        plain, metrics = self.part.calculate_kl_loss(**inputs)
        self.plain = plain
        return plain * self.weight, metrics

    def _pairs(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """The mean over pairs of rows; Trinity-RFT's loss takes all rows that it is given for one pair."""
        rows = inputs["logprob"].shape[0]
        if rows % 2:
            raise BatchError(f"a micro-batch of DPO has {rows} rows; expected pairs, chosen and rejected in turn")
        results = [
            self.part(**{k: v[i : i + 2] if isinstance(v, Tensor) else v for k, v in inputs.items()})
            for i in range(0, rows, 2)
        ]
        keys = results[0][1]
        metrics = {key: sum(found[key] for _, found in results) / len(results) for key in keys}
        return torch.stack([loss for loss, _ in results]).mean(), metrics


class ScaledTrinityPolicyLoss(_StockLoss):  # type: ignore[misc, valid-type]
    """Trinity-RFT's loss with each term weighted by its share of the mini-batch × ``dp_size``.

    Terms whose mode differs from that of the others are weighted each by their own. Logged metrics keep the
    value of the micro-batch. Where the engine gives no totals the weight is 1.

    Args:
        algo_config: Trinity-RFT's ``AlgorithmConfig``.

    Raises:
        ConfigError: The policy loss or the entropy has no share that an engine's totals give (``mix``,
            ``mix_chord``).
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
        if isinstance(self.entropy_loss_fn, MixEntropyLossFn):
            raise ConfigError("the entropy of 'mix' averages over the usual rows only, which no engine counts")
        self.policy_loss_fn = _Share(self.policy_loss_fn, _mode_of(self.policy_loss_fn))
        self.entropy_loss_fn = _Share(self.entropy_loss_fn, self.loss_agg_mode)
        self.kl_loss_fn = _Share(self.kl_loss_fn, self.loss_agg_mode)

    def __call__(
        self, model_output: dict[str, Any], data: MicroBatchData, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss and metrics of a micro-batch, as Trinity-RFT's engine calls it.

        Raises:
            TotalsError: ``dp_size`` is above 1 and the count that a mode needs is missing.
            BatchError: A pair of DPO is cut.
        """
        parts = [self.policy_loss_fn, self.entropy_loss_fn, self.kl_loss_fn]
        totals = read_totals(data)
        for part in parts:
            part.weight = _weight(part.mode, data, totals)
            part.plain = 0.0
        loss, metrics = super().__call__(model_output, data, dp_group)
        policy, entropy, kl = (float(torch.as_tensor(part.plain).detach()) for part in parts)
        metrics["final_loss"] = policy - entropy + kl
        return loss, metrics

    def __repr__(self) -> str:
        return f"Scaled{super().__repr__()}"


def _weight(mode: str, data: MicroBatchData, totals: Totals) -> Tensor | float:
    """What a term's local value is multiplied by."""
    dp_size = totals.dp_size or 1
    if mode == "seq-mean-token-sum-norm":
        # A sum over a constant, not a mean: nothing to divide.
        _check_width(data, totals)
        return float(dp_size)
    mask = get_value(data, "response_mask")
    if mode == "token-mean":
        name = "batch_num_tokens"
        flat = jagged_parts(mask)[0] if is_jagged(mask) else mask
        local: Tensor | float = flat.count_nonzero().to(torch.float64)
    elif mode in ("seq-mean-token-mean", "seq-mean-token-sum", "pairs"):
        name, local = "global_batch_size", float(mask.shape[0])
    else:
        raise ConfigError(f"loss_agg_mode is {mode!r}, which Trinity-RFT does not have")
    whole = totals.get(name)
    if whole is None:
        if dp_size > 1:
            raise TotalsError(f"dp_size is {dp_size} and {name} is missing; with several ranks it is needed")
        return 1.0
    return local * (dp_size / whole) if whole else 0.0


def _check_width(data: MicroBatchData, totals: Totals) -> None:
    mask = get_value(data, "response_mask")
    if is_jagged(mask) and get_value(data, "max_response_len") is None and totals:
        raise BatchError(
            "loss_agg_mode 'seq-mean-token-sum-norm' divides by the width that responses are padded to, and in a "
            "jagged micro-batch that is its own longest response: give all micro-batches the same max_response_len"
        )


class ScaledActorRolloutRefWorker(_StockWorker):  # type: ignore[misc, valid-type]
    """Trinity-RFT's training worker, which builds the scaled loss."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]
    def set_trinity_config(self, algo_config: Any, rollout_engine_type: str, ray_namespace: str) -> None:
        losses.TrinityPolicyLoss = ScaledTrinityPolicyLoss
        super().set_trinity_config(algo_config, rollout_engine_type, ray_namespace)


def install() -> None:
    """Makes Trinity-RFT build :class:`ScaledTrinityPolicyLoss`, in this process and in the training workers that it
    starts from here on. A second call changes nothing.
    """
    losses.TrinityPolicyLoss = ScaledTrinityPolicyLoss
    # Trinity-RFT's trainer, which imports the name, may be imported already.
    for name in (workers.__name__, "trinity.trainer.verl.trainer"):
        if name in sys.modules:
            setattr(sys.modules[name], _StockWorker.__name__, ScaledActorRolloutRefWorker)
