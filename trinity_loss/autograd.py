"""Gradients that are known already, and how they reach the model's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trinity_loss.placement import Source


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


def with_gradients(loss: Tensor, sources: Mapping[str, Source], gradients: Mapping[str, Tensor]) -> Tensor:
    """A loss, 0-d without a graph, as one with these gradients [N] by parts of the model output."""
    used = [sources[name] for name in gradients]
    graph: Tensor = _WithGradients.apply(loss, used, list(gradients.values()), *(source.tensor for source in used))
    return graph


class _WithGradients(torch.autograd.Function):
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
