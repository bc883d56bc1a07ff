"""Runs a loss on the pieces of a mini-batch, as an engine would, and puts the pieces together.

Three engines are played: FSDP adds the gradients of a rank's micro-batches and averages over ranks; Megatron's
schedule divides each loss by the number of micro-batches, which verl multiplied by before; in Megatron's
per-token regime verl returns ``loss × tokens / dp_size`` and Megatron divides the sum by the tokens. So all three
add ``loss / dp_size``, and differ in what a micro-batch says of the mini-batch. Metrics go through verl's three
reductions: over the micro-batches of a rank, over ranks, over the mini-batches of a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.errors import TrinityLossError
from trinity_loss.invariance.contracts import CONTRACTS, Contract, Played
from trinity_loss.invariance.cuts import Cut, Layout
from trinity_loss.invariance.layouts import EngineMicroBatch, build
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.loss import TrinityPolicyLoss
from trinity_loss.micro_batch import read_micro_batch
from trinity_loss.selection import Ranks, token_numbers

#: A callable of verl's engine contract.
LossFn = Callable[..., tuple[Tensor, Mapping[str, Any]]]
Builder = Callable[[MiniBatch, Sequence[int], Layout, int | None], EngineMicroBatch]


#: What verl's engines and trainers count of a mini-batch.
VERLS_TOTALS = ("dp_size", "batch_num_tokens", "global_batch_size")


class ContractError(TrinityLossError):
    """A loss did not return what the engine expects of it."""


@dataclass(frozen=True)
class BoundLoss:
    """A loss to be verified, with what is known of how it is used.

    Attributes:
        name: As in the report.
        loss_fn: The callable of the engine's contract.
        token_budgets: Token budgets of its configuration.
        group_size: Consecutive sequences that must stay together.
        distillation: What it reads of a teacher; None: nothing.
        fresh: Makes the loss anew, as it was before it was ever called; None: it is copied.
        contract: Whose engine calls it.
        fields: Fields of its own, as :func:`trinity_loss.invariance.draw.with_extra_fields` takes them.
    """

    name: str
    loss_fn: LossFn
    token_budgets: tuple[int, ...] = ()
    group_size: int = 1
    distillation: DistillationLossConfig | None = None
    fresh: Callable[[], LossFn] | None = None
    contract: Contract = CONTRACTS["verl"]
    fields: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, **inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """The loss itself."""
        return self.loss_fn(**inputs)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an optimizer step and a log would see of one mini-batch.

    Attributes:
        loss: As verl reports it: the sum over micro-batches, averaged over ranks.
        log_prob_gradient: [N] float64.
        entropy_gradient: [N] float64, zeros where the batch has no entropy.
        metrics: As verl reduces them.
        without_graph: Micro-batches whose loss does not reach the model: backward raises there.
        sizes: The same sums and means of absolute values, by the metric's name and ``loss``: what a deviation
            is measured against, since they cannot cancel.
    """

    loss: float
    log_prob_gradient: Tensor
    entropy_gradient: Tensor
    metrics: dict[str, float]
    without_graph: int = 0
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def gradient(self) -> Tensor:
        """[2 N]: with respect to log-probs, then entropies."""
        return torch.cat([self.log_prob_gradient, self.entropy_gradient])

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers, and every micro-batch has a gradient."""
        return bool(torch.isfinite(self.gradient).all()) and np.isfinite(self.loss) and not self.without_graph


def reduce_metrics(emitted: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[dict[str, float], dict[str, float]]:
    """One value per key from the dictionaries of every rank and micro-batch, as verl reduces them, and its size.

    verl's ``Metric`` objects go through their own ``aggregate_dp``; anything else, numbers and lists of numbers,
    is averaged without weights, or its maximum or minimum taken where the key says so anywhere in its name. The size
    is the same of the absolute values.

    Raises:
        ContractError: Ranks emit other keys, or a value is no number.
    """
    per_rank: list[dict[str, list[Any]]] = []
    for rank in emitted:
        lists: dict[str, list[Any]] = {}
        per_rank.append(lists)
        for key, value in (item for metrics in rank for item in metrics.items()):
            lists.setdefault(key, []).extend(value if isinstance(value, list | tuple) else [value])
    if any(set(lists) != set(per_rank[0]) for lists in per_rank):
        raise ContractError("ranks emit metrics of different names, which verl cannot reduce")
    reduced = {key: _reduce(key, [lists[key] for lists in per_rank]) for key in per_rank[0]}
    return {key: value for key, (value, _) in reduced.items()}, {key: size for key, (_, size) in reduced.items()}


def _reduce(key: str, ranks: list[list[Any]]) -> tuple[float, float]:
    """The metric, and its size."""
    first: Any = next(chain.from_iterable(ranks), 0.0)
    try:
        if hasattr(first, "aggregate_dp"):
            merged = [first.init_list() for _ in ranks]
            for metric, values in zip(merged, ranks, strict=True):
                for value in values:
                    metric.append(value)
            reduced = float(type(first).aggregate_dp(merged))
            for metric in merged:
                metric.values = [abs(value) for value in metric.values]
            return reduced, float(type(first).aggregate_dp(merged))
        flat = [float(value) for value in chain.from_iterable(ranks)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(f"metric {key!r} cannot be reduced: {error}") from error
    if not flat:
        return float("nan"), 0.0
    choose = np.max if "max" in key else np.min if "min" in key else np.mean
    return float(choose(flat)), float(choose(np.abs(flat)))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Every generator that a loss may draw from, as it was afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpys)
            random.setstate(pythons)


@lru_cache(maxsize=64)
def with_fields_over_mini_batch(loss_fn: LossFn, batch: MiniBatch) -> MiniBatch:
    """The mini-batch with the fields that our training worker makes of all of it before it is trained on."""
    if not isinstance(loss_fn, TrinityPolicyLoss) or not loss_fn.over_mini_batch:
        return batch
    micro = build(batch, range(batch.num_sequences), "nested", None)
    with torch.no_grad():
        whole = read_micro_batch(micro.model_output(batch.log_probs, batch.entropy), micro.with_totals({}, True))
        numbers = token_numbers(whole.tokens.sequence, whole.tokens.places)
        return batch.with_fields(**loss_fn.mini_batch_fields(whole, numbers, Ranks()))


def run(
    loss_fn: LossFn,
    batch: MiniBatch,
    cut: Cut,
    *,
    totals: Mapping[str, int] | None = None,
    seed: int = 0,
    build: Builder = build,
    worker: bool = True,
    as_rank: Callable[[int, int], AbstractContextManager[Any]] | None = None,
    make: Callable[[], LossFn] | None = None,
) -> Outcome:
    """Runs one mini-batch.

    Args:
        loss_fn: The loss.
        batch: The mini-batch.
        cut: How it is cut, laid out and put together.
        totals: What the micro-batches say of the mini-batch instead of what is true of it; ``dp_size`` and
            ``num_micro_batch`` may be given as well.
        seed: Of the generators of torch, numpy and Python, for losses that draw.
        build: Makes micro-batches; one that remembers them saves time where no loss changes its input.
        worker: Whether our training worker is there, which counts more than verl's engines and trainers do.
        make: Makes the loss anew for each piece.
        as_rank: Makes the process look like that rank of so many; the loss then gets a data-parallel group.

    Raises:
        ContractError: The loss returned something else than a scalar and a dictionary.
        Exception: Whatever the loss raises.
    """
    if worker:
        batch = with_fields_over_mini_batch(loss_fn, batch)
    log_probs = batch.log_probs.detach().clone().requires_grad_()
    entropy = None if batch.entropy is None else batch.entropy.detach().clone().requires_grad_()
    ranks = len(cut.ranks)
    shared: dict[str, Any] = {**batch.all_totals, "dp_size": ranks}
    if not worker:
        shared = {name: shared[name] for name in VERLS_TOTALS if name in shared}
    if cut.engine != "fsdp":
        shared["num_micro_batch"] = cut.micro_batches
    if cut.engine == "megatron per token":
        shared["routed_num_tokens"] = int((batch.prompt_lengths + batch.response_lengths).sum())
    if hasattr(loss_fn, "mini_batch_totals"):  # What the training worker of that loss counts.
        shared |= loss_fn.mini_batch_totals(batch)
    if isinstance(loss_fn, Played):
        shared |= loss_fn.before(_as_sent(batch, cut, build, log_probs.detach(), entropy, shared))
    shared |= dict(totals or {})
    contributions, reported, size, without_graph = [], 0.0, 0.0, 0
    emitted: list[list[Mapping[str, Any]]] = []
    with _seeded(seed):
        for number, rank in enumerate(cut.ranks):
            emitted.append([])
            for rows in rank:
                micro = build(batch, rows, cut.layout, cut.width)
                output = micro.model_output(log_probs, entropy)
                data = micro.with_totals({"micro_batch_size_per_gpu": micro.num_rows} | shared, worker)
                with nullcontext() if as_rank is None else as_rank(number, shared["dp_size"]):
                    called = loss_fn if make is None else make()
                    result = called(model_output=output, data=data, dp_group=None if as_rank is None else as_rank)
                loss, metrics = checked(result)
                emitted[-1].append(metrics)
                value = loss.item()
                reported, size = reported + value / ranks, size + abs(value) / ranks
                if loss.requires_grad and (value or _reaches(loss, log_probs, entropy)):
                    contributions.append(loss / ranks)
                else:
                    without_graph += 1
    if contributions:
        torch.stack(contributions).sum().backward()
    nothing = torch.zeros(batch.num_tokens, dtype=torch.float64)
    by_log_probs, by_entropy = (
        nothing if leaf is None or leaf.grad is None else leaf.grad.to(torch.float64) for leaf in (log_probs, entropy)
    )
    reduced, sizes = reduce_metrics(emitted)
    return Outcome(reported, by_log_probs, by_entropy, reduced, without_graph, {"loss": size} | sizes)


def _as_sent(
    batch: MiniBatch, cut: Cut, build: Builder, log_probs: Tensor, entropy: Tensor | None, totals: Mapping[str, Any]
) -> list[list[tuple[Any, Any]]]:
    """The pieces of all of the mini-batch: those of the cut, or where it holds only some sequences, one piece."""
    everything = tuple(range(batch.num_sequences))
    complete = tuple(sorted(i for rank in cut.ranks for rows in rank for i in rows)) == everything
    return [
        [
            (micro.model_output(log_probs, entropy), micro.with_totals(totals, False))
            for rows in rank
            for micro in [build(batch, rows, cut.layout, cut.width)]
        ]
        for rank in (cut.ranks if complete else ((everything,),))
    ]


def _reaches(loss: Tensor, *leaves: Tensor | None) -> bool:
    """Whether backward comes to one of the leaves; a new tensor with a gradient of its own does not."""
    ahead, seen = [loss.grad_fn], set[Any]()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(getattr(node, "variable", None) is leaf for leaf in leaves if leaf is not None):
            return True
        ahead += [following for following, _ in node.next_functions]
    return False


def checked(result: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """What a loss returned, as a 0-d tensor and metrics.

    Raises:
        ContractError: It is something that verl's engine cannot train with.
    """
    expects = "the engine expects (loss, metrics)"
    if not isinstance(result, tuple):
        raise ContractError(f"the loss returned {_kind(result)}; {expects}")
    if len(result) != 2:
        raise ContractError(f"the loss returned a tuple of {len(result)}: {', '.join(map(_kind, result))}; {expects}")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.is_nested or loss.numel() != 1 or not isinstance(metrics, Mapping):
        said = f"({_kind(loss)}, {_kind(metrics)})"
        raise ContractError(f"the loss returned {said}; the engine expects a tensor with one element and a dictionary")
    if not loss.is_floating_point():
        raise ContractError(f"the loss is a whole number, {loss.dtype}; the engine expects one with a gradient")
    return loss.reshape(()), metrics


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {'jagged ' if value.is_nested else ''}tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
