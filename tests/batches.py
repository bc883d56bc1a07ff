"""Mini-batches for the tests: made, cut as an engine would cut them, laid out, and run.

``make_sequences`` draws ragged sequences with holes in their masks and one that is masked throughout. ``cut``
deals them to ranks and micro-batches. ``run`` plays the engine: each micro-batch goes through the loss in one
of three layouts, losses are summed over micro-batches and averaged over ranks, one backward follows, and the
metrics go through verl's own reduction. The leaves are one flat parameter for the log-probs and one for the
entropy, an entry per (sequence, position of prompt + response), so gradients compare across cuts and layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import chain, cycle, pairwise
from typing import Any

import numpy as np
import torch
from oracle import Result, Sample
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import append_to_dict
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.utils.padding import left_right_2_no_padding

LAYOUTS = ("nested", "padded", "packed")
FIELDS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "rollout_log_probs")
POISON = (float("nan"), float("inf"), float("-inf"))


# ----------------------------------------------------------------------------------------------------
# Sequences


@cache
def make_sequences(
    n: int,
    seed: int = 0,
    *,
    max_length: int = 6,
    holes: bool = True,
    masked: int = 1,
    group_size: int = 3,
    spread: float = 0.7,
) -> tuple[Sample, ...]:
    """``n`` ragged sequences, ``masked`` of which have no valid token and a prompt of their own.

    ``spread`` is the standard deviation of the log-ratio: at 0.7 every clip is hit somewhere.
    """
    draw = np.random.default_rng(seed)
    lengths = [1 + (i * 5 + seed) % max_length for i in range(n)]
    draw.shuffle(lengths)
    prompts = draw.permutation(n) // group_size
    empty = {(n // 2 + 3 * k) % n for k in range(masked)}
    samples = []
    for i, length in enumerate(lengths):
        mask = np.ones(length, dtype=int)
        if holes and length > 2:
            mask[draw.integers(length)] = 0
        if i in empty:
            mask[:] = 0
        log_probs = -0.05 - 2 * draw.random(length)
        values = {
            "log_probs": log_probs,
            "old_log_probs": np.minimum(log_probs + spread * draw.standard_normal(length), -0.01),
            "ref_log_prob": np.minimum(log_probs + spread * draw.standard_normal(length), -0.01),
            "advantages": draw.standard_normal(length),
            "entropy": 2 * draw.random(length),
            "rollout_is_weights": 0.5 + draw.random(length),
            "rollout_log_probs": log_probs + 0.4 * draw.standard_normal(length),
        }
        samples.append(
            Sample(
                prompt_length=int(draw.integers(1, 4)),
                mask=tuple(int(m) for m in mask),
                uid=f"empty-{i}" if i in empty else f"prompt-{prompts[i]}",
                **{name: tuple(float(x) for x in array) for name, array in values.items()},
            )
        )
    return tuple(samples)


def sequence(length: int, *, mask: Sequence[int] | None = None, uid: str = "prompt", **values: Any) -> Sample:
    """One sequence whose fields are given as a number for all of its tokens or as one number each.

    What is not given is neutral: the policies agree at -1, advantages, entropy and KL are 0, weights 1.
    """
    log_probs = values.pop("log_probs", -1.0)
    neutral = {
        "log_probs": log_probs,
        "old_log_probs": log_probs,
        "ref_log_prob": log_probs,
        "advantages": 0.0,
        "entropy": 0.0,
        "rollout_is_weights": 1.0,
        "rollout_log_probs": log_probs,
    }
    unknown = set(values) - set(neutral)
    assert not unknown, unknown
    given = neutral | values
    spelled = {
        name: tuple(float(x) for x in (value if isinstance(value, list | tuple) else [value] * length))
        for name, value in given.items()
    }
    assert all(len(value) == length for value in spelled.values())
    return Sample(prompt_length=2, mask=tuple(mask or [1] * length), uid=uid, **spelled)


def token_losses(*losses: Sequence[float] | None, same_prompt: bool = False) -> tuple[Sample, ...]:
    """Sequences whose ppo token losses are the numbers given; ``None`` stands for one masked throughout.

    With the old policy equal to the current one the loss is minus the advantage, and so is its gradient.
    """
    samples = []
    for i, row in enumerate(losses):
        uid = "prompt" if same_prompt else f"prompt-{i}"
        if row is None:
            samples.append(sequence(2, mask=[0, 0], advantages=-100.0, uid=uid))
        else:
            samples.append(sequence(len(row), advantages=[-float(x) for x in row], uid=uid))
    return tuple(samples)


# ----------------------------------------------------------------------------------------------------
# Cuts


@dataclass(frozen=True, eq=False)
class Cut:
    """``ranks[r][k]`` lists the sequences of micro-batch k on rank r."""

    samples: tuple[Sample, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    def __str__(self) -> str:
        return " | ".join(" ".join("+".join(map(str, m)) for m in rank) for rank in self.ranks)


def _pieces(indices: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    edges = np.cumsum([0, *sizes])
    return tuple(tuple(indices[a:b]) for a, b in pairwise(edges))


def _dynamic(samples: Sequence[Sample], indices: list[int], n: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches that verl's dynamic batch size makes of one rank's sequences."""
    rows = [torch.zeros(samples[i].prompt_length + samples[i].length, dtype=torch.long) for i in indices]
    data = TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[len(rows)])
    _, parts = rearrange_micro_batches(data, max_token_len=10**6, min_num_micro_batch=n)
    return tuple(tuple(indices[i] for i in part) for part in parts)


@cache
def cut(samples: tuple[Sample, ...], micro_batches: int = 1, ranks: int = 1, how: str = "even", seed: int = 0) -> Cut:
    """Deal ``samples`` to ``ranks`` x ``micro_batches``.

    ``even`` keeps the order and near-equal sizes; ``uneven`` shuffles, draws the sizes, and gives the last
    micro-batch nothing but a fully masked sequence; ``dynamic`` asks verl.
    """
    pieces = micro_batches * ranks
    n = len(samples)
    assert n >= pieces, f"{n} sequences do not fill {pieces} micro-batches"
    draw = np.random.default_rng(seed)
    if how == "even":
        order = list(range(n))
        sizes = [len(part) for part in np.array_split(order, pieces)]
        flat = _pieces(order, sizes)
    elif how == "uneven":
        order = [int(i) for i in draw.permutation(n)]
        empty = [i for i in order if not samples[i].tokens]
        alone = empty[:1] if pieces > 1 else []
        order = [i for i in order if i not in alone]
        spread = pieces - len(alone)
        inner = draw.choice(np.arange(1, len(order)), size=spread - 1, replace=False) if spread > 1 else []
        edges = [0, *sorted(int(e) for e in inner), len(order)]
        flat = _pieces(order, np.diff(edges).tolist())
        if alone:
            flat = (*flat, tuple(alone))
    elif how == "dynamic":
        order = [int(i) for i in draw.permutation(n)]
        flat = tuple(chain.from_iterable(_dynamic(samples, order[r::ranks], micro_batches) for r in range(ranks)))
    else:
        raise ValueError(how)
    assert sorted(chain.from_iterable(flat)) == list(range(n))
    assert all(flat)
    return Cut(samples, _pieces(flat, [micro_batches] * ranks))


def given_cut(samples: Sequence[Sample], *ranks: Sequence[Sequence[int]]) -> Cut:
    """A cut written out: ``given_cut(samples, [[0], [1, 2]])`` is one rank with two micro-batches."""
    return Cut(tuple(samples), tuple(tuple(tuple(m) for m in rank) for rank in ranks))


# ----------------------------------------------------------------------------------------------------
# Layouts


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """``data`` as the engine hands it over, and where its tokens lie in the flat leaves (-1 is padding)."""

    data: TensorDict
    index: Tensor
    offsets: Tensor | None

    def lay_out(self, leaves: Tensor, padding: float = 0.0) -> Tensor:
        if self.offsets is not None:
            return torch.nested.nested_tensor_from_jagged(leaves[self.index], offsets=self.offsets)
        return torch.cat([leaves, leaves.new_full((1,), padding)])[self.index]


@dataclass(frozen=True)
class Options:
    """How micro-batches are built.

    ``totals`` overrides what the engine gives; None leaves an entry out. ``per_row`` is how many sequences
    the packed rows hold, in turn; ``padding_rows`` are rows of nothing, which only the packed layout has.
    ``prompts`` and ``counts`` add what the package's training worker counts once per mini-batch, prompt groups
    without a token only where ``count_empty_prompts``.
    """

    dtype: torch.dtype = torch.float64
    width: int | None = None
    poison: bool = False
    per_row: tuple[int, ...] = (3, 1, 2)
    padding_rows: int = 0
    leave_out: tuple[str, ...] = ()
    prompts: bool = False
    count_empty_prompts: bool = True
    counts: bool = False
    totals: tuple[tuple[str, Any], ...] = field(default=())


def poisoned(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The same sequences with NaN, inf and -inf in every field wherever the mask is 0."""
    bad = cycle(POISON)
    return tuple(
        replace(
            s,
            **{
                name: tuple(x if keep else next(bad) for x, keep in zip(getattr(s, name), s.mask, strict=True))
                for name in ("log_probs", "entropy", *FIELDS)
            },
        )
        for s in samples
    )


def positions(samples: Sequence[Sample]) -> list[int]:
    """Where each sequence starts in the flat leaves, and their length."""
    starts = [0]
    for s in samples:
        starts.append(starts[-1] + s.prompt_length + s.length)
    return starts


def _response_index(samples: Sequence[Sample], i: int) -> range:
    """Where sequence i's response lies in the leaves: one to the left, since a position predicts the next."""
    start = positions(samples)[i] + samples[i].prompt_length - 1
    return range(start, start + samples[i].length)


def make_leaves(samples: Sequence[Sample], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as parameters. Positions that predict no response token hold a large number."""
    total = positions(samples)[-1]
    leaves = []
    for name in ("log_probs", "entropy"):
        values = torch.full((total,), 77.0, dtype=dtype)
        for i, s in enumerate(samples):
            values[list(_response_index(samples, i))] = torch.tensor(getattr(s, name), dtype=dtype)
        leaves.append(values.requires_grad_())
    return leaves[0], leaves[1]


def flat_gradient(samples: Sequence[Sample], gradient: list[list[float]]) -> Tensor:
    """The oracle's gradient where ``make_leaves`` has its parameters."""
    out = torch.zeros(positions(samples)[-1], dtype=torch.float64)
    for i, row in enumerate(gradient):
        out[list(_response_index(samples, i))] = torch.tensor(row, dtype=torch.float64)
    return out


def _totals(samples: Sequence[Sample], ranks: int, options: Options) -> dict[str, Any]:
    given: dict[str, Any] = {
        "batch_num_tokens": sum(s.tokens for s in samples),
        "dp_size": ranks,
        "global_batch_size": len(samples),
    }
    if options.prompts:
        counted = samples if options.count_empty_prompts else [s for s in samples if s.tokens]
        given["batch_num_prompts"] = len({s.uid for s in counted})
    if options.counts:
        given["batch_num_valid_tokens"] = given["batch_num_tokens"]
        given["batch_num_nonempty_sequences"] = sum(s.tokens > 0 for s in samples)
        given["batch_num_real_sequences"] = sum(not s.uid.startswith("pad") for s in samples)
    return {k: v for k, v in (given | dict(options.totals)).items() if v is not None}


def _prompt_tokens(samples: Sequence[Sample]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for s in samples:
        counts[s.uid] = counts.get(s.uid, 0) + s.tokens
    return counts


def _fields(options: Options) -> list[str]:
    return [name for name in FIELDS if name not in options.leave_out]


def _jagged(rows: list[Tensor]) -> Tensor:
    """A jagged tensor with offsets of its own, as fields that were built apart have, and verl's longest row."""
    lengths = [row.numel() for row in rows]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows), offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def _full_index(samples: Sequence[Sample], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    starts = positions(samples)
    index = list(chain.from_iterable(range(starts[i], starts[i + 1]) for i in rows))
    lengths = [starts[i + 1] - starts[i] for i in rows]
    return torch.tensor(index), torch.tensor([0, *np.cumsum(lengths).tolist()])


def nested(samples: Sequence[Sample], rows: Sequence[int], options: Options) -> MicroBatch:
    """verl's v1 trainer: every field jagged."""
    picked = [samples[i] for i in rows]
    data = {
        "input_ids": _jagged([torch.ones(s.prompt_length + s.length, dtype=torch.long) for s in picked]),
        "prompts": _jagged([torch.ones(s.prompt_length, dtype=torch.long) for s in picked]),
        "responses": _jagged([torch.ones(s.length, dtype=torch.long) for s in picked]),
        "response_mask": _jagged([torch.tensor(s.mask) for s in picked]),
    }
    for name in _fields(options):
        data[name] = _jagged([torch.tensor(getattr(s, name), dtype=options.dtype) for s in picked])
    index, offsets = _full_index(samples, rows)
    return MicroBatch(TensorDict(data, batch_size=[len(rows)]), index, offsets)


def padded(samples: Sequence[Sample], rows: Sequence[int], options: Options) -> MicroBatch:
    """verl's v0 trainer: prompts padded on the left, responses on the right, then verl's own conversion."""
    picked = [samples[i] for i in rows]
    left = max(s.prompt_length for s in samples) + 1
    width = options.width or max(s.length for s in samples) + 1
    attention = torch.zeros(len(picked), left + width, dtype=torch.long)
    mask = torch.zeros(len(picked), width, dtype=torch.long)
    filler = POISON[0] if options.poison else 0.0
    values = {name: torch.full((len(picked), width), filler, dtype=options.dtype) for name in _fields(options)}
    for row, s in enumerate(picked):
        attention[row, left - s.prompt_length : left + s.length] = 1
        mask[row, : s.length] = torch.tensor(s.mask)
        for name in values:
            values[name][row, : s.length] = torch.tensor(getattr(s, name), dtype=options.dtype)
    data = TensorDict(
        {
            "input_ids": attention.clone(),
            "prompts": attention[:, :left].clone(),
            "responses": attention[:, left:].clone(),
            "attention_mask": attention,
            "position_ids": compute_position_id_with_mask(attention),
            "response_mask": mask,
            **values,
        },
        batch_size=[len(picked)],
    )
    index, offsets = _full_index(samples, rows)
    return MicroBatch(left_right_2_no_padding(data), index, offsets)


def packed(samples: Sequence[Sample], rows: Sequence[int], options: Options) -> MicroBatch:
    """Several sequences in a row, named by segment ids from 1; every row ends in padding, segment id 0."""
    packs: list[list[int]] = []
    queue, sizes = list(rows), cycle(options.per_row)
    while queue:
        size = next(sizes)
        packs.append(queue[:size])
        queue = queue[size:]
    width = options.width or max(sum(samples[i].length for i in pack) for pack in packs) + 2
    packs.extend([] for _ in range(options.padding_rows))
    shape = (len(packs), width)
    filler = POISON[0] if options.poison else 0.0
    segments, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    index = torch.full(shape, -1, dtype=torch.long)
    values = {name: torch.full(shape, filler, dtype=options.dtype) for name in _fields(options)}
    group_tokens, counts = torch.zeros(shape, dtype=torch.long), _prompt_tokens(samples)
    groups, names = torch.zeros(shape, dtype=torch.long), sorted(counts)
    for row, pack in enumerate(packs):
        column = 0
        for segment, i in enumerate(pack, start=1):
            s = samples[i]
            here = slice(column, column + s.length)
            segments[row, here] = segment
            mask[row, here] = torch.tensor(s.mask)
            index[row, here] = torch.tensor(list(_response_index(samples, i)))
            group_tokens[row, here] = counts[s.uid]
            groups[row, here] = names.index(s.uid) + 1
            for name in values:
                values[name][row, here] = torch.tensor(getattr(s, name), dtype=options.dtype)
            column += s.length
    data = {"segment_ids": segments, "response_mask": mask, "prompt_ids": groups, **values}
    if options.prompts:
        data["prompt_num_tokens"] = group_tokens
    return MicroBatch(TensorDict(data, batch_size=[len(packs)]), index, None)


@lru_cache(maxsize=1024)
def build(parts: Cut, layout: str, options: Options = Options()) -> tuple[tuple[MicroBatch, ...], ...]:
    """Every micro-batch of the cut, with the mini-batch's totals on it."""
    make = {"nested": nested, "padded": padded, "packed": packed}[layout]
    totals = _totals(parts.samples, len(parts.ranks), options)
    counts = _prompt_tokens(parts.samples)
    ranks = []
    for rank in parts.ranks:
        ranks.append([])
        for rows in rank:
            batch = make(parts.samples, rows, options)
            if layout != "packed":
                tu.assign_non_tensor_stack(batch.data, "uid", [parts.samples[i].uid for i in rows])
                if options.prompts:
                    batch.data["prompt_num_tokens"] = torch.tensor([counts[parts.samples[i].uid] for i in rows])
            tu.assign_non_tensor(batch.data, **totals)
            ranks[-1].append(batch)
    return tuple(tuple(rank) for rank in ranks)


# ----------------------------------------------------------------------------------------------------
# The engine


@dataclass(frozen=True, eq=False)
class Forward:
    """What came back: ``losses[r][k]`` with their graphs, and the metrics as verl reduces them."""

    losses: list[list[Tensor]]
    metrics: dict[str, float]
    emitted: list[list[dict[str, Any]]]

    @property
    def total(self) -> Tensor:
        """The sum over micro-batches, averaged over ranks: what FSDP's gradient is the gradient of."""
        return sum(sum(rank) for rank in self.losses) / len(self.losses)


@dataclass(frozen=True, eq=False)
class Run:
    loss: float
    log_prob_grad: Tensor
    entropy_grad: Tensor
    metrics: dict[str, float]
    emitted: list[list[dict[str, Any]]]


def reduce_like_verl(emitted: list[list[dict[str, Any]]]) -> dict[str, float]:
    """One dictionary per (rank, micro-batch) to one value per key, through verl's own code."""
    per_rank = []
    for rank in emitted:
        lists: dict[str, Any] = {}
        for metrics in rank:
            append_to_dict(lists, metrics)
        per_rank.append(lists)
    gathered = {key: [lists[key] for lists in per_rank] for key in per_rank[0]}
    of_mini_batch = {
        key: Metric.aggregate_dp(value) if isinstance(value[0], Metric) else list(chain.from_iterable(value))
        for key, value in gathered.items()
    }
    of_step: dict[str, Any] = {}
    append_to_dict(of_step, of_mini_batch)
    return {key: float(value) for key, value in reduce_metrics(of_step).items()}


def forward(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]],
    parts: Cut,
    layout: str,
    log_probs: Tensor,
    entropy: Tensor | None,
    options: Options = Options(),
) -> Forward:
    """Every micro-batch through the loss."""
    losses, emitted = [], []
    padding = POISON[0] if options.poison else 0.0
    for rank in build(parts, layout, options):
        losses.append([])
        emitted.append([])
        for batch in rank:
            output = {"log_probs": batch.lay_out(log_probs, padding)}
            if entropy is not None:
                output["entropy"] = batch.lay_out(entropy, padding)
            data = batch.data.clone(recurse=False)
            loss, metrics = loss_fn(model_output=output, data=data, dp_group=None)
            assert loss.ndim == 0
            assert loss.requires_grad, "every rank must be able to run backward on every micro-batch"
            losses[-1].append(loss)
            emitted[-1].append(metrics)
    return Forward(losses, reduce_like_verl(emitted), emitted)


def run(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]],
    parts: Cut,
    layout: str,
    *,
    with_entropy: bool = True,
    **options: Any,
) -> Run:
    """Play the engine for one mini-batch and return what the step would see."""
    chosen = Options(**options)
    log_probs, entropy = make_leaves(parts.samples, chosen.dtype)
    result = forward(loss_fn, parts, layout, log_probs, entropy if with_entropy else None, chosen)
    total = result.total
    total.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (log_probs, entropy)]
    return Run(total.item(), grads[0], grads[1], result.metrics, result.emitted)


def assert_equals_oracle(
    got: Run, expected: Result, samples: Sequence[Sample], tolerance: float = 1e-10, keys: Sequence[str] = ()
) -> None:
    """Loss, both gradients and metrics agree; the metrics compared are the oracle's, or ``keys``."""
    for name, mine, theirs in (
        ("gradient of log_probs", got.log_prob_grad, expected.log_prob_grad),
        ("gradient of entropy", got.entropy_grad, expected.entropy_grad),
    ):
        reference = flat_gradient(samples, theirs)
        error = (mine.double() - reference).abs().max().item()
        scale = max(1.0, reference.abs().max().item())
        assert error <= tolerance * scale, f"{name} is off by {error:.3g}"
    assert abs(got.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss)), (
        got.loss,
        expected.loss,
    )
    for key in keys or expected.metrics:
        assert key in got.metrics, f"{key} is missing from {sorted(got.metrics)}"
        mine, theirs = got.metrics[key], expected.metrics[key]
        assert abs(mine - theirs) <= tolerance * max(1.0, abs(theirs)), (key, mine, theirs)
