"""Mini-batches that nobody thought of, under configurations and cuts that nobody chose.

Each example is asked several things at once: that loss, gradients and metrics are finite; that those of the cut
mini-batch are those of the whole one, handed over in another form; and that both are the oracle's. The strategies
and the switch for a longer run are in ``strategies``; what these tests found is pinned in ``test_found``.
"""

import math
from dataclasses import replace

import pytest
import torch
from batches import poisoned
from forms import flat_gradient, jagged
from hypothesis import given
from hypothesis import strategies as st
from oracle import AGGREGATIONS, GROUPS, aggregate, evaluate, importance_metrics
from ours import OF_GROUPS, play, play_alone
from strategies import (
    BYPASS_ARGS,
    EXACT,
    FACTOR,
    LONG,
    REJECTIONS,
    TYPES,
    aggregations,
    asked,
    cases,
    cuts,
    examples,
    forms,
    mini_batches,
    ran,
    terms,
)

from trinity_loss import aggregate_loss
from trinity_loss.importance_sampling import LEVELS
from trinity_loss.metrics import importance_sampling_metrics
from trinity_loss.registry import get_policy_loss

pytestmark = pytest.mark.timeout(600 * FACTOR)


def finite(run):
    """Nothing of what the step would see is NaN or infinite; but a gradient that fp16 does not hold is infinite."""
    assert math.isfinite(run.loss)
    for gradient in (run.log_prob_grad, run.entropy_grad):
        # Where fp16 would hold it, ``is_the_oracles`` refuses infinity: the error is infinite.
        bad = gradient.isnan() if gradient.dtype == torch.float16 else ~gradient.isfinite()
        assert not bad.any(), gradient.tolist()
    odd = {key: x for key, x in run.metrics.items() if not math.isfinite(x)}
    assert not odd, odd


def scale_of(expected):
    largest = max((abs(g) for row in expected.log_prob_grad for g in row), default=0.0)
    return max(1.0, abs(expected.loss), largest)


def near(mine, theirs, bound, what, scale=1.0):
    assert abs(mine - theirs) <= bound * max(scale, abs(theirs)), (what, mine, theirs)


def is_the_oracles(run, expected, samples, with_entropy, tolerance=1e-10, grain=0.0):
    """Loss, gradients and metrics; ``grain`` is what a gradient loses by the type that it comes back in."""
    bound = tolerance * scale_of(expected)
    near(run.loss, expected.loss, bound, "loss")
    for mine, theirs in ((run.log_prob_grad, expected.log_prob_grad), (run.entropy_grad, expected.entropy_grad)):
        right = flat_gradient(samples, theirs)
        # Beyond what fp16 holds there is nothing to compare.
        held = right.abs() < 0.9 * torch.finfo(mine.dtype).max
        error = ((mine.double() - right).abs() - grain * right.abs())[held]
        assert error.numel() == 0 or error.max() <= bound, (mine.tolist(), right.tolist())
    for key, right in expected.metrics.items():
        if key != "actor/entropy_loss" or with_entropy:
            near(run.metrics[key], right, bound, key)


def is_the_same(one, other, bound, scale=1.0):
    """All metrics of two runs, those included that the oracle does not know."""
    assert one.metrics.keys() == other.metrics.keys()
    for key, right in other.metrics.items():
        # A standard deviation from moments: the root of what cancelled.
        near(one.metrics[key], right, max(bound, 1e-6) if key.endswith("_std") else bound, key, scale)


def compare(case, tolerance=1e-10, grain=0.0, metrics=1e-9):
    """The cut mini-batch, and the whole one by itself, against the oracle and each other."""
    unknown = ("rollout_metrics", "rollout_metrics_upper", "rollout_metrics_lower", "count_padding_rows")
    known = {k: v for k, v in case.settings.items() if k not in unknown}
    expected = evaluate(case.clean, **known)
    cut = play(case.settings, case.samples, case.ranks, case.form, with_entropy=case.with_entropy)
    whole = play_alone(case.settings, case.samples, case.whole, with_entropy=case.with_entropy)
    finite(cut)
    finite(whole)
    is_the_oracles(cut, expected, case.clean, case.with_entropy, tolerance, grain)
    is_the_oracles(whole, expected, case.clean, case.with_entropy, tolerance, grain)
    is_the_same(cut, whole, metrics * scale_of(expected))
    return expected, cut, whole


@examples(900)
@given(cases())
def test_every_loss_under_every_cut(case):
    """Every policy loss, mode, KL estimator and choice of counts, in float64."""
    if case.settings["loss_mode"] == "rec" and far_apart(case.clean):
        case = replace(case, settings=case.settings | {"loss_mode": "gpg", "loss_args": {}})
    compare(case)


def far_apart(samples):
    return any(
        abs(a - b) > 15 for s in samples for a, b in zip(s.valid(s.log_probs), s.valid(s.old_log_probs), strict=True)
    )


@examples(20)
@given(cases(gaps=(0.0,), lengths=LONG))
def test_long_responses(case):
    """Thousands of tokens beside one."""
    compare(case)


@examples(400)
@given(cases(types=TYPES, gaps=(0.0,)))
def test_number_types_of_engines(case):
    """Log-probs and fields in float32, bf16 and fp16, also beside each other: computed in float32."""
    grain = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(case.form.dtype, 0.0)
    compare(case, 3e-5, grain, metrics=1e-4)


@st.composite
def bypasses(draw):
    arguments = {**draw(BYPASS_ARGS), **draw(REJECTIONS)}
    return draw(aggregations()) | draw(terms()) | {"loss_mode": "bypass_mode", "loss_args": arguments}


@examples(250)
@given(cases(configuration=bypasses(), gaps=(0.0,)))
def test_weights_and_rejection_in_the_loss(case):
    """verl's bypass mode: what is weighed and rejected does not depend on the cut."""
    settings = case.settings | {"use_weights": False}
    compare(replace(case, settings=settings))


@st.composite
def measured(draw):
    level = draw(st.sampled_from(LEVELS))
    upper, lower = draw(st.sampled_from(((2.0, 0.5), (1.3, 0.9))))
    bounds = {"rollout_metrics_upper": upper, "rollout_metrics_lower": lower}
    return draw(aggregations()) | bounds | {"rollout_metrics": level, "use_weights": False}


@examples(250)
@given(cases(configuration=measured(), gaps=(0.0,)))
def test_importance_sampling_metrics(case):
    """Those that the loss reports, cut and whole, and those of the function by itself."""
    options = {"level": case.settings["rollout_metrics"]}
    options |= {bound: case.settings[f"rollout_metrics_{bound}"] for bound in ("upper", "lower")}
    _, cut, whole = compare(case)
    old, rollout = ([s.valid(getattr(s, name)) for s in case.clean] for name in ("old_log_probs", "rollout_log_probs"))
    expected = importance_metrics(old, rollout, **options)
    of_trajectories = case.settings["loss_agg_mode"].startswith("trajectory")
    trajectories = [s.trajectory for s in case.clean] if of_trajectories else None
    in_the_loss = importance_metrics(old, rollout, **options, trajectories=trajectories)
    lengths = [s.length for s in case.samples]
    laid_out = [
        jagged(torch.tensor([x for s in case.samples for x in getattr(s, name)], dtype=dtype), lengths, memory)
        for name, dtype, memory in (
            ("old_log_probs", torch.float64, case.form.memory),
            ("rollout_log_probs", torch.float64, case.whole.memory),
            ("mask", torch.bool, "contiguous"),
        )
    ]
    alone = importance_sampling_metrics(*laid_out, **options)
    for key in alone:
        right = expected.get(key, 0.0)
        near(alone[key], right, 1e-6, key)
        for run in (cut, whole):
            near(run.metrics[f"rollout_corr/{key}"], in_the_loss.get(key, 0.0), 1e-6, key)
    assert set(expected) <= set(alone)


@st.composite
def preferences(draw):
    arguments = {"beta": draw(st.sampled_from((0.1, 2.0))), "label_smoothing": draw(st.sampled_from((0.0, 0.2)))}
    return {"loss_mode": "dpo", "loss_args": arguments, "loss_agg_mode": "token-mean", "use_weights": False}


@examples(100)
@given(cases(configuration=preferences(), gaps=(0.0, 60.0), layouts=("nested", "padded", "dense"), pairs=True))
def test_pairs(case):
    """dpo, whose pairs stay together: a mean over the pairs of the mini-batch."""
    case = replace(case, with_entropy=False)
    expected = evaluate(case.clean, loss_mode="dpo", loss_args=case.settings["loss_args"])
    only_pairs = replace(expected, metrics={"actor/pg_loss": expected.metrics["actor/pg_loss"]})
    cut = play(case.settings, case.samples, case.ranks, case.form, with_entropy=False)
    whole = play_alone(case.settings, case.samples, case.whole, with_entropy=False)
    for run in (cut, whole):
        finite(run)
        is_the_oracles(run, only_pairs, case.clean, False)
    is_the_same(cut, whole, 1e-9)


@examples(200)
@given(cases(gaps=(0.0,)), st.data())
def test_neutral_tokens(case, data):
    """nonfinite=neutral: tokens with a NaN or an infinity are as if masked, but every count still has them."""
    places = [(i, t) for i, s in enumerate(case.clean) for t, keep in enumerate(s.mask) if keep]
    chosen = data.draw(st.sets(st.sampled_from(places), max_size=4)) if places else set()
    name = data.draw(st.sampled_from(("log_probs", "old_log_probs", "advantages", "entropy")))
    bad = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    read = {"log_probs", *(["entropy"] if case.with_entropy else [])}
    settings = case.settings | {"nonfinite": "neutral"}
    read |= set(get_policy_loss(settings["loss_mode"]).fields)
    if name not in read:
        name = "log_probs"

    def spoil(i, s):
        values = tuple(bad if (i, t) in chosen else x for t, x in enumerate(getattr(s, name)))
        return replace(s, **{name: values})

    def without(i, s):
        return replace(s, mask=tuple(int(keep and (i, t) not in chosen) for t, keep in enumerate(s.mask)))

    spoiled = tuple(spoil(i, s) for i, s in enumerate(case.samples))
    left = tuple(without(i, s) for i, s in enumerate(case.clean))
    form, whole = (replace(f, column=False) for f in (case.form, case.whole))
    known = {k: v for k, v in settings.items() if k != "nonfinite"}
    expected = evaluate(left, **known, counted=case.clean)
    share = len(chosen) / len(places) if places else 0.0
    cut = play(settings, spoiled, case.ranks, form, with_entropy=case.with_entropy)
    alone = play_alone(settings, spoiled, whole, with_entropy=case.with_entropy)
    for run in (cut, alone):
        finite(run)
        near(run.loss, expected.loss, 1e-10 * scale_of(expected), "loss")
        right = flat_gradient(left, expected.log_prob_grad)
        torch.testing.assert_close(run.log_prob_grad, right, rtol=1e-9, atol=1e-10 * scale_of(expected))
        near(run.metrics["actor/nonfinite_frac"], share, 1e-12, "nonfinite_frac")
    is_the_same(cut, alone, 1e-9 * scale_of(expected))


#: Log-ratios that no oracle needs: what overflows somewhere would show as an infinity.
FAR = (0.0, 25.0, 200.0, 3000.0)


@examples(300)
@given(cases(gaps=FAR, types=(EXACT, *TYPES)))
def test_nothing_overflows(case):
    """Any loss in any type, with policies further apart than any exponential: finite, and the same for any cut."""
    if case.settings["loss_mode"] == "gmpo":
        case = replace(case, settings=case.settings | {"loss_mode": "gspo"})
    cut = play(case.settings, case.samples, case.ranks, case.form, with_entropy=case.with_entropy)
    whole = play(
        case.settings, case.samples, ((tuple(range(len(case.samples))),),), case.whole, with_entropy=case.with_entropy
    )
    for run in (cut, whole):
        finite(run)
    # What is added up may be large and cancel: a term of the loss is about as large as its gradient.
    gradient, right = cut.log_prob_grad.double(), whole.log_prob_grad.double()
    held = right.abs() < 0.9 * torch.finfo(case.form.dtype).max
    tolerance = 1e-5 if case.form.dtype != torch.float64 else 1e-10
    scale = max(1.0, abs(whole.loss), right[held].abs().sum().item(), *FAR)
    near(cut.loss, whole.loss, tolerance, "loss", scale)
    is_the_same(cut, whole, tolerance, scale)
    grain = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(case.form.dtype, 0.0)  # Both were rounded.
    torch.testing.assert_close(gradient[held], right[held], rtol=tolerance + grain, atol=tolerance)


@examples(300)
@given(mini_batches(), aggregations(), forms(), st.booleans(), st.data())
def test_modes_alone(samples, mode, form, count_empty, data):
    """``aggregate_loss`` in any layout: the oracle's numerator and denominator; both add up over pieces."""
    values = [[x for x, keep in zip(s.advantages, s.mask, strict=True) if keep] for s in samples]
    scalars = [[torch.tensor(x, dtype=torch.float64) for x in row] for row in values]
    scale = {k: v for k, v in mode.items() if k == "loss_scale_factor"}
    numerator, denominator = aggregate(
        samples, scalars, mode["loss_agg_mode"], count_empty_sequences=count_empty, **scale
    )
    spoiled = poisoned(samples) if form.poison else samples
    if form.layout == "packed" and not all(s.length for s in samples):
        form = replace(form, layout="dense")  # a response of no token is nowhere in a packed row
    ranks = data.draw(cuts(len(samples)))
    pieces = [tuple(range(len(samples)))]
    if mode["loss_agg_mode"] not in OF_GROUPS:
        pieces = [part for rank in ranks for part in rank]
    total, counted = torch.zeros(2, dtype=torch.float64)
    for rows in pieces:
        ratio, losses = aggregated([spoiled[i] for i in rows], mode, form, count_empty)
        ratio.numerator.backward()
        gradient = losses.grad
        assert torch.isfinite(gradient).all()
        total += ratio.numerator.detach()
        counted += ratio.denominator
    near(total.item(), numerator.item(), 1e-10, "numerator")
    if AGGREGATIONS[mode["loss_agg_mode"]].total is None:
        counted /= len(pieces)
    assert counted.item() == denominator


def aggregated(samples, mode, form, count_empty):
    """``aggregate_loss`` of advantages as token losses, and the flat leaf that they come from."""
    flat = torch.tensor([x for s in samples for x in s.advantages], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([m for s in samples for m in s.mask], dtype=form.mask_dtype)
    lengths = [s.length for s in samples]
    groups, prompts = GROUPS.get(AGGREGATIONS[mode["loss_agg_mode"]].total), {}
    if groups is not None:
        keys = [groups.key(s) for s in samples]
        prompts[groups.ids] = torch.tensor([keys.index(key) for key in keys])
    options = dict(mode, count_empty_sequences=count_empty)
    name = options.pop("loss_agg_mode")
    if form.layout in ("nested", "padded"):
        laid_out = (jagged(x, lengths, memory) for x, memory in ((flat, form.memory), (mask, "contiguous")))
        return aggregate_loss(*laid_out, name, **prompts, **options), flat
    width = max(lengths) + form.spare
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    index = torch.full(inside.shape, -1)
    index[inside] = torch.arange(flat.numel())
    losses = torch.cat([flat, flat.new_full((1,), math.nan)])[index]
    wide = torch.cat([mask, mask.new_zeros(1)])[index]
    if form.layout == "dense":
        return aggregate_loss(losses, wide, name, **prompts, **options), flat
    segments = torch.where(inside, torch.arange(1, len(samples) + 1)[:, None] * form.ids, 0).reshape(1, -1)
    prompts = {k: torch.repeat_interleave(v, width).reshape(1, -1) for k, v in prompts.items()}
    # Padding keeps its ids, which no segment has.
    ratio = aggregate_loss(losses.reshape(1, -1), wide.reshape(1, -1), name, segment_ids=segments, **prompts, **options)
    return ratio, flat


def test_there_are_enough_examples():
    assert sum(asked.values()) >= 2000, asked
    few = {name: number for name, number in ran.items() if number < asked[name] * FACTOR}
    assert not few, f"fewer examples ran than {asked}: {few}"
