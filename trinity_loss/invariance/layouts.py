"""An engine's micro-batches from a mini-batch, in each of the layouts that reach a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
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
        # A tensor of its own: jagged tensors that an engine made apart do not combine either.
        return _jagged(picked, self.offsets, self.bounds)


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
    batch: MiniBatch, rows: Sequence[int], layout: Layout = "nested", width: int | None = None
) -> EngineMicroBatch:
    """One micro-batch, in any layout: of all rows, what a trainer hands to the engine as the mini-batch.

    Args:
        batch: The mini-batch; ``rows`` may name a sequence twice.
        rows: Its sequences.
        layout: ``nested`` (verl v1), ``padded`` (verl v0) or ``packed`` (dense rows with ``segment_ids``).
        width: Padded width of responses or packed rows.

    Example:
        >>> from trinity_loss.invariance import make_mini_batch
        >>> batch = make_mini_batch(8)
        >>> micro_batch = build(batch, [0, 3, 5], "padded")
        >>> data = micro_batch.with_totals(batch.counted_totals | {"dp_size": 1})
        >>> model_output = micro_batch.model_output(batch.log_probs.clone().requires_grad_(), batch.entropy)
        >>> list(data["responses"].shape), model_output["log_probs"].is_nested
        ([3, 25], True)
    """
    return _build(batch, tuple(rows), layout, width, {})


def remembering() -> Callable[[MiniBatch, Sequence[int], Layout, int | None], EngineMicroBatch]:
    """A :func:`build` that makes no tensor twice, for losses that leave their input as it is."""
    memory: dict[Any, Any] = {}

    def remember(
        batch: MiniBatch, rows: Sequence[int], layout: Layout = "nested", width: int | None = None
    ) -> EngineMicroBatch:
        return _build(batch, tuple(rows), layout, width, memory)

    return remember


def _build(
    batch: MiniBatch, rows: tuple[int, ...], layout: Layout, width: int | None, memory: dict[Any, Any]
) -> EngineMicroBatch:
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
    if layout == "packed":
        num_rows, counted = len(fields["segment_ids"]), frozenset(batch.counts_per_sequence)
        return EngineMicroBatch(fields, model, num_rows, counted, outputs, batch.constants)
    index = torch.tensor(rows)
    for name, values in {**batch.sequence_fields, **batch.counts_per_sequence}.items():
        fields[name] = values[index]
    if batch.uids is not None:
        if (key, "uid") not in memory:
            memory[key, "uid"] = NonTensorStack(*(batch.uids[i] for i in rows))
        fields["uid"] = memory[key, "uid"]
    return EngineMicroBatch(fields, model, len(rows), frozenset(batch.counts_per_sequence), outputs, batch.constants)


def _padding(values: Tensor) -> float:
    """Padding of a field: 0, and what is not finite where the field has that at its masked tokens."""
    if not values.is_floating_point():
        return 0
    return float("nan") if bool(values.isnan().any()) else float("inf") if bool(values.isinf().any()) else 0


def _tokens(batch: MiniBatch, i: int) -> Tensor:
    return torch.arange(batch.starts[i], batch.starts[i + 1])


def _model_layer(batch: MiniBatch, rows: Sequence[int]) -> Layer:
    """Prompt and response of each sequence; a response token is predicted one place to the left of its own."""
    nowhere = batch.num_tokens
    pieces = []
    for i in rows:
        prompt = int(batch.prompt_lengths[i])
        pieces += [torch.full((prompt - 1,), nowhere), _tokens(batch, i), torch.full((1,), nowhere)]
    return Layer(torch.cat(pieces), _offsets(torch.tensor([a + b for a, b in _sizes(batch, rows)])))


def _sizes(batch: MiniBatch, rows: Sequence[int]) -> list[tuple[int, int]]:
    return [(int(batch.prompt_lengths[i]), batch.starts[i + 1] - batch.starts[i]) for i in rows]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _jagged(values: Tensor, offsets: Tensor, bounds: tuple[int, int] | None) -> Tensor:
    shortest, longest = bounds or (None, None)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets.clone(), min_seqlen=shortest, max_seqlen=longest
    )


def _bounds(lengths: Tensor) -> tuple[int, int]:
    return int(lengths.min()), int(lengths.max())


def _ids(batch: MiniBatch, rows: Sequence[int]) -> list[Tensor]:
    """Prompt and response of each sequence, one after the other: twice as many tensors as rows."""
    sizes = torch.stack([batch.prompt_lengths, batch.response_lengths], 1).reshape(-1)
    ids = torch.ones(int(sizes.sum()), dtype=torch.int64) if batch.input_ids is None else batch.input_ids
    pieces = ids.split(sizes.tolist())
    return [piece for i in rows for piece in pieces[2 * i : 2 * i + 2]]


def _jagged_like(values: Tensor, lengths: Tensor) -> Tensor:
    return _jagged(values, _offsets(lengths), _bounds(lengths))


def _positions(lengths: Tensor) -> Tensor:
    """0, 1, 2, … of each sequence, one after the other."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(_offsets(lengths)[:-1], lengths)


#: Fields that the layout alone decides, where response tokens stand in the others, and in the model output.
_Made = tuple[dict[str, Any], Layer, Layer]


def _nested(batch: MiniBatch, rows: Sequence[int], width: int | None) -> _Made:
    index = torch.tensor(list(rows))
    prompts, responses = batch.prompt_lengths[index], batch.response_lengths[index]
    ids = _ids(batch, rows)
    fields = {
        "input_ids": _jagged_like(torch.cat(ids), prompts + responses),
        "position_ids": _jagged_like(_positions(prompts + responses), prompts + responses),
        "prompts": _jagged_like(torch.cat(ids[::2]), prompts),
        "responses": _jagged_like(torch.cat(ids[1::2]), responses),
    }
    tokens = torch.cat([_tokens(batch, i) for i in rows])
    return fields, Layer(tokens, _offsets(responses), _bounds(responses)), _model_layer(batch, rows)


def _padded(batch: MiniBatch, rows: Sequence[int], width: int | None) -> _Made:
    """What verl's ``left_right_2_no_padding`` makes of prompts padded on the left and responses on the right."""
    index = torch.tensor(list(rows))
    prompts, responses = batch.prompt_lengths[index], batch.response_lengths[index]
    left = int(batch.prompt_lengths.max()) + 1
    right = width or int(batch.response_lengths.max()) + 1
    position = torch.arange(left + right)
    real = (position >= left - prompts[:, None]) & (position < left + responses[:, None])
    starts = torch.tensor([batch.starts[i] for i in rows])
    column = torch.arange(right)
    places = torch.where(column < responses[:, None], starts[:, None] + column, batch.num_tokens)
    ids = torch.cat(_ids(batch, rows))
    rectangle = torch.zeros(real.shape, dtype=torch.int64).masked_scatter(real, ids)
    fields = {
        "input_ids": _jagged_like(ids, prompts + responses),
        "position_ids": _jagged_like(_positions(prompts + responses), prompts + responses),
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
    packs: list[list[int]] = []
    queue, sizes = list(rows), cycle(_SEQUENCES_PER_ROW)
    while queue:
        size = next(sizes)
        packs.append(queue[:size])
        queue = queue[size:]
    longest = max(sum(batch.starts[i + 1] - batch.starts[i] for i in pack) for pack in packs)
    shape = (len(packs), max(width or 0, longest + 2))
    places = torch.full(shape, batch.num_tokens)
    segments, groups = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name in batch.counts_per_sequence}
    spread = {
        name: torch.zeros(shape, dtype=values.dtype)
        for name, values in batch.sequence_fields.items()
        if name == EXPERT_MASK
    }
    names = sorted(set(batch.uids)) if batch.uids is not None else []
    for row, pack in enumerate(packs):
        column = 0
        for segment, i in enumerate(pack, start=1):
            here = slice(column, column + batch.starts[i + 1] - batch.starts[i])
            places[row, here] = _tokens(batch, i)
            segments[row, here] = segment
            for name, values in batch.counts_per_sequence.items():
                counts[name][row, here] = values[i]
            for name, of_rows in spread.items():
                of_rows[row, here] = batch.sequence_fields[name][i]
            groups[row, here] = 1 + (names.index(batch.uids[i]) if batch.uids is not None else i)
            column = here.stop
    fields = {"segment_ids": segments, "prompt_ids": groups, **counts, **spread}
    return fields, Layer(places), Layer(places)
