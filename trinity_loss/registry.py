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
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode
from trinity_loss.errors import ConfigError
from trinity_loss.import_path import find_at
from trinity_loss.metric_set import MetricSet
from trinity_loss.rules import BOOLEAN, NUMBER, TEXT, Rule, check
from trinity_loss.selection import Ranks
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

    def versions(self) -> list[int]:
        """How often each tensor was written into."""
        tensors = [self.log_prob, self.tokens.mask, *self.fields.values()]
        tensors += [] if self.rollout_is_weights is None else [self.rollout_is_weights]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

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

    def times(self, weights: Tensor, means: Mapping[str, Tensor] | None = None) -> TokenLoss:
        """The loss of each token times weights [N] that have no gradient, with further means."""
        derivative = None if self.derivative is None else self.derivative * weights
        means = {**self.means, **(means or {})}
        return replace(self, values=self.values * weights, derivative=derivative, means=means)


PolicyLossFn = Callable[..., TokenLoss | Tensor]
Fn = TypeVar("Fn", bound=PolicyLossFn)


@dataclass(frozen=True)
class OverMiniBatch:
    """A field of a loss that no micro-batch can make, since it depends on all tokens of the mini-batch.

    Attributes:
        of: Makes it, once per mini-batch, on every rank: given the :class:`PolicyInputs` of the rank's rows, a number
            [N] for each token (:func:`trinity_loss.selection.token_numbers`), the
            :class:`trinity_loss.selection.Ranks` that hold the other rows and, by name, those arguments of the loss
            that it takes, it returns values [N].
        needed: Whether the loss reads it, given the loss's arguments.
    """

    of: Callable[..., Tensor]
    needed: Callable[[Mapping[str, Any]], bool] = lambda arguments: True

    def make(self, inputs: PolicyInputs, numbers: Tensor, ranks: Ranks, arguments: Mapping[str, Any]) -> Tensor:
        """The field [N] of this rank's tokens."""
        taken = [p.name for p in inspect.signature(self.of).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return self.of(inputs, numbers, ranks, **{name: arguments[name] for name in taken})


@dataclass(frozen=True)
class ExpertPart:
    """What a loss makes of an expert's rows, which the field ``expert_mask`` marks; it takes the other rows itself.

    The whole is (1 - µ) × the aggregate of the usual rows + µ × that of the expert's, each over its own count.

    Attributes:
        expert: The loss of the expert's rows, given the :class:`PolicyInputs` and all arguments of the loss.
        weight: µ, given the arguments and the training step.
        needs_step: Whether µ depends on the step, given the arguments.
    """

    expert: Callable[[PolicyInputs, Mapping[str, Any]], TokenLoss]
    weight: Callable[[Mapping[str, Any], int], float]
    needs_step: Callable[[Mapping[str, Any]], bool] = lambda arguments: False


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss.

    Attributes:
        fn: The function.
        arguments: Names of its keyword-only arguments with their defaults (``inspect.Parameter.empty``
            where one must be given).

    The others are the arguments of :func:`register_policy_loss`.
    """

    fn: PolicyLossFn
    fields: tuple[str, ...] = ("old_log_probs", "advantages")
    analytic: bool = False
    weighs_itself: bool = False
    rejects: bool = False
    rules: Mapping[str, Rule] = field(default_factory=dict)
    validate: Callable[[Mapping[str, Any]], None] | None = None
    mode: AggregationMode | None = None
    agg_mode: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    over_mini_batch: Mapping[str, OverMiniBatch] = field(default_factory=dict)
    mixture: ExpertPart | None = None

    def check_arguments(self, loss_mode: str, given: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigError` where ``loss_args`` has unknown names, lacks one or breaks a rule."""
        own = {k: v for k, v in self.arguments.items() if k not in CLIP_ARGUMENTS}
        for name, value in given.items():
            if name not in own:
                raise ConfigError(
                    f"loss_args has {name!r}, but loss_mode {loss_mode!r} takes {', '.join(own) or 'none'}"
                )
            rule = self.rules.get(name) or _rule_of(own[name], value)
            if rule is not None:
                check(f"loss_args[{name!r}]", value, rule)
        missing = [k for k, v in own.items() if v is inspect.Parameter.empty and k not in given]
        if missing:
            raise ConfigError(f"loss_mode {loss_mode!r} needs loss_args {', '.join(missing)}")
        if self.validate is not None:
            self.validate(given)

    def needed_over_mini_batch(self, arguments: Mapping[str, Any]) -> dict[str, OverMiniBatch]:
        """Those fields over the mini-batch that it reads, given its arguments."""
        complete = {**self.arguments, **arguments}
        return {name: field for name, field in self.over_mini_batch.items() if field.needed(complete)}

    def __call__(self, inputs: PolicyInputs, **arguments: Any) -> TokenLoss:
        """What the function returns, in tensors of the inputs' dtype.

        Raises:
            ConfigError: It is no :class:`TokenLoss`, or the function wrote into its inputs.
        """
        before = inputs.versions()
        result = self.fn(inputs, **arguments)
        if inputs.versions() != before:
            raise ConfigError("the policy loss writes into its inputs, which other terms read too; let it copy")
        return self._as_token_loss(result, inputs.log_prob)

    def _as_token_loss(self, result: Any, log_prob: Tensor) -> TokenLoss:
        if isinstance(result, Tensor):
            result = TokenLoss(result)
        if not isinstance(result, TokenLoss):
            raise ConfigError(
                f"the policy loss returned {_kind(result)}; expected one value per response token, or a TokenLoss"
            )
        per_token = log_prob.shape
        values = _as_numbers("values", result.values, log_prob, per_token if self.mode is None else None)
        derivative, kept = result.derivative, result.kept
        if self.analytic or derivative is not None:
            derivative = _as_numbers("derivative", derivative, log_prob, per_token)
        if kept is not None:
            kept = _as_numbers("kept", kept, log_prob, per_token)
        # A mean may be one number per pair, as the values are; a largest or smallest is one of tokens.
        means, maxima, minima = (
            {name: _as_numbers(f"metric {name!r}", metric, log_prob, shape, spread=True) for name, metric in of.items()}
            for of, shape in (
                (result.means, values.shape),
                (result.maxima, per_token),
                (result.minima, per_token),
            )
        )
        maxima, minima = ({name: metric.expand(per_token) for name, metric in of.items()} for of in (maxima, minima))
        return replace(
            result, values=values, derivative=derivative, kept=kept, means=means, maxima=maxima, minima=minima
        )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_kind, value))}"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _as_numbers(name: str, values: Any, log_prob: Tensor, shape: torch.Size | None, *, spread: bool = False) -> Tensor:
    """Values as a tensor of the log-probs' dtype; its shape is ``shape``, or 0-d where ``spread``."""
    if spread and isinstance(values, bool | int | float):
        values = torch.full((), values, dtype=log_prob.dtype, device=log_prob.device)
    if not isinstance(values, Tensor) or values.is_complex():
        raise ConfigError(f"{name} of the policy loss is {_kind(values)}; expected a tensor of real numbers")
    if shape is not None and values.shape != shape and not (spread and values.dim() == 0):
        raise ConfigError(
            f"{name} of the policy loss has shape {list(values.shape)}; expected {list(shape)}, one number for each "
            "response token"
        )
    return values if values.dtype == log_prob.dtype else as_numbers(values, log_prob.dtype)


def _rule_of(default: Any, value: Any) -> Rule | None:
    """The rule of an argument without one: a value of the default's kind, and in any case a finite number."""
    for kind, rule in ((bool, BOOLEAN), (int | float, NUMBER), (str, TEXT)):
        if isinstance(default, kind):
            return rule
    return NUMBER if isinstance(value, int | float) and not isinstance(value, bool) else None


_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(
    *names: str,
    fields: tuple[str, ...] = ("old_log_probs", "advantages"),
    analytic: bool = False,
    weighs_itself: bool = False,
    rejects: bool = False,
    rules: Mapping[str, Rule] | None = None,
    validate: Callable[[Mapping[str, Any]], None] | None = None,
    mode: AggregationMode | None = None,
    over_mini_batch: Mapping[str, OverMiniBatch] | None = None,
    agg_mode: str | None = None,
    mixture: ExpertPart | None = None,
) -> Callable[[Fn], Fn]:
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
        over_mini_batch: Fields that are made of the whole mini-batch, by name, such as which tokens it selects.
        agg_mode: Name of the aggregation mode that is part of the loss.
        mixture: What it makes of an expert's rows.

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

    def register(fn: Fn) -> Fn:
        loss = PolicyLoss(
            fn=fn,
            fields=fields,
            analytic=analytic,
            weighs_itself=weighs_itself,
            rejects=rejects,
            rules=rules or {},
            validate=validate,
            mode=mode,
            arguments=_keyword_arguments(fn, names[0]),
            over_mini_batch=over_mini_batch or {},
            agg_mode=agg_mode,
            mixture=mixture,
        )
        for name in names:
            if name in _LOSSES:
                raise ConfigError(f"loss_mode {name!r} exists already")
            _LOSSES[name] = loss
        return fn

    return register


def _keyword_arguments(fn: PolicyLossFn, name: str) -> dict[str, Any]:
    """Keyword-only arguments of a loss with their defaults.

    Raises:
        ConfigError: It is no function of one :class:`PolicyInputs`.
    """
    expected = "expected a function of one PolicyInputs, other arguments keyword-only"
    if not callable(fn) or isinstance(fn, type):
        what = f"the class {fn.__name__}" if isinstance(fn, type) else f"a {type(fn).__name__}"
        raise ConfigError(f"loss_mode {name!r} is {what}; {expected}")
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss_mode {name!r} cannot be looked at ({error}); {expected}") from error
    if {"log_prob", "response_mask", "loss_agg_mode"} <= set(parameters):
        raise ConfigError(
            f"loss_mode {name!r} has the signature of verl's own policy losses, ({', '.join(parameters)}), and "
            f"aggregates by itself; {expected}, one loss per token (without our policy_loss._target_, verl takes it "
            "under the name that its register_policy_loss gives it)"
        )
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    bound = [p.name for p in positional[1:] if p.default is p.empty]
    if bound or not (positional or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())):
        raise ConfigError(f"loss_mode {name!r} takes ({', '.join(parameters)}); {expected}")
    return {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}


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
        return _at_place(loss_mode, find_at("loss_mode", loss_mode))
    raise ConfigError(
        f"loss_mode is {loss_mode!r}; expected one of {', '.join(_LOSSES)}, or a function of your own as "
        "'package.module:function'"
    )


def _at_place(loss_mode: str, fn: Any) -> PolicyLoss:
    """The loss of a function; one that was registered keeps what it was registered with, bound arguments or not."""
    for loss in _LOSSES.values():
        if loss.fn is fn:
            return loss
        if isinstance(fn, partial) and loss.fn is fn.func:
            return replace(loss, fn=fn, arguments=_keyword_arguments(fn, loss_mode))
    return PolicyLoss(fn, arguments=_keyword_arguments(fn, loss_mode))
