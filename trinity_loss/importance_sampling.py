"""Importance-sampling metrics between the policy that answered and the policy that trains.

Keys and definitions are those of verl's ``verl/trainer/ppo/rollout_corr_helper.py``; means, extremes and
fractions run over the tokens and the sequences that exist, where verl counts fully masked rows too. Level
``geometric`` is the sequence level with the mean of the log-ratio in place of its sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError, FieldShapeError
from trinity_loss.jagged import check_tensor, jagged_parts
from trinity_loss.log_ratio import LOG_RATIO_LIMIT, LogRatio, limited
from trinity_loss.metric_set import MetricSet, extreme_of
from trinity_loss.rules import POSITIVE, check
from trinity_loss.tokens import ResponseTokens

LEVELS = ("token", "sequence", "geometric")
#: Beyond it a perplexity is infinite in float32, and so are the sums that it is in. verl has no limit there.
_LOG_PERPLEXITY_LIMIT = 80.0


def check_level(level: str, upper: float, lower: float) -> None:
    """Raises :class:`ConfigError` unless the level is one of :data:`LEVELS` and 0 < lower <= upper."""
    if level not in LEVELS:
        raise ConfigError(f"level is {level!r}; expected one of {', '.join(LEVELS)}")
    check("upper", upper, POSITIVE)
    check("lower", lower, POSITIVE)
    if lower > upper:
        raise ConfigError(f"lower is {lower!r}, above upper, {upper!r}")


def perplexity(log_perplexity: Tensor) -> Tensor:
    """e to a log-perplexity, or to a difference of two, that is clamped to ±80."""
    return log_perplexity.clamp(-_LOG_PERPLEXITY_LIMIT, _LOG_PERPLEXITY_LIMIT).exp()


def add_weight_metrics(
    metrics: MetricSet, log_ratio: LogRatio, applied: Tensor, level: str, upper: float, lower: float, prefix: str = ""
) -> None:
    """Adds the statistics of importance weights.

    Args:
        metrics: Where to add them.
        log_ratio: What the weights come from.
        applied: Weights as they are applied [N], after truncation.
        level: One of :data:`LEVELS`.
        upper: Upper threshold.
        lower: Lower threshold.
        prefix: What the keys begin with.
    """
    tokens, weights = log_ratio.tokens, log_ratio.token_weights
    nonempty, of_sequences = log_ratio.nonempty, log_ratio.sequence_weights
    raw = log_ratio.weights(level)
    name = prefix + "rollout_is"
    metrics.add_moments(applied, weights, {f"{name}_mean": "mean"})
    metrics.add_moments(
        applied.clamp(0, upper), weights, {f"{name}_std": "std", f"{name}_eff_sample_size": "effective_sample_size"}
    )
    if level == "token":
        metrics.add_extremes(name, applied, tokens.mask)
        high, low, where = raw > upper, raw < lower, weights
    else:
        of_sequence = log_ratio.of_sequence(level)
        metrics.add_extremes(name, of_sequence.clamp(max=LOG_RATIO_LIMIT).exp(), nonempty)
        high, low, where = of_sequence > math.log(upper), of_sequence < math.log(lower), of_sequences
    metrics.add_moments(high.to(raw.dtype), where, {f"{name}_ratio_fraction_high": "mean"})
    metrics.add_moments(low.to(raw.dtype), where, {f"{name}_ratio_fraction_low": "mean"})

    raw_per_sequence = tokens.mean_per_sequence(raw)
    add_sequence_metrics(metrics, log_ratio, f"{name}_seq", tokens.mean_per_sequence(applied), 1.0)
    above, below = raw_per_sequence > upper, raw_per_sequence < lower
    metrics.add_moments(above.to(raw.dtype), of_sequences, {f"{name}_seq_fraction_high": "mean"})
    metrics.add_moments(below.to(raw.dtype), of_sequences, {f"{name}_seq_fraction_low": "mean"})


def add_sequence_metrics(metrics: MetricSet, log_ratio: LogRatio, name: str, values: Tensor, expected: float) -> None:
    """Adds mean, spread and extremes of values [S], and how far one is from ``expected`` at most."""
    nonempty = log_ratio.nonempty
    metrics.add_moments(values, log_ratio.sequence_weights, {f"{name}_mean": "mean", f"{name}_std": "unbiased_std"})
    metrics.add_extremes(name, values, nonempty)
    metrics.add_extreme(f"{name}_max_deviation", "max", extreme_of((values - expected).abs(), nonempty, "max"))


def add_offpolicy_metrics(
    metrics: MetricSet, log_ratio: LogRatio, log_prob: Tensor, rollout_log_prob: Tensor, prefix: str = ""
) -> None:
    """Adds perplexities of both policies, their gap, KL and χ² estimates.

    Args:
        metrics: Where to add them.
        log_ratio: Training minus rollout.
        log_prob: Log-probs of the training policy [N], 0 at uncounted tokens.
        rollout_log_prob: Those of the rollout policy [N], 0 at uncounted tokens.
        prefix: What the keys begin with.
    """
    tokens, nonempty, weights = log_ratio.tokens, log_ratio.nonempty, log_ratio.token_weights
    log_ppl = -tokens.mean_per_sequence(log_prob)
    rollout_log_ppl = -tokens.mean_per_sequence(rollout_log_prob)
    # Not the difference of the two, which leaves little of it where the policies are near.
    difference = -tokens.mean_per_sequence(log_ratio.values)
    # Where the policies are near, the terms of the divergences leave little of each other.
    of_token, of_sequence = (limited(x.double()) for x in (log_ratio.values, log_ratio.of_sequence("sequence")))
    per_sequence: Mapping[str, Tensor] = {
        "training_ppl": perplexity(log_ppl),
        "training_log_ppl": log_ppl,
        "rollout_ppl": perplexity(rollout_log_ppl),
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": perplexity(difference),
        "chi2_seq": (2 * of_sequence).expm1(),
    }
    per_token: Mapping[str, Tensor] = {
        "kl": -log_ratio.values,
        "k3_kl": of_token.expm1() - of_token,
        "chi2_token": (2 * of_token).expm1(),
    }
    for name, values in per_sequence.items():
        metrics.add_moments(values, log_ratio.sequence_weights, {prefix + name: "mean"})
    for name, values in per_token.items():
        metrics.add_moments(values, weights, {prefix + name: "mean"})
    metrics.add_extremes(prefix + "log_ppl_diff", difference, nonempty)


def importance_sampling_metrics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    segment_ids: Tensor | None = None,
    level: str = "token",
    upper: float = 2.0,
    lower: float = 0.5,
) -> dict[str, float]:
    """The importance-sampling metrics of one batch, over the tokens and sequences that exist.

    Args:
        old_log_prob: Log-probs of the training policy, [rows, T] or jagged.
        rollout_log_prob: Those of the rollout policy, same layout.
        response_mask: Same layout; non-zero counts.
        segment_ids: Integers [rows, T] for packed rows, 0 is padding.
        level: ``token``, ``sequence`` or ``geometric``.
        upper: Weights are truncated here; the upper bound of the fractions.
        lower: The lower bound of the fractions.

    Returns:
        Keys of verl without a prefix: ``rollout_is_mean``, ``rollout_is_seq_min``, ``training_ppl`` and so on.

    Raises:
        ConfigError: Unknown level, or thresholds that are not 0 < lower <= upper.
        FieldShapeError: The shapes differ.
        NonFiniteError: A log-prob that counts is NaN or infinite.

    Example:
        >>> import torch
        >>> logs = torch.tensor([[0.9, 1.0], [1.1, 1.0], [1.0, 1.0]]).log()
        >>> mask = torch.tensor([[1, 0], [1, 0], [0, 0]])
        >>> metrics = importance_sampling_metrics(logs, torch.zeros(3, 2), mask)
        >>> round(metrics["rollout_is_seq_min"], 6), round(metrics["rollout_is_mean"], 6)
        (0.9, 1.0)
    """
    check_level(level, upper, lower)
    with torch.no_grad():
        tokens, flat = _flatten(old_log_prob, rollout_log_prob, response_mask, segment_ids)
        dtype = torch.promote_types(flat[0].dtype, torch.promote_types(flat[1].dtype, torch.float32))
        old, rollout = (tokens.select(values.detach().to(dtype)) for values in flat)
        log_ratio = LogRatio(tokens, old - rollout)
        metrics = MetricSet()
        applied = log_ratio.weights(level).clamp(max=upper)
        add_weight_metrics(metrics, log_ratio, applied, level, upper, lower)
        add_offpolicy_metrics(metrics, log_ratio, old, rollout)
        metrics.checks = {"old_log_prob": old.sum(), "rollout_log_prob": rollout.sum()}
        numbers = metrics.read()
    for name, values in zip(metrics.checks, (old, rollout), strict=True):
        if not math.isfinite(numbers[name]):
            tokens.check_finite(name, values)
    return metrics.local(numbers)


def _flatten(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, segment_ids: Tensor | None
) -> tuple[ResponseTokens, list[Tensor]]:
    check_tensor("response_mask", response_mask)
    tokens, flat = ResponseTokens.of(response_mask, segment_ids), []
    for name, value in (("old_log_prob", old_log_prob), ("rollout_log_prob", rollout_log_prob)):
        check_tensor(name, value)
        if value.is_nested != response_mask.is_nested:
            raise FieldShapeError(f"{name} and response_mask must both be jagged or both dense")
        if not value.is_nested and value.shape != response_mask.shape:
            raise FieldShapeError(
                f"{name} has shape {list(value.shape)}; expected that of response_mask, {list(response_mask.shape)}"
            )
        flat.append(jagged_parts(value)[0] if value.is_nested else value.reshape(-1))
        if flat[-1].numel() != tokens.size:
            raise FieldShapeError(f"{name} holds {flat[-1].numel()} tokens; response_mask {tokens.size}")
    return tokens, flat
