"""Policy losses that choose among the tokens of the whole mini-batch: ``clip_cov``, ``kl_cov``, ``m2po``.

What is chosen is known before the mini-batch is trained on (:mod:`trinity_loss.selection`), so every micro-batch reads
the field ``selected_tokens`` and no cut changes it. Formulas are those of verl 0.9.1's ``core_algos.py`` and AReaL's
``actor.py``; there the tokens of a micro-batch, or of a rank, choose among themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_loss.log_ratio import limited
from trinity_loss.policy import ppo
from trinity_loss.registry import OverMiniBatch, PolicyInputs, TokenLoss, register_policy_loss
from trinity_loss.rules import NOT_NEGATIVE, NUMBER, POSITIVE, SHARE
from trinity_loss.selection import Ranks, largest, smallest_with_mean_below, top_quantile
from trinity_loss.tokens import equal

SELECTED = "selected_tokens"


def high_entropy_tokens(inputs: PolicyInputs, entropy: Tensor, numbers: Tensor, ranks: Ranks, share: float) -> Tensor:
    """1.0 at the share of the mini-batch's tokens that have the highest entropy [N] (TRL's top_entropy_quantile)."""
    mask = inputs.tokens.mask
    return _spread(inputs, top_quantile(entropy[mask], share, numbers[mask], ranks))


def _spread(inputs: PolicyInputs, chosen: Tensor) -> Tensor:
    """What was said of the tokens that count, [N] with 0.0 at the others."""
    return torch.zeros_like(inputs.log_prob).masked_scatter_(inputs.tokens.mask, chosen.to(inputs.log_prob.dtype))


def _covariances(inputs: PolicyInputs, ranks: Ranks) -> tuple[Tensor, int]:
    """(A - mean A)(log π - mean log π) of each token that counts, float64, and how many all ranks have."""
    mask = inputs.tokens.mask
    advantages, log_prob = (values[mask].to(torch.float64) for values in (inputs.advantages, inputs.log_prob.detach()))
    count, of_advantages, of_log_prob = ranks.total(mask.sum(), advantages.sum(), log_prob.sum())
    count = max(count, 1.0)
    return (advantages - of_advantages / count) * (log_prob - of_log_prob / count), int(count)


def _clip_cov_tokens(
    inputs: PolicyInputs,
    numbers: Tensor,
    ranks: Ranks,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    mask = inputs.tokens.mask
    covariances, count = _covariances(inputs, ranks)
    ratio = limited(inputs.log_prob.detach() - inputs.old_log_prob)[mask].exp()
    cost = -inputs.advantages[mask]
    is_clipped = cost * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) > cost * ratio
    candidates = (covariances > clip_cov_lb) & (covariances < clip_cov_ub) & ~is_clipped
    # The smallest of numbers that are as good as random: a draw that belongs to the tokens.
    drawn = ~numbers[mask][candidates]
    chosen = largest(drawn, max(int(clip_cov_ratio * count), 1), torch.zeros_like(drawn), ranks)
    return _spread(inputs, candidates.masked_scatter(candidates, chosen))


def _kl_cov_tokens(inputs: PolicyInputs, numbers: Tensor, ranks: Ranks, *, kl_cov_ratio: float) -> Tensor:
    covariances, count = _covariances(inputs, ranks)
    chosen = largest(covariances, max(int(kl_cov_ratio * count), 1), numbers[inputs.tokens.mask], ranks)
    return _spread(inputs, chosen)


def _m2po_tokens(inputs: PolicyInputs, numbers: Tensor, ranks: Ranks, *, m2_threshold: float) -> Tensor:
    mask = inputs.tokens.mask
    squares = (inputs.log_prob.detach() - inputs.old_log_prob)[mask].to(torch.float64).square()
    return _spread(inputs, smallest_with_mean_below(squares, m2_threshold, numbers[mask], ranks))


@register_policy_loss(
    "clip_cov",
    analytic=True,
    over_mini_batch={SELECTED: OverMiniBatch(_clip_cov_tokens)},
    rules={"clip_cov_ratio": SHARE, "clip_cov_lb": NUMBER, "clip_cov_ub": NUMBER},
)
def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> TokenLoss:
    """Clipped policy gradient without some of the tokens of large covariance: https://arxiv.org/abs/2505.22617.

    ``clip_cov_ratio`` of the mini-batch's tokens, drawn among those whose covariance is between the bounds.
    """
    cost = -inputs.advantages
    unlimited = inputs.log_prob - inputs.old_log_prob
    log_ratio = limited(unlimited)
    ratio, stays = log_ratio.exp(), 1 - inputs.fields[SELECTED]
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    values = torch.maximum(plain, clipped)
    derivative = plain * equal(log_ratio, unlimited) * equal(values, plain)
    means = {"actor/pg_clipfrac": 1 - stays, "actor/ppo_kl": -log_ratio}
    return TokenLoss(values * stays, derivative * stays, means=means)


@register_policy_loss(
    "kl_cov",
    analytic=True,
    over_mini_batch={SELECTED: OverMiniBatch(_kl_cov_tokens)},
    rules={"kl_cov_ratio": SHARE, "ppo_kl_coef": NOT_NEGATIVE},
)
def kl_cov(inputs: PolicyInputs, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0) -> TokenLoss:
    """Policy gradient with a penalty on the tokens of largest covariance: https://arxiv.org/abs/2505.22617.

    ``actor/ppo_kl`` is the mean of \\|log-ratio\\|, as verl reports it for this loss.
    """
    cost = -inputs.advantages
    unlimited = inputs.log_prob - inputs.old_log_prob
    log_ratio = limited(unlimited)
    penalty = ppo_kl_coef * inputs.fields[SELECTED]
    plain, moves = cost * log_ratio.exp(), equal(log_ratio, unlimited)
    values = plain + penalty * log_ratio.abs()
    derivative = (plain + penalty * log_ratio.sign()) * moves
    return TokenLoss(values, derivative, means={"actor/ppo_kl": log_ratio.abs()})


@register_policy_loss(
    "m2po", analytic=True, over_mini_batch={SELECTED: OverMiniBatch(_m2po_tokens)}, rules={"m2_threshold": POSITIVE}
)
def m2po(
    inputs: PolicyInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    m2_threshold: float = 0.04,
) -> TokenLoss:
    """``ppo`` on the tokens that keep the second moment of the log-ratio small: https://arxiv.org/abs/2510.01161.

    The tokens of largest squared log-ratio weigh 0, as many as bring the mean square of the others below the
    threshold; denominators count them all the same.
    """
    base = ppo(inputs, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
    stays = inputs.fields[SELECTED]
    return base.times(stays, {"actor/m2_dropped_frac": 1 - stays})
