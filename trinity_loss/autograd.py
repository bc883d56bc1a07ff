"""Terms of a loss with gradients that are known already, and how they reach the model's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode
from trinity_loss.micro_batch import Source
from trinity_loss.tokens import ResponseTokens


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the loss, token by token.

    Attributes:
        name: Key of its metric.
        coefficient: Its weight in the loss, sign included.
        mode: How its tokens are aggregated.
        tokens: Which tokens it counts.
        values: [N], finite.
        source: What it is differentiated by: ``log_probs`` or ``entropy``.
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


def differentiate(
    fn: Callable[[Tensor], tuple[Tensor, Any]], values: Tensor
) -> tuple[Tensor, Any, Callable[[Tensor], Tensor]]:
    """What ``fn`` makes of values [N], what else it returns, and what takes weights of the result back to the values.

    Nothing that is returned has a graph.
    """
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        graph, others = fn(leaf)

    def gradient(weights: Tensor) -> Tensor:
        found = None
        if graph.requires_grad:
            (found,) = torch.autograd.grad(graph, leaf, weights, allow_unused=True)
        return torch.zeros_like(leaf) if found is None else found

    return graph.detach(), others, gradient


class WithGradient(torch.autograd.Function):
    """A loss whose gradients are known already: backward only puts them in their places.

    It hangs on the engine's tensors themselves, jagged ones too: going through their flat values would
    add a detour to the graph that costs more than all the rest of a small micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, sources: list[Source], gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.sources = sources
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.sources, ctx.saved_tensors, strict=True)
        return None, None, None, *(source.scatter(upstream * gradient) for source, gradient in gradients)
