"""The terms of a loss, token by token: policy gradient, entropy, KL, each with what it is differentiated by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode, Ratio
from trinity_loss.autograd import differentiate
from trinity_loss.distillation import OUTPUTS, TEACHER, TOP_K_OUTPUTS, distillation_loss, overlap
from trinity_loss.errors import MissingFieldError
from trinity_loss.importance_sampling import LogRatio, add_offpolicy_metrics, add_weight_metrics
from trinity_loss.kl import kl_penalty, unbiased_kl
from trinity_loss.loss_config import LossConfig
from trinity_loss.metric_set import MetricSet, extreme_of
from trinity_loss.micro_batch import MicroBatch
from trinity_loss.policy import off_policy_weights
from trinity_loss.registry import ExpertPart, PolicyInputs, TokenLoss
from trinity_loss.row_values import get_value
from trinity_loss.selecting_losses import high_entropy_tokens
from trinity_loss.selection import Ranks
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import VALID_TOKENS

#: The field that says which tokens have the highest entropy of the mini-batch.
_HIGH_ENTROPY = "high_entropy_tokens"


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the loss, token by token.

    Attributes:
        name: Key of its metric.
        coefficient: Its weight in the loss, sign included.
        mode: How its tokens are aggregated.
        tokens: Which tokens it counts.
        values: [N], finite.
        source: What it is differentiated by: ``log_probs``, ``entropy`` or ``distillation_losses``.
        derivative: Derivative of each value with respect to its own token [N], or one number for all, or a
            function that takes weights of the values [N] back to the tokens [N].
    """

    name: str
    coefficient: float
    mode: AggregationMode
    tokens: ResponseTokens
    values: Tensor
    source: str
    derivative: Tensor | float | Callable[[Tensor], Tensor]

    def pull_back(self, weights: Tensor, factor: Tensor | float) -> Tensor:
        """New tensor [N]: gradient by the source of ``factor`` × the values weighted by ``weights`` [N]."""
        if isinstance(self.derivative, Tensor):
            return (weights * self.derivative).mul_(factor)
        if callable(self.derivative):
            return self.derivative(weights) * factor
        return weights * (self.derivative * factor)


class TokenLosses:
    """What a configuration computes of each token.

    Attributes:
        config: What the loss is.
        modes: Aggregation mode of each term: ``pg``, ``entropy``, ``kl`` and, where they are there, ``nll`` and
            ``distillation``.
        may_be_nonfinite: Fields that may hold a NaN or an infinity at a token that counts.
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.modes = config.aggregation_modes
        self._policy_loss = config.policy_loss
        self._policy_arguments = config.policy_arguments
        self._all_arguments = {**self._policy_loss.arguments, **self._policy_arguments}
        teacher = config.distillation
        #: Whether there is more than distillation, and whether it trains or only reports.
        self._has_policy = teacher is None or teacher.needs_policy_loss
        self._policy_trains = teacher is None or teacher.use_task_rewards
        self._over_mini_batch = config.over_mini_batch if self._has_policy else {}
        neutral = config.nonfinite == "neutral"
        self.may_be_nonfinite = {"rollout_log_probs"} - set(self._policy_loss.fields) if neutral else set()

    def outputs(self, model_output: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Names of the parts of the model output that are read, and of the fields that stand where they do."""
        teacher, names = self.config.distillation, ["log_probs"] if self._has_policy else []
        if teacher is None:
            return names, []
        if teacher.use_topk:
            names += TOP_K_OUTPUTS
            names += [name for name in OUTPUTS if name not in names and model_output.get(name, None) is not None]
            return names, []
        return (names or ["log_probs"]), [TEACHER]

    def fields(self, batch: MicroBatch) -> list[str]:
        """Names of the fields that are read."""
        if not self._has_policy:
            return []
        names = [*self._policy_loss.fields]
        teacher = self.config.distillation
        names += ["old_log_probs"] if teacher is not None and teacher.use_policy_gradient else []
        names += [name for name in ("rollout_is_weights",) if batch.has(name)]
        names += [name for name in self.over_mini_batch if batch.has(name)]
        names += ["ref_log_prob"] if self.config.use_kl_loss else []
        names += ["old_log_probs"] if self.config.kl_unbiased else []
        names += ["advantages"] if self.config.nll_on_positives else []
        names += ["old_log_probs", "advantages"] if self.config.off_policy_mask is not None else []
        if self.config.rollout_metrics is not None:
            names += ["old_log_probs", "rollout_log_probs"]
        return list(dict.fromkeys(names))

    @property
    def over_mini_batch(self) -> tuple[str, ...]:
        """Names of the fields that are made of all tokens of the mini-batch."""
        highest = (_HIGH_ENTROPY,) if self.config.top_entropy_quantile < 1 else ()
        return (*self._over_mini_batch, *highest)

    def make_over_mini_batch(self, batch: MicroBatch, numbers: Tensor, ranks: Ranks) -> dict[str, Tensor]:
        """These fields [N] for a rank's rows of the mini-batch, whose other fields are loaded."""
        loss, values = self._policy_loss, batch.values
        inputs = PolicyInputs(batch.tokens, values["log_probs"], {name: values[name] for name in loss.fields})
        fields = {
            name: of.make(inputs, numbers, ranks, self._all_arguments) for name, of in self._over_mini_batch.items()
        }
        share = self.config.top_entropy_quantile
        if share < 1:
            fields[_HIGH_ENTROPY] = high_entropy_tokens(inputs, values["entropy"], numbers, ranks, share)
        return fields

    def terms(self, batch: MicroBatch, metrics: MetricSet) -> Iterator[Term]:
        """The terms of a micro-batch whose fields are loaded, and their metrics.

        One is computed when it is asked for, so that the vectors of two are never in memory together.
        """
        config, tokens, values = self.config, batch.tokens, batch.values
        if self._has_policy:
            yield self._policy_term(batch, metrics)
            if self._policy_loss.mixture is not None:
                yield self._expert_term(batch, self._policy_loss.mixture, metrics)
        if config.distillation is not None:
            yield self._distillation_term(batch, metrics)
        if not self._has_policy:
            return
        if "entropy" in values:
            mode, coefficient = self.modes["entropy"], -config.entropy_coeff
            yield Term("actor/entropy_loss", coefficient, mode, tokens, values["entropy"], "entropy", 1.0)
        if config.use_kl_loss:
            log_prob, ref = values["log_probs"], values["ref_log_prob"]
            if config.kl_unbiased:
                value, slope = unbiased_kl(log_prob, values["old_log_probs"], ref, config.kl_loss_type)
            else:
                value, slope = kl_penalty(log_prob, ref, config.kl_loss_type)
            metrics.constants["kl_coef"] = config.kl_loss_coef
            yield Term("kl_loss", config.kl_loss_coef, self.modes["kl"], tokens, value, "log_probs", slope)
        if config.nll_on_positives:
            # As they came: what a rejected token has counts in the denominator, as for the other terms.
            coefficient, positive = config.nll_on_positives, tokens.restrict(batch.raw("advantages") > 0)
            nll, mode = -values["log_probs"], self.modes["nll"]
            yield Term("actor/nll_on_positives", coefficient, mode, positive, nll, "log_probs", -1.0)
        if config.rollout_metrics is not None:
            self._add_rollout_metrics(batch, config.rollout_metrics, metrics)

    def _policy_term(self, batch: MicroBatch, metrics: MetricSet) -> Term:
        loss, tokens = self._policy_loss, batch.tokens
        if batch.expert is not None:
            tokens = tokens.restrict_sequences(~batch.expert)
        fields = {name: batch.values[name] for name in (*loss.fields, *self._over_mini_batch)}
        weights = batch.values.get("rollout_is_weights")
        factor = None if loss.weighs_itself else weights
        highest = batch.values.get(_HIGH_ENTROPY)
        if highest is not None:
            factor = highest if factor is None else factor * highest
        stays, delta, values = None, self.config.off_policy_mask, batch.values
        if delta is not None:
            old, advantages = values["old_log_probs"], values["advantages"]
            stays = off_policy_weights(tokens, values["log_probs"], old, advantages, delta)
            factor = stays if factor is None else factor * stays

        def compute(log_prob: Tensor) -> tuple[Tensor, TokenLoss]:
            result = loss(PolicyInputs(tokens, log_prob, fields, weights), **self._policy_arguments)
            result = result if factor is None else result.times(factor)
            return result.values, result

        derivative: Any
        if loss.analytic:
            losses, result = compute(values["log_probs"])
            derivative = result.derivative
        else:
            losses, result, derivative = differentiate(compute, values["log_probs"])
        if stays is not None:
            result = replace(result, means={**result.means, "actor/off_policy_frac": 1 - stays})
        if result.kept is not None:
            tokens = tokens.reject(result.kept == 0)
        self._add_policy_metrics(tokens, batch.dtype, result, metrics)
        weight = 1.0 if self._policy_trains else 0.0
        if loss.mixture is not None:
            mu = metrics.constants["actor/mu"] = loss.mixture.weight(self._all_arguments, self._step(batch))
            weight *= 1 - mu
        return Term("actor/pg_loss", weight, self.modes["pg"], tokens, losses, "log_probs", derivative)

    def _expert_term(self, batch: MicroBatch, mixture: ExpertPart, metrics: MetricSet) -> Term:
        assert batch.expert is not None
        tokens = batch.tokens.restrict_sequences(batch.expert)
        fields = {name: batch.values[name] for name in self._policy_loss.fields}
        result = mixture.expert(PolicyInputs(tokens, batch.values["log_probs"], fields), self._all_arguments)
        assert result.derivative is not None
        weight, mode = metrics.constants["actor/mu"] if self._policy_trains else 0.0, self.modes["expert"]
        return Term("actor/expert_loss", weight, mode, tokens, result.values, "log_probs", result.derivative)

    def _step(self, batch: MicroBatch) -> int:
        """The training step, where the loss depends on it; else 0."""
        mixture = self._policy_loss.mixture
        if mixture is None or not mixture.needs_step(self._all_arguments):
            return 0
        step = get_value(batch.data, "step")
        if step is None:
            raise MissingFieldError(
                f"the micro-batch has no 'step', which loss_mode {self.config.loss_mode!r} weighs an expert's rows by; "
                "trinity_loss.verl.PolicyLossConfig attaches it"
            )
        return int(step.max() if isinstance(step, Tensor) else step)

    def _distillation_term(self, batch: MicroBatch, metrics: MetricSet) -> Term:
        teacher, tokens, values = self.config.distillation, batch.tokens, batch.values
        assert teacher is not None
        result = distillation_loss(teacher, tokens, values)
        assert result.derivative is not None
        _add_means(metrics, result.means, tokens, tokens.indicator(batch.dtype), tokens.num_tokens, VALID_TOKENS)
        _add_extremes(metrics, result, tokens)
        shared = overlap(values)
        if shared is not None:
            advantage, counted = shared
            counted = counted * tokens.indicator(counted.dtype)
            metrics.add_moments(advantage, counted, {"distillation/overlap_token_advantage": "mean"})
        mode, weight = self.modes["distillation"], teacher.coefficient
        return Term("distillation/loss", weight, mode, tokens, result.values, teacher.source, result.derivative)

    def _add_policy_metrics(
        self, tokens: ResponseTokens, dtype: torch.dtype, result: TokenLoss, metrics: MetricSet
    ) -> None:
        mode = self._policy_loss.mode
        if mode is None:
            weights, count = tokens.indicator(dtype), tokens.num_tokens
        else:
            weights, count = mode.token_weights(tokens, dtype), mode.local_count(tokens)
        total = VALID_TOKENS if mode is None else mode.total
        if self._policy_loss.mixture is not None:
            total = "batch_num_usual_valid_tokens"
        _add_means(metrics, result.means, tokens, weights, count, total)
        _add_extremes(metrics, result, tokens)
        if result.add_metrics is not None:
            result.add_metrics(metrics)

    def _add_rollout_metrics(self, batch: MicroBatch, level: str, metrics: MetricSet) -> None:
        upper, lower = self.config.rollout_metrics_upper, self.config.rollout_metrics_lower
        old, rollout = batch.values["old_log_probs"], batch.values["rollout_log_probs"]
        if self.config.nonfinite == "neutral":
            rollout = torch.where(torch.isfinite(rollout), rollout, old)
        log_ratio = LogRatio(batch.tokens, old - rollout)
        applied = log_ratio.weights(level).clamp(max=upper)
        add_weight_metrics(metrics, log_ratio, applied, level, upper, lower, "rollout_corr/")
        add_offpolicy_metrics(metrics, log_ratio, old, rollout, "rollout_corr/")


def _add_means(
    metrics: MetricSet,
    means: Mapping[str, Tensor],
    tokens: ResponseTokens,
    weights: Tensor,
    count: Tensor,
    total: str | None,
) -> None:
    for name, values in means.items():
        if tokens.denominator_mask is not None:
            # How many tokens of the mini-batch stay is known when all of it is computed.
            metrics.add_moments(values.detach().expand_as(weights), weights, {name: "mean"})
        else:
            metrics.add_ratio(name, Ratio((values * weights).sum(), count), total)


def _add_extremes(metrics: MetricSet, result: TokenLoss, tokens: ResponseTokens) -> None:
    for name, values in result.maxima.items():
        metrics.add_extreme(name, "max", extreme_of(values, tokens.mask, "max"))
    for name, values in result.minima.items():
        metrics.add_extreme(name, "min", extreme_of(values, tokens.mask, "min"))
