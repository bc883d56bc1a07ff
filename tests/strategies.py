"""Hypothesis strategies: mini-batches, configurations, cuts, and the form in which they are handed over.

Lengths, masks, prompts and everything that has structure is drawn by Hypothesis, which shrinks it; the numbers
come from a seed that it draws, since a number per token and field would cost more than the loss.

``HYPOTHESIS_PROFILE=long`` runs twenty times as many examples, other ones each time; otherwise they are the
same ones on every run of the same tests. (Hypothesis draws constants from the modules that are loaded, so a test by
itself sees other examples than after others: repeat what failed with the blob that is printed.)
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from batches import Ranks, poisoned
from forms import FIELDS, LAYOUTS, Form
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from oracle import AGGREGATIONS, MODES, POLICY_LOSSES, Sample

from trinity_loss.kl import KL_TYPES

PROFILES = ("ci", "long")
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
assert PROFILE in PROFILES, f"HYPOTHESIS_PROFILE is {PROFILE!r}; expected one of {', '.join(PROFILES)}"
FACTOR = {"ci": 1, "long": 20}[PROFILE]

#: Examples that each test asks for in the ci profile, and those that ran.
asked: dict[str, int] = {}
ran: Counter[str] = Counter()


def examples(number: int) -> Callable[[Any], Any]:
    """Decorates a test with the number of its examples in the ci profile."""

    def decorate(test: Any) -> Any:
        asked[test.__name__] = number
        inner = test.hypothesis.inner_test

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            ran[test.__name__] += 1
            return inner(*args, **kwargs)

        test.hypothesis.inner_test = counted
        return settings(
            max_examples=number * FACTOR,
            derandomize=PROFILE == "ci",
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(test)

    return decorate


# ----------------------------------------------------------------------------------------------------
# Mini-batches

#: Mostly short ones, nothing at all, and now and then one that is long; and what a real one is, at the oracle's pace.
LONG = st.sampled_from((1, 300, 2000))
LENGTHS = st.integers(0, 15).map(lambda k: k if k < 7 else (k - 6 if k < 13 else (1, 2, 40)[k - 13]))
MASKS = st.sampled_from(("full", "full", "holes", "holes", "none"))
#: How far apart the policies are: standard deviation of the log-ratio, or a gap at some tokens.
SPREADS = (0.0, 0.3, 0.7, 3.0)
GAPS = (25.0, 60.0, 600.0)


def rounded(samples: Sequence[Sample], dtype: torch.dtype) -> tuple[Sample, ...]:
    """The same sequences with every number as ``dtype`` holds it."""

    def to(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(torch.tensor(values, dtype=torch.float64).to(dtype).double().tolist())

    names = ("log_probs", "entropy", *FIELDS)
    return tuple(replace(s, **{name: to(getattr(s, name)) for name in names}) for s in samples)


def fill(
    shape: Sequence[tuple[int, str, str]], seed: int, spread: float, gap: float, constant_advantages: bool
) -> tuple[Sample, ...]:
    """Sequences of (length, mask, uid) with numbers drawn from a seed.

    Args:
        shape: What each sequence is like.
        seed: Where the numbers come from.
        spread: Standard deviation of the log-ratios.
        gap: Log-ratio of every fourth token, up or down; 0 for none.
        constant_advantages: One advantage for all tokens of a sequence.
    """
    draw = np.random.default_rng(seed)
    samples = []
    for length, kind, uid in shape:
        mask = {
            "full": np.ones(length, dtype=int),
            "holes": draw.integers(0, 2, length),
            "none": np.zeros(length, dtype=int),
        }[kind]
        log_probs = -0.02 - 2 * draw.random(length)
        advantages = draw.standard_normal(length) * draw.choice([1e-3, 1.0, 1.0, 30.0])
        advantages[draw.random(length) < 0.1] = 0.0
        if constant_advantages:
            advantages[:] = draw.standard_normal()
        values = {"advantages": advantages, "entropy": 2 * draw.random(length)}
        jumps = gap * draw.choice([1, -1], length) * (draw.random(length) < 0.25)
        if gap:
            log_probs = log_probs - gap * (draw.random(length) < 0.5)
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs"):
            other = log_probs + spread * draw.standard_normal(length) + jumps * draw.integers(0, 2)
            values[name] = np.minimum(other, -0.005)
        values["rollout_is_weights"] = draw.choice([0.5, 1.0, 1.7], length) * (0.5 + draw.random(length))
        if spread == 0 and not gap:
            values["old_log_probs"] = log_probs
        samples.append(
            Sample(
                prompt_length=int(draw.integers(1, 4)),
                mask=tuple(mask.tolist()),
                uid=uid,
                session=int(draw.integers(2)),
                log_probs=tuple(log_probs.tolist()),
                **{name: tuple(array.tolist()) for name, array in values.items()},
            )
        )
    return tuple(samples)


@st.composite
def mini_batches(
    draw: st.DrawFn,
    *,
    most: int = 6,
    gaps: Sequence[float] = (0.0,),
    pairs: bool = False,
    lengths: st.SearchStrategy[int] = LENGTHS,
):
    """Up to ``most`` sequences, with a log-ratio of one of ``gaps`` at some tokens."""
    uids = st.sampled_from(("a", "b", "c"))
    rows = st.lists(st.tuples(lengths, MASKS, uids), min_size=2 if pairs else 1, max_size=most)
    shape = draw(rows)
    if pairs and len(shape) % 2:
        shape = shape[:-1]
    everything_masked = draw(st.integers(0, 19)) == 19
    if everything_masked:
        shape = [(length, "none", uid) for length, _, uid in shape]
    spread, gap = draw(st.sampled_from(SPREADS)), draw(st.sampled_from(tuple(gaps)))
    return fill(shape, draw(st.integers(0, 2**32 - 1)), spread, gap, draw(st.booleans()))


# ----------------------------------------------------------------------------------------------------
# Cuts


@st.composite
def cuts(draw: st.DrawFn, n: int, *, most_pieces: int = 6) -> Ranks:
    """``n`` sequences in any order, over ranks with equally many micro-batches, as verl has them."""
    pieces = [(ranks, micro) for ranks in (1, 2, 3) for micro in (1, 2, 3, 4) if ranks * micro <= min(n, most_pieces)]
    ranks, micro = draw(st.sampled_from(pieces))
    order = draw(st.permutations(range(n)))
    inner = draw(st.sets(st.integers(1, max(n - 1, 1)), min_size=ranks * micro - 1, max_size=ranks * micro - 1))
    edges = [0, *sorted(inner), n]
    parts = [tuple(order[a:b]) for a, b in pairwise(edges)]
    return tuple(tuple(parts[r * micro : (r + 1) * micro]) for r in range(ranks))


# ----------------------------------------------------------------------------------------------------
# Configurations

#: Of each loss what is drawn for its arguments.
LOSS_ARGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    loss.name: st.fixed_dictionaries({name: st.sampled_from(values[1:]) for name, values in loss.arguments.items()})
    for loss in POLICY_LOSSES.values()
}
BYPASS_ARGS = st.fixed_dictionaries(
    {
        "loss_type": st.sampled_from(("ppo_clip", "reinforce")),
        "rollout_is": st.sampled_from((None, "token", "sequence")),
        "rollout_is_threshold": st.sampled_from(("2.0", "1.3", "0.55_1.6")),
    }
)
REJECTIONS = st.sampled_from(
    (
        {"rollout_rs": None, "rollout_rs_threshold": None},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
        {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.3,1.8"},
        {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "0.5"},
        {"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": "0.6"},
    )
)


@st.composite
def aggregations(draw: st.DrawFn, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """A mode with its divisor."""
    mode = draw(st.sampled_from(tuple(modes)))
    scale = {"loss_scale_factor": draw(st.sampled_from((1, 3.5, 4096)))}
    return {"loss_agg_mode": mode, **(scale if AGGREGATIONS[mode].scaled else {})}


@st.composite
def terms(draw: st.DrawFn) -> dict[str, Any]:
    """Weights of entropy and KL, and the estimator."""
    chosen: dict[str, Any] = {"entropy_coeff": draw(st.sampled_from((0.0, 0.0, 0.4, -0.1)))}
    if draw(st.booleans()):
        chosen |= {
            "use_kl_loss": True,
            "kl_loss_coef": draw(st.sampled_from((0.001, 0.6, 0.0))),
            "kl_loss_type": draw(st.sampled_from(KL_TYPES)),
        }
    return chosen


@st.composite
def configurations(draw: st.DrawFn, losses: Sequence[str] = tuple(LOSS_ARGS)) -> dict[str, Any]:
    """Settings of a loss, as the oracle takes them."""
    name = draw(st.sampled_from(tuple(losses)))
    low, high, c = draw(st.sampled_from(((0.2, 0.2, 3.0), (0.15, 0.28, 1.6), (0.0003, 0.0004, 10.0))))
    chosen = draw(aggregations()) | draw(terms())
    chosen |= {"loss_mode": name, "loss_args": draw(LOSS_ARGS[name])}
    chosen |= {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    chosen["count_empty_sequences"] = draw(st.booleans())
    chosen["use_weights"] = draw(st.booleans())
    return chosen


# ----------------------------------------------------------------------------------------------------
# Forms

EXACT = (torch.float64, torch.float64)
#: Types of the log-probs and of the other fields as they stand beside each other.
TYPES = tuple(
    (a, b)
    for a in (torch.float32, torch.bfloat16, torch.float16)
    for b in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    if {a, b} != {torch.bfloat16, torch.float16}
)
NARROWER = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MASK_TYPES = (torch.int64, torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16)


@st.composite
def forms(
    draw: st.DrawFn,
    *,
    types: Sequence[tuple[torch.dtype, torch.dtype]] = (EXACT,),
    layouts: Sequence[str] = (*LAYOUTS, "dense"),
) -> Form:
    """How it is handed over."""
    layout = draw(st.sampled_from(tuple(layouts)))
    dtype, field_dtype = draw(st.sampled_from(tuple(types)))
    packed = layout == "packed"
    return Form(
        layout=layout,
        dtype=dtype,
        field_dtype=field_dtype,
        mask_dtype=draw(st.sampled_from(MASK_TYPES)),
        memory=draw(st.sampled_from(("contiguous", "strided", "narrowed"))),
        flat=not packed and layout != "dense" and draw(st.booleans()),
        poison=draw(st.booleans()),
        spare=draw(st.integers(0, 2)),
        per_row=draw(st.sampled_from(((2, 1), (1,), (3,)))) if packed else (1,),
        ids=draw(st.sampled_from((1, -3, 1000))) if packed else 1,
        container=draw(st.sampled_from(("dict", "dict", "dict", "TensorDict"))),
        number=draw(st.sampled_from(("int", "float", "tensor", "numpy", "NonTensorData"))),
        bare=True,
    )


@dataclass(frozen=True)
class Case:
    """A mini-batch, what to do with it, how it is cut and handed over; ``clean`` is it before it was poisoned."""

    clean: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    settings: dict[str, Any]
    ranks: Ranks
    form: Form
    whole: Form
    with_entropy: bool


def _has_columns(samples: Sequence[Sample], form: Form) -> bool:
    return form.layout != "packed" and all(len(set(s.valid(s.advantages))) < 2 for s in samples)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    configuration: st.SearchStrategy[dict[str, Any]] | None = None,
    gaps: Sequence[float] = (0.0, 0.0, 0.0, *GAPS),
    types: Sequence[tuple[torch.dtype, torch.dtype]] = (EXACT,),
    layouts: Sequence[str] = (*LAYOUTS, "dense"),
    pairs: bool = False,
    lengths: st.SearchStrategy[int] = LENGTHS,
) -> Case:
    """Everything about one example; mini-batches are rounded to the narrower of the form's types."""
    chosen = draw(configurations() if configuration is None else configuration)
    clean = draw(mini_batches(gaps=gaps, pairs=pairs, lengths=lengths))
    form = draw(forms(types=types, layouts=layouts))
    whole = replace(draw(forms(layouts=layouts)), dtype=form.dtype, field_dtype=form.field_dtype)
    clean = rounded(clean, min((form.dtype, form.field_dtype), key=NARROWER.index))
    form, whole = (replace(f, column=_has_columns(clean, f) and draw(st.booleans())) for f in (form, whole))
    if whole.layout == "packed" and not all(s.length for s in clean):
        # A response of no token is nowhere in a packed row; only the totals know of it.
        whole = replace(whole, layout="dense")
    samples = poisoned(clean) if draw(st.booleans()) else clean
    n = len(samples)
    if pairs:
        of_pairs = draw(cuts(n // 2))
        ranks = tuple(tuple(tuple(x for p in part for x in (2 * p, 2 * p + 1)) for part in rank) for rank in of_pairs)
    else:
        ranks = draw(cuts(n))
    with_entropy = chosen.get("entropy_coeff", 0.0) != 0 or draw(st.booleans())
    return Case(clean, samples, chosen, ranks, form, whole, with_entropy)
