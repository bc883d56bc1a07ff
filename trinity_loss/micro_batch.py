"""An engine micro-batch: its response tokens, its fields as flat vectors, the mini-batch's totals.

Three layouts arrive here and none of them leaves:

- *nested* (verl v1): fields are jagged over the responses, the model output is jagged over prompt + response;
- *padded* (verl v0): fields are [rows, T], the model output is jagged over prompt + response;
- *dense*: fields and model output are [rows, T], aligned to the response tokens; with ``segment_ids``
  [rows, T] several sequences share a row.

The log-probability of response token t stands one place to the left in the model output.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from trinity_loss.errors import BatchError, FieldShapeError, MissingFieldError
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.tokens import ResponseTokens, computing_dtype, is_jagged, jagged_parts
from trinity_loss.totals import Rows, Totals, prompt_keys, read_totals

#: How to make verl send a field that is missing.
_SWITCHES = {
    "ref_log_prob": "actor_rollout_ref.actor.use_kl_loss=True makes verl compute it",
    "rollout_log_probs": "actor_rollout_ref.rollout.calculate_log_probs=True makes the rollout return it",
    "rollout_is_weights": "algorithm.rollout_correction.rollout_is makes verl compute it",
    "entropy": "actor_rollout_ref.actor.calculate_entropy=True makes the engine return it",
}

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
            jagged: Any = self.tensor
            return torch.nested.nested_tensor_from_jagged(gradient, offsets=jagged.offsets(), lengths=jagged.lengths())
        return gradient if self.tensor.dim() == 1 else gradient.reshape(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """What the token-wise part of a loss reads, in whatever layout it came: flat tensors, nothing of the engine's.

    Attributes:
        tokens: The response tokens.
        table: [names, N] without a graph, 0 at uncounted tokens.
        values: Its rows by name, ``log_probs`` and ``entropy`` among them.
    """

    tokens: ResponseTokens
    table: Tensor
    values: dict[str, Tensor]

    @property
    def log_prob(self) -> Tensor:
        return self.values["log_probs"]

    @property
    def dtype(self) -> torch.dtype:
        """Type that everything is computed in: float32, or float64 where the log-probs are."""
        return self.log_prob.dtype

    def total(self) -> Tensor:
        """The sum of all values, 0-d: not finite if one of them is not."""
        return self.table.sum()

    @classmethod
    def load(cls, tokens: ResponseTokens, raw: Mapping[str, Tensor], index: Mapping[str, Tensor]) -> FlatBatch:
        """Reads everything in one go: few operations, however many fields.

        Args:
            tokens: The response tokens.
            raw: Flat values by name.
            index: int64 [N], where the response tokens stand in the values of that name; the others are [N].
        """
        dtype = computing_dtype(raw["log_probs"].dtype)
        rows = [(v.index_select(0, index[name]) if name in index else v).to(dtype) for name, v in raw.items()]
        table = tokens.select_(torch.stack(rows))
        return cls(tokens, table, dict(zip(raw, table.unbind(), strict=True)))


@dataclass(frozen=True, eq=False)
class Faults:
    """Contradictions of a micro-batch that only the device can see, read to the host with everything else.

    Attributes:
        flags: 0-d bool tensors that must be false, each with the error to raise otherwise.
        pairs: Integer tensors that must be equal, all of one shape, likewise.
    """

    flags: list[tuple[Tensor, BatchError]] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor, BatchError]] = field(default_factory=list)

    def scalars(self) -> dict[str, Tensor]:
        """0-d tensors, one of which is not 0 where there is a fault."""
        found = {f"fault {number}": flag for number, (flag, _) in enumerate(self.flags)}
        if self.pairs:
            left, right, _ = zip(*self.pairs, strict=True)
            found["unequal"] = torch.ne(torch.stack(left), torch.stack(right)).any()
        return found

    def raise_first(self) -> None:
        """Raises the error of the first fault there is; it reads to the host."""
        for flag, error in (*self.flags, *((torch.ne(a, b).any(), error) for a, b, error in self.pairs)):
            if flag:
                raise error


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch in whatever layout, read as flat response tokens.

    Attributes:
        data: What the engine passed.
        tokens: The response tokens.
        log_probs: The policy's log-probabilities.
        entropy: The policy's entropies, or None.
        totals: What was counted over the mini-batch.
        shape: Shape that a dense field must have, None in the nested layout.
        faults: What contradicts itself in it.
    """

    data: MicroBatchData
    tokens: ResponseTokens
    log_probs: Source
    entropy: Source | None
    totals: Totals
    shape: torch.Size | None
    faults: Faults = field(default_factory=Faults)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type that everything is computed in: float32, or float64 where the log-probs are."""
        return computing_dtype(self.log_probs.values.dtype)

    @property
    def sources(self) -> dict[str, Source]:
        """The model output by its names there."""
        return {"log_probs": self.log_probs} | ({} if self.entropy is None else {"entropy": self.entropy})

    def check_finite(self, names: Iterable[str]) -> None:
        """Raises :class:`NonFiniteError` at the first number of these that counts and is not finite."""
        sources = self.sources
        for name in names:
            self.tokens.check_finite(name, sources[name].gather() if name in sources else self.raw(name))

    def has(self, name: str) -> bool:
        """Whether the micro-batch has a field of that name."""
        return self.data.get(name, None) is not None

    def read(self, name: str) -> Tensor:
        """A field [N] in the type of computation, 0 at uncounted tokens.

        Args:
            name: Key; the field is aligned to the response tokens, or [rows, 1] for one value per sequence.

        Raises:
            MissingFieldError: It is not there.
            FieldShapeError: It does not fit the response tokens.
        """
        return self.tokens.select(self.raw(name).to(self.dtype))

    def raw(self, name: str) -> Tensor:
        """A field [N] as it is, uncounted tokens included; errors as in :meth:`read`."""
        value = get_value(self.data, name)
        if value is None:
            hint = f"; {_SWITCHES[name]}" if name in _SWITCHES else ""
            raise MissingFieldError(
                f"the micro-batch has no {name!r}, expected aligned to the {self.tokens.size} response "
                f"tokens{hint}; it has {', '.join(sorted(map(str, self.data.keys())))}"
            )
        _check_tensor(name, value)
        if _dtype(value).is_complex:
            raise FieldShapeError(f"{name} has dtype {_dtype(value)}; expected real numbers")
        if is_jagged(value):
            values, offsets = jagged_parts(value)
            if self.shape is not None or values.shape != (self.tokens.size,):
                raise FieldShapeError(
                    f"{name} is jagged with {list(values.shape)} values; expected "
                    f"{self._expected()}, like response_mask"
                )
            expected = cast(Tensor, self.tokens.offsets)
            error = FieldShapeError(f"{name} is jagged with other sequence lengths than response_mask")
            if offsets.shape != expected.shape:
                raise error
            self.faults.pairs.append((offsets, expected, error))
            return values
        if self.shape is not None and value.shape == self.shape:
            return value.reshape(-1)
        if self.tokens.offsets is not None and value.shape == (self.tokens.num_slots, 1):
            return self.tokens.per_token(value.reshape(-1))
        raise FieldShapeError(f"{name} has shape {list(value.shape)}; expected {self._expected()}")

    def _expected(self) -> str:
        if self.shape is None:
            return f"a jagged tensor of {self.tokens.size} response tokens, or [{self.tokens.num_slots}, 1]"
        per_sequence = "" if self.tokens.offsets is None else f" or [{self.shape[0]}, 1]"
        return f"{list(self.shape)}{per_sequence}"

    def prompt_num_tokens(self) -> Tensor:
        """``prompt_num_tokens`` as one count per sequence slot, int64 [S].

        Raises:
            FieldShapeError: It is neither [rows] nor, for packed rows, [rows, T].
        """
        value, tokens = get_value(self.data, "prompt_num_tokens"), self.tokens
        expected = [tokens.num_slots] if tokens.offsets is not None else list(self.shape or ())
        if not isinstance(value, Tensor) or list(value.shape) != expected:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise FieldShapeError(f"prompt_num_tokens is {shape}; expected {expected}")
        _check_integers("prompt_num_tokens", value)
        counts = value.to(torch.int64)
        if tokens.offsets is None:
            zeros = torch.zeros(tokens.num_slots, dtype=torch.int64, device=value.device)
            counts = zeros.scatter_(0, tokens.sequence, counts.reshape(-1))
        self.faults.flags.append(
            (
                (counts < tokens.counts).any(),
                FieldShapeError(
                    "prompt_num_tokens is smaller than the tokens of a sequence here; expected those of its prompt "
                    "group over the whole mini-batch"
                ),
            )
        )
        return counts


def read_micro_batch(
    model_output: Mapping[str, Any], data: MicroBatchData, *, count_padding_rows: bool = True
) -> MicroBatch:
    """Reads an engine micro-batch in any of the three layouts.

    Args:
        model_output: ``log_probs`` and, where computed, ``entropy``.
        data: The micro-batch, ``response_mask`` and the fields that the loss needs.
        count_padding_rows: Whether the synthetic rows of verl's v1 trainer count as sequences.

    Raises:
        MissingFieldError: ``log_probs`` or ``response_mask`` is missing.
        FieldShapeError: They do not fit each other.
    """
    if isinstance(data, TensorDict):
        # A look into a TensorDict costs as much as ten operations, and there are a dozen.
        data = dict(data.items())
    log_probs = model_output.get("log_probs", None)
    if log_probs is None:
        raise MissingFieldError("the model output has no 'log_probs'")
    mask, entropy = get_value(data, "response_mask"), model_output.get("entropy", None)
    if mask is None:
        raise MissingFieldError("the micro-batch has no 'response_mask'")
    _check_tensor("response_mask", mask)
    _check_output("log_probs", log_probs)
    if entropy is not None:
        _check_output("entropy", entropy)
    faults = Faults()
    if _dtype(mask).is_floating_point:  # Where NaN would count, being not 0.
        values = jagged_parts(mask)[0] if is_jagged(mask) else mask
        faults.flags.append((values.isnan().any(), FieldShapeError("response_mask holds NaN; expected 0 and 1")))
    shape: torch.Size | None = None
    if is_jagged(mask):
        tokens = ResponseTokens.from_jagged(*jagged_parts(mask))
        index = _nested_index(log_probs, data, tokens, faults)
    else:
        if mask.dim() != 2:
            raise FieldShapeError(f"response_mask has shape {list(mask.shape)}; expected [rows, T]")
        shape = mask.shape
        segment_ids = get_value(data, "segment_ids")
        if segment_ids is None:
            tokens = ResponseTokens.from_padded(mask)
        elif not isinstance(segment_ids, Tensor):
            raise FieldShapeError(f"segment_ids is a {type(segment_ids).__name__}; expected a tensor")
        else:
            tokens = ResponseTokens.from_packed(mask, segment_ids)
        index = None
        if is_jagged(log_probs) or log_probs.dim() == 1:
            if segment_ids is not None:
                raise FieldShapeError("with segment_ids, log_probs must be dense [rows, T] like response_mask")
            index = _padded_index(log_probs, data, tokens, shape, faults)
        elif log_probs.shape != shape:
            raise FieldShapeError(
                f"log_probs has shape {list(log_probs.shape)}; expected that of response_mask, {list(shape)}, "
                "or a jagged tensor over prompt + response"
            )
    if not count_padding_rows:
        tokens = _without_padding_rows(tokens, data)
    source = _make_source(log_probs, index)
    return MicroBatch(
        data=data,
        tokens=tokens,
        log_probs=source,
        entropy=None if entropy is None else _entropy_source(entropy, log_probs, index),
        totals=read_totals(data),
        shape=shape,
        faults=faults,
    )


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise FieldShapeError(f"{name} is a {type(value).__name__}; expected a tensor")
    if not is_jagged(value) and value.is_nested:
        raise FieldShapeError(f"{name} is a nested tensor of layout torch.strided; expected torch.jagged")


def _check_integers(name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        raise FieldShapeError(f"{name} has dtype {value.dtype}; expected integers")


def _dtype(tensor: Any) -> torch.dtype:
    # Questions to a jagged tensor itself are answered in Python, at 0.1 ms each.
    return tensor._values.dtype if is_jagged(tensor) else tensor.dtype


def _check_output(name: str, value: Any) -> None:
    _check_tensor(name, value)
    dtype = _dtype(value)
    if not dtype.is_floating_point:
        raise FieldShapeError(f"{name} has dtype {dtype}; expected a floating point type")


def _make_source(tensor: Any, index: Tensor | None) -> Source:
    if not is_jagged(tensor):
        return Source(tensor, tensor.detach().reshape(-1), index)
    # An engine makes the jagged tensor as a view of flat values. Their graph is the view's; a gradient that
    # enters there skips the backward of the view, which costs more than the rest of a small micro-batch.
    inner = tensor._values
    if tensor.lengths() is not None:
        # Narrowed: there are gaps between the sequences, and torch has no gradient of a copy without them.
        places = torch.cat([torch.arange(a, a + n) for a, n in _extents(tensor)]).to(inner.device)
        index = places if index is None else places.index_select(0, index)
    return Source(inner if inner.requires_grad else tensor, inner.detach(), index)


def _extents(narrowed: Any) -> list[tuple[int, int]]:
    """Where each sequence of a narrowed jagged tensor starts in its values, and its length (read to the host)."""
    starts = narrowed.offsets()[: narrowed.shape[0]]
    return list(zip(starts.tolist(), narrowed.lengths().tolist(), strict=True))


def _num_values(tensor: Any) -> int:
    if is_jagged(tensor):
        return sum(n for _, n in _extents(tensor)) if tensor.lengths() is not None else tensor._values.numel()
    return tensor.numel()


def _entropy_source(entropy: Tensor, log_probs: Tensor, index: Tensor | None) -> Source:
    found, expected = _num_values(entropy), _num_values(log_probs)
    if found != expected:
        raise FieldShapeError(f"entropy holds {[found]} values; expected as many as log_probs, {[expected]}")
    return _make_source(entropy, index)


def _check_sequences(log_probs: Tensor, offsets: Tensor, faults: Faults) -> Tensor:
    """Where each sequence (prompt + response) of a jagged output starts [S + 1]; a fault if not at ``offsets``."""
    found = jagged_parts(log_probs)[1]
    if found.shape != offsets.shape:
        raise FieldShapeError(
            f"log_probs is jagged with {found.numel() - 1} sequences; response_mask has {offsets.numel() - 1}"
        )
    error = FieldShapeError("log_probs is jagged with other lengths than prompt + response of each sequence")
    faults.pairs.append((found, offsets, error))
    return found


def _nested_index(log_probs: Tensor, data: MicroBatchData, tokens: ResponseTokens, faults: Faults) -> Tensor:
    prompts = get_value(data, "prompts")
    if not isinstance(prompts, Tensor) or not is_jagged(prompts):
        raise MissingFieldError("response_mask is jagged, so a jagged 'prompts' is needed to place the responses")
    if not is_jagged(log_probs) and log_probs.dim() != 1:
        raise FieldShapeError(
            f"response_mask is jagged but log_probs has shape {list(log_probs.shape)}; expected a jagged tensor "
            "over prompt + response, or its values [tokens]"
        )
    (prompt_tokens, starts), offsets = jagged_parts(prompts), cast(Tensor, tokens.offsets)
    if starts.shape != offsets.shape:
        raise FieldShapeError(f"prompts holds {starts.numel() - 1} sequences; response_mask {tokens.num_slots}")
    lengths = starts.diff()
    faults.flags.append(((lengths < 1).any(), FieldShapeError(_EMPTY_PROMPT)))
    if is_jagged(log_probs):
        _check_sequences(log_probs, starts + offsets, faults)
    found, expected = _num_values(log_probs), prompt_tokens.numel() + tokens.size
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
    return index


def _padded_index(
    log_probs: Tensor,
    data: MicroBatchData,
    tokens: ResponseTokens,
    shape: torch.Size,
    faults: Faults,
) -> Tensor:
    prompts, attention_mask = get_value(data, "prompts"), get_value(data, "attention_mask")
    if not isinstance(prompts, Tensor) or not isinstance(attention_mask, Tensor):
        raise MissingFieldError(
            "log_probs is jagged over prompt + response and response_mask is padded, so 'prompts' and "
            "'attention_mask' are needed to place the responses"
        )
    rows, width = shape
    if prompts.dim() != 2:
        raise FieldShapeError(f"prompts has shape {list(prompts.shape)}; expected [rows, T]")
    _check_integers("attention_mask", attention_mask)
    prompt_width = prompts.shape[1]
    if attention_mask.shape != (rows, prompt_width + width):
        raise FieldShapeError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [{rows}, {prompt_width + width}], "
            "the width of prompts and of response_mask together"
        )
    prompt_lengths = attention_mask[:, :prompt_width].sum(1)
    lengths = attention_mask[:, prompt_width:].sum(1)
    faults.flags.append(((prompt_lengths < 1).any(), FieldShapeError(_EMPTY_PROMPT)))
    ends = (prompt_lengths + lengths).cumsum(0)
    if is_jagged(log_probs):
        ends = _check_sequences(log_probs, torch.nn.functional.pad(ends, (1, 0)), faults)[1:]
    position = torch.arange(width, device=lengths.device)
    beyond = position >= lengths[:, None]
    hole = ((attention_mask[:, prompt_width:] == 0) != beyond).any()
    outside = (beyond.reshape(-1) & tokens.mask).any()
    faults.flags.extend(
        (
            (hole, FieldShapeError("attention_mask has a hole within a response; expected its tokens, then padding")),
            (outside, FieldShapeError("response_mask counts tokens that attention_mask leaves out")),
        )
    )
    start = ends - lengths - 1
    # Padding takes the sequence's last place, which predicts no response token: nobody else's gradient is there.
    return torch.where(beyond, ends[:, None] - 1, start[:, None] + position).reshape(-1)


def _without_padding_rows(tokens: ResponseTokens, data: MicroBatchData) -> ResponseTokens:
    if get_value(data, "uid") is None:
        raise MissingFieldError("count_padding_rows=False needs 'uid' to tell the synthetic rows of the batch")
    if tokens.offsets is None:
        raise FieldShapeError("count_padding_rows=False needs one uid per row; packed rows have none")
    real = ~torch.tensor(Rows(tokens, data).synthetic, dtype=torch.bool)
    return replace(tokens, exists=real.to(tokens.mask.device, non_blocking=True))


def local_prompt_ids(batch: MicroBatch) -> Tensor:
    """Ids of the prompt groups of a micro-batch by itself: from ``prompt_ids``, ``uid``, or equal prompts.

    Returns:
        int64 [S], or [N] for packed rows, which need ``prompt_ids`` [rows, T].

    Raises:
        MissingFieldError: None of the three is there.
    """
    data, tokens = batch.data, batch.tokens
    ids = get_value(data, "prompt_ids")
    if isinstance(ids, Tensor):
        expected = tokens.num_slots if tokens.offsets is not None else tokens.size
        if ids.numel() != expected:
            raise FieldShapeError(f"prompt_ids has shape {list(ids.shape)}; expected {expected} ids")
        return ids.reshape(-1)
    if tokens.offsets is None:
        raise MissingFieldError("packed rows need 'prompt_ids' [rows, T] to tell prompt groups")
    keys = prompt_keys(Rows(tokens, data))
    if len(keys) != tokens.num_slots:
        raise FieldShapeError(f"prompts has {len(keys)} entries; expected one per row, {tokens.num_slots}")
    return torch.tensor(number_keys(keys), dtype=torch.int64).to(tokens.mask.device)


def number_keys(keys: Sequence[Hashable]) -> list[int]:
    """Equal keys as equal numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
