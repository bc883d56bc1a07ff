"""Chooses among the tokens of a mini-batch, over all ranks, before the training worker trains on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from trinity_loss.errors import BatchError, MissingFieldError
from trinity_loss.jagged import jagged_parts
from trinity_loss.loss import TrinityPolicyLoss
from trinity_loss.micro_batch import MicroBatch, read_micro_batch, read_responses
from trinity_loss.selection import Ranks, row_numbers, token_numbers
from trinity_loss.verl.counting import raise_on_every_rank
from trinity_loss.verl.steps import Steps


def attach_selection(
    data: TensorDict,
    loss: TrinityPolicyLoss,
    infer: Callable[[TensorDict], Mapping[str, Tensor] | None],
    dp_group: Any,
    steps: Steps,
) -> None:
    """Attaches to a mini-batch the fields that the loss needs of all of it, such as which tokens are selected.

    Args:
        data: This rank's rows of the mini-batch.
        loss: What trains.
        infer: :func:`infer`, of a training worker.
        dp_group: The ranks that hold the other rows; None where this rank holds all of them.
        steps: Which step and mini-batch it is.

    Raises:
        BatchError: The old log-probs shall stand for the current ones, but the policy has moved since.
    """
    config = loss.config
    if not loss.over_mini_batch:
        return
    if config.selection_pass == "old_log_probs":
        if steps.mini_batch > 1:
            raise BatchError(
                f"selection_pass is old_log_probs, but this is mini-batch {steps.mini_batch} of its training batch: "
                "the policy has moved since these log-probs; selection_pass=forward computes them again"
            )
        read: Callable[[], MicroBatch | None] = partial(read_responses, data, "old_log_probs")
    else:
        read = partial(_forward, data, infer, entropy=config.top_entropy_quantile < 1)
    error, batch = None, None
    with torch.no_grad():
        try:
            batch = read()
            if batch is None:  # A stage of a pipeline without an output, as have the ranks that would add up.
                return
            batch, tokens = loss.loaded(batch), batch.tokens
            rows = tokens.per_token(_row_numbers(data))
            numbers = token_numbers(rows, tokens.places, config.selection_seed, steps.step)
        except BatchError as raised:
            error = raised
        raise_on_every_rank(error, dp_group)
        assert batch is not None
        for name, values in loss.mini_batch_fields(batch, numbers, _ranks(dp_group)).items():
            data[name] = _like(data["response_mask"], values)


def infer(worker: Any, data: TensorDict) -> Mapping[str, Tensor] | None:
    """A forward pass without a gradient, on every rank that a loss runs on; None where a pipeline has no output.

    verl's ``infer_batch`` of the worker gives the output to one of the ranks that share a row (tensor, context and
    sequence parallelism), but all of them compute the loss.
    """
    config = worker.engine_config
    settings = {
        "use_remove_padding": worker.model_config.get("use_remove_padding", False),
        "use_dynamic_bsz": config.use_dynamic_bsz,
        "max_token_len_per_gpu": config.infer_max_token_len_per_gpu,
        "micro_batch_size_per_gpu": config.infer_micro_batch_size_per_gpu,
        "use_fused_kernels": config.use_fused_kernels,
    }
    tu.assign_non_tensor(data, **{name: value for name, value in settings.items() if name not in set(data.keys())})
    with worker.engine.eval_mode(disable_auto_offload=tu.get(data, "disable_auto_offload", default=False)):
        output: Mapping[str, Any] = worker.engine.infer_batch(data)
    return output.get("model_output")


def _forward(
    data: TensorDict, infer: Callable[[TensorDict], Mapping[str, Tensor] | None], *, entropy: bool
) -> MicroBatch | None:
    """The mini-batch with what the model says of it now."""
    asked = data.copy()
    # Without a loss there is nothing that an engine could call with the logits.
    no_teacher = {"distillation_use_topk": False, "distillation_only": False}
    tu.assign_non_tensor(asked, compute_loss=False, calculate_entropy=entropy, **no_teacher)
    output = infer(asked)
    if output is None:
        return None
    device = data["response_mask"].device
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    found: Mapping[str, Tensor] = {name: output[name].to(device) for name in names}
    return read_micro_batch(found, data)


def _row_numbers(data: TensorDict) -> Tensor:
    """What tells each row wherever it is: its prompt and response."""
    ids = data.get("input_ids", None)
    if ids is None or not ids.is_nested:
        raise MissingFieldError("the mini-batch has no jagged 'input_ids', which tell its rows for a draw")
    return row_numbers(*jagged_parts(ids))


def _ranks(dp_group: Any) -> Ranks:
    if dp_group is None:
        return Ranks()

    def add_up(tensor: Tensor) -> Tensor:
        held = tensor.to(get_device_id())
        torch.distributed.all_reduce(held, group=dp_group)
        return held.to(tensor.device)

    return Ranks(add_up, torch.distributed.get_rank(dp_group), torch.distributed.get_world_size(dp_group))


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """Values [N] in the layout of ``response_mask``."""
    if not mask.is_nested:
        return values.reshape(mask.shape)
    offsets = jagged_parts(mask)[1]
    return torch.nested.as_nested_tensor(list(values.split(offsets.diff().tolist())), layout=torch.jagged)
