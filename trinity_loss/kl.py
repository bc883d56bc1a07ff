"""KL estimators, token by token, with their derivatives.

Names and clamps are verl's (``kl_penalty`` in ``verl/trainer/ppo/core_algos.py``); the estimators are
John Schulman's, http://joschu.net/blog/kl-approx.html. With a trailing ``+`` the value is the estimator's
and the gradient that of ``k2``, whose expectation is the gradient of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trinity_loss.log_ratio import limited
from trinity_loss.rules import check, one_of
from trinity_loss.tokens import equal

ValueAndDerivative = tuple[Tensor, Tensor]

_OUTPUT_LIMIT = 10.0


def _k1(difference: Tensor) -> ValueAndDerivative:
    return difference, torch.ones_like(difference)


def _abs(difference: Tensor) -> ValueAndDerivative:
    return difference.abs(), difference.sign()


def _k2(difference: Tensor) -> ValueAndDerivative:
    return 0.5 * difference.square(), difference


def _k3(difference: Tensor) -> ValueAndDerivative:
    # Clamped before and after the exponential, so an outlier costs 10 and pulls with no gradient: a log-ratio that is
    # clamped has a value above 10.
    log_ratio = limited(difference)
    growth = (-log_ratio).expm1()
    value = growth + log_ratio
    bounded = value.clamp(max=_OUTPUT_LIMIT)
    return bounded, -growth * equal(bounded, value)


_ESTIMATORS: dict[str, Callable[[Tensor], ValueAndDerivative]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}

KL_TYPES: tuple[str, ...] = tuple(name + plus for name in _ESTIMATORS for plus in ("", "+"))


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kl_loss_type: str) -> ValueAndDerivative:
    """Estimates KL(policy ‖ reference) at each token.

    Args:
        log_prob: Log-probabilities under the policy, float32 or float64, any shape.
        ref_log_prob: Those under the reference, same shape.
        kl_loss_type: One of :data:`KL_TYPES`.

    Returns:
        The estimate and its derivative with respect to ``log_prob``, both of the inputs' shape, without
        a graph.

    Raises:
        ConfigError: Unknown ``kl_loss_type``.

    Example:
        >>> value, derivative = kl_penalty(torch.tensor(-1.0), torch.tensor(-1.5), "low_var_kl")
        >>> round(value.item(), 5), round(derivative.item(), 5)
        (0.10653, 0.39347)
    """
    check("kl_loss_type", kl_loss_type, one_of(*KL_TYPES))
    with torch.no_grad():
        difference = log_prob - ref_log_prob
        value, derivative = _ESTIMATORS[kl_loss_type.removesuffix("+")](difference)
        if kl_loss_type.endswith("+"):
            derivative = difference
        return value, derivative


def unbiased_kl(log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_loss_type: str) -> ValueAndDerivative:
    """:func:`kl_penalty` times the ratio π/π_old, which moves with the log-prob.

    Its expectation over answers of the old policy is that over answers of the policy, with its gradient:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.

    Example:
        >>> value, derivative = unbiased_kl(*torch.tensor([-1.0, -1.0, -1.5]), "k1")
        >>> value.item(), derivative.item()
        (0.5, 1.5)
    """
    value, derivative = kl_penalty(log_prob, ref_log_prob, kl_loss_type)
    with torch.no_grad():
        unlimited = log_prob - old_log_prob
        log_ratio = limited(unlimited)
        ratio = log_ratio.exp()
        return ratio * value, ratio * (derivative + equal(log_ratio, unlimited) * value)
