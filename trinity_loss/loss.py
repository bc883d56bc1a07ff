"""The loss as an engine calls it: configuration, local means, global shares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

import trinity_loss.policy  # noqa: F401  (registers the losses)
from trinity_loss.aggregation import AggregationMode, Ratio, Totals, has_scale_factor, make_aggregation_mode
from trinity_loss.batch import MicroBatch, MicroBatchData, Source, local_prompt_ids, read_micro_batch
from trinity_loss.errors import ConfigError, FieldShapeError, MissingFieldError, TotalsError
from trinity_loss.kl import check_kl_type, kl_penalty
from trinity_loss.metrics import MetricSet
from trinity_loss.registry import PolicyInputs, PolicyLoss, TokenLoss, get_policy_loss
from trinity_loss.tokens import ResponseTokens


@dataclass(frozen=True)
class LossConfig:
    """What the loss is. Frozen, picklable, checked when made; field names are verl's where verl has one.

    Attributes:
        loss_mode: Policy loss, see :func:`trinity_loss.policy.policy_loss_names`, or ``package.module:function``.
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
        count_empty_sequences: Whether fully masked sequences count in a mean over sequences (verl: yes).
        count_padding_rows: Whether the synthetic rows of verl's v1 trainer count in it (verl: yes).
        count_rejected_tokens: Whether a mean over tokens divides by the tokens before rejection (verl v1: yes).

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
    count_empty_sequences: bool = True
    count_padding_rows: bool = True
    count_rejected_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), minimum=0.0)
        for name in ("entropy_coeff", "kl_loss_coef"):
            _check_number(name, getattr(self, name))
        _check_number("clip_ratio_c", self.clip_ratio_c)
        if self.clip_ratio_c <= 1.0:
            raise ConfigError(f"clip_ratio_c is {self.clip_ratio_c!r}; expected a number above 1")
        for name in ("use_kl_loss", "count_empty_sequences", "count_padding_rows", "count_rejected_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected true or false")
        check_kl_type(self.kl_loss_type)
        object.__setattr__(self, "loss_args", dict(self.loss_args))
        self.policy_loss.check_arguments(self.loss_mode, self.loss_args)
        self.aggregation_modes  # noqa: B018  (makes the modes, which checks them)

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
    def aggregation_modes(self) -> dict[str, AggregationMode]:
        """Mode of each term: ``pg``, ``entropy``, ``kl``."""
        names = {
            "pg": self.loss_agg_mode,
            "entropy": self.entropy_agg_mode or self.loss_agg_mode,
            "kl": self.kl_agg_mode or self.loss_agg_mode,
        }
        modes = {term: self._make_mode(name) for term, name in names.items()}
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


def _check_number(name: str, value: Any, minimum: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < minimum:
        expected = "a finite number" if minimum == -math.inf else f"a finite number, at least {minimum:g}"
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the loss, token by token.

    Attributes:
        name: Key of its metric.
        coefficient: Its weight in the loss, sign included.
        mode: How its tokens are aggregated.
        values: [N], finite.
        source: What it is differentiated by: log-probs or entropies.
        derivative: Derivative of each value with respect to its own token [N]; None: ``leaf`` and ``graph``.
        leaf: Leaf of the graph behind ``graph``.
        graph: The values with their graph.
    """

    name: str
    coefficient: float
    mode: AggregationMode
    values: Tensor
    source: Source
    derivative: Tensor | None
    leaf: Tensor | None = None
    graph: Tensor | None = None

    def pull_back(self, weights: Tensor) -> Tensor:
        """Gradient [N] with respect to the source of the values weighted by ``weights`` [N]."""
        if self.derivative is not None:
            return weights * self.derivative
        assert self.graph is not None
        assert self.leaf is not None
        if not self.graph.requires_grad:
            return torch.zeros_like(weights)
        (gradient,) = torch.autograd.grad(self.graph, self.leaf, weights, allow_unused=True)
        return torch.zeros_like(weights) if gradient is None else gradient


class _WithGradient(torch.autograd.Function):
    """A loss whose gradients are known already: backward only puts them in their places."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, sources: list[Source], gradients: list[Tensor], *values: Tensor) -> Tensor:
        ctx.sources, ctx.count = sources, len(values)
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scattered = (
            source.scatter(upstream * gradient) for source, gradient in zip(ctx.sources, ctx.saved_tensors, strict=True)
        )
        return None, None, None, *scattered


class TrinityPolicyLoss:
    """The loss of one batch by itself: means over the tokens and sequences that it holds.

    Args:
        config: What the loss is.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 2)
        >>> log_probs = torch.full((1, 2), -1.0, requires_grad=True)
        >>> loss, metrics = TrinityPolicyLoss(LossConfig())(
        ...     model_output={"log_probs": log_probs},
        ...     data={"response_mask": ones, "old_log_probs": -ones, "advantages": 2 * ones},
        ... )
        >>> loss.backward()
        >>> loss.item(), log_probs.grad.tolist(), metrics["actor/pg_loss"]
        (-2.0, [[-1.0, -1.0]], -2.0)
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self._policy_loss = config.policy_loss
        self._policy_arguments = config.policy_arguments
        self._modes = config.aggregation_modes

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self.config, f.name)!r}"
            for f in fields(self.config)
            if f.name in ("loss_mode", "loss_agg_mode") or getattr(self.config, f.name) != getattr(LossConfig(), f.name)
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def __call__(
        self, *, model_output: Mapping[str, Any], data: MicroBatchData, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes loss and metrics of a micro-batch.

        Args:
            model_output: ``log_probs`` and, for the entropy term, ``entropy``, from the engine.
            data: The micro-batch.
            dp_group: Part of the engine's contract; no collective runs in a loss, so it is not used.

        Returns:
            The loss, 0-d with a graph, in float32 or better, and the metrics.

        Raises:
            BatchError: The micro-batch does not fit the configuration, see :mod:`trinity_loss.errors`.
        """
        # Outside no_grad: the flat view of the model output must keep its graph.
        batch = read_micro_batch(model_output, data, count_padding_rows=self.config.count_padding_rows)
        with torch.no_grad():
            if any(mode.needs_prompt_groups for mode in self._modes.values()):
                batch = replace(batch, tokens=self._with_prompt_groups(batch))
            metrics = MetricSet()
            loss, gradients = self._combine(batch, self._terms(batch, metrics), metrics)
            faults = [fault for fault, _ in batch.faults]
            metrics.checks |= {f"fault {i}": fault for i, fault in enumerate(faults)}
            numbers, checks = metrics.read()
        self._raise_faults(batch, checks)
        self._check_counts(metrics, numbers, batch, dp_group)
        if torch.is_grad_enabled():
            sources = list(gradients)
            loss = _WithGradient.apply(loss, sources, list(gradients.values()), *(s.values for s in sources))
        return loss, self._report(metrics, numbers, batch)

    def _terms(self, batch: MicroBatch, metrics: MetricSet) -> list[Term]:
        config = self.config
        terms = [self._policy_term(batch, metrics)]
        if batch.entropy is not None:
            entropy = batch.tokens.select(batch.entropy.gather())
            metrics.checks["entropy"] = entropy.sum()
            derivative = torch.ones_like(entropy)
            terms.append(
                Term(
                    "actor/entropy_loss",
                    -config.entropy_coeff,
                    self._modes["entropy"],
                    entropy,
                    batch.entropy,
                    derivative,
                )
            )
        elif config.entropy_coeff != 0:
            raise MissingFieldError(
                f"entropy_coeff is {config.entropy_coeff}, but the model output has no 'entropy'; "
                "actor_rollout_ref.actor.calculate_entropy=True makes the engine return it"
            )
        if config.use_kl_loss:
            reference = self._read(batch, "ref_log_prob", metrics)
            value, derivative = kl_penalty(batch.log_prob, reference, config.kl_loss_type)
            terms.append(Term("kl_loss", config.kl_loss_coef, self._modes["kl"], value, batch.log_probs, derivative))
            metrics.constants["kl_coef"] = config.kl_loss_coef
        return terms

    def _policy_term(self, batch: MicroBatch, metrics: MetricSet) -> Term:
        loss = self._policy_loss
        metrics.checks["log_probs"] = batch.log_prob.sum()
        fields = {name: self._read(batch, name, metrics) for name in loss.fields}
        weights = self._read(batch, "rollout_is_weights", metrics) if batch.has("rollout_is_weights") else None
        log_prob = batch.log_prob
        if not loss.analytic:
            log_prob = log_prob.detach().requires_grad_()
        with torch.set_grad_enabled(not loss.analytic):
            result = loss(PolicyInputs(batch.tokens, log_prob, fields, weights), **self._policy_arguments)
            values, derivative = result.values, result.derivative
            if weights is not None and not loss.weighs_itself:
                values = values * weights
                derivative = None if derivative is None else derivative * weights
        self._policy_metrics(batch, result, metrics)
        return Term(
            "actor/pg_loss",
            1.0,
            self._modes["pg"],
            values.detach(),
            batch.log_probs,
            derivative,
            leaf=log_prob,
            graph=values,
        )

    def _policy_metrics(self, batch: MicroBatch, result: TokenLoss, metrics: MetricSet) -> None:
        tokens = batch.tokens
        mode = self._policy_loss.mode
        if mode is None:
            weights, count, total = tokens.indicator(batch.dtype), tokens.num_tokens, batch.num_valid_tokens
        else:
            weights = mode.token_weights(tokens, batch.dtype)
            count, total = mode.local_count(tokens), self._total(mode, batch.totals)
        for name, values in result.means.items():
            metrics.add_ratio(name, Ratio((values.detach() * weights).sum(), count), total)
        for name, values in result.maxima.items():
            metrics.add_extreme(name, "max", values.detach(), tokens)
        for name, values in result.minima.items():
            metrics.add_extreme(name, "min", values.detach(), tokens)

    def _read(self, batch: MicroBatch, name: str, metrics: MetricSet) -> Tensor:
        """A field [N]; its sum travels with the metrics, since one NaN or infinity makes it non-finite."""
        values = batch.read(name)
        metrics.checks[name] = values.sum()
        return values

    def _combine(self, batch: MicroBatch, terms: list[Term], metrics: MetricSet) -> tuple[Tensor, dict[Source, Tensor]]:
        loss = torch.zeros((), dtype=torch.float64, device=batch.log_prob.device)
        gradients: dict[Source, Tensor] = {}
        for term in terms:
            weights = term.mode.linearize(term.values, batch.tokens)
            numerator = term.mode.numerator(term.values, batch.tokens)
            count = term.mode.local_count(batch.tokens)
            scale = self._scale(term.mode, count, batch.totals)
            metrics.add_ratio(term.name, Ratio(numerator, count), self._total(term.mode, batch.totals))
            if term.coefficient == 0:
                continue
            factor = term.coefficient * scale
            loss = loss + factor * numerator
            gradient = factor * term.pull_back(weights)
            gradients[term.source] = gradients[term.source] + gradient if term.source in gradients else gradient
        return loss.to(batch.dtype), gradients

    def _with_prompt_groups(self, batch: MicroBatch) -> ResponseTokens:
        return batch.tokens.with_prompt_groups(local_prompt_ids(batch), count_empty=self.config.count_empty_sequences)

    def _scale(self, mode: AggregationMode, count: Tensor, totals: Totals) -> Tensor | float:
        """What a numerator is multiplied by; here one over the count of this batch."""
        return count.clamp(min=1).to(torch.float64).reciprocal()

    def _total(self, mode: AggregationMode, totals: Totals) -> int | None:
        """The mini-batch's count, None where it is not used."""
        return None

    def _check_counts(self, metrics: MetricSet, numbers: dict[str, float], batch: MicroBatch, dp_group: Any) -> None:
        """Raises where totals contradict the micro-batch; here nothing reads them."""

    def _raise_faults(self, batch: MicroBatch, checks: dict[str, float]) -> None:
        for number, (_, message) in enumerate(batch.faults):
            if checks[f"fault {number}"]:
                raise FieldShapeError(message)
        for name, total in checks.items():
            if not math.isfinite(total):
                source = {"log_probs": batch.log_probs, "entropy": batch.entropy}.get(name)
                batch.check_finite(name, batch.read(name) if source is None else source.gather())

    def _report(self, metrics: MetricSet, numbers: dict[str, float], batch: MicroBatch) -> dict[str, Any]:
        return metrics.local(numbers)


class EnginePolicyLoss(TrinityPolicyLoss):
    """The loss of a micro-batch as its share of the whole mini-batch, for verl's engines.

    Each term is ``numerator × dp_size / count of the mini-batch``, so that the sum over micro-batches,
    averaged over data-parallel ranks, is the term of the whole mini-batch however it was cut. The counts
    are ``batch_num_tokens``, ``global_batch_size``, ``dp_size`` of the micro-batch and, where a mode needs
    others, what :mod:`trinity_loss.verl` attaches. Where the engine gives no count the weight is 1: the
    local mean of :class:`TrinityPolicyLoss` remains, and a warning says so.

    Metrics are verl's ``Metric`` objects, exact once verl has reduced them.

    Args:
        config: What the loss is.
    """

    def _with_prompt_groups(self, batch: MicroBatch) -> ResponseTokens:
        totals = batch.totals
        if totals.batch_num_prompts is not None and batch.has("prompt_num_tokens"):
            return replace(
                batch.tokens,
                group_num_tokens=batch.prompt_num_tokens(),
                num_groups=batch.tokens.num_tokens * 0,
            )
        if totals != Totals():
            raise TotalsError(
                "loss_agg_mode 'prompt-mean' needs batch_num_prompts and prompt_num_tokens, counted over the whole "
                "mini-batch, since a prompt group may be cut; trinity_loss.verl.PolicyLossConfig attaches them"
            )
        return super()._with_prompt_groups(batch)

    def _scale(self, mode: AggregationMode, count: Tensor, totals: Totals) -> Tensor | float:
        dp_size = totals.dp_size or 1
        total = self._total(mode, totals)
        if total is not None:
            return dp_size / total if total else 0.0
        if dp_size > 1:
            raise TotalsError(f"dp_size is {dp_size} and {mode.total} is missing; with several ranks it is needed")
        _warn_once(f"the micro-batch has no {mode.total}: its loss is the mean over its own tokens or sequences")
        return super()._scale(mode, count, totals)

    def _total(self, mode: AggregationMode, totals: Totals) -> int | None:
        return 1 if mode.total is None else getattr(totals, mode.total)

    def _check_counts(self, metrics: MetricSet, numbers: dict[str, float], batch: MicroBatch, dp_group: Any) -> None:
        dp_size = batch.totals.dp_size
        if dp_group is not None and dp_size is not None and torch.distributed.is_initialized():
            group_size = torch.distributed.get_world_size(dp_group)
            if group_size != dp_size:
                raise TotalsError(f"dp_size is {dp_size}, but the data-parallel group has {group_size} ranks")
        for term, mode in (("actor/pg_loss", "pg"), ("actor/entropy_loss", "entropy"), ("kl_loss", "kl")):
            entry = metrics.entries.get(term)
            if entry is None or entry.total is None or self._modes[mode].total is None:
                continue
            count = int(numbers[term + "#"])
            if count > entry.total:
                raise TotalsError(
                    f"{self._modes[mode].total} is {entry.total}, but this micro-batch alone counts {count}: the "
                    "totals are not those of this mini-batch (look at who sets them, and at a mask that changed since)"
                )

    def _report(self, metrics: MetricSet, numbers: dict[str, float], batch: MicroBatch) -> dict[str, Any]:
        return metrics.engine(numbers, batch.totals.dp_size or 1)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
