"""A mini-batch in every form in which an engine could hand it over, and what comes back.

``batches`` builds micro-batches as verl does. Here the same sequences arrive in other clothes: number types
that differ between fields, masks of any type, tensors that are views of larger ones, one advantage per row,
totals as tensors, segment ids that are neither dense nor in order, plain dictionaries. What is built is as
little as the loss reads, so that thousands of mini-batches are a matter of a minute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from batches import POISON, Run, reduce_like_verl
from oracle import Sample
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.metric_set import finish_metrics

LAYOUTS = ("nested", "padded", "dense", "packed")
#: Every cut: ``ranks[r][k]`` lists the sequences of micro-batch k on rank r.
Ranks = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Form:
    """How micro-batches are handed over.

    Attributes:
        layout: One of :data:`LAYOUTS`; ``dense`` is a row per sequence with log-probs aligned to it.
        dtype: Type of log-probs and entropies.
        field_dtype: Type of every other field.
        mask_dtype: Type of ``response_mask``.
        memory: ``contiguous``, ``strided`` or ``narrowed``: views of something larger.
        flat: Log-probs and entropy over prompt + response are flat values, not a jagged tensor.
        column: The advantages come as [rows, 1].
        poison: NaN and infinities stand wherever nothing counts, and where the model predicts a prompt.
        spare: Columns of padding beyond the longest row.
        per_row: Sequences in each packed row, in turn.
        ids: Packed rows: factor of the segment ids, which are then shuffled within the row.
        container: ``dict`` or ``TensorDict``.
        totals: Type of the totals: ``int``, ``float``, ``tensor``, ``numpy`` or ``NonTensorData``.
    """

    layout: str = "nested"
    dtype: torch.dtype = torch.float64
    field_dtype: torch.dtype = torch.float64
    mask_dtype: torch.dtype = torch.int64
    memory: str = "contiguous"
    flat: bool = False
    column: bool = False
    poison: bool = False
    spare: int = 1
    per_row: tuple[int, ...] = (2, 1)
    ids: int = 1
    container: str = "dict"
    totals: str = "int"


# ----------------------------------------------------------------------------------------------------
# Where everything lies


def _starts(samples: Sequence[Sample]) -> list[int]:
    return [0, *np.cumsum([s.prompt_length + s.length for s in samples]).tolist()]


def _full(samples: Sequence[Sample], name: str, dtype: torch.dtype, filler: float) -> Tensor:
    """A value per (sequence, position of prompt + response); a response token stands one place to the left."""
    values = chain.from_iterable([*[filler] * (s.prompt_length - 1), *getattr(s, name), filler] for s in samples)
    return torch.tensor(list(values), dtype=torch.float64).to(dtype).requires_grad_()


def _response(samples: Sequence[Sample], starts: Sequence[int], i: int) -> range:
    start = starts[i] + samples[i].prompt_length - 1
    return range(start, start + samples[i].length)


def _view(tensor: Tensor, memory: str) -> Tensor:
    """The same numbers as a view of a tensor that holds others too; differentiable."""
    if memory == "strided":
        return torch.stack([tensor, torch.ones_like(tensor)], -1)[..., 0]
    if memory == "narrowed":
        return torch.nn.functional.pad(tensor, (2, 3), value=1)[..., 2:-3]
    return tensor


def jagged(values: Tensor, lengths: Sequence[int], memory: str) -> Tensor:
    """A jagged tensor of flat values; narrowed, its values have gaps."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    if memory != "narrowed":
        longest, shortest = max(lengths), min(lengths)
        return torch.nested.nested_tensor_from_jagged(
            _view(values, memory), offsets=offsets, min_seqlen=shortest, max_seqlen=longest
        )
    width = max(lengths) + 3
    column = torch.arange(width)
    inside = (column >= 1) & (column < 1 + torch.tensor(lengths)[:, None])
    index = torch.zeros(inside.shape, dtype=torch.long)
    index[inside] = torch.arange(1, values.numel() + 1)
    buffer = torch.cat([values.new_ones(1), values])[index]
    starts = torch.ones(len(lengths), dtype=torch.long)
    return torch.nested.narrow(buffer, 1, starts, torch.tensor(lengths), layout=torch.jagged)


def _rectangle(rows: Sequence[Sequence[Any]], width: int, filler: Any, form: Form, dtype: torch.dtype) -> Tensor:
    padded = [[*row, *[filler] * (width - len(row))] for row in rows]
    kind = torch.float64 if dtype.is_floating_point else dtype
    return _view(torch.tensor(padded, dtype=kind).reshape(len(rows), width).to(dtype), form.memory)


@dataclass(frozen=True)
class Handed:
    """A micro-batch, and how the model's values at all positions become its output."""

    data: Any
    lay_out: Callable[[Tensor], Tensor]


def hand_over(
    samples: Sequence[Sample], rows: Sequence[int], form: Form, names: Sequence[str], totals: dict[str, Any]
) -> Handed:
    """One micro-batch with the fields of those names.

    Args:
        samples: The whole mini-batch.
        rows: Those that this micro-batch holds.
        form: How.
        names: Fields, as attributes of the sequences are named.
        totals: Counts of the mini-batch; ``prompt_num_tokens`` maps a uid to a count.
    """
    picked = [samples[i] for i in rows]
    filler = POISON[len(rows) % 3] if form.poison else 0.0
    per_prompt = totals.get("prompt_num_tokens")
    if form.layout == "packed":
        return _packed(samples, rows, form, names, totals, filler)
    data: dict[str, Any] = {"uid": np.array([s.uid for s in picked], dtype=object)}
    if per_prompt is not None:
        data["prompt_num_tokens"] = torch.tensor([per_prompt[s.uid] for s in picked])
    lengths = [s.length for s in picked]
    width = max(lengths) + form.spare
    for name in ("mask", *names):
        key, dtype = (name, form.field_dtype) if name != "mask" else ("response_mask", form.mask_dtype)
        values = [getattr(s, name) for s in picked]
        if name == "advantages" and form.column:
            column = [next(iter(s.valid(s.advantages)), filler) for s in picked]
            data[key] = _view(torch.tensor(column, dtype=torch.float64)[:, None], form.memory).to(dtype)
        elif form.layout == "nested":
            flat = torch.tensor(list(chain.from_iterable(values)), dtype=torch.float64).to(dtype)
            data[key] = jagged(flat, lengths, form.memory)
        else:
            data[key] = _rectangle(values, width, 0 if name == "mask" else filler, form, dtype)
    starts = _starts(samples)
    if form.layout == "dense":
        index = _rectangle([_response(samples, starts, i) for i in rows], width, -1, Form(), torch.int64)
        return Handed(_wrapped(data, len(rows), totals, form), _gatherer(index, filler, form))
    prompts = [s.prompt_length for s in picked]
    if form.layout == "nested":
        data["prompts"] = jagged(torch.ones(sum(prompts), dtype=torch.long), prompts, form.memory)
    else:
        left = max(prompts)
        data["prompts"] = torch.ones(len(rows), left, dtype=torch.long)
        attention = [[0] * (left - s.prompt_length) + [1] * (s.prompt_length + s.length) for s in picked]
        data["attention_mask"] = _rectangle(attention, left + width, 0, form, torch.int64)
    index = torch.tensor([p for i in rows for p in range(starts[i], starts[i + 1])])
    sizes = [s.prompt_length + s.length for s in picked]

    def lay_out(leaf: Tensor) -> Tensor:
        return _view(leaf[index], form.memory) if form.flat else jagged(leaf[index], sizes, form.memory)

    return Handed(_wrapped(data, len(rows), totals, form), lay_out)


def _gatherer(index: Tensor, filler: float, form: Form) -> Callable[[Tensor], Tensor]:
    return lambda leaf: _view(torch.cat([leaf, leaf.new_full((1,), filler)])[index], form.memory)


def _packed(
    samples: Sequence[Sample],
    rows: Sequence[int],
    form: Form,
    names: Sequence[str],
    totals: dict[str, Any],
    filler: float,
) -> Handed:
    packs: list[list[int]] = []
    queue, sizes = list(rows), cycle(form.per_row)
    while queue:
        size = next(sizes)
        packs.append(queue[:size])
        queue = queue[size:]
    starts, uids = _starts(samples), sorted({s.uid for s in samples})
    width = max(sum(samples[i].length for i in pack) for pack in packs) + form.spare
    # Tokens of one row in an order of their own: only the ids say which belong together.
    order = np.random.default_rng(len(rows)).permutation(width) if form.ids != 1 else np.arange(width)

    def spread(of: Callable[[int, int], Sequence[Any]], padding: Any, dtype: torch.dtype, form: Form = form) -> Tensor:
        lines = [[x for k, i in enumerate(pack) for x in of(k, i)] for pack in packs]
        lines = [[*line, *[padding] * (width - len(line))] for line in lines]
        return _rectangle([[line[j] for j in order] for line in lines], width, padding, form, dtype)

    data: dict[str, Any] = {
        "segment_ids": spread(lambda k, i: [form.ids * (k + 1)] * samples[i].length, 0, torch.int64),
        # Ids at padding are anybody's.
        "prompt_ids": spread(lambda k, i: [uids.index(samples[i].uid) - 2] * samples[i].length, 9, torch.int64),
        "response_mask": spread(lambda k, i: samples[i].mask, int(form.poison), form.mask_dtype),
    }
    for name in names:
        data[name] = spread(lambda k, i, name=name: getattr(samples[i], name), filler, form.field_dtype)
    counts = totals.get("prompt_num_tokens")
    if counts is not None:
        data["prompt_num_tokens"] = spread(lambda k, i: [counts[samples[i].uid]] * samples[i].length, 7, torch.int64)
    index = spread(lambda k, i: _response(samples, starts, i), -1, torch.int64, Form())
    return Handed(_wrapped(data, len(packs), totals, form), _gatherer(index, filler, form))


def _wrapped(data: dict[str, Any], rows: int, totals: dict[str, Any], form: Form) -> Any:
    convert = {
        "int": int,
        "float": float,
        "tensor": torch.tensor,
        "numpy": np.int64,
        "NonTensorData": NonTensorData,
    }[form.totals]
    given = {k: convert(v) for k, v in totals.items() if k != "prompt_num_tokens"}
    if form.container == "dict":
        return data | given
    uid = data.pop("uid", None)
    wrapped = TensorDict(data, batch_size=[rows])
    if uid is not None:
        tu.assign_non_tensor_stack(wrapped, "uid", list(uid))
    tu.assign_non_tensor(wrapped, **{k: int(v) for k, v in totals.items() if k != "prompt_num_tokens"})
    return wrapped


# ----------------------------------------------------------------------------------------------------
# Playing it


def count(samples: Sequence[Sample], dp_size: int, settings: dict[str, Any], extra: bool) -> dict[str, Any]:
    """What engine, trainer and, with ``extra`` or where the settings need it, training worker count."""
    counted = samples if settings.get("count_empty_sequences", True) else [s for s in samples if s.tokens]
    tokens = sum(s.tokens for s in samples)
    totals: dict[str, Any] = {"batch_num_tokens": tokens, "global_batch_size": len(samples), "dp_size": dp_size}
    if settings.get("loss_agg_mode") == "prompt-mean":
        per_prompt: dict[str, int] = {}
        for s in samples:
            per_prompt[s.uid] = per_prompt.get(s.uid, 0) + s.tokens
        totals |= {"batch_num_prompts": len({s.uid for s in counted}), "prompt_num_tokens": per_prompt}
    if extra or not all(settings.get(f"count_{k}", True) for k in CHOICES):
        totals["batch_num_valid_tokens"] = tokens
        totals["batch_num_nonempty_sequences"] = sum(s.tokens > 0 for s in samples)
        totals["batch_num_real_sequences"] = sum(not s.uid.startswith("pad") for s in samples)
    if not settings.get("count_rejected_tokens", True):
        # Tokens that were rejected before the loss, which the mask no longer has.
        totals["batch_num_tokens"] += 5
    return totals


CHOICES = ("empty_sequences", "padding_rows", "rejected_tokens")
#: Arguments of the oracle that are none of the configuration.
NOT_SETTINGS = ("use_weights", "weight_floor")


def make_config(settings: dict[str, Any]) -> LossConfig:
    return LossConfig(**{k: v for k, v in settings.items() if k not in NOT_SETTINGS})


def _names(settings: dict[str, Any], config: LossConfig) -> list[str]:
    names = {*config.policy_loss.fields}
    names |= {"rollout_is_weights"} if settings.get("use_weights", True) else set()
    names |= {"ref_log_prob"} if config.use_kl_loss else set()
    names |= {"old_log_probs", "rollout_log_probs"} if config.rollout_metrics else set()
    return sorted(names)


def play(
    settings: dict[str, Any],
    samples: Sequence[Sample],
    ranks: Ranks,
    form: Form,
    *,
    with_entropy: bool = True,
    extra_counts: bool = False,
) -> Run:
    """Every micro-batch through ``EnginePolicyLoss``, one backward, metrics as verl reduces them."""
    config = make_config(settings)
    totals = count(samples, len(ranks), settings, extra_counts)
    return _play(EnginePolicyLoss(config), settings, samples, ranks, form, totals, with_entropy)


def play_alone(settings: dict[str, Any], samples: Sequence[Sample], form: Form, *, with_entropy: bool = True) -> Run:
    """The whole mini-batch in one piece through ``TrinityPolicyLoss``, which looks at no totals."""
    loss = TrinityPolicyLoss(make_config(settings))
    return _play(loss, settings, samples, ((tuple(range(len(samples))),),), form, {}, with_entropy)


def _play(
    loss: TrinityPolicyLoss,
    settings: dict[str, Any],
    samples: Sequence[Sample],
    ranks: Ranks,
    form: Form,
    totals: dict[str, Any],
    with_entropy: bool,
) -> Run:
    filler = POISON[0] if form.poison else 77.0
    leaves = [_full(samples, name, form.dtype, filler) for name in ("log_probs", "entropy")]
    names = _names(settings, loss.config)
    losses, emitted = [], []
    for rank in ranks:
        losses.append([])
        emitted.append([])
        for rows in rank:
            handed = hand_over(samples, rows, form, names, totals)
            output = {"log_probs": handed.lay_out(leaves[0])}
            if with_entropy:
                output["entropy"] = handed.lay_out(leaves[1])
            value, metrics = loss(model_output=output, data=handed.data, dp_group=None)
            assert value.ndim == 0
            assert value.requires_grad
            losses[-1].append(value)
            emitted[-1].append(metrics)
    keys = {tuple(metrics) for rank in emitted for metrics in rank}
    assert len(keys) == 1, "every micro-batch must emit every metric"
    total = sum(sum(rank) for rank in losses) / len(losses)
    total.backward()
    metrics = reduce_like_verl(emitted)
    finish_metrics(metrics)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Run(total.item(), grads[0], grads[1], metrics, emitted)
