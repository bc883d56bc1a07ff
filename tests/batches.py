"""Mini-batches for the tests: made, cut as an engine would cut them, and run.

``make_sequences`` draws ragged sequences with holes in their masks and one that is masked throughout. ``cut``
deals them to ranks and micro-batches, which ``forms`` builds. ``run`` plays the engine: each micro-batch goes
through the loss, losses are summed over micro-batches and averaged over ranks, one backward follows, and the
metrics go through verl's own reduction. The leaves are one flat parameter for the log-probs and one for the
entropy, an entry per (sequence, position of prompt + response), so gradients compare across cuts and layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, cycle, pairwise
from typing import Any

import numpy as np
import torch
from forms import FIELDS, POISON, Form, MicroBatch, flat_gradient, hand_over, make_leaves, totals_of
from oracle import Result, Sample
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.utils.seqlen_balancing import rearrange_micro_batches

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
                session=int(i % 3 == 0),
                **{name: tuple(float(x) for x in array) for name, array in values.items()},
            )
        )
    return tuple(samples)


def sequence(
    length: int, *, mask: Sequence[int] | None = None, uid: str = "prompt", session: int = 0, **values: Any
) -> Sample:
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
    return Sample(prompt_length=2, mask=tuple(mask or [1] * length), uid=uid, session=session, **spelled)


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


#: ``ranks[r][k]`` lists the sequences of micro-batch k on rank r.
Ranks = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """A mini-batch and who gets which of its sequences."""

    samples: tuple[Sample, ...]
    ranks: Ranks

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
# Micro-batches


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


def build(parts: Cut, form: Form) -> tuple[tuple[MicroBatch, ...], ...]:
    """Every micro-batch of the cut, with the mini-batch's totals on it."""
    totals = totals_of(parts.samples, len(parts.ranks), form)
    return tuple(tuple(hand_over(parts.samples, rows, form, totals) for rows in rank) for rank in parts.ranks)


_build_once = lru_cache(maxsize=1024)(build)


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
    form: Form,
    log_probs: Tensor,
    entropy: Tensor | None,
) -> Forward:
    """Every micro-batch through the loss."""
    losses, emitted = [], []
    # Bare ones are of generated mini-batches, none of which comes twice.
    for rank in build(parts, form) if form.bare else _build_once(parts, form):
        losses.append([])
        emitted.append([])
        for batch in rank:
            output = {"log_probs": batch.lay_out(log_probs)}
            if entropy is not None:
                output["entropy"] = batch.lay_out(entropy)
            data = batch.data.copy()
            loss, metrics = loss_fn(model_output=output, data=data, dp_group=None)
            assert loss.ndim == 0
            assert loss.requires_grad, "every rank must be able to run backward on every micro-batch"
            losses[-1].append(loss)
            emitted[-1].append(metrics)
    keys = {tuple(metrics) for rank in emitted for metrics in rank}
    assert len(keys) == 1, "every micro-batch must emit every metric"
    return Forward(losses, reduce_like_verl(emitted), emitted)


def run(
    loss_fn: Callable[..., tuple[Tensor, dict[str, Any]]],
    parts: Cut,
    layout: str | Form,
    *,
    with_entropy: bool = True,
    **options: Any,
) -> Run:
    """Play the engine for one mini-batch and return what the step would see.

    ``options`` are attributes of ``Form``; they hold for a layout, or in the place of those of a form.
    """
    form = Form(layout, **options) if isinstance(layout, str) else replace(layout, **options)
    log_probs, entropy = make_leaves(parts.samples, form.dtype, POISON[0] if form.poison else 77.0)
    result = forward(loss_fn, parts, form, log_probs, entropy if with_entropy else None)
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
