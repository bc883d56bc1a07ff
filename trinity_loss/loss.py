"""The loss as an engine calls it: local means, global shares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode, Ratio
from trinity_loss.autograd import with_gradients
from trinity_loss.errors import MissingFieldError, MissingGraphError, NonFiniteError, TotalsError
from trinity_loss.loss_config import LossConfig
from trinity_loss.metric_set import MetricSet
from trinity_loss.micro_batch import MicroBatch, read_micro_batch
from trinity_loss.row_values import MicroBatchData
from trinity_loss.selection import Ranks, token_numbers
from trinity_loss.sequence_groups import find_local_groups, read_attached_groups
from trinity_loss.token_losses import TokenLosses
from trinity_loss.totals import VALID_TOKENS, GroupCount, Totals, find_count, read_totals

#: Key of each term's metric, and its name among the modes.
_TERMS = {
    "actor/pg_loss": "pg",
    "actor/entropy_loss": "entropy",
    "kl_loss": "kl",
    "actor/nll_on_positives": "nll",
    "actor/expert_loss": "expert",
    "distillation/loss": "distillation",
}
_NO_GRAPH = {
    "entropy": (
        "entropy_coeff is {coefficient}, but 'entropy' of the model output has no graph, so its term would train "
        "nothing: let the engine compute it with gradients, or set actor_rollout_ref.actor.entropy_coeff=0 "
        "(actor_rollout_ref.actor.calculate_entropy=True still reports it)"
    ),
    "log_probs": "'log_probs' of the model output has no graph, so the policy would not be trained by it",
    "distillation_losses": "'distillation_losses' of the model output has no graph, so the teacher would teach nothing",
}
#: Warned of already.
_warned: set[object] = set()


def _warn_once(what: object, message: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(message, stacklevel=4)


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
        self._token_losses = TokenLosses(config)
        self._modes = self._token_losses.modes
        # Groups of sequences that a mode divides by, and the name of such a mode.
        names = {"entropy": config.entropy_agg_mode, "kl": config.kl_agg_mode}
        totals = {mode.total: names.get(term) or config.loss_agg_mode for term, mode in self._modes.items()}
        counts = {find_count(total): name for total, name in totals.items() if total is not None}
        self._groups = {count: name for count, name in counts.items() if isinstance(count, GroupCount)}

    def __repr__(self) -> str:
        given, default = vars(self.config), vars(LossConfig())
        shown = (name for name in given if name in ("loss_mode", "loss_agg_mode") or given[name] != default[name])
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]!r}' for name in shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def __call__(
        self, *, model_output: Mapping[str, Any], data: MicroBatchData, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes loss and metrics of a micro-batch.

        Args:
            model_output: ``log_probs`` and, for the entropy term, ``entropy``, from the engine.
            data: The micro-batch.
            dp_group: The data-parallel ranks; no collective runs in a loss, only their number is looked at.

        Returns:
            The loss, 0-d with a graph, in float32 or better, and the metrics.

        Raises:
            BatchError: The micro-batch does not fit the configuration, see :mod:`trinity_loss.errors`.
        """
        metrics = MetricSet()
        with torch.no_grad():
            batch = self._read(model_output, data, metrics)
            loss, gradients = self._combine(batch, metrics)
            loss = loss.to(batch.dtype)
            numbers = metrics.read()
        self._check(batch, numbers)
        self._check_totals(batch.totals, metrics, numbers, dp_group)
        if torch.is_grad_enabled():
            self._check_graphs(batch, gradients)
            loss = with_gradients(loss, batch.sources, gradients)
        return loss, self._report(metrics, numbers, batch.totals)

    def _read(self, model_output: Mapping[str, Any], data: MicroBatchData, metrics: MetricSet) -> MicroBatch:
        """The micro-batch with all that the configuration needs of it."""
        config = self.config
        outputs, beside = self._token_losses.outputs(model_output)
        batch = read_micro_batch(
            model_output, data, outputs=outputs, beside=beside, count_padding_rows=config.count_padding_rows
        )
        asking = ["entropy_coeff"] if config.entropy_coeff else []
        if config.top_entropy_quantile < 1 and not all(batch.has(name) for name in self.over_mini_batch):
            asking.append("top_entropy_quantile")
        if "entropy" not in batch.sources and asking:
            raise MissingFieldError(
                f"{asking[0]} is {getattr(config, asking[0])}, but the model output has no 'entropy'; "
                "actor_rollout_ref.actor.calculate_entropy=True makes the engine return it"
            )
        if config.policy_loss.mixture is not None:
            batch = batch.with_expert_rows()
        for count, mode in self._groups.items():
            batch = self._with_groups(batch, count, mode)
        names = self._token_losses.fields(batch)
        may_be_nonfinite = self._token_losses.may_be_nonfinite
        if config.nonfinite == "neutral":
            before = batch.tokens.num_tokens
            batch, bad = batch.without_nonfinite(n for n in (*batch.sources, *names) if n not in may_be_nonfinite)
            metrics.add_ratio("actor/nonfinite_frac", Ratio(bad.sum(), before), VALID_TOKENS)
        if config.row_weights is not None:
            batch = batch.weighted_by(config.row_weights)
        elif batch.has("loss_weight"):
            _warn_once(
                "loss_weight", "the batch has a 'loss_weight', which nothing reads; row_weights=loss_weight would"
            )
        batch = self._with_fields_over_mini_batch(batch.load(names))
        # One number that is not finite makes the sum so; which one it was is asked then.
        metrics.checks["fields"] = batch.total
        metrics.checks |= {f"fault {number}": fault.found for number, fault in enumerate(batch.faults)}
        return batch

    @property
    def over_mini_batch(self) -> tuple[str, ...]:
        """Names of the fields that are made of all tokens of a mini-batch before it is trained on."""
        return self._token_losses.over_mini_batch

    def mini_batch_fields(self, batch: MicroBatch, numbers: Tensor, ranks: Ranks) -> dict[str, Tensor]:
        """The fields of :attr:`over_mini_batch`, such as which tokens are selected.

        Args:
            batch: This rank's rows of the mini-batch.
            numbers: A number for each token [N], see :func:`trinity_loss.selection.token_numbers`.
            ranks: Who holds the other rows.

        Returns:
            Values [N] by the names under which the micro-batches have to have them.
        """
        loaded = batch if batch.values else self.loaded(batch)
        return self._token_losses.make_over_mini_batch(loaded, numbers, ranks)

    def loaded(self, batch: MicroBatch) -> MicroBatch:
        """The rows of a mini-batch with what :meth:`mini_batch_fields` are made of; no collective is in it.

        Raises:
            BatchError: Something is not there, or does not fit.
        """
        return batch.load([name for name in self._token_losses.fields(batch) if name not in self.over_mini_batch])

    def _with_fields_over_mini_batch(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with fields over the mini-batch; those that were not sent are made of the batch by itself."""
        missing = [name for name in self.over_mini_batch if name not in batch.values]
        if not missing:
            return batch
        tokens = batch.tokens
        made = self._token_losses.make_over_mini_batch(batch, token_numbers(tokens.sequence, tokens.places), Ranks())
        return replace(batch, values={**batch.values, **{name: made[name] for name in missing}})

    def _with_groups(self, batch: MicroBatch, count: GroupCount, mode: str) -> MicroBatch:
        """The micro-batch with the groups that a mode divides by; here those of the batch by itself."""
        return find_local_groups(batch, count, count_empty=self.config.count_empty_sequences)

    def _combine(self, batch: MicroBatch, metrics: MetricSet) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, 0-d in float64 without a graph, and its gradient [N] by each part of the model output."""
        loss = torch.zeros((), dtype=torch.float64, device=batch.tokens.mask.device)
        gradients: dict[str, Tensor] = {}
        row_weights = batch.row_weights
        for term in self._token_losses.terms(batch, metrics):
            mode, tokens = term.mode, term.tokens
            if mode.is_linear:
                weights = mode.token_weights(tokens, term.values.dtype)
                weights = weights if row_weights is None else weights * row_weights
                numerator = (term.values * weights).sum()
            elif row_weights is None:
                numerator, weights = mode.linearize(term.values, tokens)
            else:
                numerator, weights = mode.linearize(term.values * row_weights, tokens)
                weights = weights * row_weights
            count = mode.local_count(tokens.before_rejection)
            metrics.add_ratio(term.name, Ratio(numerator, count), mode.total)
            if term.coefficient == 0:
                continue
            factor = term.coefficient * self._scale(mode, count, batch.totals)
            loss += factor * numerator
            gradient = term.pull_back(weights, factor)
            gradients[term.source] = gradients[term.source].add_(gradient) if term.source in gradients else gradient
        return loss, gradients

    def _scale(self, mode: AggregationMode, count: Tensor, totals: Totals) -> Tensor | float:
        """What a numerator is multiplied by; here one over the count of this batch, 0 where that is 0."""
        return torch.where(count == 0, 0.0, count.to(torch.float64).reciprocal())

    def _check(self, batch: MicroBatch, numbers: dict[str, float]) -> None:
        """Raises what the device found."""
        for number, fault in enumerate(batch.faults):
            if numbers[f"fault {number}"]:
                raise fault.error
        if not math.isfinite(numbers["fields"]):
            batch.check_finite(name for name in batch.values if name not in self._token_losses.may_be_nonfinite)
        for term in _TERMS:
            if not math.isfinite(numbers.get(term, 0.0)):
                raise NonFiniteError(
                    f"{term} of this micro-batch is {numbers[term]}, though all that it is made of is finite: numbers "
                    f"this far apart overflow in {batch.dtype}; look at the largest advantages and log-ratios"
                )

    def _check_graphs(self, batch: MicroBatch, names: Iterable[str]) -> None:
        """Raises where one part of the model output has a graph and another, which a term needs, has none."""
        has_graph = {name: batch.sources[name].tensor.requires_grad for name in names}
        without = [name for name, has in has_graph.items() if not has]
        if without and any(has_graph.values()):
            raise MissingGraphError(_NO_GRAPH[without[0]].format(coefficient=self.config.entropy_coeff))

    def _check_totals(self, totals: Totals, metrics: MetricSet, numbers: dict[str, float], dp_group: Any) -> None:
        """Looks at whether the totals fit the micro-batch; here nothing reads them."""

    def _report(self, metrics: MetricSet, numbers: dict[str, float], totals: Totals) -> dict[str, Any]:
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

    def _read(self, model_output: Mapping[str, Any], data: MicroBatchData, metrics: MetricSet) -> MicroBatch:
        batch = super()._read(model_output, data, metrics)
        if batch.totals.get(VALID_TOKENS) is None:
            metrics.checks |= {"loss tokens": batch.num_loss_tokens, "sequences": batch.tokens.num_sequences}
        return batch

    def _with_fields_over_mini_batch(self, batch: MicroBatch) -> MicroBatch:
        missing = [name for name in self.over_mini_batch if name not in batch.values]
        if missing and batch.totals:
            raise MissingFieldError(
                f"the micro-batch has no {missing[0]!r}, which is made of all tokens of the mini-batch before it is "
                "trained on; trinity_loss.verl.PolicyLossConfig attaches it"
            )
        return super()._with_fields_over_mini_batch(batch)

    def _with_groups(self, batch: MicroBatch, count: GroupCount, mode: str) -> MicroBatch:
        return read_attached_groups(batch, count, mode) or super()._with_groups(batch, count, mode)

    def _scale(self, mode: AggregationMode, count: Tensor, totals: Totals) -> Tensor | float:
        dp_size = totals.dp_size or 1
        total = totals.get(mode.total)
        if total is not None:
            return dp_size / total if total else 0.0
        if dp_size > 1:
            raise TotalsError(f"dp_size is {dp_size} and {mode.total} is missing; with several ranks it is needed")
        missing = f"the micro-batch has no {mode.total}: its loss is the mean over its own tokens or sequences"
        _warn_once(missing, missing)
        return super()._scale(mode, count, totals)

    def _check_totals(self, totals: Totals, metrics: MetricSet, numbers: dict[str, float], dp_group: Any) -> None:
        if dp_group is not None and totals and torch.distributed.is_initialized():
            _check_group(totals.dp_size, torch.distributed.get_world_size(dp_group))
        of_whole = totals.get(VALID_TOKENS)
        if of_whole is not None:  # Our worker counted: what the trainer sent it has looked at, whatever the cut.
            self._warn_if_below("batch_num_tokens", totals.get("batch_num_tokens"), of_whole)
        for term, mode in _TERMS.items():
            name = self._modes[mode].total if term in metrics.entries else None
            if name is None:
                continue
            total, here = totals.get(name), numbers[term + "#"]
            if total == 0 < here:
                raise TotalsError(f"{name} is 0, but this micro-batch alone counts {here:.0f}")
            count = find_count(name)
            if isinstance(count, GroupCount) and count.exact and total is not None and total < here:
                raise TotalsError(
                    f"{name} is {total}, but this micro-batch alone holds {here:.0f}; expected those of the whole "
                    "mini-batch, on all ranks, as trinity_loss.verl.PolicyLossConfig counts them"
                )
            if of_whole is None:
                self._warn_if_below(name, total, here)

    def _warn_if_below(self, name: str, total: int | None, counted: float) -> None:
        """Says once that a total is too small. It is no error: whether one micro-batch sees it hangs on the cut."""
        if total is not None and total < counted:
            _warn_once(
                (self, name),
                f"{name} is {total}, but {counted:.0f} are there: the loss is a sum over more than it is divided by "
                "(look at who sets it, and at a mask that changed since)",
            )

    def _report(self, metrics: MetricSet, numbers: dict[str, float], totals: Totals) -> dict[str, Any]:
        return metrics.engine(numbers, totals, self._share(totals, numbers))

    def _share(self, totals: Totals, numbers: dict[str, float]) -> float | None:
        """This micro-batch's share of the tokens that the engine counted; None where it counted none."""
        whole = totals.get("batch_num_tokens")
        if "loss tokens" not in numbers or not whole:
            return None
        if totals.dp_size in (None, 1) and numbers["sequences"] == totals.get("global_batch_size"):
            return 1.0
        return numbers["loss tokens"] / whole


def _check_group(dp_size: int | None, group_size: int) -> None:
    """Raises :class:`TotalsError` unless the data-parallel group holds a rank per replica."""
    if group_size == (dp_size or 1):
        return
    given = "missing" if dp_size is None else dp_size
    why = ""
    if group_size % (dp_size or 1) == 0:
        why = (
            f"; ranks that share their data (context parallelism) must not be in it, or every count of it is "
            f"{group_size // (dp_size or 1)} times too large"
        )
    raise TotalsError(f"dp_size is {given}, but the data-parallel group has {group_size} ranks{why}")
