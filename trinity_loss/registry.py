"""What a policy loss is, and where it is found by name; the losses themselves are in ``policy.py``.

A loss is a function of a :class:`PolicyInputs` that returns one loss per token. It is written on flat
tensors [N], finite everywhere (0 at uncounted tokens), and may look at a whole sequence through
``inputs.tokens``. Two ways to its gradient:

- plain PyTorch on ``inputs.log_prob``: autograd takes the gradient, on the flat tokens;
- ``analytic=True``: the function returns the derivative of each token's loss with respect to its own
  log-prob in :attr:`TokenLoss.derivative`, and nothing is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from trinity_loss.aggregation import AggregationMode
from trinity_loss.errors import ConfigError
from trinity_loss.import_path import find_at
from trinity_loss.metric_set import MetricSet
from trinity_loss.rules import NUMBER, Rule, check
from trinity_loss.tokens import ResponseTokens, as_numbers

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
        values: Loss of each token [N]; of each pair for a loss whose ``mode`` counts pairs.
        derivative: Its derivative with respect to the token's own log-prob [N]; None: ask autograd.
        means: Metrics [N] (or 0-d) that are averaged over the tokens of the mini-batch, or over its pairs.
        maxima: Metrics [N] of which the largest is reported.
        minima: Metrics [N] of which the smallest is reported.
        kept: 1.0 at tokens that stay, 0.0 at those that the loss rejects [N]; None: all stay.
        add_metrics: Adds metrics of other kinds.
    """

    values: Tensor
    derivative: Tensor | None = None
    means: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None
    add_metrics: Callable[[MetricSet], None] | None = None


PolicyLossFn = Callable[..., TokenLoss | Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss.

    Attributes:
        fn: The function.
        fields: Fields of the batch that it reads.
        analytic: Whether it gives its own derivative.
        weighs_itself: Whether it applies ``rollout_is_weights`` itself; else they multiply its values.
        rejects: Whether it may reject tokens.
        rules: What its arguments must be.
        validate: Raises :class:`ConfigError` where arguments do not fit each other.
        mode: Its own aggregation, for a loss that is not one value per token; None: ``loss_agg_mode``.
        arguments: Names of its keyword-only arguments with their defaults (``inspect.Parameter.empty``
            where one must be given).
    """

    fn: PolicyLossFn
    fields: tuple[str, ...] = ("old_log_probs", "advantages")
    analytic: bool = False
    weighs_itself: bool = False
    rejects: bool = False
    rules: Mapping[str, Rule] = field(default_factory=dict)
    validate: Callable[[Mapping[str, Any]], None] | None = None
    mode: AggregationMode | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check_arguments(self, loss_mode: str, given: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigError` where ``loss_args`` has unknown names, lacks one or breaks a rule."""
        own = {k: v for k, v in self.arguments.items() if k not in CLIP_ARGUMENTS}
        for name, value in given.items():
            if name not in own:
                raise ConfigError(
                    f"loss_args has {name!r}, but loss_mode {loss_mode!r} takes {', '.join(own) or 'none'}"
                )
            rule = self.rules.get(name)
            if rule is None and isinstance(value, int | float) and not isinstance(value, bool):
                rule = NUMBER
            if rule is not None:
                check(f"loss_args[{name!r}]", value, rule)
        missing = [k for k, v in own.items() if v is inspect.Parameter.empty and k not in given]
        if missing:
            raise ConfigError(f"loss_mode {loss_mode!r} needs loss_args {', '.join(missing)}")
        if self.validate is not None:
            self.validate(given)

    def __call__(self, inputs: PolicyInputs, **arguments: Any) -> TokenLoss:
        result = self.fn(inputs, **arguments)
        if isinstance(result, Tensor):
            result = TokenLoss(result)
        dtype = inputs.log_prob.dtype
        means, maxima, minima = (
            {name: as_numbers(values, dtype) for name, values in metrics.items()}
            for metrics in (result.means, result.maxima, result.minima)
        )
        result = replace(result, means=means, maxima=maxima, minima=minima)
        if self.mode is None and result.values.shape != inputs.log_prob.shape:
            raise ConfigError(
                f"the policy loss returned shape {list(result.values.shape)}; expected one value per response "
                f"token, {list(inputs.log_prob.shape)}"
            )
        return result


_LOSSES: dict[str, PolicyLoss] = {}

_SELECTS = (
    "it selects tokens by their covariance among all tokens of the batch, and a micro-batch is not the batch: which "
    "tokens are selected, and how many, depends on the cut"
)
_REFUSED = {"clip_cov": _SELECTS, "kl_cov": _SELECTS}


def register_policy_loss(
    *names: str,
    fields: tuple[str, ...] = ("old_log_probs", "advantages"),
    analytic: bool = False,
    weighs_itself: bool = False,
    rejects: bool = False,
    rules: Mapping[str, Rule] | None = None,
    validate: Callable[[Mapping[str, Any]], None] | None = None,
    mode: AggregationMode | None = None,
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Registers a policy loss under one or more names that ``loss_mode`` then accepts.

    Keyword-only arguments of the function are its ``loss_args``; those named ``clip_ratio_low``,
    ``clip_ratio_high`` and ``clip_ratio_c`` come from the configuration's own fields.

    Args:
        *names: Names; the first one is its own, the others are aliases.
        fields: Fields of the batch that it reads, besides the log-probs.
        analytic: It returns :attr:`TokenLoss.derivative`.
        weighs_itself: It applies ``rollout_is_weights`` itself.
        rejects: It may reject tokens (:attr:`TokenLoss.kept`).
        rules: What its arguments must be, checked when a configuration is made.
        validate: Called with the given arguments then; raises where they do not fit each other.
        mode: Its own aggregation, for a loss that is not one value per token.

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
        loss = PolicyLoss(
            fn, fields, analytic, weighs_itself, rejects, rules or {}, validate, mode, _keyword_arguments(fn)
        )
        for name in names:
            if name in _LOSSES:
                raise ConfigError(f"loss_mode {name!r} exists already")
            _LOSSES[name] = loss
        return fn

    return register


def _keyword_arguments(fn: PolicyLossFn) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}


def policy_loss_names() -> tuple[str, ...]:
    """Names that ``loss_mode`` accepts, besides dotted paths."""
    return tuple(_LOSSES)


def get_policy_loss(loss_mode: str) -> PolicyLoss:
    """The loss of that name, or the function at a dotted path ``package.module:function``.

    Raises:
        ConfigError: Unknown name, or nothing importable at the path.
    """
    if loss_mode in _REFUSED:
        raise ConfigError(f"loss_mode {loss_mode!r} is refused: {_REFUSED[loss_mode]}")
    if loss_mode in _LOSSES:
        return _LOSSES[loss_mode]
    if ":" in loss_mode:
        fn = find_at("loss_mode", loss_mode)
        # A function that was registered keeps what it was registered with.
        registered = next((loss for loss in _LOSSES.values() if loss.fn is fn), None)
        return registered or PolicyLoss(fn, arguments=_keyword_arguments(fn))
    raise ConfigError(
        f"loss_mode is {loss_mode!r}; expected one of {', '.join(_LOSSES)}, or a function of your own as "
        "'package.module:function'"
    )
