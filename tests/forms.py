"""The one builder of the tests: sequences to a micro-batch, in every form in which an engine could hand it over.

By default as verl does: a TensorDict with every field that its engine has, the padded layout through verl's own
conversion. And in other clothes: number types that differ between fields, masks of any type, tensors that are
views of larger ones, one advantage per row, totals as tensors, segment ids that are neither dense nor in order,
plain dictionaries. ``bare`` builds as little as the loss reads, so that thousands of mini-batches are a matter of
a minute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from oracle import COUNTS, GROUPS, OF_VERL, Sample
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask
from verl.workers.utils.padding import left_right_2_no_padding

#: Those of verl's trainers, and packed rows.
LAYOUTS = ("nested", "padded", "packed")
FIELDS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "rollout_log_probs")
POISON = (float("nan"), float("inf"), float("-inf"))
#: For ``Form.totals``: a micro-batch without any count.
NO_TOTALS = tuple((name, None) for name in (*COUNTS, *GROUPS, "dp_size"))


@dataclass(frozen=True)
class Form:
    """What a micro-batch holds, and how it is handed over.

    Attributes:
        layout: One of :data:`LAYOUTS`, or ``dense``: a row per sequence with log-probs aligned to it.
        dtype: Type of log-probs and entropies.
        field_dtype: Type of every other field; None is the same.
        mask_dtype: Type of ``response_mask``.
        memory: ``contiguous``, ``strided`` or ``narrowed``: views of something larger.
        flat: Log-probs and entropy over prompt + response are flat values, not a jagged tensor.
        column: The advantages come as [rows, 1].
        poison: NaN and infinities stand wherever nothing counts, and where the model predicts a prompt.
        width: Columns; None is as many as the longest row needs, and ``spare``.
        spare: Columns of padding beyond the longest row.
        per_row: Sequences in each packed row, in turn.
        padding_rows: Packed rows of nothing.
        ids: Packed rows: factor of the segment ids, which are then shuffled within the row.
        container: ``dict`` or ``TensorDict``.
        number: Type of the totals: ``int``, ``float``, ``tensor``, ``numpy`` or ``NonTensorData``.
        bare: Only what our loss reads.
        leave_out: Fields that are not there.
        groups: What the training worker counts of groups is there.
        count_empty_groups: Groups without a token are counted too.
        counts: What the training worker counts of tokens and sequences is there.
        totals: Counts that take the place of the engine's; None leaves one out.
    """

    layout: str = "nested"
    dtype: torch.dtype = torch.float64
    field_dtype: torch.dtype | None = None
    mask_dtype: torch.dtype = torch.int64
    memory: str = "contiguous"
    flat: bool = False
    column: bool = False
    poison: bool = False
    width: int | None = None
    spare: int = 1
    per_row: tuple[int, ...] = (3, 1, 2)
    padding_rows: int = 0
    ids: int = 1
    container: str = "TensorDict"
    number: str = "int"
    bare: bool = False
    leave_out: tuple[str, ...] = ()
    groups: bool = False
    count_empty_groups: bool = True
    counts: bool = False
    totals: tuple[tuple[str, Any], ...] = ()

    @property
    def fields(self) -> list[str]:
        return [name for name in FIELDS if name not in self.leave_out]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch, and how the model's values at all positions become its output."""

    data: Any
    lay_out: Callable[[Tensor], Tensor]


# ----------------------------------------------------------------------------------------------------
# Where everything lies: one flat leaf, an entry per (sequence, position of prompt + response)


def positions(samples: Sequence[Sample]) -> list[int]:
    """Where each sequence starts in the flat leaves, and their length."""
    return [0, *np.cumsum([s.prompt_length + s.length for s in samples]).tolist()]


def _response(samples: Sequence[Sample], starts: Sequence[int], i: int) -> range:
    """Where sequence i's response lies in the leaves: one to the left, since a position predicts the next."""
    start = starts[i] + samples[i].prompt_length - 1
    return range(start, start + samples[i].length)


def make_leaves(
    samples: Sequence[Sample], dtype: torch.dtype = torch.float64, filler: float = 77.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as parameters. Positions that predict no response token hold ``filler``."""

    def leaf(name: str) -> Tensor:
        values = chain.from_iterable([*[filler] * (s.prompt_length - 1), *getattr(s, name), filler] for s in samples)
        return torch.tensor(list(values), dtype=torch.float64).to(dtype).requires_grad_()

    return leaf("log_probs"), leaf("entropy")


def flat_gradient(samples: Sequence[Sample], gradient: list[list[float]]) -> Tensor:
    """The oracle's gradient where ``make_leaves`` has its parameters."""
    starts = positions(samples)
    out = torch.zeros(starts[-1], dtype=torch.float64)
    for i, row in enumerate(gradient):
        out[list(_response(samples, starts, i))] = torch.tensor(row, dtype=torch.float64)
    return out


# ----------------------------------------------------------------------------------------------------
# Tensors


def _view(tensor: Tensor, memory: str) -> Tensor:
    """The same numbers as a view of a tensor that holds others too; differentiable."""
    if memory == "strided":
        return torch.stack([tensor, torch.ones_like(tensor)], -1)[..., 0]
    if memory == "narrowed":
        return torch.nn.functional.pad(tensor, (2, 3), value=1)[..., 2:-3]
    return tensor


def jagged(values: Tensor, lengths: Sequence[int], memory: str = "contiguous") -> Tensor:
    """A jagged tensor of flat values with offsets of its own; narrowed, its values have gaps."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    if memory != "narrowed":
        # The longest row is noted, as verl's own are: else verl pads to the sum of all.
        return torch.nested.nested_tensor_from_jagged(
            _view(values, memory), offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
        )
    width = max(lengths) + 3
    column = torch.arange(width)
    inside = (column >= 1) & (column < 1 + torch.tensor(lengths)[:, None])
    index = torch.zeros(inside.shape, dtype=torch.long)
    index[inside] = torch.arange(1, values.numel() + 1)
    buffer = torch.cat([values.new_ones(1), values])[index]
    starts = torch.ones(len(lengths), dtype=torch.long)
    return torch.nested.narrow(buffer, 1, starts, torch.tensor(lengths), layout=torch.jagged)


def _rectangle(rows: Sequence[Sequence[Any]], width: int, filler: Any, memory: str, dtype: torch.dtype) -> Tensor:
    padded = [[*row, *[filler] * (width - len(row))] for row in rows]
    kind = torch.float64 if dtype.is_floating_point else dtype
    return _view(torch.tensor(padded, dtype=kind).reshape(len(rows), width).to(dtype), memory)


# ----------------------------------------------------------------------------------------------------
# Micro-batches


def totals_of(samples: Sequence[Sample], ranks: int, form: Form) -> dict[str, Any]:
    """What engine, trainer and, as far as the form says so, training worker count of the mini-batch."""
    given: dict[str, Any] = {"dp_size": ranks}
    given |= {name: count(samples) for name, count in COUNTS.items() if form.counts or name in OF_VERL}
    if form.groups:
        counted = samples if form.count_empty_groups else [s for s in samples if s.tokens]
        given |= {name: len({group.key(s) for s in counted}) for name, group in GROUPS.items()}
    return {k: v for k, v in (given | dict(form.totals)).items() if v is not None}


def group_tokens(samples: Sequence[Sample], i: int) -> dict[str, int]:
    """Tokens of each group that a sequence belongs to, by the fields that carry them."""
    return {
        group.per_row: sum(s.tokens for s in samples if group.key(s) == group.key(samples[i]))
        for group in GROUPS.values()
    }


def hand_over(samples: Sequence[Sample], rows: Sequence[int], form: Form, totals: dict[str, Any]) -> MicroBatch:
    """The micro-batch of ``rows``, those of ``samples`` that it holds, with the mini-batch's totals on it."""
    filler = POISON[len(rows) % 3] if form.poison else 0.0
    make = _packed if form.layout == "packed" else _row_by_row
    data, lay_out = make(samples, rows, form, filler)
    return MicroBatch(_wrapped(data, form, totals), lay_out)


def _row_by_row(
    samples: Sequence[Sample], rows: Sequence[int], form: Form, filler: float
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    picked = [samples[i] for i in rows]
    # verl's trainer pads all micro-batches alike.
    alike = picked if form.bare else samples
    width = form.width or max(s.length for s in alike) + form.spare
    lengths, prompts = [s.length for s in picked], [s.prompt_length for s in picked]
    data: dict[str, Any] = {"uid": [s.uid for s in picked], "session_id": [s.session for s in picked]}
    if form.groups:
        sizes_of = [group_tokens(samples, i) for i in rows]
        data |= {name: torch.tensor([sizes[name] for sizes in sizes_of]) for name in sizes_of[0]}
    for name in ("mask", *form.fields):
        dtype = form.mask_dtype if name == "mask" else form.field_dtype or form.dtype
        key, padding = ("response_mask", 0) if name == "mask" else (name, filler)
        values = [getattr(s, name) for s in picked]
        if name == "advantages" and form.column:
            column = [next(iter(s.valid(s.advantages)), filler) for s in picked]
            data[key] = _view(torch.tensor(column, dtype=torch.float64)[:, None], form.memory).to(dtype)
        elif form.layout == "nested":
            flat = torch.tensor(list(chain.from_iterable(values)), dtype=torch.float64).to(dtype)
            data[key] = jagged(flat, lengths, form.memory)
        else:
            data[key] = _rectangle(values, width, padding, form.memory, dtype)
    starts = positions(samples)
    if form.layout == "dense":
        index = _rectangle([_response(samples, starts, i) for i in rows], width, -1, "contiguous", torch.int64)
        return data, _gatherer(index, filler, form)
    sizes = [s.prompt_length + s.length for s in picked]
    if form.layout == "nested":
        data["prompts"] = jagged(torch.ones(sum(prompts), dtype=torch.long), prompts, form.memory)
        if not form.bare:
            data["responses"] = jagged(torch.ones(sum(lengths), dtype=torch.long), lengths)
            data["input_ids"] = jagged(torch.ones(sum(sizes), dtype=torch.long), sizes)
    else:
        left = max(s.prompt_length for s in alike) + form.spare
        attention = _rectangle(
            [[0] * (left - s.prompt_length) + [1] * (s.prompt_length + s.length) for s in picked],
            left + width,
            0,
            form.memory,
            torch.int64,
        )
        data |= {"prompts": attention[:, :left].clone(), "attention_mask": attention}
        if not form.bare:
            data |= {"responses": attention[:, left:].clone(), "input_ids": attention.clone()}
            data["position_ids"] = compute_position_id_with_mask(attention)
    places = torch.tensor([p for i in rows for p in range(starts[i], starts[i + 1])])
    offsets = torch.tensor([0, *np.cumsum(sizes).tolist()])

    def lay_out(leaf: Tensor) -> Tensor:
        if form.flat:
            return _view(leaf[places], form.memory)
        if form.bare:
            return jagged(leaf[places], sizes, form.memory)
        return torch.nested.nested_tensor_from_jagged(leaf[places], offsets=offsets)  # As verl's engine does.

    return data, lay_out


def _packed(
    samples: Sequence[Sample], rows: Sequence[int], form: Form, filler: float
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Several sequences in a row, named by segment ids; padding is segment 0."""
    packs: list[list[int]] = []
    queue, sizes = list(rows), cycle(form.per_row)
    while queue:
        size = next(sizes)
        packs.append(queue[:size])
        queue = queue[size:]
    width = form.width or max(sum(samples[i].length for i in pack) for pack in packs) + form.spare
    packs.extend([] for _ in range(form.padding_rows))
    starts = positions(samples)
    # Tokens of one row in an order of their own: only the ids say which belong together.
    order = np.random.default_rng(len(rows)).permutation(width) if form.ids != 1 else np.arange(width)

    def spread(of: Callable[[int, int], Sequence[Any]], padding: Any, dtype: torch.dtype, memory: str) -> Tensor:
        lines = [[x for k, i in enumerate(pack) for x in of(k, i)] for pack in packs]
        lines = [[*line, *[padding] * (width - len(line))] for line in lines]
        return _rectangle([[line[j] for j in order] for line in lines], width, padding, memory, dtype)

    def numbers(of: Callable[[int], int], padding: int) -> Tensor:
        return spread(lambda _, i: [of(i)] * samples[i].length, padding, torch.int64, form.memory)

    data: dict[str, Any] = {
        "segment_ids": spread(lambda k, i: [form.ids * (k + 1)] * samples[i].length, 0, torch.int64, form.memory),
        "response_mask": spread(lambda k, i: samples[i].mask, int(form.poison), form.mask_dtype, form.memory),
    }
    for k, group in enumerate(GROUPS.values()):
        keys = sorted({group.key(s) for s in samples})
        # Ids at padding are anybody's.
        data[group.ids] = numbers(lambda i, g=group, keys=keys, k=k: keys.index(g.key(samples[i])) - 2 - k, 9 - k)
    for name in form.fields:
        dtype = form.field_dtype or form.dtype
        data[name] = spread(lambda k, i, name=name: getattr(samples[i], name), filler, dtype, form.memory)
    if form.groups:
        for name in (group.per_row for group in GROUPS.values()):
            data[name] = numbers(lambda i, name=name: group_tokens(samples, i)[name], 7)
    index = spread(lambda k, i: _response(samples, starts, i), -1, torch.int64, "contiguous")
    return data, _gatherer(index, filler, form)


def _gatherer(index: Tensor, filler: float, form: Form) -> Callable[[Tensor], Tensor]:
    return lambda leaf: _view(torch.cat([leaf, leaf.new_full((1,), filler)])[index], form.memory)


def _wrapped(data: dict[str, Any], form: Form, totals: dict[str, Any]) -> Any:
    uid = data.pop("uid", None)
    if form.container == "dict":
        convert = {
            "int": int,
            "float": float,
            "tensor": torch.tensor,
            "numpy": np.int64,
            "NonTensorData": NonTensorData,
        }[form.number]
        named = {} if uid is None else {"uid": np.array(uid, dtype=object)}
        return data | named | {k: convert(v) for k, v in totals.items()}
    wrapped = TensorDict(data, batch_size=[len(data["response_mask"])])
    if form.layout == "padded" and not form.bare:
        wrapped = left_right_2_no_padding(wrapped)
    if uid is not None:
        tu.assign_non_tensor_stack(wrapped, "uid", uid)
    tu.assign_non_tensor(wrapped, **totals)
    return wrapped
