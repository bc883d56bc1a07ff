"""Where the response tokens stand in the model output: one place to the left of their own, behind their prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import Fault, FieldShapeError, MissingFieldError
from trinity_loss.jagged import extents, is_jagged, jagged_parts, like, num_values, stored_values
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.tokens import ResponseTokens, computing_dtype

#: Places int64 [N] and what may be wrong with them.
Placement = tuple[Tensor, tuple[Fault, ...]]

_EMPTY_PROMPT = "a prompt is empty; the first response token needs one before it"


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of the model output, and where the response tokens stand in it.

    Attributes:
        tensor: As the engine gave it, with its graph.
        values: Flat [M], without a graph.
        index: int64 [N] into ``values``; None where the tokens are the values.
    """

    tensor: Tensor
    values: Tensor
    index: Tensor | None

    @classmethod
    def of(cls, tensor: Any, index: Tensor | None) -> Source:
        """The source that a tensor of the model output is, the response tokens at ``index`` of its values."""
        if not is_jagged(tensor):
            return cls(tensor, tensor.detach().reshape(-1), index)
        # An engine makes the jagged tensor as a view of flat values. Their graph is the view's; a gradient that
        # enters there skips the backward of the view, which costs more than the rest of a small micro-batch.
        inner = stored_values(tensor)
        if tensor.lengths() is not None:
            # Narrowed: there are gaps between the sequences, and torch has no gradient of a copy without them.
            places = torch.cat([torch.arange(a, a + n) for a, n in extents(tensor)]).to(inner.device)
            index = places if index is None else places.index_select(0, index)
        return cls(inner if inner.requires_grad else tensor, inner.detach(), index)

    def gather(self) -> Tensor:
        """The response tokens' values [N], without a graph, in float32 or better."""
        values = self.values if self.index is None else self.values.index_select(0, self.index)
        return values.to(computing_dtype(values.dtype))

    def scatter(self, gradient: Tensor) -> Tensor:
        """A gradient [N] of the response tokens as the gradient of ``tensor``."""
        gradient = gradient.to(self.values.dtype)
        if self.index is not None:
            gradient = torch.zeros_like(self.values).scatter_(0, self.index, gradient)
        if is_jagged(self.tensor):
            return like(self.tensor, gradient)
        return gradient if self.tensor.dim() == 1 else gradient.reshape(self.tensor.shape)


def _other_lengths(found: Tensor, offsets: Tensor) -> Fault:
    """The fault of a jagged output whose sequences do not start at ``offsets`` [S + 1].

    Raises:
        FieldShapeError: It has another number of sequences.
    """
    if found.shape != offsets.shape:
        raise FieldShapeError(
            f"log_probs is jagged with {found.numel() - 1} sequences; response_mask has {offsets.numel() - 1}"
        )
    error = FieldShapeError("log_probs is jagged with other lengths than prompt + response of each sequence")
    return Fault((found != offsets).any(), error)


def place_nested(log_probs: Tensor, data: MicroBatchData, tokens: ResponseTokens) -> Placement:
    """Places of jagged responses in a model output over prompt + response.

    Raises:
        MissingFieldError: There are no jagged prompts.
        FieldShapeError: Prompts or output do not fit the responses.
    """
    prompts = get_value(data, "prompts")
    if not isinstance(prompts, Tensor) or not is_jagged(prompts):
        raise MissingFieldError("response_mask is jagged, so a jagged 'prompts' is needed to place the responses")
    if not is_jagged(log_probs) and log_probs.dim() != 1:
        raise FieldShapeError(
            f"response_mask is jagged but log_probs has shape {list(log_probs.shape)}; expected a jagged tensor "
            "over prompt + response, or its values [tokens]"
        )
    (prompt_tokens, starts), offsets = jagged_parts(prompts), tokens.starts
    if starts.shape != offsets.shape:
        raise FieldShapeError(f"prompts holds {starts.numel() - 1} sequences; response_mask {tokens.num_slots}")
    lengths = starts.diff()
    faults = [Fault((lengths < 1).any(), FieldShapeError(_EMPTY_PROMPT))]
    if is_jagged(log_probs):
        faults.append(_other_lengths(jagged_parts(log_probs)[1], starts + offsets))
    found, expected = num_values(log_probs), prompt_tokens.numel() + tokens.size
    if found != expected:
        raise FieldShapeError(
            f"log_probs holds {found} values; expected {expected}, with other lengths than prompt + response of each "
            "sequence nothing can be placed"
        )
    # The place of token t is t - 1 plus all prompts up to its own: steps of 1, and of a prompt more where a response
    # starts. Adding them up costs a fifth of `repeat_interleave` on a CPU.
    steps = torch.ones(tokens.size + 1, dtype=torch.int64, device=lengths.device)
    steps[:1].fill_(-1)
    steps.index_add_(0, offsets[:-1], lengths.to(torch.int64))
    index = torch.cumsum(steps, 0, out=steps)[:-1]
    # Before the first place if the first prompt is empty, which is reported once the faults are read.
    index[:1].clamp_(min=0)
    return index, tuple(faults)


def place_padded(log_probs: Tensor, data: MicroBatchData, tokens: ResponseTokens, shape: torch.Size) -> Placement:
    """Places of padded responses [rows, T] in a model output over prompt + response.

    Raises:
        MissingFieldError: Prompts or attention mask are missing.
        FieldShapeError: They or the output do not fit the responses.
    """
    prompts, attention_mask = get_value(data, "prompts"), get_value(data, "attention_mask")
    if not isinstance(prompts, Tensor) or not isinstance(attention_mask, Tensor):
        raise MissingFieldError(
            "log_probs is jagged over prompt + response and response_mask is padded, so 'prompts' and "
            "'attention_mask' are needed to place the responses"
        )
    rows, width = shape
    if prompts.dim() != 2:
        raise FieldShapeError(f"prompts has shape {list(prompts.shape)}; expected [rows, T]")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise FieldShapeError(f"attention_mask has dtype {attention_mask.dtype}; expected integers")
    prompt_width = prompts.shape[1]
    if attention_mask.shape != (rows, prompt_width + width):
        raise FieldShapeError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [{rows}, {prompt_width + width}], "
            "the width of prompts and of response_mask together"
        )
    prompt_lengths = attention_mask[:, :prompt_width].sum(1)
    lengths = attention_mask[:, prompt_width:].sum(1)
    faults = [Fault((prompt_lengths < 1).any(), FieldShapeError(_EMPTY_PROMPT))]
    ends = (prompt_lengths + lengths).cumsum(0)
    if is_jagged(log_probs):
        found = jagged_parts(log_probs)[1]
        faults.append(_other_lengths(found, torch.nn.functional.pad(ends, (1, 0))))
        ends = found[1:]
    position = torch.arange(width, device=lengths.device)
    beyond = position >= lengths[:, None]
    hole = ((attention_mask[:, prompt_width:] == 0) != beyond).any()
    outside = (beyond.reshape(-1) & tokens.mask).any()
    faults += [
        Fault(hole, FieldShapeError("attention_mask has a hole within a response; expected its tokens, then padding")),
        Fault(outside, FieldShapeError("response_mask counts tokens that attention_mask leaves out")),
    ]
    start = ends - lengths - 1
    # Padding takes the sequence's last place, which predicts no response token: nobody else's gradient is there.
    index = torch.where(beyond, ends[:, None] - 1, start[:, None] + position).reshape(-1)
    return index, tuple(faults)
