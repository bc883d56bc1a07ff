"""Policy losses, token by token; the aggregation mode is applied outside.

A loss is a function of a :class:`PolicyInputs` that returns one loss per token. It is written on flat
tensors [N], finite everywhere (0 at uncounted tokens), and may look at a whole sequence through
``inputs.tokens``. Two ways to its gradient:

- plain PyTorch on ``inputs.log_prob``: autograd takes the gradient, on the flat tokens;
- ``analytic=True``: the function returns the derivative of each token's loss with respect to its own
  log-prob in :attr:`TokenLoss.derivative`, and nothing is recorded.

Formulas are those of verl 0.9.1 (``verl/trainer/ppo/core_algos.py``) with the papers named there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError
from trinity_loss.tokens import ResponseTokens

_LOG_RATIO_LIMIT = 20.0
#: Arguments that LossConfig has a field of its own for.
CLIP_ARGUMENTS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass(frozen=True, eq=False)
class PolicyInputs:
    """What a policy loss may look at. All tensors [N], float32 or float64, 0 at uncounted tokens.

    Attributes:
        tokens: Which tokens count and which sequence each belongs to.
        log_prob: Log-probs under the policy; a leaf that requires grad unless the loss is analytic.
        fields: The fields named at registration, by their name in the batch.
        rollout_is_weights: Importance weights of the rollout correction, None where the trainer sent none.
    """

    tokens: ResponseTokens
    log_prob: Tensor
    fields: Mapping[str, Tensor]
    rollout_is_weights: Tensor | None = None

    @property
    def old_log_prob(self) -> Tensor:
        return self.fields["old_log_probs"]

    @property
    def advantages(self) -> Tensor:
        return self.fields["advantages"]


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """Losses and metrics, token by token.

    Attributes:
        values: Loss of each token [N].
        derivative: Its derivative with respect to the token's own log-prob [N]; None: ask autograd.
        means: Metrics [N] that are averaged over the tokens of the mini-batch.
        maxima: Metrics [N] of which the largest is reported.
        minima: Metrics [N] of which the smallest is reported.
    """

    values: Tensor
    derivative: Tensor | None = None
    means: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLossFn = Callable[..., TokenLoss | Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss.

    Attributes:
        fn: The function.
        fields: Fields of the batch that it reads.
        analytic: Whether it gives its own derivative.
        weighs_itself: Whether it applies ``rollout_is_weights`` itself; else they multiply its values.
        arguments: Names of its keyword-only arguments with their defaults (``inspect.Parameter.empty``
            where one must be given).
    """

    fn: PolicyLossFn
    fields: tuple[str, ...] = ("old_log_probs", "advantages")
    analytic: bool = False
    weighs_itself: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, inputs: PolicyInputs, **arguments: Any) -> TokenLoss:
        result = self.fn(inputs, **arguments)
        if isinstance(result, Tensor):
            result = TokenLoss(result)
        if result.values.shape != inputs.log_prob.shape:
            raise ConfigError(
                f"the policy loss returned shape {list(result.values.shape)}; expected one value per response "
                f"token, {list(inputs.log_prob.shape)}"
            )
        return result


_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(
    *names: str,
    fields: tuple[str, ...] = ("old_log_probs", "advantages"),
    analytic: bool = False,
    weighs_itself: bool = False,
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Registers a policy loss under one or more names that ``loss_mode`` then accepts.

    Keyword-only arguments of the function are its ``loss_args``; those named ``clip_ratio_low``,
    ``clip_ratio_high`` and ``clip_ratio_c`` come from the configuration's own fields.

    Args:
        *names: Names; the first one is its own, the others are aliases.
        fields: Fields of the batch that it reads, besides the log-probs.
        analytic: It returns :attr:`TokenLoss.derivative`.
        weighs_itself: It applies ``rollout_is_weights`` itself.

    Raises:
        ConfigError: A name is taken.

    Example:
        >>> @register_policy_loss("docs-reinforce", fields=("advantages",))
        ... def reinforce(inputs: PolicyInputs, *, baseline: float = 0.0) -> Tensor:
        ...     return -(inputs.advantages - baseline) * inputs.log_prob
        >>> from trinity_loss import LossConfig
        >>> LossConfig(loss_mode="docs-reinforce", loss_args={"baseline": 0.5}).loss_args
        {'baseline': 0.5}
    """

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        for name in names:
            if name in _LOSSES:
                raise ConfigError(f"loss_mode {name!r} exists already")
            _LOSSES[name] = _describe(fn, fields, analytic, weighs_itself)
        return fn

    return register


def _describe(fn: PolicyLossFn, fields: tuple[str, ...], analytic: bool, weighs_itself: bool) -> PolicyLoss:
    arguments = {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
    return PolicyLoss(fn, fields, analytic, weighs_itself, arguments)


def policy_loss_names() -> tuple[str, ...]:
    """Names that ``loss_mode`` accepts, besides dotted paths."""
    return tuple(_LOSSES)


def get_policy_loss(loss_mode: str) -> PolicyLoss:
    """The loss of that name, or the function at a dotted path ``package.module:function``.

    Raises:
        ConfigError: Unknown name, or nothing importable at the path.
    """
    if loss_mode in _LOSSES:
        return _LOSSES[loss_mode]
    if ":" in loss_mode:
        module, _, attribute = loss_mode.partition(":")
        try:
            fn = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"loss_mode is {loss_mode!r}: {error}") from error
        # A function that was registered keeps what it was registered with.
        registered = next((loss for loss in _LOSSES.values() if loss.fn is fn), None)
        return registered or _describe(fn, ("old_log_probs", "advantages"), False, False)
    raise ConfigError(
        f"loss_mode is {loss_mode!r}; expected one of {', '.join(_LOSSES)}, or a function of your own as "
        "'package.module:function'"
    )


def _above(left: Tensor, right: Tensor | float) -> Tensor:
    """1.0 where left > right, else 0.0: a float comparison costs a quarter of a boolean one on a CPU."""
    return torch.gt(left, right, out=torch.empty_like(left))


def _log_ratio(inputs: PolicyInputs) -> Tensor:
    return (inputs.log_prob - inputs.old_log_prob).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


@register_policy_loss("ppo", "vanilla", analytic=True)
def ppo(inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """Clipped policy gradient with dual clip: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1912.09729."""
    advantages = inputs.advantages
    unlimited = inputs.log_prob - inputs.old_log_prob
    log_ratio = unlimited.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    larger = torch.maximum(plain, clipped)
    # Dual clip: where the advantage is negative the loss is at most c·|A|. Where it is positive the loss is
    # negative, so the same bound never binds and needs no branch.
    bound = clip_ratio_c * advantages.abs()
    values = torch.minimum(larger, bound)
    is_clipped = _above(clipped, plain)
    is_bounded = _above(larger, bound)
    moves = torch.le(unlimited.abs(), _LOG_RATIO_LIMIT, out=torch.empty_like(unlimited))
    derivative = plain * moves * (1 - is_clipped) * (1 - is_bounded)
    return TokenLoss(
        values,
        derivative,
        means={
            "actor/pg_clipfrac": is_clipped,
            "actor/pg_clipfrac_lower": is_bounded,
            "actor/ppo_kl": -log_ratio,
        },
    )
