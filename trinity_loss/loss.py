"""The loss as an engine calls it: local means, global shares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode, Ratio
from trinity_loss.autograd import Term, WithGradient, differentiate
from trinity_loss.errors import MissingFieldError, NonFiniteError, TotalsError
from trinity_loss.importance_sampling import add_offpolicy_metrics, add_weight_metrics
from trinity_loss.kl import kl_penalty
from trinity_loss.log_ratio import LogRatio
from trinity_loss.loss_config import LossConfig
from trinity_loss.metric_set import MetricSet
from trinity_loss.micro_batch import (
    FlatBatch,
    MicroBatch,
    local_prompt_ids,
    read_micro_batch,
)
from trinity_loss.registry import PolicyInputs, TokenLoss
from trinity_loss.row_values import MicroBatchData
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import Totals, read_totals

#: Key of each term's metric, and its name among the modes.
_TERMS = {"actor/pg_loss": "pg", "actor/entropy_loss": "entropy", "kl_loss": "kl"}


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
        config = self.config
        with torch.no_grad():
            batch = read_micro_batch(model_output, data, count_padding_rows=config.count_padding_rows)
            if any(mode.needs_prompt_groups for mode in self._modes.values()):
                batch = replace(batch, tokens=self._with_prompt_groups(batch))
            if batch.entropy is None and config.entropy_coeff != 0:
                raise MissingFieldError(
                    f"entropy_coeff is {config.entropy_coeff}, but the model output has no 'entropy'; "
                    "actor_rollout_ref.actor.calculate_entropy=True makes the engine return it"
                )
            first = MetricSet()
            if config.nonfinite == "neutral":
                batch = self._reject_nonfinite(batch, first)
            names = self._fields(batch)
            raw = {name: source.values for name, source in batch.sources.items()}
            raw |= {name: batch.raw(name) for name in names}
            index = {name: s.index for name, s in batch.sources.items() if s.index is not None}
            loss, gradients, metrics = self._token_wise(batch.tokens, raw, index, batch.totals)
            metrics.entries = first.entries | metrics.entries
            metrics.checks |= batch.faults.scalars()
            numbers, checks = metrics.read()
        self._raise_faults(batch, list(raw), checks, numbers)
        self._check_counts(metrics, numbers, batch, dp_group)
        if torch.is_grad_enabled():
            sources = [batch.sources[name] for name in gradients]
            loss = WithGradient.apply(loss, sources, list(gradients.values()), *(s.tensor for s in sources))
        return loss, self._report(metrics, numbers, batch)

    def _token_wise(
        self, tokens: ResponseTokens, raw: dict[str, Tensor], index: dict[str, Tensor], totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor], MetricSet]:
        """All that is done token by token: no host read, nothing of the engine's.

        Args:
            tokens: The response tokens.
            raw: Model output and fields by name, flat.
            index: See :meth:`FlatBatch.load`.
            totals: What was counted over the mini-batch.

        Returns:
            The loss, 0-d without a graph, its gradient [N] by each part of the model output, and the metrics.
        """
        batch, metrics = FlatBatch.load(tokens, raw, index), MetricSet()
        # One number that is not finite makes the sum so; which one it was is asked then.
        metrics.checks["fields"] = batch.total()
        terms = self._terms(batch, totals, metrics)
        loss, gradients = self._combine(terms, totals, metrics)
        return loss.to(batch.dtype), gradients, metrics

    @property
    def _may_be_nonfinite(self) -> set[str]:
        """Fields that may hold a NaN or an infinity at a token that counts."""
        neutral = self.config.nonfinite == "neutral"
        return {"rollout_log_probs"} - set(self._policy_loss.fields) if neutral else set()

    def _fields(self, batch: MicroBatch) -> list[str]:
        """Names of the fields that are read."""
        names = [*self._policy_loss.fields]
        names += [name for name in ("rollout_is_weights",) if batch.has(name)]
        names += ["ref_log_prob"] if self.config.use_kl_loss else []
        if self.config.rollout_metrics is not None:
            names += ["old_log_probs", "rollout_log_probs"]
        return list(dict.fromkeys(names))

    def _terms(self, batch: FlatBatch, totals: Totals, metrics: MetricSet) -> list[Term]:
        config, tokens, values = self.config, batch.tokens, batch.values
        terms = [self._policy_term(batch, totals, metrics)]
        if "entropy" in values:
            mode, coefficient = self._modes["entropy"], -config.entropy_coeff
            terms.append(Term("actor/entropy_loss", coefficient, mode, tokens, values["entropy"], "entropy", 1.0))
        if config.use_kl_loss:
            value, slope = kl_penalty(batch.log_prob, values["ref_log_prob"], config.kl_loss_type)
            mode = self._modes["kl"]
            terms.append(Term("kl_loss", config.kl_loss_coef, mode, tokens, value, "log_probs", slope))
            metrics.constants["kl_coef"] = config.kl_loss_coef
        if config.rollout_metrics is not None:
            self._add_rollout_metrics(batch, config.rollout_metrics, metrics)
        return terms

    def _policy_term(self, batch: FlatBatch, totals: Totals, metrics: MetricSet) -> Term:
        loss, tokens = self._policy_loss, batch.tokens
        fields = {name: batch.values[name] for name in loss.fields}
        weights = batch.values.get("rollout_is_weights")
        weighs = not loss.weighs_itself

        def compute(log_prob: Tensor) -> tuple[Tensor, TokenLoss]:
            result = loss(PolicyInputs(tokens, log_prob, fields, weights), **self._policy_arguments)
            return result.values * weights if weights is not None and weighs else result.values, result

        derivative: Any
        if loss.analytic:
            values, result = compute(batch.log_prob)
            derivative = result.derivative
            if weights is not None and weighs:
                derivative = derivative * weights
        else:
            values, result, derivative = differentiate(compute, batch.log_prob)
        if result.kept is not None:
            tokens = tokens.reject(result.kept == 0)
        self._add_policy_metrics(tokens, batch.dtype, totals, result, metrics)
        return Term("actor/pg_loss", 1.0, self._modes["pg"], tokens, values, "log_probs", derivative)

    def _add_policy_metrics(
        self, tokens: ResponseTokens, dtype: torch.dtype, totals: Totals, result: TokenLoss, metrics: MetricSet
    ) -> None:
        mode = self._policy_loss.mode
        if mode is None:
            weights, count, total = tokens.indicator(dtype), tokens.num_tokens, _num_valid_tokens(totals)
        else:
            weights = mode.token_weights(tokens, dtype)
            count, total = mode.local_count(tokens), self._total(mode, totals)
        for name, values in result.means.items():
            if tokens.has_rejections:
                # How many tokens of the mini-batch stay is known when all of it is computed.
                metrics.add_moments(values.detach().expand_as(weights), weights, {name: "mean"})
            else:
                metrics.add_ratio(name, Ratio(tokens.weighted_sum(values, weights), count), total)
        for name, values in result.maxima.items():
            metrics.add_extreme(name, "max", tokens.maximum(values))
        for name, values in result.minima.items():
            metrics.add_extreme(name, "min", tokens.minimum(values))
        if result.add_metrics is not None:
            result.add_metrics(metrics)

    def _add_rollout_metrics(self, batch: FlatBatch, level: str, metrics: MetricSet) -> None:
        upper, lower = self.config.rollout_metrics_upper, self.config.rollout_metrics_lower
        old, rollout = batch.values["old_log_probs"], batch.values["rollout_log_probs"]
        if self.config.nonfinite == "neutral":
            rollout = torch.where(torch.isfinite(rollout), rollout, old)
        log_ratio = LogRatio(batch.tokens, old - rollout)
        applied = log_ratio.weights(level).clamp(max=upper)
        add_weight_metrics(metrics, log_ratio, applied, level, upper, lower, "rollout_corr/")
        add_offpolicy_metrics(metrics, log_ratio, old, rollout, "rollout_corr/")

    def _reject_nonfinite(self, batch: MicroBatch, metrics: MetricSet) -> MicroBatch:
        """The micro-batch without the tokens that have a NaN or an infinity in a field that the loss reads."""
        finite = torch.isfinite(batch.tokens.select(batch.log_probs.gather()))
        if batch.entropy is not None:
            finite &= torch.isfinite(batch.tokens.select(batch.entropy.gather()))
        for name in self._fields(batch):
            if name in self._may_be_nonfinite:
                continue
            finite &= torch.isfinite(batch.read(name))
        bad = ~finite
        share = Ratio(bad.sum(), batch.tokens.num_tokens)
        metrics.add_ratio("actor/nonfinite_frac", share, _num_valid_tokens(batch.totals))
        return replace(batch, tokens=batch.tokens.reject(bad))

    def _combine(self, terms: list[Term], totals: Totals, metrics: MetricSet) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, 0-d without a graph, and its gradient [N] by each part of the model output."""
        loss = torch.zeros((), dtype=torch.float64, device=terms[0].values.device)
        gradients: dict[str, Tensor] = {}
        shared: list[tuple[AggregationMode, ResponseTokens, Tensor]] = []
        for term in terms:
            mode, tokens = term.mode, term.tokens
            if mode.is_linear:
                # Terms that share mode and tokens share their weights.
                known = [w for m, t, w in shared if t is tokens and m == mode]
                weights = known[0] if known else mode.token_weights(tokens, term.values.dtype)
                shared.append((mode, tokens, weights))
                numerator = tokens.weighted_sum(term.values, weights)
            else:
                numerator, weights = mode.linearize(term.values, tokens)
            count = mode.local_count(tokens)
            scale = self._scale(mode, count, totals)
            metrics.add_ratio(term.name, Ratio(numerator, count), self._total(mode, totals))
            if term.coefficient == 0:
                continue
            factor = term.coefficient * scale
            loss += factor * numerator
            gradient = term.pull_back(weights, factor)
            gradients[term.source] = gradients[term.source].add_(gradient) if term.source in gradients else gradient
        return loss, gradients

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

    def _raise_faults(
        self, batch: MicroBatch, names: list[str], checks: dict[str, float], numbers: dict[str, float]
    ) -> None:
        if any(checks[name] for name in checks if name != "fields"):
            batch.faults.raise_first()
        if not math.isfinite(checks["fields"]):
            batch.check_finite(name for name in names if name not in self._may_be_nonfinite)
        for term in _TERMS:
            if not math.isfinite(numbers.get(term, 0.0)):
                raise NonFiniteError(
                    f"{term} of this micro-batch is {numbers[term]}, though all that it is made of is finite: numbers "
                    f"this far apart overflow in {batch.dtype}; look at the largest advantages and log-ratios"
                )

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

    def dp_size(self, data: MicroBatchData) -> int:
        """Ranks that the engine averages over, 1 where it does not say."""
        return read_totals(data).dp_size or 1

    def _with_prompt_groups(self, batch: MicroBatch) -> ResponseTokens:
        totals = batch.totals
        if totals.get("batch_num_prompts") is not None and batch.has("prompt_num_tokens"):
            counts, group_num_tokens = batch.tokens.counts, batch.prompt_num_tokens()
            # Which group a sequence belongs to is not said, but no group has more than 1 of such shares.
            shares = (counts / group_num_tokens.clamp(min=1).to(torch.float64)).sum()
            fewest = (shares - 1e-6).ceil().to(torch.int64)
            return replace(batch.tokens, group_num_tokens=group_num_tokens, num_groups=fewest)
        if totals:
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
        return 1 if mode.total is None else totals.get(mode.total)

    def _check_counts(self, metrics: MetricSet, numbers: dict[str, float], batch: MicroBatch, dp_group: Any) -> None:
        if dp_group is not None and batch.totals and torch.distributed.is_initialized():
            group_size = torch.distributed.get_world_size(dp_group)
            if group_size != (batch.totals.dp_size or 1):
                dp_size = "missing" if batch.totals.dp_size is None else batch.totals.dp_size
                raise TotalsError(f"dp_size is {dp_size}, but the data-parallel group has {group_size} ranks")
        for term, mode in _TERMS.items():
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
        return metrics.engine(numbers, batch.totals.dp_size or 1, nothing_counts=_num_valid_tokens(batch.totals) == 0)


def _num_valid_tokens(totals: Totals) -> int | None:
    """Tokens that metrics are averaged over, None where nobody counted them."""
    valid = totals.get("batch_num_valid_tokens")
    return totals.get("batch_num_tokens") if valid is None else valid


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
