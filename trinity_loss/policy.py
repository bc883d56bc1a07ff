"""Policy losses, token by token; the aggregation mode is applied outside.

Formulas are those of verl 0.9.1 (``verl/trainer/ppo/core_algos.py``) and Trinity-RFT 0.6.0
(``trinity/algorithm/policy_loss_fn``), with the papers named there. Log-ratios are clamped to ±20 before
the exponential, as verl does. How a loss is written and registered: :mod:`trinity_loss.registry`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode
from trinity_loss.errors import FieldShapeError
from trinity_loss.log_ratio import LOG_RATIO_LIMIT, limited, limited_exp
from trinity_loss.registry import (
    PolicyInputs,
    TokenLoss,
    register_policy_loss,
)
from trinity_loss.rules import NOT_NEGATIVE, POSITIVE, SHARE, number, one_of
from trinity_loss.tokens import ResponseTokens, above, at_most, equal

_SEQUENCE_LOG_RATIO_LIMIT = 10.0  # gspo's
_VESPO_LIMITS = (math.log(1e-8), LOG_RATIO_LIMIT)  # of the logarithm of its weight
_TINY = 1e-8  # keeps 1 - p away from 0 in dppo_kl, as verl does


def _log_ratio(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """The clamped log-ratio, and 1.0 where it is not clamped, so moves with the log-prob."""
    unlimited = inputs.log_prob - inputs.old_log_prob
    log_ratio = limited(unlimited)
    return log_ratio, equal(log_ratio, unlimited)


def _metrics(
    ratio: Tensor, log_ratio: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
) -> dict[str, Any]:
    """verl's three metrics, and the ratio's mean and extremes."""
    zero = ratio.new_zeros(())
    means = {
        "actor/pg_clipfrac": zero if clipped is None else clipped,
        "actor/pg_clipfrac_lower": zero if clipped_lower is None else clipped_lower,
        "actor/ppo_kl": -log_ratio,
        "actor/ratio_mean": ratio,
    }
    return {"means": means, "maxima": {"actor/ratio_max": ratio}, "minima": {"actor/ratio_min": ratio}}


@register_policy_loss("ppo", "vanilla", analytic=True)
def ppo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """Clipped policy gradient with dual clip: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1912.09729."""
    cost = -inputs.advantages
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    plain = cost * ratio
    values, is_clipped, is_bounded = _dual_clip(cost, plain, 1 - clip_ratio_low, 1 + clip_ratio_high, clip_ratio_c)
    derivative = cost * (equal(values, plain) * moves * ratio)
    return TokenLoss(values, derivative, **_metrics(ratio, log_ratio, is_clipped, is_bounded))


def _dual_clip(cost: Tensor, plain: Tensor, low: float, high: float, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """The larger of plain and clipped loss up to the bound, and where it is the clipped one, and the bound."""
    # cost × clip(ratio) is above cost × ratio only at one end of the range: at the lower one of these two.
    clipped = torch.minimum(cost * low, cost * high)
    # Where the advantage is positive the loss is below 0, and so below the bound.
    bounded = cost.abs() * bound
    return plain.clamp(clipped, bounded), above(clipped, plain), above(plain, bounded)


@register_policy_loss("gspo", analytic=True)
def gspo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """One ratio per sequence, the gradient of each token's own: https://arxiv.org/abs/2507.18071."""
    cost, tokens = -inputs.advantages, inputs.tokens
    log_ratio = inputs.log_prob - inputs.old_log_prob
    of_sequence = tokens.per_token(tokens.mean_per_sequence(log_ratio))
    ratio = of_sequence.clamp(max=_SEQUENCE_LOG_RATIO_LIMIT).exp()
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    is_clipped, moves = above(clipped, plain), at_most(of_sequence, _SEQUENCE_LOG_RATIO_LIMIT)
    derivative = cost * (ratio * moves * (1 - is_clipped))
    return TokenLoss(torch.maximum(plain, clipped), derivative, **_metrics(ratio, log_ratio, is_clipped))


# Its sum over a sequence and mean over sequences is part of the loss: https://arxiv.org/abs/2602.05261.
register_policy_loss("luspo", analytic=True, agg_mode="seq-mean-token-sum")(gspo)


@register_policy_loss("cispo", analytic=True)
def cispo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """The clipped ratio as a constant weight of the log-prob: https://arxiv.org/abs/2506.13585."""
    log_ratio, _ = _log_ratio(inputs)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    derivative = -weight * inputs.advantages
    return TokenLoss(derivative * inputs.log_prob, derivative, **_metrics(ratio, log_ratio, ratio != weight))


@register_policy_loss("sapo", analytic=True, rules={"tau_pos": POSITIVE, "tau_neg": POSITIVE})
def sapo(inputs: PolicyInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """A smooth gate in place of the clip: https://arxiv.org/abs/2511.20347."""
    advantages = inputs.advantages
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    tau = tau_neg + (tau_pos - tau_neg) * above(advantages, 0)
    gate = torch.sigmoid(tau * (ratio - 1))
    derivative = -4 * advantages * gate * (1 - gate) * ratio * moves
    return TokenLoss(-4 * advantages * gate / tau, derivative, **_metrics(ratio, log_ratio))


@register_policy_loss("gmpo", "geo_mean", weighs_itself=True)
def gmpo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """The geometric mean of a sequence's clipped ratios: https://arxiv.org/abs/2507.20673.

    Every token of a sequence carries the sequence's loss, so ``seq-mean-token-mean`` is the mean over
    sequences that the paper and verl's ``geo_mean`` take; other modes weigh sequences as they say.
    """
    advantages, tokens = inputs.advantages, inputs.tokens
    good, bad = advantages > 0, advantages < 0
    log_ratio = inputs.log_prob - inputs.old_log_prob
    bounded = torch.where(good, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    geometric_mean = tokens.mean_per_sequence(torch.where(good | bad, bounded, 0)).exp()
    loss = -tokens.mean_per_sequence(advantages) * geometric_mean
    if inputs.rollout_is_weights is not None:
        loss = loss * tokens.mean_per_sequence((inputs.rollout_is_weights + 1e-10).log()).exp()
    log_ratio = log_ratio.detach()
    is_clipped = (log_ratio < -clip_ratio_low) | (log_ratio > clip_ratio_high)
    metrics = _metrics(limited_exp(log_ratio), log_ratio, is_clipped & good, is_clipped & bad)
    return TokenLoss(tokens.per_token(loss), **metrics)


@register_policy_loss("gpg", fields=("advantages",), analytic=True)
def gpg(inputs: PolicyInputs) -> TokenLoss:
    """Plain policy gradient: https://arxiv.org/abs/2504.02546."""
    derivative = -inputs.advantages
    return TokenLoss(derivative * inputs.log_prob, derivative)


def _dppo(inputs: PolicyInputs, may_rise: Tensor, may_fall: Tensor, clip_ratio_c: float) -> TokenLoss:
    """DPPO's loss, given where a token's divergence allows its probability to rise, and to fall."""
    log_ratio, _ = _log_ratio(inputs)
    ratio = log_ratio.exp()
    is_good = inputs.advantages > 0
    keeps = is_good & may_rise | ~is_good & may_fall
    derivative = torch.where(keeps, -inputs.advantages * ratio.clamp(max=clip_ratio_c), 0)
    metrics = _metrics(ratio, log_ratio, ~keeps, (ratio > clip_ratio_c) & keeps)
    return TokenLoss(derivative * inputs.log_prob, derivative, **metrics)


@register_policy_loss("dppo_tv", analytic=True, rules={"kl_tau": NOT_NEGATIVE})
def dppo_tv(
    inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float, kl_tau: float = 0.0
) -> TokenLoss:
    """Masks tokens by the total variation of the binary policy: https://arxiv.org/abs/2602.04879.

    ``kl_tau`` adds prime-rl's square of the log-ratio, over masked tokens too.
    """
    change = inputs.log_prob.exp() - inputs.old_log_prob.exp()
    result = _dppo(inputs, change <= clip_ratio_high, change >= -clip_ratio_low, clip_ratio_c)
    return _with_square(result, inputs, kl_tau) if kl_tau else result


def _with_square(result: TokenLoss, inputs: PolicyInputs, tau: float) -> TokenLoss:
    """The loss plus ``tau`` times the squared log-ratio of every token."""
    assert result.derivative is not None
    log_ratio = inputs.log_prob - inputs.old_log_prob
    values, derivative = result.values + tau * log_ratio.square(), result.derivative + 2 * tau * log_ratio
    return replace(result, values=values, derivative=derivative)


@register_policy_loss("ipo", analytic=True, rules={"threshold": POSITIVE, "kl_tau": NOT_NEGATIVE})
def ipo(inputs: PolicyInputs, *, threshold: float = 0.2, kl_tau: float = 0.001) -> TokenLoss:
    """prime-rl's: the ratio of tokens whose probability moved by at most ``threshold``, and a squared log-ratio."""
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    keeps = at_most((inputs.log_prob.exp() - inputs.old_log_prob.exp()).abs(), threshold)
    values = -inputs.advantages * ratio * keeps
    result = TokenLoss(values, values * moves, **_metrics(ratio, log_ratio, 1 - keeps))
    return _with_square(result, inputs, kl_tau)


@register_policy_loss("dppo_kl", analytic=True)
def dppo_kl(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """Masks tokens by the KL divergence of the binary policy: https://arxiv.org/abs/2602.04879."""
    prob, old_prob = inputs.log_prob.exp(), inputs.old_log_prob.exp()
    log_of_rest = torch.log((1 - old_prob + _TINY) / (1 - prob + _TINY))
    divergence = old_prob * (inputs.old_log_prob - inputs.log_prob) + (1 - old_prob) * log_of_rest
    may_rise = (divergence <= clip_ratio_high) | (prob <= old_prob)
    may_fall = (divergence <= clip_ratio_low) | (prob >= old_prob)
    return _dppo(inputs, may_rise, may_fall, clip_ratio_c)


@register_policy_loss("dro", analytic=True, rules={"dro_beta": POSITIVE})
def dro(inputs: PolicyInputs, *, dro_beta: float) -> TokenLoss:
    """Policy gradient with a quadratic penalty on the log-ratio: https://arxiv.org/abs/2405.19107."""
    log_ratio = inputs.log_prob - inputs.old_log_prob
    values = 0.5 * dro_beta * log_ratio.square() - inputs.log_prob * inputs.advantages
    return TokenLoss(values, dro_beta * log_ratio - inputs.advantages, means={"actor/ppo_kl": -log_ratio})


@register_policy_loss("importance_sampling", analytic=True)
def importance_sampling(inputs: PolicyInputs) -> TokenLoss:
    """The ratio without a clip (Trinity-RFT)."""
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    values = -inputs.advantages * ratio
    return TokenLoss(values, values * moves, **_metrics(ratio, log_ratio))


@register_policy_loss("topr", analytic=True)
def topr(inputs: PolicyInputs, *, advantage_threshold: float = 0.0) -> TokenLoss:
    """Truncates the ratio at 1 for answers that are not good: https://arxiv.org/abs/2503.14286."""
    log_ratio, _ = _log_ratio(inputs)
    is_good = above(inputs.advantages, advantage_threshold)
    truncated = (inputs.log_prob - inputs.old_log_prob).clamp(max=0).exp()
    alpha = is_good + (1 - is_good) * truncated
    derivative = -alpha * inputs.advantages
    metrics = _metrics(log_ratio.exp(), log_ratio)
    metrics["means"]["actor/topr_alpha"] = alpha
    return TokenLoss(derivative * inputs.log_prob, derivative, **metrics)


@register_policy_loss(
    "vespo",
    analytic=True,
    weighs_itself=True,
    rules=dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), NOT_NEGATIVE),
)
def vespo(
    inputs: PolicyInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> TokenLoss:
    """A sequence's ratio w, reshaped to w^k e^(λ(1 - w)), as a constant weight of its log-probs (TRL's).

    k and λ are those of the advantage's sign. Rollout weights are factors of w.
    """
    log_ratio, _ = _log_ratio(inputs)
    log_weight = log_ratio
    if inputs.rollout_is_weights is not None:
        log_weight = log_weight + inputs.tokens.select(inputs.rollout_is_weights.log().clamp(*_VESPO_LIMITS))
    of_sequence = inputs.tokens.sum_per_sequence(inputs.tokens.select(log_weight)).clamp(*_VESPO_LIMITS)
    log_weight = inputs.tokens.per_token(of_sequence)
    is_bad = above(-inputs.advantages, 0)
    k, lambda_ = k_pos + (k_neg - k_pos) * is_bad, lambda_pos + (lambda_neg - lambda_pos) * is_bad
    weight = (lambda_ + k * log_weight - lambda_ * log_weight.exp()).exp()
    derivative = -weight * inputs.advantages
    metrics = _metrics(log_ratio.exp(), log_ratio)
    metrics["means"]["actor/vespo_weight"] = weight
    return TokenLoss(derivative * inputs.log_prob, derivative, **metrics)


@register_policy_loss("opmd", fields=("advantages",), analytic=True, rules={"tau": NOT_NEGATIVE})
def opmd(inputs: PolicyInputs, *, tau: float = 1.0) -> TokenLoss:
    """Online policy mirror descent, a policy gradient over 1 + tau (Trinity-RFT)."""
    derivative = -inputs.advantages / (1 + tau)
    return TokenLoss(derivative * inputs.log_prob, derivative)


@register_policy_loss("sppo", analytic=True, rules={"epsilon": POSITIVE})
def sppo(inputs: PolicyInputs, *, epsilon: float = 0.3) -> TokenLoss:
    """The log-ratio, of tokens whose ratio is between 1 / (1 + epsilon) and 1 + epsilon (Trinity-RFT)."""
    log_ratio, _ = _log_ratio(inputs)
    ratio = log_ratio.exp()
    in_range = at_most(ratio, 1 + epsilon) * at_most(-ratio, -1 / (1 + epsilon))
    derivative = -inputs.advantages * in_range
    return TokenLoss(derivative * log_ratio, derivative, **_metrics(ratio, log_ratio, 1 - in_range))


@register_policy_loss(
    "rec",
    analytic=True,
    rules={
        "clip_mode": one_of("none", "one-side", "gspo-one-side", "two-side", "ring"),
        "weight": one_of("none", "importance_sampling", "gspo_importance_sampling", "advantage"),
        "regularizer": one_of("none", "k2", "forward-kl"),
        "regularizer_coef": NOT_NEGATIVE,
        "temp": POSITIVE,
        **dict.fromkeys(("epsilon_low", "epsilon_low_prime"), SHARE),
        **dict.fromkeys(("epsilon_high", "epsilon_high_prime"), POSITIVE),
    },
)
def rec(
    inputs: PolicyInputs,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    epsilon_low_prime: float = 0.6,
    epsilon_high_prime: float = 2.0,
    clip_mode: str = "none",
    weight: str = "none",
    regularizer: str = "none",
    regularizer_coef: float = 0.0,
    temp: float = 1.0,
) -> TokenLoss:
    """REINFORCE with chosen clipping, weighting and regularizer: https://arxiv.org/abs/2509.24203."""
    advantages, tokens = inputs.advantages, inputs.tokens
    log_ratio = inputs.log_prob - inputs.old_log_prob
    ratio = log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()
    of_sequence = ratio
    if clip_mode == "gspo-one-side" or weight == "gspo_importance_sampling":
        of_sequence = tokens.per_token(tokens.mean_per_sequence(log_ratio).clamp(max=LOG_RATIO_LIMIT)).exp()
    good, bad = advantages >= 0, advantages <= 0
    low, high = 1 - epsilon_low, 1 + epsilon_high
    two_sides = (ratio >= low) & (ratio <= high)
    if clip_mode == "none":
        keeps = torch.ones_like(two_sides)
    elif clip_mode == "two-side":
        keeps = two_sides
    elif clip_mode == "ring":
        far = good & (ratio <= 1 - epsilon_low_prime) | bad & (ratio >= 1 + epsilon_high_prime)
        keeps = two_sides | far
    else:
        clipped = of_sequence if clip_mode == "gspo-one-side" else ratio
        keeps = good & (clipped <= high) | bad & (clipped >= low)

    if weight == "importance_sampling":
        advantages = advantages * ratio
    elif weight == "gspo_importance_sampling":
        advantages = advantages * of_sequence
    elif weight == "advantage":
        advantages = advantages * (advantages / temp).exp()

    derivative = torch.where(keeps, -advantages, 0)
    values = derivative * inputs.log_prob
    if regularizer == "forward-kl":
        values, derivative = values - regularizer_coef * inputs.log_prob, derivative - regularizer_coef
    elif regularizer == "k2":
        values = values + regularizer_coef * log_ratio.square()
        derivative = derivative + 2 * regularizer_coef * log_ratio
    return TokenLoss(values, derivative, **_metrics(ratio, log_ratio, ~keeps))


@register_policy_loss("sft", fields=(), analytic=True)
def sft(inputs: PolicyInputs) -> TokenLoss:
    """Negative log-likelihood."""
    return TokenLoss(-inputs.log_prob, -torch.ones_like(inputs.log_prob))


@register_policy_loss("sft_is", fields=(), analytic=True)
def sft_is(inputs: PolicyInputs) -> TokenLoss:
    """Negative log-likelihood weighted by the probability (Trinity-RFT)."""
    derivative = -inputs.log_prob.exp()
    return TokenLoss(derivative * inputs.log_prob, derivative)


@register_policy_loss(
    "sft_phi",
    fields=(),
    analytic=True,
    rules={"cutoff_prob": number("a number above 0, at most 1", lambda value: 0 < value <= 1)},
)
def sft_phi(inputs: PolicyInputs, *, cutoff_prob: float = 1.0) -> TokenLoss:
    """Negative log-likelihood weighted by p (1 - p), of tokens up to a probability: https://arxiv.org/abs/2508.11408."""
    prob = inputs.log_prob.exp()
    derivative = -prob * (1 - prob)
    limit = math.log(cutoff_prob)
    moves = at_most(inputs.log_prob, limit) if cutoff_prob < 1 else 1
    return TokenLoss(derivative * inputs.log_prob.clamp(max=limit), derivative * moves)


def off_policy_weights(
    tokens: ResponseTokens, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """0.0 at tokens of negative advantage of a sequence that the policy has left behind, else 1.0.

    DeepSeek-V3.2's off-policy sequence mask, https://arxiv.org/abs/2512.02556: a sequence is left behind where the
    mean of log π_old - log π over its tokens is above ``delta``. One sequence decides, so no cut changes it.

    Args:
        tokens: The response tokens.
        log_prob: [N], 0 at uncounted tokens.
        old_log_prob: [N], likewise.
        advantages: [N], likewise.
        delta: The limit δ.
    """
    drift = tokens.per_token(tokens.mean_per_sequence(old_log_prob - log_prob))
    return 1 - above(-advantages, 0) * above(drift, delta)


@dataclass(frozen=True)
class PairMean(AggregationMode):
    """Mean over pairs of sequences that stand next to each other."""

    group_size: ClassVar[int] = 2

    @property
    def total(self) -> str:
        return "batch_num_pairs"

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return torch.full((), tokens.num_slots // 2, dtype=torch.int64, device=tokens.mask.device)

    def token_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        return torch.ones(tokens.num_slots // 2, dtype=dtype, device=tokens.mask.device)


@register_policy_loss(
    "dpo",
    fields=("ref_log_prob",),
    mode=PairMean(),
    weighs_itself=True,
    rules={"beta": POSITIVE, "label_smoothing": number("a number from 0 to 0.5", lambda value: 0 <= value <= 0.5)},
)
def dpo(inputs: PolicyInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> TokenLoss:
    """Direct preference optimization: https://arxiv.org/abs/2305.18290.

    Rows 2i and 2i + 1 are a pair, the chosen answer first. A pair must not be cut, which our training worker sees to
    (``force_group_size=2``); the mean is over the pairs of the mini-batch.
    """
    tokens = inputs.tokens
    if tokens.offsets is None or tokens.num_slots % 2:
        raise FieldShapeError(
            f"loss_mode 'dpo' got {tokens.num_slots} rows; expected pairs, chosen and rejected one after the other, "
            "one sequence per row (verl keeps pairs together with force_group_size=2)"
        )
    # Two sums that are almost equal: rounded to float32, a long answer leaves little of their difference.
    log_ratio = tokens.sum_per_sequence(tokens.select(inputs.log_prob - inputs.fields["ref_log_prob"]).double())
    chosen, rejected = log_ratio[::2], log_ratio[1::2]
    margin = beta * (chosen - rejected)
    losses = -(1 - label_smoothing) * torch.nn.functional.logsigmoid(margin)
    losses = losses - label_smoothing * torch.nn.functional.logsigmoid(-margin)
    means = {
        "actor/chosen_reward": beta * chosen.detach(),
        "actor/rejected_reward": beta * rejected.detach(),
        "actor/accuracy": (chosen.detach() > rejected.detach()).to(losses.dtype),
    }
    return TokenLoss(losses, means=means)
