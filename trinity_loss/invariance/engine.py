"""Runs a loss on the pieces of a mini-batch, as an engine would, and puts the pieces together.

Three engines are played: FSDP adds the gradients of a rank's micro-batches and averages over ranks; Megatron's
schedule divides each loss by the number of micro-batches, which verl multiplied by before; in Megatron's
per-token regime verl returns ``loss × tokens / dp_size`` and Megatron divides the sum by the tokens. Metrics go
through verl's three reductions: over the micro-batches of a rank, over ranks, over the mini-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_loss.errors import TrinityLossError
from trinity_loss.invariance.cuts import Cut, Layout
from trinity_loss.invariance.layouts import EngineMicroBatch, build
from trinity_loss.invariance.minibatch import MiniBatch

#: A callable of verl's engine contract.
LossFn = Callable[..., tuple[Tensor, Mapping[str, Any]]]
Builder = Callable[[MiniBatch, Sequence[int], Layout, int | None], EngineMicroBatch]


class ContractError(TrinityLossError):
    """A loss did not return what the engine expects of it."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an optimizer step and a log would see of one mini-batch.

    Attributes:
        loss: As verl reports it: the sum over micro-batches, averaged over ranks.
        log_prob_gradient: [N] float64.
        entropy_gradient: [N] float64, zeros where the batch has no entropy.
        metrics: As verl reduces them.
        without_graph: Micro-batches whose loss does not reach the model: backward raises there.
    """

    loss: float
    log_prob_gradient: Tensor
    entropy_gradient: Tensor
    metrics: dict[str, float]
    without_graph: int = 0


def reduce_metrics(emitted: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, float]:
    """One value per key from the dictionaries of every rank and micro-batch, as verl reduces them.

    verl's ``Metric`` objects go through their own ``aggregate_dp``; anything else is averaged without weights,
    or its maximum or minimum taken where the key says so anywhere in its name.

    Raises:
        ContractError: Ranks emit other keys, or a value is no number.
    """
    per_rank = [_by_key(rank) for rank in emitted]
    if any(set(lists) != set(per_rank[0]) for lists in per_rank):
        raise ContractError("ranks emit metrics of different names, which verl cannot reduce")
    return {key: _reduce(key, [lists[key] for lists in per_rank]) for key in per_rank[0]}


def _by_key(rank: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for metrics in rank:
        for key, value in metrics.items():
            lists.setdefault(key, []).append(value)
    return lists


def _reduce(key: str, ranks: list[list[Any]]) -> float:
    first = ranks[0][0]
    try:
        if hasattr(first, "aggregate_dp"):
            merged = [first.init_list() for _ in ranks]
            for metric, values in zip(merged, ranks, strict=True):
                for value in values:
                    metric.append(value)
            return float(type(first).aggregate_dp(merged))
        flat = [float(value) for value in chain.from_iterable(ranks)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(f"metric {key!r} cannot be reduced: {error}") from error
    return float(np.max(flat) if "max" in key else np.min(flat) if "min" in key else np.mean(flat))


def run(
    loss_fn: LossFn,
    batch: MiniBatch,
    cut: Cut,
    *,
    totals: Mapping[str, int] | None = None,
    seed: int = 0,
    build: Builder = build,
) -> Outcome:
    """Runs one mini-batch.

    Args:
        loss_fn: The loss.
        batch: The mini-batch.
        cut: How it is cut, laid out and put together.
        totals: What the micro-batches say of the mini-batch instead of what is true of it; ``dp_size`` and
            ``num_micro_batch`` may be given as well.
        seed: Of torch's generator, for losses that draw.
        build: Makes micro-batches; one that remembers them saves time where no loss changes its input.

    Raises:
        ContractError: The loss returned something else than a scalar and a dictionary.
        Exception: Whatever the loss raises.
    """
    log_probs = batch.log_probs.detach().clone().requires_grad_()
    entropy = None if batch.entropy is None else batch.entropy.detach().clone().requires_grad_()
    ranks = len(cut.ranks)
    shared: dict[str, Any] = {**batch.all_totals, "dp_size": ranks}
    tokens = int((batch.prompt_lengths + batch.response_lengths).sum())
    if cut.engine != "fsdp":
        shared["num_micro_batch"] = cut.micro_batches
    if cut.engine == "megatron per token":
        shared["routed_num_tokens"] = tokens
    shared |= dict(totals or {})
    contributions, reported, without_graph = [], 0.0, 0
    emitted: list[list[Mapping[str, Any]]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for rank in cut.ranks:
            emitted.append([])
            for rows in rank:
                micro = build(batch, rows, cut.layout, cut.width)
                loss, metrics = _call(loss_fn, micro, log_probs, entropy, shared)
                emitted[-1].append(metrics)
                reported += loss.item() / ranks
                if loss.requires_grad:
                    contributions.append(_contribution(loss, cut, ranks, tokens))
                else:
                    without_graph += 1
    if contributions:
        torch.stack(contributions).sum().backward()
    return Outcome(
        reported, _gradient(log_probs), _gradient(entropy, log_probs), reduce_metrics(emitted), without_graph
    )


def _call(
    loss_fn: LossFn, micro: EngineMicroBatch, log_probs: Tensor, entropy: Tensor | None, totals: Mapping[str, Any]
) -> tuple[Tensor, Mapping[str, Any]]:
    data = micro.with_totals(totals)
    result = loss_fn(model_output=micro.model_output(log_probs, entropy), data=data, dp_group=None)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"the loss returned a {type(result).__name__}; the engine expects (loss, metrics)")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        raise ContractError(
            f"the loss returned ({type(loss).__name__}, {type(metrics).__name__}); the engine expects a tensor "
            "with one element and a dictionary"
        )
    return loss.reshape(()), metrics


def _contribution(loss: Tensor, cut: Cut, ranks: int, tokens: int) -> Tensor:
    """This micro-batch's part of what the optimizer's gradient is the gradient of."""
    if cut.engine == "megatron":
        return loss * cut.micro_batches / cut.micro_batches / ranks
    if cut.engine == "megatron per token":
        return (loss * tokens / ranks) / tokens
    return loss / ranks


def _gradient(leaf: Tensor | None, like: Tensor | None = None) -> Tensor:
    if leaf is None or leaf.grad is None:
        reference = leaf if leaf is not None else like
        assert reference is not None
        return torch.zeros_like(reference, dtype=torch.float64).detach()
    return leaf.grad.to(torch.float64)
