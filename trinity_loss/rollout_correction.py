"""verl's bypass mode: the rollout policy is the old policy, and the loss itself weighs and rejects.

Options, thresholds and statistics are those of verl's ``rollout_corr_helper.py``; its asynchronous trainers
switch this on. Weights and rejection look at one token or one sequence, so they do not depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError
from trinity_loss.importance_sampling import add_offpolicy_metrics, add_sequence_metrics, add_weight_metrics
from trinity_loss.log_ratio import LogRatio, limited
from trinity_loss.metric_set import MetricSet
from trinity_loss.policy import ppo
from trinity_loss.registry import OverMiniBatch, PolicyInputs, TokenLoss, register_policy_loss
from trinity_loss.rules import BOOLEAN, TEXT, Rule, one_of, optional
from trinity_loss.selection import Ranks

_PREFIX = "rollout_corr/"
_LEAST_MEAN = 1e-8  # verl leaves weights alone whose mean is smaller
_STATISTICS = tuple(
    f"{of}_{k}"
    for of in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in ("k1", "k2", "k3")
    if (of, k) != ("seq_max", "k1")
)


def parse_weight_threshold(spec: str | float) -> tuple[float, float | None]:
    """Upper bound, and the lower one where weights outside of both become 0 (``"lower_upper"``).

    Raises:
        ConfigError: Not a positive number or two of them in order.

    Example:
        >>> parse_weight_threshold("0.5_5")
        (5.0, 0.5)
    """
    lower, upper = _parse_bounds("rollout_is_threshold", str(spec))
    return upper, lower


def _parse_bounds(name: str, spec: str) -> tuple[float | None, float]:
    try:
        bounds = [float(part) for part in spec.split("_")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(math.isfinite(b) and b > 0 for b in bounds) or bounds != sorted(bounds):
        raise ConfigError(f"{name} is {spec!r}; expected a number above 0, or 'lower_upper'")
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


@dataclass(frozen=True)
class Rejection:
    """One rejection criterion: a statistic of the log-ratio and the bounds that it must stay within.

    Attributes:
        name: verl's name of the statistic.
        low: Lower bound of the statistic; ``-inf`` where it has none.
        high: Upper bound.
    """

    name: str
    low: float
    high: float

    def statistic(self, log_ratio: LogRatio) -> Tensor:
        """Its value for each token [N] or, for a statistic of sequences, for each sequence [S]."""
        tokens, values = log_ratio.tokens, limited(log_ratio.values)
        divergence = {
            "k1": lambda: -values,
            "k2": lambda: 0.5 * values.square(),
            "k3": lambda: values.double().expm1() - values,
        }[self.name[-2:]]()
        if self.name.startswith("token"):
            return divergence
        if self.name.startswith("seq_sum"):
            return tokens.sum_per_sequence(divergence * log_ratio.token_weights)
        if self.name.startswith("seq_mean"):
            return tokens.mean_per_sequence(divergence)
        zeros = torch.zeros(tokens.num_slots, dtype=divergence.dtype, device=divergence.device)
        # k2 and k3 are never negative, so 0 stands for a sequence without tokens.
        return zeros.scatter_reduce(0, tokens.sequence, divergence * log_ratio.token_weights, "amax")


def parse_rejections(rollout_rs: str | None, rollout_rs_threshold: str | float | None) -> tuple[Rejection, ...]:
    """Rejection criteria from verl's comma-separated options and thresholds.

    Raises:
        ConfigError: Unknown option, thresholds missing, too many or not positive.

    Example:
        >>> parse_rejections("token_k2,seq_mean_k3", "0.5,0.1")[1].high
        0.1
    """
    if rollout_rs is None:
        return ()
    names = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in _STATISTICS]
    if unknown or not names:
        raise ConfigError(f"rollout_rs is {rollout_rs!r}; expected some of {', '.join(_STATISTICS)}")
    specs = [] if rollout_rs_threshold is None else [part.strip() for part in str(rollout_rs_threshold).split(",")]
    if len(specs) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold is {rollout_rs_threshold!r}; expected one threshold, or one for each of "
            f"{', '.join(names)}"
        )
    return tuple(_make_rejection(n, s) for n, s in zip(names, specs * (len(names) // len(specs)), strict=True))


def _make_rejection(name: str, spec: str) -> Rejection:
    lower, upper = _parse_bounds("rollout_rs_threshold", spec)
    if name.endswith("k1"):
        if lower is None and upper < 1:
            raise ConfigError(
                f"rollout_rs_threshold is {spec!r}; for {name} expected 1 or more, or 'lower_upper' in quotes that "
                "reach Hydra, which takes 0.5_2 for the number 0.52"
            )
        return Rejection(name, math.log(1 / upper if lower is None else lower), math.log(upper))
    if lower is not None:
        raise ConfigError(f"rollout_rs_threshold is {spec!r}; {name} has an upper bound only")
    return Rejection(name, -math.inf, upper)


def _validate(given: Mapping[str, Any]) -> None:
    parse_rejections(given.get("rollout_rs"), given.get("rollout_rs_threshold"))


def _is_parsed(parse: Any) -> Any:
    def holds(value: Any) -> bool:
        try:
            parse(value)
        except ConfigError:
            return False
        return True

    return holds


#: The field that scales the weights so that they are 1 on average over the mini-batch.
_SCALE = "rollout_is_scale"


def _weights(log_ratio: LogRatio, level: str, upper: float, lower: float | None) -> tuple[Tensor, Tensor]:
    """Weights [N] as they are applied, and 1.0 where they are within bounds."""
    raw = log_ratio.weights(level)
    if lower is None:
        return raw.clamp(max=upper), torch.ones_like(raw)
    inside = ((raw >= lower) & (raw <= upper)).to(raw.dtype)
    return raw * inside, inside


def _scale(
    inputs: PolicyInputs, numbers: Tensor, ranks: Ranks, *, rollout_is: str, rollout_is_threshold: str | float
) -> Tensor:
    """One over the mean weight of the mini-batch's tokens, or of its sequences that have any."""
    log_ratio = LogRatio(inputs.tokens, inputs.log_prob.detach() - inputs.old_log_prob)
    weights, _ = _weights(log_ratio, rollout_is, *parse_weight_threshold(rollout_is_threshold))
    counted = log_ratio.token_weights
    if rollout_is == "sequence":
        weights, counted = inputs.tokens.mean_per_sequence(weights), log_ratio.nonempty.to(weights.dtype)
    total, count = ranks.total((weights.double() * counted).sum(), counted.double().sum())
    mean = total / count if count else 0.0
    return torch.full_like(inputs.log_prob, 1 / mean if mean > _LEAST_MEAN else 1.0)


@register_policy_loss(
    "bypass_mode",
    analytic=True,
    weighs_itself=True,
    rejects=True,
    rules={
        "loss_type": one_of("ppo_clip", "reinforce"),
        "rollout_is": one_of(None, "token", "sequence"),
        "rollout_rs": optional(TEXT),
        "rollout_is_threshold": Rule(_is_parsed(parse_weight_threshold), "a number above 0, or 'lower_upper'"),
        "rollout_is_batch_normalize": BOOLEAN,
    },
    over_mini_batch={
        _SCALE: OverMiniBatch(_scale, lambda given: given["rollout_is_batch_normalize"] and bool(given["rollout_is"]))
    },
    validate=_validate,
)
def bypass_mode(
    inputs: PolicyInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = "sequence",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> TokenLoss:
    """Policy gradient against the rollout policy, with truncated weights and rejection: verl's ``bypass_mode``.

    ``old_log_probs`` are the rollout's log-probs. ``reinforce`` multiplies by the weights; in ``ppo_clip`` the
    ratio itself corrects, so weights are only reported.
    """
    log_ratio = LogRatio(inputs.tokens, inputs.log_prob - inputs.old_log_prob)
    weights = None
    upper, lower = parse_weight_threshold(rollout_is_threshold)
    if rollout_is is not None:
        weights, inside = _weights(log_ratio, rollout_is, upper, lower)
    scale = inputs.fields[_SCALE] if rollout_is_batch_normalize and weights is not None else None
    rejections = parse_rejections(rollout_rs, rollout_rs_threshold)
    kept = torch.ones_like(inputs.log_prob)
    statistics = []
    for rejection in rejections:
        statistic = rejection.statistic(log_ratio)
        keeps = ((statistic >= rejection.low) & (statistic <= rejection.high)).to(kept.dtype)
        statistics.append((rejection, statistic, keeps))
        kept = kept * (keeps if rejection.name.startswith("token") else inputs.tokens.per_token(keeps))

    def add_metrics(metrics: MetricSet) -> None:
        if rollout_is is not None and weights is not None:
            add_weight_metrics(metrics, log_ratio, weights, rollout_is, upper, lower or 1 / upper, _PREFIX)
            if lower is not None:
                outside = {f"{_PREFIX}rollout_is_oob_ratio": "mean"}
                metrics.add_moments(1 - inside, log_ratio.token_weights, outside)
        add_offpolicy_metrics(metrics, log_ratio, inputs.log_prob, inputs.old_log_prob, _PREFIX)
        for rejection, statistic, keeps in statistics:
            _add_rejection_metrics(metrics, log_ratio, rejection, statistic, keeps)
        if rejections:
            _add_masked_fractions(metrics, log_ratio, kept, f"{_PREFIX}rollout_rs")

    if loss_type == "ppo_clip":
        base = ppo(inputs, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
    else:
        derivative = -inputs.advantages if weights is None else -inputs.advantages * weights
        derivative = derivative if scale is None else derivative * scale
        base = TokenLoss(derivative * inputs.log_prob, derivative, means={"actor/ppo_kl": -log_ratio.values})
    means = base.means if scale is None else {**base.means, f"{_PREFIX}rollout_is_batch_norm_factor": 1 / scale}
    return replace(base, means=means, kept=kept if rejections else None, add_metrics=add_metrics)


def _add_rejection_metrics(
    metrics: MetricSet, log_ratio: LogRatio, rejection: Rejection, statistic: Tensor, keeps: Tensor
) -> None:
    tokens, name = log_ratio.tokens, f"{_PREFIX}rollout_rs_{rejection.name}"
    of_tokens = rejection.name.startswith("token")
    per_sequence = tokens.mean_per_sequence(statistic) if of_tokens else statistic
    per_token = statistic if of_tokens else tokens.per_token(statistic)
    of_sequences = log_ratio.sequence_weights
    where = log_ratio.token_weights if of_tokens else of_sequences
    high, low = statistic > rejection.high, statistic < rejection.low
    floor = 0.0 if rejection.low == -math.inf else rejection.low
    metrics.add_moments(per_token, log_ratio.token_weights, {f"{name}_mean": "mean"})
    metrics.add_moments(per_token.clamp(floor, rejection.high), log_ratio.token_weights, {f"{name}_std": "std"})
    metrics.add_extremes(name, statistic, where > 0)
    metrics.add_moments(high, where, {f"{name}_fraction_high": "mean"})
    metrics.add_moments(low, where, {f"{name}_fraction_low": "mean"})
    metrics.add_moments((per_sequence > rejection.high), of_sequences, {f"{name}_seq_fraction_high": "mean"})
    if rejection.low > -math.inf:
        metrics.add_moments((per_sequence < rejection.low), of_sequences, {f"{name}_seq_fraction_low": "mean"})
    add_sequence_metrics(metrics, log_ratio, f"{name}_seq", per_sequence, 0.0)
    _add_masked_fractions(metrics, log_ratio, keeps if of_tokens else tokens.per_token(keeps), name)


def _add_masked_fractions(metrics: MetricSet, log_ratio: LogRatio, kept: Tensor, name: str) -> None:
    rejected = (1 - kept) * log_ratio.token_weights
    touched = log_ratio.tokens.sum_per_sequence(rejected) > 0
    metrics.add_moments(rejected, log_ratio.token_weights, {f"{name}_masked_fraction": "mean"})
    metrics.add_moments(touched.to(kept.dtype), log_ratio.sequence_weights, {f"{name}_seq_masked_fraction": "mean"})
