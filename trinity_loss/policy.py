"""Policy losses, token by token; the aggregation mode is applied outside.

Formulas are those of verl 0.9.1 (``verl/trainer/ppo/core_algos.py``) and Trinity-RFT 0.6.0
(``trinity/algorithm/policy_loss_fn``), with the papers named there. Log-ratios are clamped to ±20 before
the exponential, as verl does. How a loss is written and registered: :mod:`trinity_loss.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from trinity_loss.rules import NOT_NEGATIVE, POSITIVE, one_of
from trinity_loss.tokens import ResponseTokens

_SEQUENCE_LOG_RATIO_LIMIT = 10.0  # gspo's
_TINY = 1e-8  # keeps 1 - p away from 0 in dppo_kl, as verl does


def _above(left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where left > right, else 0.0: a float comparison costs a quarter of a boolean one on a CPU."""
    return torch.gt(left, right, out=torch.empty_like(left))


def _at_most(left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where left <= right, else 0.0."""
    return torch.le(left, right, out=torch.empty_like(left))


def _log_ratio(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """The clamped log-ratio, and its derivative with respect to the log-prob: 1.0 where it is not clamped."""
    unlimited = inputs.log_prob - inputs.old_log_prob
    log_ratio = limited(unlimited)
    return log_ratio, unlimited.eq_(log_ratio)


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
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    cost = -inputs.advantages
    plain = cost * ratio
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high).mul_(cost)
    larger = torch.maximum(plain, clipped)
    # Dual clip: where the advantage is negative the loss is at most c·|A|. Where it is positive the loss is
    # negative, so the same bound never binds and needs no branch.
    bound = cost.abs_().mul_(clip_ratio_c)
    is_clipped = clipped.gt_(plain)
    is_bounded = _above(larger, bound)
    # A token is never both: the bound binds above c, where for a negative advantage nothing is clipped.
    derivative = (1 - is_clipped).sub_(is_bounded).mul_(moves).mul_(plain)
    values = torch.minimum(larger, bound, out=larger)
    return TokenLoss(values, derivative, **_metrics(ratio, log_ratio, is_clipped, is_bounded))


@register_policy_loss("gspo", analytic=True)
def gspo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """One ratio per sequence, the gradient of each token's own: https://arxiv.org/abs/2507.18071."""
    advantages, tokens = inputs.advantages, inputs.tokens
    log_ratio = inputs.log_prob - inputs.old_log_prob
    of_sequence = tokens.per_token(tokens.mean_per_sequence(log_ratio))
    ratio = of_sequence.clamp(max=_SEQUENCE_LOG_RATIO_LIMIT).exp()
    moves = _at_most(of_sequence, _SEQUENCE_LOG_RATIO_LIMIT)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    is_clipped = _above(clipped, plain)
    derivative = plain * moves * (1 - is_clipped)
    return TokenLoss(torch.maximum(plain, clipped), derivative, **_metrics(ratio, log_ratio, is_clipped))


@register_policy_loss("cispo", analytic=True)
def cispo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """The clipped ratio as a constant weight of the log-prob: https://arxiv.org/abs/2506.13585."""
    log_ratio, _ = _log_ratio(inputs)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    is_clipped = torch.ne(ratio, weight, out=torch.empty_like(ratio))
    derivative = -weight * inputs.advantages
    return TokenLoss(derivative * inputs.log_prob, derivative, **_metrics(ratio, log_ratio, is_clipped))


@register_policy_loss("sapo", analytic=True, rules={"tau_pos": POSITIVE, "tau_neg": POSITIVE})
def sapo(inputs: PolicyInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """A smooth gate in place of the clip: https://arxiv.org/abs/2511.20347."""
    advantages = inputs.advantages
    log_ratio, moves = _log_ratio(inputs)
    ratio = log_ratio.exp()
    tau = tau_neg + (tau_pos - tau_neg) * _above(advantages, 0.0)
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
    log_ratio = inputs.log_prob - inputs.old_log_prob
    clamped = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)
    loss = -tokens.mean_per_sequence(advantages) * tokens.mean_per_sequence(pessimistic).exp()
    if inputs.rollout_is_weights is not None:
        loss = loss * tokens.mean_per_sequence((inputs.rollout_is_weights + 1e-10).log()).exp()
    with torch.no_grad():
        is_clipped = torch.ne(log_ratio, clamped).to(log_ratio.dtype)
        higher, lower = is_clipped * _above(advantages, 0.0), is_clipped * _above(-advantages, 0.0)
        ratio = limited_exp(log_ratio)
        metrics = _metrics(ratio, log_ratio, higher, lower)
    return TokenLoss(tokens.per_token(loss), **metrics)


@register_policy_loss("gpg", fields=("advantages",), analytic=True)
def gpg(inputs: PolicyInputs) -> TokenLoss:
    """Plain policy gradient: https://arxiv.org/abs/2504.02546."""
    derivative = -inputs.advantages
    return TokenLoss(derivative * inputs.log_prob, derivative)


def _dppo(inputs: PolicyInputs, keeps_rise: Tensor, keeps_fall: Tensor, clip_ratio_c: float) -> TokenLoss:
    """DPPO's loss, given 1.0 where a token's divergence allows its probability to rise, and to fall."""
    log_ratio, _ = _log_ratio(inputs)
    ratio = log_ratio.exp()
    keeps = torch.lerp(keeps_fall, keeps_rise, _above(inputs.advantages, 0.0))
    derivative = -inputs.advantages * ratio.clamp(max=clip_ratio_c) * keeps
    metrics = _metrics(ratio, log_ratio, 1 - keeps, _above(ratio, clip_ratio_c) * keeps)
    return TokenLoss(derivative * inputs.log_prob, derivative, **metrics)


@register_policy_loss("dppo_tv", analytic=True)
def dppo_tv(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """Masks tokens by the total variation of the binary policy: https://arxiv.org/abs/2602.04879."""
    change = inputs.log_prob.exp() - inputs.old_log_prob.exp()
    return _dppo(inputs, _at_most(change, clip_ratio_high), _at_most(-change, clip_ratio_low), clip_ratio_c)


@register_policy_loss("dppo_kl", analytic=True)
def dppo_kl(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """Masks tokens by the KL divergence of the binary policy: https://arxiv.org/abs/2602.04879."""
    prob, old_prob = inputs.log_prob.exp(), inputs.old_log_prob.exp()
    log_of_rest = torch.log((1 - old_prob + _TINY) / (1 - prob + _TINY))
    divergence = old_prob * (inputs.old_log_prob - inputs.log_prob) + (1 - old_prob) * log_of_rest
    keeps_rise = torch.maximum(_at_most(divergence, clip_ratio_high), _at_most(prob, old_prob))
    keeps_fall = torch.maximum(_at_most(divergence, clip_ratio_low), _at_most(old_prob, prob))
    return _dppo(inputs, keeps_rise, keeps_fall, clip_ratio_c)


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
    is_good = _above(inputs.advantages, advantage_threshold)
    truncated = (inputs.log_prob - inputs.old_log_prob).clamp(max=0.0).exp()
    alpha = torch.lerp(truncated, torch.ones_like(truncated), is_good)
    derivative = -alpha * inputs.advantages
    metrics = _metrics(log_ratio.exp(), log_ratio)
    metrics["means"]["actor/topr_alpha"] = alpha
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
    in_range = _at_most(ratio, 1 + epsilon) * _at_most(-ratio, -1 / (1 + epsilon))
    derivative = -inputs.advantages * in_range
    return TokenLoss(derivative * log_ratio, derivative, **_metrics(ratio, log_ratio, 1 - in_range))


_REC_EPSILONS = ("epsilon_low", "epsilon_high", "epsilon_low_prime", "epsilon_high_prime")


@register_policy_loss(
    "rec",
    analytic=True,
    rules={
        "clip_mode": one_of("none", "one-side", "gspo-one-side", "two-side", "ring"),
        "weight": one_of("none", "importance_sampling", "gspo_importance_sampling", "advantage"),
        "regularizer": one_of("none", "k2", "forward-kl"),
        "regularizer_coef": NOT_NEGATIVE,
        "temp": POSITIVE,
        **dict.fromkeys(_REC_EPSILONS, POSITIVE),
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
    good, bad = _at_most(-advantages, 0.0), _at_most(advantages, 0.0)

    def one_side(clipped: Tensor) -> Tensor:
        return torch.maximum(_at_most(clipped, 1 + epsilon_high) * good, _at_most(-clipped, epsilon_low - 1) * bad)

    two_sides = _at_most(ratio, 1 + epsilon_high) * _at_most(-ratio, epsilon_low - 1)
    if clip_mode == "none":
        keeps = torch.ones_like(ratio)
    elif clip_mode == "two-side":
        keeps = two_sides
    elif clip_mode == "ring":
        far_below = good * _at_most(ratio, 1 - epsilon_low_prime)
        far_above = bad * _at_most(-ratio, -1 - epsilon_high_prime)
        keeps = torch.maximum(two_sides, torch.maximum(far_below, far_above))
    else:
        keeps = one_side(of_sequence if clip_mode == "gspo-one-side" else ratio)

    if weight == "importance_sampling":
        advantages = advantages * ratio
    elif weight == "gspo_importance_sampling":
        advantages = advantages * of_sequence
    elif weight == "advantage":
        advantages = advantages * (advantages / temp).exp()

    derivative = -advantages * keeps
    values = derivative * inputs.log_prob
    if regularizer == "forward-kl":
        values, derivative = values - regularizer_coef * inputs.log_prob, derivative - regularizer_coef
    elif regularizer == "k2":
        values = values + regularizer_coef * log_ratio.square()
        derivative = derivative + 2 * regularizer_coef * log_ratio
    return TokenLoss(values, derivative, **_metrics(ratio, log_ratio, 1 - keeps))


@register_policy_loss("sft", fields=(), analytic=True)
def sft(inputs: PolicyInputs) -> TokenLoss:
    """Negative log-likelihood."""
    return TokenLoss(-inputs.log_prob, -torch.ones_like(inputs.log_prob))


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
    rules={"beta": POSITIVE, "label_smoothing": NOT_NEGATIVE},
)
def dpo(inputs: PolicyInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> TokenLoss:
    """Direct preference optimization: https://arxiv.org/abs/2305.18290.

    Rows 2i and 2i + 1 are a pair, the chosen answer first. A pair must not be cut, which verl's
    ``force_group_size=2`` sees to; the mean is over the pairs of the mini-batch.
    """
    tokens = inputs.tokens
    if tokens.offsets is None or tokens.num_slots % 2:
        raise FieldShapeError(
            f"loss_mode 'dpo' got {tokens.num_slots} rows; expected pairs, chosen and rejected one after the other, "
            "one sequence per row (verl keeps pairs together with force_group_size=2)"
        )
    log_ratio = tokens.sum_per_sequence((inputs.log_prob - inputs.fields["ref_log_prob"]) * tokens.mask)
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
