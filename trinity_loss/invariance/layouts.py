"""An engine's micro-batches from a mini-batch, in each of the layouts that reach a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from trinity_loss.distillation import OUTPUTS, TEACHER
from trinity_loss.invariance.cuts import Layout
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.totals import EXPERT_MASK

#: What stands where the model predicts no response token: in reach of a loss that looks one place aside.
_ELSEWHERE = -3.0
_SEQUENCES_PER_ROW = (3, 1, 2)


@dataclass(frozen=True, eq=False)
class Layer:
    """How flat response tokens [N] become a tensor of a layout.

    Attributes:
        index: int64, into the tokens; N stands for a place without one.
        offsets: int64 [S + 1] of a jagged tensor; None: ``index`` has the tensor's shape.
        bounds: Shortest and longest sequence of a jagged tensor, which pads to its longest only if told; an
            engine's model output is not.
    """

    index: Tensor
    offsets: Tensor | None = None
    bounds: tuple[int, int] | None = None

    def lay_out(self, values: Tensor, elsewhere: float = 0) -> Tensor:
        """Puts values [N] in their places, differentiably."""
        picked = torch.cat([values, values.new_full((1, *values.shape[1:]), elsewhere)])[self.index]
        if self.offsets is None:
            return picked
        shortest, longest = self.bounds or (None, None)
        # Offsets of its own: jagged tensors that an engine made apart do not combine either.
        return torch.nested.nested_tensor_from_jagged(
            picked, offsets=self.offsets.clone(), min_seqlen=shortest, max_seqlen=longest
        )


@dataclass(frozen=True, eq=False)
class EngineMicroBatch:
    """A micro-batch as an engine hands it over.

    Attributes:
        fields: Everything but the totals that depend on the cut.
        model: Layer of the model output.
        num_rows: Rows.
        counted: Names of the fields that our training worker attaches.
        outputs: Values [N] of further parts of the model output, by their names there.
        constants: Fields that are the same in every micro-batch.
    """

    fields: dict[str, Any]
    model: Layer
    num_rows: int
    counted: frozenset[str] = frozenset()
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> TensorDict:
        """The fields as the loss gets them: a new container each time, of the same tensors."""
        return self.with_totals({})

    def with_totals(self, totals: Mapping[str, Any], worker: bool = True) -> TensorDict:
        """:attr:`data`, with what was counted over the mini-batch.

        Args:
            totals: Counts by name.
            worker: Whether our training worker attached its fields.
        """
        given = {name: NonTensorData(value) for name, value in {**self.constants, **totals}.items()}
        fields = {name: value for name, value in self.fields.items() if worker or name not in self.counted}
        return TensorDict({**fields, **given}, batch_size=[self.num_rows])

    def model_output(self, log_probs: Tensor, entropy: Tensor | None = None) -> dict[str, Tensor]:
        """The model output that carries these values [N] of the mini-batch's response tokens, differentiably."""
        output = {"log_probs": self.model.lay_out(log_probs, _ELSEWHERE)}
        if entropy is not None:
            output["entropy"] = self.model.lay_out(entropy, -_ELSEWHERE)
        for name, values in self.outputs.items():
            # The divergence from a teacher moves with the model, so here with its log-probs.
            moves = log_probs - log_probs.detach() if name == "distillation_losses" else 0
            output[name] = self.model.lay_out(values + moves)
        return output


def build(
    batch: MiniBatch,
    rows: Sequence[int],
    layout: Layout = "nested",
    width: int | None = None,
    memory: dict[Any, Any] | None = None,
) -> EngineMicroBatch:
    """One micro-batch, in any layout: of all rows, what a trainer hands to the engine as the mini-batch.

    Args:
        batch: The mini-batch; ``rows`` may name a sequence twice.
        rows: Its sequences.
        layout: ``nested`` (verl v1), ``padded`` (verl v0) or ``packed`` (dense rows with ``segment_ids``).
        width: Padded width of responses or packed rows.
        memory: What was made stays here, and is made no second time; for losses that leave their input as it is.

    Example:
        >>> from trinity_loss.invariance import make_mini_batch
        >>> batch = make_mini_batch(8)
        >>> micro_batch = build(batch, [0, 3, 5], "padded")
        >>> data = micro_batch.with_totals(batch.counted_totals | {"dp_size": 1})
        >>> model_output = micro_batch.model_output(batch.log_probs.clone().requires_grad_(), batch.entropy)
        >>> list(data["responses"].shape), model_output["log_probs"].is_nested
        ([3, 25], True)
    """
    rows, memory = tuple(rows), {} if memory is None else memory
    key = (id(batch.prompt_lengths), id(batch.response_mask), id(batch.uids), rows, layout, width)
    if key not in memory:
        make = {"packed": _packed, "nested": _nested, "padded": _padded}[layout]
        # Whose parts the key names stays, so that no other object gets their number.
        memory[key] = (*make(batch, rows, width), batch)
    fixed, response, model, _ = memory[key]
    fields = dict(fixed)
    outputs = {name: values for name, values in batch.token_fields.items() if name in OUTPUTS}
    if TEACHER in batch.token_fields:  # As verl has it: where the model output stands, in a last dimension of its own.
        column = batch.token_fields[TEACHER][:, None]
        fields[TEACHER] = model.lay_out(column if layout != "packed" else column[:, 0])
    here = {name: values for name, values in batch.token_fields.items() if name not in (*OUTPUTS, TEACHER)}
    for name, values in {"response_mask": batch.response_mask, **here}.items():
        if (key, id(values)) not in memory:
            memory[key, id(values)] = (response.lay_out(values, _padding(values)), values)
        fields[name] = memory[key, id(values)][0]
    fields["loss_mask"] = fields["response_mask"] if batch.loss_mask is None else response.lay_out(batch.loss_mask)
    num_rows, counted = len(rows), frozenset(batch.counts_per_sequence)
    if layout == "packed":
        num_rows = len(fields["segment_ids"])
    else:
        of_rows = {**batch.sequence_fields, **batch.counts_per_sequence}
        fields |= {name: values[list(rows)] for name, values in of_rows.items()}
        if batch.uids is not None:
            if (key, "uid") not in memory:
                memory[key, "uid"] = NonTensorStack(*(batch.uids[i] for i in rows))
            fields["uid"] = memory[key, "uid"]
    return EngineMicroBatch(fields, model, num_rows, counted, outputs, batch.constants)


def _padding(values: Tensor) -> float:
    """Padding of a field: 0, and what is not finite where the field has that at its masked tokens."""
    if not values.is_floating_point():
        return 0
    return float("nan") if bool(values.isnan().any()) else float("inf") if bool(values.isinf().any()) else 0


def _tokens(batch: MiniBatch, i: int) -> Tensor:
    return torch.arange(batch.starts[i], batch.starts[i + 1])


def _model_layer(batch: MiniBatch, rows: Sequence[int]) -> Layer:
    """Prompt and response of each sequence; a response token is predicted one place to the left of its own."""
    pad = torch.nn.functional.pad
    prompts = batch.prompt_lengths.tolist()
    pieces = [pad(_tokens(batch, i), (prompts[i] - 1, 1), value=batch.num_tokens) for i in rows]
    return Layer(torch.cat(pieces), _offsets(torch.tensor([len(piece) for piece in pieces])))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _bounds(lengths: Tensor) -> tuple[int, int]:
    return int(lengths.min()), int(lengths.max())


def _ids(batch: MiniBatch, rows: Sequence[int]) -> list[Tensor]:
    """Prompt and response of each sequence, one after the other: twice as many tensors as rows."""
    sizes = torch.stack([batch.prompt_lengths, batch.response_lengths], 1).reshape(-1)
    ids = torch.ones(int(sizes.sum()), dtype=torch.int64) if batch.input_ids is None else batch.input_ids
    pieces = ids.split(sizes.tolist())
    return [piece for i in rows for piece in pieces[2 * i : 2 * i + 2]]


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    return Layer(torch.arange(len(values)), _offsets(lengths), _bounds(lengths)).lay_out(values)


def _for_the_model(ids: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in zip(ids[::2], ids[1::2], strict=True)])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return {"input_ids": _jagged(torch.cat(ids), lengths), "position_ids": _jagged(positions, lengths)}


#: Fields that the layout alone decides, where response tokens stand in the others, and in the model output.
_Made = tuple[dict[str, Any], Layer, Layer]


def _nested(batch: MiniBatch, rows: Sequence[int], width: int | None) -> _Made:
    prompts, responses = batch.prompt_lengths[list(rows)], batch.response_lengths[list(rows)]
    ids = _ids(batch, rows)
    fields = _for_the_model(ids) | {
        "prompts": _jagged(torch.cat(ids[::2]), prompts),
        "responses": _jagged(torch.cat(ids[1::2]), responses),
    }
    tokens = torch.cat([_tokens(batch, i) for i in rows])
    return fields, Layer(tokens, _offsets(responses), _bounds(responses)), _model_layer(batch, rows)


def _padded(batch: MiniBatch, rows: Sequence[int], width: int | None) -> _Made:
    """What verl's ``left_right_2_no_padding`` makes of prompts padded on the left and responses on the right."""
    prompts, responses = batch.prompt_lengths[list(rows)], batch.response_lengths[list(rows)]
    left = int(batch.prompt_lengths.max()) + 1
    right = width or int(batch.response_lengths.max()) + 1
    position = torch.arange(left + right)
    real = (position >= left - prompts[:, None]) & (position < left + responses[:, None])
    starts = torch.tensor([batch.starts[i] for i in rows])
    column = torch.arange(right)
    places = torch.where(column < responses[:, None], starts[:, None] + column, batch.num_tokens)
    ids = _ids(batch, rows)
    rectangle = torch.zeros(real.shape, dtype=torch.int64).masked_scatter(real, torch.cat(ids))
    fields = _for_the_model(ids) | {
        "prompts": rectangle[:, :left].clone(),
        "responses": rectangle[:, left:].clone(),
        "attention_mask": real.long(),
        "max_seq_len": NonTensorData(left + right),
        "max_response_len": NonTensorData(right),
        "indices": NonTensorData(torch.nonzero(real.reshape(-1)).reshape(-1)),
    }
    return fields, Layer(places), _model_layer(batch, rows)


def _packed(batch: MiniBatch, rows: Sequence[int], width: int | None) -> _Made:
    """Several sequences in a row, named by segment ids from 1; every row ends in padding."""
    queue, sizes = iter(rows), cycle(_SEQUENCES_PER_ROW)
    packs = list(iter(lambda: list(islice(queue, next(sizes))), []))
    tokens = [torch.cat([_tokens(batch, i) for i in pack]) for pack in packs]
    shape = (len(packs), max(width or 0, max(map(len, tokens)) + 2))
    places, segments = torch.full(shape, batch.num_tokens), torch.zeros(shape, dtype=torch.int64)
    for row, (pack, here) in enumerate(zip(packs, tokens, strict=True)):
        places[row, : len(here)] = here
        numbers = torch.arange(1, len(pack) + 1)
        segments[row, : len(here)] = numbers.repeat_interleave(batch.response_lengths[pack])
    layer = Layer(places)
    names = sorted(set(batch.uids or ()))
    prompts = range(batch.num_sequences) if batch.uids is None else map(names.index, batch.uids)
    marks = {name: values for name, values in batch.sequence_fields.items() if name == EXPERT_MASK}
    of_sequences = {"prompt_ids": torch.tensor([*prompts]) + 1, **batch.counts_per_sequence, **marks}
    of_tokens = {name: v.repeat_interleave(batch.response_lengths) for name, v in of_sequences.items()}
    return {"segment_ids": segments, **{name: layer.lay_out(v) for name, v in of_tokens.items()}}, layer, layer
