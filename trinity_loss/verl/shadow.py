"""Shadow mode: train with verl's loss as before, and log ours on the same micro-batches beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.metric import AggregationType, Metric

from trinity_loss.jagged import jagged_parts
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.metric_set import moment_key, prefix_key
from trinity_loss.row_values import MicroBatchData
from trinity_loss.verl.diagnostic import only_warning

#: What the names of its metrics begin with.
PREFIX = "shadow/"


class ShadowLoss:
    """verl's loss, with the metrics of ours and how the two gradients compare.

    The gradients are those with respect to the log-probs, over the whole mini-batch:
    ``shadow/grad_norm_ratio`` is the norm of ours over that of verl's, ``shadow/grad_cosine`` the cosine
    between them. Where both are 1 nothing would change. It costs a second evaluation of verl's loss.

    Args:
        verl_loss: The loss that trains.
        ours: The loss that is only reported.
    """

    def __init__(self, verl_loss: Callable[..., tuple[Tensor, dict[str, Any]]], ours: EnginePolicyLoss) -> None:
        self.verl_loss = verl_loss
        self.ours = ours

    def __repr__(self) -> str:
        # verl's is a partial over a whole configuration.
        name = getattr(getattr(self.verl_loss, "func", self.verl_loss), "__name__", type(self.verl_loss).__name__)
        return f"ShadowLoss(verl's {name}, beside it {self.ours})"

    def __call__(
        self, *, model_output: Mapping[str, Any], data: MicroBatchData, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """verl's loss and metrics, with ``shadow/…`` beside them."""
        loss, metrics = self.verl_loss(model_output=model_output, data=data, dp_group=dp_group)
        if torch.is_grad_enabled():
            with only_warning("shadow mode"):
                metrics = metrics | self._compare(model_output, data, dp_group)
        return loss, metrics

    def _compare(self, model_output: Mapping[str, Any], data: MicroBatchData, dp_group: Any) -> dict[str, Any]:
        """The metrics of ours, and how the gradients compare; all of them or none."""
        verls, _, _ = loss_gradient(self.verl_loss, model_output, data, dp_group)
        ours, our_loss, our_metrics = loss_gradient(self.ours, model_output, data, dp_group)
        dp_size = self.ours.dp_size(data)
        # The moments of a pair of vectors: both squares and the product.
        sums = {"count": verls.square().sum(), "sum": (verls * ours).sum(), "square": ours.square().sum()}
        numbers = torch.stack(list(sums.values())).tolist()
        metrics = {PREFIX + "loss": Metric(AggregationType.SUM, our_loss)}
        for name in ("norm_ratio", "cosine"):
            for moment, number in zip(sums, numbers, strict=True):
                key = moment_key(name, moment, f"{PREFIX}grad_{name}")
                metrics[key] = Metric(AggregationType.SUM, number * dp_size)
        return metrics | {prefix_key(PREFIX, key): value for key, value in our_metrics.items()}


def loss_gradient(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]], model_output: Mapping[str, Any], data: Any, dp_group: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Gradient with respect to the log-probs, float64 [N], with loss and metrics; the live graph is not touched."""
    outputs: dict[str, Any] = {}
    leaf = None
    for name in ("log_probs", "entropy"):
        value = model_output.get(name, None)
        if value is None:
            continue
        if value.is_nested:
            values, offsets = jagged_parts(value)
            copy = values.detach().clone().requires_grad_(value.requires_grad or name == "log_probs")
            outputs[name] = torch.nested.nested_tensor_from_jagged(copy, offsets=offsets)
        else:
            outputs[name] = copy = value.detach().clone().requires_grad_(value.requires_grad or name == "log_probs")
        leaf = copy if name == "log_probs" else leaf
    assert leaf is not None
    loss, metrics = loss_fn(model_output=outputs, data=data, dp_group=dp_group)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient.to(torch.float64), loss.detach(), metrics
