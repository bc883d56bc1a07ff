"""Shadow mode: train with verl's loss as before, and log ours on the same micro-batches beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
#: Parts of the model output that the gradients are taken by.
_DIFFERENTIATED = ("log_probs", "distillation_losses")


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
        self,
        *,
        data: MicroBatchData,
        model_output: Mapping[str, Any] | None = None,
        dp_group: Any = None,
        **of_logits: Any,
    ) -> Any:
        """verl's loss and metrics, with ``shadow/…`` beside them; of logits, which distillation has, verl's alone."""
        if model_output is None:
            return self.verl_loss(data=data, **of_logits)
        beside: dict[str, Any] = {}
        if torch.is_grad_enabled():
            # Before it trains, so that verl's loss draws here what it draws then, and as it would without this.
            with only_warning("shadow mode"), _put_back_draws(model_output):
                beside = self._compare(model_output, data, dp_group)
        loss, metrics = self.verl_loss(model_output=model_output, data=data, dp_group=dp_group)
        return loss, metrics | beside

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


def _put_back_draws(model_output: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Afterwards the random states of the host and of the device are as before."""
    device = next(value.device for value in model_output.values() if isinstance(value, Tensor))
    on_host = device.type == "cpu"
    return torch.random.fork_rng([] if on_host else [device], device_type="cuda" if on_host else device.type)


def loss_gradient(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]], model_output: Mapping[str, Any], data: Any, dp_group: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The gradient of :func:`loss_gradients` as one vector, with loss and metrics."""
    found, loss, metrics = loss_gradients(loss_fn, model_output, data, dp_group)
    return torch.cat(list(found.values())), loss, metrics


def loss_gradients(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]], model_output: Mapping[str, Any], data: Any, dp_group: Any
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Gradients by log-probs and a teacher's divergence, flat float64, with loss and metrics; the live graph stays."""
    outputs: dict[str, Any] = {}
    leaves: dict[str, Tensor] = {}
    for name, value in model_output.items():
        if not isinstance(value, Tensor):
            continue
        values, offsets = jagged_parts(value) if value.is_nested else (value, None)
        differentiated = name in _DIFFERENTIATED
        copy = values.detach().clone().requires_grad_(differentiated or value.requires_grad)
        outputs[name] = copy if offsets is None else torch.nested.nested_tensor_from_jagged(copy, offsets=offsets)
        leaves |= {name: copy} if differentiated else {}
    loss, metrics = loss_fn(model_output=outputs, data=data, dp_group=dp_group)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    flat = (part.reshape(-1).to(torch.float64) for part in found)
    return dict(zip(leaves, flat, strict=True)), loss.detach(), metrics
