"""What the loss is: one frozen configuration, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import trinity_loss.mixtures
import trinity_loss.policy
import trinity_loss.rollout_correction
import trinity_loss.selecting_losses  # noqa: F401  (all four register their losses)
from trinity_loss.aggregation import (
    AggregationMode,
    PositiveTokenMean,
    check_aggregation_mode,
    has_scale_factor,
    make_aggregation_mode,
)
from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.errors import ConfigError
from trinity_loss.importance_sampling import LEVELS, check_level
from trinity_loss.kl import KL_TYPES
from trinity_loss.mixtures import split_mode
from trinity_loss.registry import OverMiniBatch, PolicyLoss, get_policy_loss
from trinity_loss.rules import (
    BOOLEAN,
    COUNT,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SHARE,
    TEXT,
    Rule,
    check,
    naming_unknown_fields,
    number,
    one_of,
    optional,
)
from trinity_loss.trial import check_metrics, trial_tokens, try_mode, try_policy_loss

#: What each field must be, beside what other fields and the loss ask for.
RULES: dict[str, Rule] = {
    "loss_mode": TEXT,
    "loss_agg_mode": TEXT,
    "clip_ratio": NOT_NEGATIVE,
    "clip_ratio_low": optional(NOT_NEGATIVE),
    "clip_ratio_high": optional(NOT_NEGATIVE),
    "clip_ratio_c": number("a number above 1", lambda value: value > 1),
    "loss_args": Rule(lambda value: isinstance(value, Mapping), "a mapping"),
    "entropy_coeff": NUMBER,
    "entropy_agg_mode": optional(TEXT),
    "use_kl_loss": BOOLEAN,
    "kl_loss_coef": NUMBER,
    "kl_loss_type": one_of(*KL_TYPES),
    "kl_agg_mode": optional(TEXT),
    "kl_unbiased": BOOLEAN,
    "off_policy_mask": optional(NOT_NEGATIVE),
    "nll_on_positives": NOT_NEGATIVE,
    "row_weights": optional(TEXT),
    "distillation": optional(
        Rule(lambda value: isinstance(value, DistillationLossConfig), "a DistillationLossConfig or its fields")
    ),
    "top_entropy_quantile": SHARE,
    "selection_pass": one_of("forward", "old_log_probs"),
    "selection_seed": COUNT,
    "count_empty_sequences": BOOLEAN,
    "count_padding_rows": BOOLEAN,
    "count_rejected_tokens": BOOLEAN,
    "nonfinite": one_of("error", "neutral"),
    "rollout_metrics": one_of(None, *LEVELS),
    "rollout_metrics_upper": POSITIVE,
    "rollout_metrics_lower": POSITIVE,
}


_REJECTS = (
    "count_rejected_tokens is False, but the loss itself may reject tokens: how many of the mini-batch stay is not "
    "known while its first micro-batch is computed"
)


#: What has no effect where only the distillation trains.
_OF_POLICY = ("entropy_coeff", "use_kl_loss", "off_policy_mask", "nll_on_positives", "top_entropy_quantile")


@naming_unknown_fields
@dataclass(frozen=True)
class LossConfig:
    """What the loss is. Frozen, picklable, checked when made; field names are verl's where verl has one.

    Attributes:
        loss_mode: Policy loss, see :func:`trinity_loss.registry.policy_loss_names`, or ``package.module:function``.
        loss_agg_mode: Aggregation mode, see :func:`trinity_loss.aggregation.aggregation_mode_names`.
        loss_scale_factor: Divisor of the modes that have a constant one.
        clip_ratio: Clip range below and above 1.
        clip_ratio_low: Clip range below 1; None: ``clip_ratio``.
        clip_ratio_high: Clip range above 1; None: ``clip_ratio``.
        clip_ratio_c: Bound of the dual clip, above 1.
        loss_args: Arguments that only this ``loss_mode`` takes.
        entropy_coeff: Weight of the entropy, which is subtracted.
        entropy_agg_mode: Aggregation mode of the entropy; None: ``loss_agg_mode``.
        use_kl_loss: Whether to add a KL term against the reference policy.
        kl_loss_coef: Its weight.
        kl_loss_type: Its estimator, see :data:`trinity_loss.kl.KL_TYPES`.
        kl_agg_mode: Aggregation mode of the KL term; None: ``loss_agg_mode``.
        kl_unbiased: Whether the KL term is weighted by the ratio to the old policy, see
            :func:`trinity_loss.kl.unbiased_kl`.
        off_policy_mask: Tokens of negative advantage of sequences whose mean of log π_old - log π is above this weigh 0
            in the policy loss, see :func:`trinity_loss.policy.off_policy_weights`; None: none.
        nll_on_positives: Weight of a further term, the negative log-likelihood of tokens of positive advantage, a mean
            over those tokens of the mini-batch (VAPO, https://arxiv.org/abs/2504.05118).
        row_weights: Field of the batch, per sequence ([rows] or [rows, 1]) or per token, that multiplies the token
            losses of every term; denominators stay. None: none.
        distillation: What is added of a teacher, as a :class:`trinity_loss.DistillationLossConfig` or a mapping of its
            fields, aggregated by ``loss_agg_mode``; None: nothing.
        top_entropy_quantile: Share of the mini-batch's tokens, those of highest entropy, that weigh 1 in the policy
            loss; the others weigh 0 there, and denominators stay.
        selection_pass: Where the log-probs come from that tokens of the mini-batch are chosen by: ``forward``, a pass
            before it is trained on, or ``old_log_probs``, which are those of the policy until it moves.
        selection_seed: Changes all random choices among tokens.
        count_empty_sequences: Whether fully masked sequences count in a mean over sequences (verl: yes).
        count_padding_rows: Whether the synthetic rows of verl's v1 trainer count in it (verl: yes).
        count_rejected_tokens: Whether a mean over tokens divides by the tokens before rejection (verl v1: yes).
        nonfinite: What a NaN or an infinity at a token that counts does: ``error`` raises and names the token,
            ``neutral`` rejects the token and reports ``actor/nonfinite_frac``; a rollout log-prob is taken
            for the old one instead.
        rollout_metrics: Level of the importance-sampling metrics (``token``, ``sequence``, ``geometric``)
            of ``old_log_probs`` against ``rollout_log_probs``; None: no such metrics.
        rollout_metrics_upper: Their upper threshold.
        rollout_metrics_lower: Their lower threshold.

    Raises:
        ConfigError: A value is unknown, not finite, out of range or without use.

    Example:
        >>> LossConfig(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01).clip_range
        (0.2, 0.2)
    """

    loss_mode: str = "ppo"
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    entropy_coeff: float = 0.0
    entropy_agg_mode: str | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    kl_agg_mode: str | None = None
    kl_unbiased: bool = False
    off_policy_mask: float | None = None
    nll_on_positives: float = 0.0
    row_weights: str | None = None
    distillation: DistillationLossConfig | None = None
    top_entropy_quantile: float = 1.0
    selection_pass: str = "forward"
    selection_seed: int = 0
    count_empty_sequences: bool = True
    count_padding_rows: bool = True
    count_rejected_tokens: bool = True
    nonfinite: str = "error"
    rollout_metrics: str | None = None
    rollout_metrics_upper: float = 2.0
    rollout_metrics_lower: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.distillation, Mapping):
            object.__setattr__(
                self, "distillation", DistillationLossConfig(**{str(k): v for k, v in self.distillation.items()})
            )
        for name, rule in RULES.items():
            check(name, getattr(self, name), rule)
        for name in ("entropy_agg_mode", "kl_agg_mode"):
            check_aggregation_mode(name, getattr(self, name))
        check_level(self.rollout_metrics or "token", self.rollout_metrics_upper, self.rollout_metrics_lower)
        if self.kl_unbiased and not self.use_kl_loss:
            raise ConfigError("kl_unbiased is True, but use_kl_loss is False: there is no KL term")
        for name in ("off_policy_mask", "row_weights"):
            if getattr(self, name) is not None and self.policy_loss.mode is not None:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but {self.loss_mode!r} is no loss per token")
        rejects = self.policy_loss.rejects or self.nonfinite == "neutral"
        if rejects and not self.count_rejected_tokens:
            raise ConfigError(_REJECTS)
        object.__setattr__(self, "loss_args", dict(self.loss_args))
        self.policy_loss.check_arguments(self.loss_mode, self.loss_args)
        self._check_selection()
        self._check_distillation()
        with torch.inference_mode(False):
            self._try()

    def _check_selection(self) -> None:
        """Whether what is chosen among the tokens of the mini-batch can be."""
        names = (*self.over_mini_batch, *(["top_entropy_quantile"] if self.top_entropy_quantile < 1 else []))
        if names and self.nonfinite == "neutral":
            raise ConfigError(
                f"nonfinite is 'neutral', but {names[0]} is made of all tokens of the mini-batch beforehand, and a NaN "
                "among them is found later; expected 'error'"
            )
        if self.selection_pass == "old_log_probs":
            if self.top_entropy_quantile < 1:
                raise ConfigError("selection_pass is 'old_log_probs', which have no entropy; expected 'forward'")
            if not self.over_mini_batch:
                raise ConfigError(
                    f"selection_pass is 'old_log_probs', but loss_mode {self.loss_mode!r} chooses no tokens by "
                    "log-probs; expected 'forward'"
                )
            if "rollout_is_scale" in self.over_mini_batch:
                raise ConfigError("selection_pass is 'old_log_probs', here those of the rollout; expected 'forward'")
        if self.policy_loss.mode is not None and self.top_entropy_quantile < 1:
            raise ConfigError(
                f"top_entropy_quantile is {self.top_entropy_quantile}, but loss_mode {self.loss_mode!r} is not one loss"
                " per token"
            )

    def _check_distillation(self) -> None:
        """Whether all that is asked for beside the distillation trains."""
        if self.distillation is None or self.distillation.use_task_rewards:
            return
        for name in _OF_POLICY:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default:
                raise ConfigError(
                    f"{name} is {value!r}, but distillation_loss.use_task_rewards is False, so the distillation alone "
                    f"trains; expected {default!r}, or use_task_rewards=True"
                )

    def _try(self) -> None:
        """Calls the loss and the modes on two sequences, which finds what no field shows."""
        loss, modes = self.policy_loss, self.aggregation_modes
        for result in try_policy_loss(self.loss_mode, loss, self.policy_arguments):
            check_metrics(self.loss_mode, result, "rollout_corr/" if self.rollout_metrics else None)
            if result.kept is not None and not self.count_rejected_tokens:
                raise ConfigError(_REJECTS)
        names = {"pg": "loss_agg_mode", "entropy": "entropy_agg_mode", "kl": "kl_agg_mode"}
        for tokens in trial_tokens():
            values = tokens.indicator(torch.float32)
            for term, mode in modes.items():
                if mode is not loss.mode and term in names:
                    name = getattr(self, names[term])
                    try_mode(names[term] if name else "loss_agg_mode", name or self.loss_agg_mode, mode, values, tokens)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The registered loss of ``loss_mode``."""
        return get_policy_loss(self.loss_mode)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip range below and above 1."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return (self.clip_ratio if low is None else low, self.clip_ratio if high is None else high)

    @property
    def policy_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the policy loss."""
        low, high = self.clip_range
        given = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": self.clip_ratio_c}
        return {k: v for k, v in given.items() if k in self.policy_loss.arguments} | dict(self.loss_args)

    @property
    def group_size(self) -> int:
        """So many consecutive rows are one for the loss, as the two answers of a pair are, and stay together."""
        return max(mode.group_size for mode in self.aggregation_modes.values())

    @property
    def over_mini_batch(self) -> dict[str, OverMiniBatch]:
        """Fields of the policy loss that are made of all tokens of the mini-batch."""
        return self.policy_loss.needed_over_mini_batch(self.policy_arguments)

    @property
    def aggregation_modes(self) -> dict[str, AggregationMode]:
        """Mode of each term: ``pg``, ``entropy``, ``kl`` and, where they are there, those of further terms."""
        names = {
            "pg": self.loss_agg_mode,
            "entropy": self.entropy_agg_mode or self.loss_agg_mode,
            "kl": self.kl_agg_mode or self.loss_agg_mode,
        }
        if self.policy_loss.agg_mode is not None:
            names["pg"] = self.policy_loss.agg_mode
        if self.distillation is not None:
            names["distillation"] = self.loss_agg_mode
        modes = {term: self._make_mode(name) for term, name in names.items()}
        if self.policy_loss.mixture is not None:
            modes |= split_mode(names["pg"], modes["pg"])
        if self.nll_on_positives:
            modes["nll"] = PositiveTokenMean()
        return modes if self.policy_loss.mode is None else modes | {"pg": self.policy_loss.mode}

    def _make_mode(self, name: str) -> AggregationMode:
        # The divisor belongs to the modes that have one; where terms differ, the others go without.
        belongs_elsewhere = not has_scale_factor(name) and any(
            has_scale_factor(other) for other in (self.loss_agg_mode, self.entropy_agg_mode, self.kl_agg_mode) if other
        )
        return make_aggregation_mode(
            name,
            loss_scale_factor=None if belongs_elsewhere else self.loss_scale_factor,
            count_empty_sequences=self.count_empty_sequences,
            count_padding_rows=self.count_padding_rows,
            count_rejected_tokens=self.count_rejected_tokens,
        )
