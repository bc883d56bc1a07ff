"""An engine micro-batch: its response tokens, its fields as flat vectors, the mini-batch's totals.

Three layouts arrive here and none of them leaves:

- *nested* (verl v1): fields are jagged over the responses, the model output is jagged over prompt + response;
- *padded* (verl v0): fields are [rows, T], the model output is jagged over prompt + response;
- *dense*: fields and model output are [rows, T], aligned to the response tokens; with ``segment_ids``
  [rows, T] several sequences share a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.errors import Fault, FieldShapeError, FieldValueError, MissingFieldError
from trinity_loss.jagged import check_tensor, dtype_of, is_jagged, jagged_parts, num_values
from trinity_loss.placement import Source, place_nested, place_padded
from trinity_loss.row_values import MicroBatchData, get_value, row_values
from trinity_loss.tokens import ResponseTokens, computing_dtype
from trinity_loss.totals import EXPERT_MASK, Rows, Totals, expert_rows, expert_values, read_totals

#: How to make verl send a field that is missing.
_SWITCHES = {
    "ref_log_prob": "actor_rollout_ref.actor.use_kl_loss=True makes verl compute it",
    "rollout_log_probs": "actor_rollout_ref.rollout.calculate_log_probs=True makes the rollout return it",
    "rollout_is_weights": "algorithm.rollout_correction.rollout_is makes verl compute it",
    **dict.fromkeys(
        ("teacher_logprobs", "teacher_ids"), "distillation.enabled=True makes verl's agent loop ask the teacher for it"
    ),
}
#: How to make an engine return what is missing.
_ENGINE_SWITCHES = dict.fromkeys(
    ("distillation_losses", "student_mass", "teacher_mass"),
    ", which an engine makes of the student's logits and the batch's 'teacher_logprobs' and 'teacher_ids' where the "
    "batch says distillation_use_topk; distillation.enabled=True makes verl's trainers say so",
)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch in whatever layout, read as flat response tokens.

    Attributes:
        data: What the engine passed.
        tokens: The response tokens.
        sources: What of the model output is read, by its names there: ``log_probs``, ``entropy`` where there is one,
            and what was asked for; further fields of the batch that stand where these do.
        totals: What was counted over the mini-batch.
        shape: Shape that a dense field must have, None in the nested layout.
        faults: What may contradict itself in it.
        values: What :meth:`load` read, [N] by name, without a graph, 0 at uncounted tokens.
        total: The sum of all these values, 0-d: not finite if one of them is not.
        expert: Which sequences are an expert's, bool [S]; None where nobody asked.
        row_weights: What multiplies the token losses of every term [N], 0 at uncounted tokens; None: nothing does.
    """

    data: MicroBatchData
    tokens: ResponseTokens
    sources: Mapping[str, Source]
    totals: Totals
    shape: torch.Size | None
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict)
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    row_weights: Tensor | None = None
    expert: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type that everything is computed in: float32, or float64 where the log-probs are."""
        return computing_dtype(next(iter(self.sources.values())).values.dtype)

    def load(self, names: Sequence[str]) -> MicroBatch:
        """The same micro-batch with the model output and the fields of these names in :attr:`values`.

        They are read in one go: few operations, however many fields. Errors as in :meth:`raw`.
        """
        raw = {name: source.gather() for name, source in self.sources.items()}
        raw |= {name: self.raw(name) for name in names}
        table = torch.stack([values.to(self.dtype) for values in raw.values()]).masked_fill_(~self.tokens.mask, 0)
        faults = (*self.faults, *self._unequal(names))
        return replace(self, values=dict(zip(raw, table.unbind(), strict=True)), total=table.sum(), faults=faults)

    def with_expert_rows(self) -> MicroBatch:
        """The same micro-batch that knows its :attr:`expert` rows.

        Raises:
            MissingFieldError: Nothing tells them.
            FieldShapeError: What tells them does not have one number per row, or per token of packed rows.
        """
        tokens, values = self.tokens, expert_values(self.tokens, self.data)
        if values is None:
            raise _missing(
                EXPERT_MASK, self.data, "expected one number per row, 1 where it is an expert's and 0 elsewhere"
            )
        strange, faults = (values != 0) & (values != 1), []
        if tokens.offsets is None:
            strange &= tokens.mask
            error = FieldValueError(
                f"{EXPERT_MASK} differs within a packed segment; expected one number for its tokens"
            )
            faults.append(Fault(tokens.differ_within(values), error))
        error = FieldValueError(f"{EXPERT_MASK} holds a number that is neither 0 nor 1; expected 1 for an expert's row")
        faults.append(Fault(strange.any(), error))
        return replace(self, expert=expert_rows(tokens, self.data), faults=(*self.faults, *faults))

    def weighted_by(self, name: str) -> MicroBatch:
        """The same micro-batch with a field as its :attr:`row_weights`, given per token or one for each sequence.

        Args:
            name: Key; besides the shapes of :meth:`raw`, [rows] or a list of numbers where a row is a sequence.

        Raises:
            MissingFieldError: It is not there.
            FieldShapeError: It does not fit the response tokens.
        """
        value, tokens, faults = get_value(self.data, name), self.tokens, self.faults
        if value is None:
            raise MissingFieldError(
                f"row_weights is {name!r}, but the batch has no {name!r}; expected one number per row or per token, "
                f"sent by the trainer with the other fields; it has {', '.join(sorted(map(str, self.data.keys())))}"
            )
        per_row = isinstance(value, Tensor) and not is_jagged(value) and value.shape == (tokens.num_slots,)
        if tokens.offsets is not None and (per_row or isinstance(value, list | tuple | np.ndarray)):
            numbers = value if per_row else row_values(self.data, name, tokens.num_slots)
            if not per_row and not all(isinstance(number, Real) for number in numbers or ()):
                raise FieldShapeError(f"{name} has entries that are no numbers; expected one number per row")
            weights = tokens.per_token(torch.as_tensor(numbers, dtype=self.dtype, device=tokens.mask.device))
        else:
            weights = self.raw(name).to(self.dtype)
            faults = (*faults, *self._unequal([name]))
        weights = tokens.select(weights)
        error = FieldValueError(
            f"{name} has a weight that is negative or not finite at a token that counts; expected finite numbers, 0 or "
            f"more, from who sends {name}, which row_weights names"
        )
        bad = Fault(~((weights >= 0) & weights.isfinite()).all(), error)
        return replace(self, row_weights=weights, faults=(*faults, bad))

    def _unequal(self, names: Iterable[str]) -> list[Fault]:
        """The faults of jagged fields among these whose sequences have other lengths than those of response_mask."""
        fields = {name: get_value(self.data, name) for name in names if name not in self.sources}
        offsets = {name: jagged_parts(field)[1] for name, field in fields.items() if is_jagged(field)}
        if not offsets:
            return []
        found = (torch.stack([*offsets.values()]) != self.tokens.starts).any(1)
        return [Fault(here, _other_lengths(name)) for here, name in zip(found.unbind(), offsets, strict=True)]

    def check_finite(self, names: Iterable[str]) -> None:
        """Raises :class:`NonFiniteError` at the first number of these that counts and is not finite."""
        for name in names:
            self.tokens.check_finite(name, self.raw(name))

    def without_nonfinite(self, names: Iterable[str]) -> tuple[MicroBatch, Tensor]:
        """The same micro-batch without the tokens that have a NaN or an infinity in one of these.

        Returns:
            The micro-batch, and which tokens it rejects, bool [N].
        """
        finite = torch.stack([torch.isfinite(self.tokens.select(self.raw(name).to(self.dtype))) for name in names])
        bad = ~finite.all(0)
        return replace(self, tokens=self.tokens.reject(bad)), bad

    @property
    def num_loss_tokens(self) -> Tensor:
        """int64 0-d: tokens of ``loss_mask``, which an engine counts; of ``response_mask`` where there is none."""
        mask = get_value(self.data, "loss_mask")
        if not isinstance(mask, Tensor):
            return self.tokens.before_rejection.num_tokens
        return (jagged_parts(mask)[0] if is_jagged(mask) else mask).count_nonzero()

    def has(self, name: str) -> bool:
        """Whether the micro-batch has a field of that name."""
        return self.data.get(name, None) is not None

    def raw(self, name: str) -> Tensor:
        """A field or a part of the model output [N] as it is, uncounted tokens included.

        Args:
            name: Key; the field is aligned to the response tokens, or [rows, 1] for one value per sequence.

        Raises:
            MissingFieldError: It is not there.
            FieldShapeError: It does not fit the response tokens.
        """
        if name in self.sources:
            return self.sources[name].gather()
        value = get_value(self.data, name)
        if value is None:
            raise _missing(name, self.data, f"expected aligned to the {self.tokens.size} response tokens")
        check_tensor(name, value)
        if dtype_of(value).is_complex:
            raise FieldShapeError(f"{name} has dtype {dtype_of(value)}; expected real numbers")
        if is_jagged(value):
            values, offsets = jagged_parts(value)
            if self.shape is not None or values.shape != (self.tokens.size,):
                raise FieldShapeError(
                    f"{name} is jagged with {list(values.shape)} values; expected {self._expected()}, like "
                    "response_mask"
                )
            if offsets.shape != self.tokens.starts.shape:
                raise _other_lengths(name)
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


def _missing(name: str, data: MicroBatchData, expected: str) -> MissingFieldError:
    hint = f"; {_SWITCHES[name]}" if name in _SWITCHES else ""
    has = ", ".join(sorted(map(str, data.keys())))
    return MissingFieldError(f"the micro-batch has no {name!r}, {expected}{hint}; it has {has}")


def check_teacher(config: DistillationLossConfig, data: MicroBatchData) -> None:
    """Raises :class:`MissingFieldError` where a batch lacks what a teacher has to say."""
    for name in config.teacher_fields:
        if data.get(name, None) is None:
            each = "of its k most likely tokens" if config.use_topk else "of the token there"
            raise _missing(name, data, f"expected what the teacher says {each} at each place of prompt and response")


def read_micro_batch(
    model_output: Mapping[str, Any],
    data: MicroBatchData,
    *,
    outputs: Sequence[str] = ("log_probs",),
    beside: Sequence[str] = (),
    count_padding_rows: bool = True,
) -> MicroBatch:
    """Reads an engine micro-batch in any of the three layouts.

    Args:
        model_output: What ``outputs`` names and, where computed, ``entropy``.
        data: The micro-batch, ``response_mask`` and the fields that the loss needs.
        outputs: Parts of the model output that are read, at least one.
        beside: Fields of the batch, a number each, that stand where the model output does, not where responses do.
        count_padding_rows: Whether the synthetic rows of verl's v1 trainer count as sequences.

    Raises:
        MissingFieldError: A part of the model output, one of these fields or ``response_mask`` is missing.
        FieldShapeError: They do not fit each other.
    """
    if isinstance(data, TensorDict):
        # A look into a TensorDict costs as much as ten operations, and there are a dozen.
        data = dict(data.items())
    elif not hasattr(data, "get"):
        raise FieldShapeError(
            f"the micro-batch is a {type(data).__name__}; expected a TensorDict or another mapping, as "
            "DataProto.to_tensordict() makes one"
        )
    mask = get_value(data, "response_mask")
    parts = {name: model_output.get(name, None) for name in outputs}
    for name, part in parts.items():
        if part is None:
            raise MissingFieldError(f"the model output has no {name!r}{_ENGINE_SWITCHES.get(name, '')}")
    if mask is None:
        raise MissingFieldError("the micro-batch has no 'response_mask'")
    check_tensor("response_mask", mask)
    first, log_probs = outputs[0], parts[outputs[0]]
    _check_output(first, log_probs)
    tokens, shape = _read_tokens(mask, data)
    index, faults = _place(log_probs, data, tokens, shape)
    if dtype_of(mask).is_floating_point:  # Where NaN would count, being not 0.
        values = jagged_parts(mask)[0] if is_jagged(mask) else mask
        fault = Fault(values.isnan().any(), FieldShapeError("response_mask holds NaN; expected 0 and 1"))
        faults = (fault, *faults)
    if model_output.get("entropy", None) is not None:
        _check_output("entropy", parts.setdefault("entropy", model_output["entropy"]))
    for name, part in parts.items():
        found, expected = num_values(part), num_values(log_probs)
        if found != expected:
            raise FieldShapeError(f"{name} holds {[found]} values; expected as many as {first}, {[expected]}")
    sources = {name: Source.of(part, index) for name, part in parts.items()}
    for name in beside:
        sources[name], more = _read_beside(name, data, log_probs, index)
        faults = (*faults, *more)
    if not count_padding_rows:
        tokens = _without_padding_rows(tokens, data)
    return MicroBatch(
        data=data,
        tokens=tokens,
        sources=sources,
        totals=read_totals(data),
        shape=shape,
        faults=faults,
    )


def read_responses(data: MicroBatchData, name: str) -> MicroBatch:
    """The response tokens of a batch, with a field of it in the place of the policy's log-probs.

    Args:
        data: A batch as of :func:`read_micro_batch`.
        name: The field, aligned to the response tokens.
    """
    mask, values = get_value(data, "response_mask"), get_value(data, name)
    for key, value in (("response_mask", mask), (name, values)):
        if value is None:
            raise MissingFieldError(f"the batch has no {key!r}")
        check_tensor(key, value)
    tokens, shape = _read_tokens(mask, data)
    return MicroBatch(data, tokens, {"log_probs": Source.of(values, None)}, read_totals(data), shape)


def _read_tokens(mask: Any, data: MicroBatchData) -> tuple[ResponseTokens, torch.Size | None]:
    """The response tokens, and the shape of a dense mask."""
    if is_jagged(mask):
        return ResponseTokens.from_jagged(*jagged_parts(mask)), None
    if mask.dim() != 2:
        raise FieldShapeError(f"response_mask has shape {list(mask.shape)}; expected [rows, T]")
    segment_ids = get_value(data, "segment_ids")
    if segment_ids is None:
        return ResponseTokens.from_padded(mask), mask.shape
    return ResponseTokens.from_packed(mask, segment_ids), mask.shape


def _place(
    log_probs: Any, data: MicroBatchData, tokens: ResponseTokens, shape: torch.Size | None
) -> tuple[Tensor | None, tuple[Fault, ...]]:
    """Where the response tokens stand in the model output; None where the tokens are its values."""
    if shape is None:
        return place_nested(log_probs, data, tokens)
    if is_jagged(log_probs) or log_probs.dim() == 1:
        if tokens.offsets is None:
            raise FieldShapeError("with segment_ids, log_probs must be dense [rows, T] like response_mask")
        return place_padded(log_probs, data, tokens, shape)
    if log_probs.shape != shape:
        raise FieldShapeError(
            f"log_probs has shape {list(log_probs.shape)}; expected that of response_mask, {list(shape)}, "
            "or a jagged tensor over prompt + response"
        )
    return None, ()


def _read_beside(
    name: str, data: MicroBatchData, log_probs: Any, index: Tensor | None
) -> tuple[Source, tuple[Fault, ...]]:
    """A field of one number a token, laid out as the model output is, with or without a last dimension of 1."""
    value = get_value(data, name)
    faults: tuple[Fault, ...] = ()
    if value is None:
        raise _missing(name, data, "expected one number for each token of prompt and response")
    check_tensor(name, value)
    values, offsets = jagged_parts(value) if is_jagged(value) else (value, None)
    count = num_values(log_probs)
    if values.numel() != count:
        raise FieldShapeError(
            f"{name} has {list(values.shape)} values; expected {[count]}, one for each token of prompt and response, "
            "as in the model output"
        )
    if offsets is not None and is_jagged(log_probs):
        error = FieldShapeError(f"{name} is jagged with other sequence lengths than the model output")
        theirs = jagged_parts(log_probs)[1]
        if offsets.shape != theirs.shape:
            raise error
        faults = (Fault((offsets != theirs).any(), error),)
    flat = values.detach().reshape(-1)
    return Source(flat, flat, index), faults


def _check_output(name: str, value: Any) -> None:
    check_tensor(name, value)
    dtype = dtype_of(value)
    if not dtype.is_floating_point:
        raise FieldShapeError(f"{name} has dtype {dtype}; expected a floating point type")


def _other_lengths(name: str) -> FieldShapeError:
    return FieldShapeError(f"{name} is jagged with other sequence lengths than response_mask")


def _without_padding_rows(tokens: ResponseTokens, data: MicroBatchData) -> ResponseTokens:
    if get_value(data, "uid") is None:
        raise MissingFieldError("count_padding_rows=False needs 'uid' to tell the synthetic rows of the batch")
    if tokens.offsets is None:
        raise FieldShapeError("count_padding_rows=False needs one uid per row; packed rows have none")
    real = ~torch.tensor(Rows(tokens, data, count_padding_rows=False).synthetic, dtype=torch.bool)
    return replace(tokens, exists=real.to(tokens.mask.device, non_blocking=True))
