"""The importance-sampling metrics against the oracle: of one batch in each layout, and of cut mini-batches."""

import math

import pytest
import torch
from batches import cut, make_sequences, poisoned, sequence
from forms import LAYOUTS
from oracle import importance_metrics
from ours import run_ours

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.errors import FieldShapeError
from trinity_loss.metrics import importance_sampling_metrics

SAMPLES = make_sequences(11, seed=2, masked=2)
LEVELS = ("token", "sequence", "geometric")
every_level = pytest.mark.parametrize("level", LEVELS)


def expected(level, upper=2.0, lower=0.5, samples=SAMPLES):
    return importance_metrics(
        [s.valid(s.old_log_probs) for s in samples],
        [s.valid(s.rollout_log_probs) for s in samples],
        level=level,
        upper=upper,
        lower=lower,
    )


def laid_out(layout, samples, dtype=torch.float64):
    """old, rollout, mask and segment ids; what is no valid token is NaN, inf or -inf."""
    samples = poisoned(samples)
    fields = ("old_log_probs", "rollout_log_probs", "mask")
    if layout == "nested":
        old, rollout, mask = (
            torch.nested.as_nested_tensor(
                [torch.tensor(getattr(s, f), dtype=dtype) for s in samples], layout=torch.jagged
            )
            for f in fields
        )
        return old, rollout, mask, None
    if layout == "padded":
        groups = [[s] for s in samples]
    else:
        groups = [list(samples[i : i + 3]) for i in range(0, len(samples), 3)]
    width = max(sum(s.length for s in group) for group in groups) + 2
    tensors = {f: torch.full((len(groups), width), 0.0 if f == "mask" else math.nan, dtype=dtype) for f in fields}
    segments = torch.zeros(len(groups), width, dtype=torch.long)
    for row, group in enumerate(groups):
        column = 0
        for k, s in enumerate(group):
            here = slice(column, column + s.length)
            for f in fields:
                tensors[f][row, here] = torch.tensor(getattr(s, f), dtype=dtype)
            segments[row, here] = 7 - k
            column += s.length
    return *tensors.values(), segments if layout == "packed" else None


@pytest.mark.parametrize(("upper", "lower"), [(2.0, 0.5), (1.1, 0.8), (1.3, 0.2)])
@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_one_batch(layout, level, upper, lower):
    old, rollout, mask, segments = laid_out(layout, SAMPLES)
    got = importance_sampling_metrics(old, rollout, mask, segment_ids=segments, level=level, upper=upper, lower=lower)
    right = expected(level, upper, lower)
    assert set(got) == set(right)
    for key, number in right.items():
        assert got[key] == pytest.approx(number, rel=1e-10, abs=1e-12), key


@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_one_batch_in_float32(layout, level):
    old, rollout, mask, segments = laid_out(layout, SAMPLES, torch.float32)
    got = importance_sampling_metrics(old, rollout, mask, segment_ids=segments, level=level)
    for key, number in expected(level).items():
        assert got[key] == pytest.approx(number, rel=2e-5, abs=2e-6), key


@every_level
def test_of_nothing(level):
    """No valid token: 0 for every key that a batch has, nothing infinite."""
    old, rollout, mask, _ = laid_out("padded", SAMPLES)
    got = importance_sampling_metrics(old, rollout, torch.zeros_like(mask), level=level)
    assert set(got) == set(expected(level))
    assert set(got.values()) == {0.0}


@every_level
def test_of_one_sequence(level):
    """A single sequence has no spread over sequences, a single token none at all."""
    for samples in (SAMPLES[:1], tuple(s for s in SAMPLES if s.tokens > 2)[:1]):
        old, rollout, mask, _ = laid_out("padded", samples)
        got = importance_sampling_metrics(old, rollout, mask, level=level)
        assert got["rollout_is_seq_std"] == 0.0
        for key, number in expected(level, samples=samples).items():
            assert got[key] == pytest.approx(number, rel=1e-8, abs=1e-7), key


@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_cut_mini_batch(layout, level):
    """What the loss reports with rollout_metrics: the same numbers, however the mini-batch was cut."""
    settings = {"loss_agg_mode": "token-mean", "rollout_metrics": level}
    right = expected(level)
    for micro, ranks, how in ((1, 1, "even"), (4, 1, "uneven"), (8, 1, "uneven"), (2, 4, "dynamic")):
        got = run_ours(settings, cut(SAMPLES, micro, ranks, how), layout).metrics
        for key, number in right.items():
            assert got[f"rollout_corr/{key}"] == pytest.approx(number, rel=1e-9, abs=1e-11), key
        assert not [key for key in got if "moments" in key]


@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trajectory_weighs_once_in_a_mean_over_sequences(layout, level):
    settings = {"loss_agg_mode": "trajectory-mean", "rollout_metrics": level}
    old, rollout = ([s.valid(getattr(s, name)) for s in SAMPLES] for name in ("old_log_probs", "rollout_log_probs"))
    right = importance_metrics(old, rollout, level=level, trajectories=[s.trajectory for s in SAMPLES])
    assert abs(right["training_log_ppl"] / expected(level)["training_log_ppl"] - 1) > 1e-3
    for micro, ranks, how in ((1, 1, "even"), (4, 1, "uneven"), (2, 4, "dynamic")):
        got = run_ours(settings, cut(SAMPLES, micro, ranks, how), layout).metrics
        for key, number in right.items():
            assert got[f"rollout_corr/{key}"] == pytest.approx(number, rel=1e-9, abs=1e-11), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_a_trajectory_is_split_changes_no_linear_metric(layout):
    whole = sequence(4, old_log_probs=[-1.0, -2.0, -0.5, -3.0], rollout_log_probs=[-1.1, -1.5, -0.5, -2.0])
    halves = [
        sequence(size, **{name: list(getattr(whole, name)[part]) for name in ("old_log_probs", "rollout_log_probs")})
        for size, part in ((1, slice(1)), (3, slice(1, None)))
    ]
    other = sequence(2, uid="other", old_log_probs=-1.0, rollout_log_probs=-0.7)
    settings = {"loss_agg_mode": "trajectory-mean", "rollout_metrics": "token"}
    one, two = (run_ours(settings, cut(samples, 2), layout).metrics for samples in ((whole, other), (*halves, other)))
    for key in ("training_log_ppl", "rollout_log_ppl", "log_ppl_diff", "rollout_is_seq_mean"):
        assert two[f"rollout_corr/{key}"] == pytest.approx(one[f"rollout_corr/{key}"], rel=1e-12), key


def test_of_a_micro_batch_by_itself():
    """TrinityPolicyLoss reports plain floats of what it was given."""
    old, rollout, mask, _ = laid_out("padded", SAMPLES)
    data = {"response_mask": mask, "old_log_probs": old, "rollout_log_probs": rollout, "advantages": old}
    loss = TrinityPolicyLoss(LossConfig(rollout_metrics="token"))
    log_probs = torch.where(mask != 0, old, 0.0).requires_grad_()
    _, metrics = loss(model_output={"log_probs": log_probs}, data=data)
    for key, number in expected("token").items():
        assert metrics[f"rollout_corr/{key}"] == pytest.approx(number, rel=1e-10, abs=1e-12), key


def test_log_ratios_far_from_zero():
    """Weights are clamped to exp(+-20) before they are truncated; fractions look at the log-ratio itself."""
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -31.0, 0.0]], dtype=torch.float64)
    rollout = torch.tensor([[-31.0, -1.0, -1.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for level in LEVELS:
        right = importance_metrics(
            [[-1.0, -1.0, -1.0], [-1.0, -31.0]], [[-31.0, -1.0, -1.0], [-1.0, -1.0]], level=level
        )
        got = importance_sampling_metrics(old, rollout, mask, level=level)
        for key in set(right) - {"k3_kl", "ppl_ratio", "training_ppl", "rollout_ppl"}:
            assert got[key] == pytest.approx(right[key], rel=1e-9, abs=1e-12), (level, key)
        assert all(math.isfinite(x) for x in got.values())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "batch"}, "level"),
        ({"upper": 0.0}, "upper"),
        ({"upper": math.inf}, "upper"),
        ({"lower": -0.5}, "lower"),
        ({"upper": 0.4, "lower": 0.5}, "lower"),
    ],
)
def test_options_are_checked(options, named):
    old, rollout, mask, _ = laid_out("padded", SAMPLES)
    with pytest.raises(ValueError, match=named):
        importance_sampling_metrics(old, rollout, mask, **options)


def test_shapes_are_checked():
    old, rollout, mask, segments = laid_out("packed", SAMPLES)
    with pytest.raises(ValueError, match="rollout_log_prob"):
        importance_sampling_metrics(old, rollout[:, :-1], mask)
    with pytest.raises(ValueError, match="old_log_prob"):
        importance_sampling_metrics(old[:1], rollout, mask)
    with pytest.raises(ValueError, match="segment_ids"):
        importance_sampling_metrics(old, rollout, mask, segment_ids=segments[:, :-1])


@pytest.mark.parametrize("name", ["old_log_prob", "rollout_log_prob", "response_mask", "segment_ids"])
def test_what_is_no_tensor_is_named(name):
    fields = dict.fromkeys(("old_log_prob", "rollout_log_prob", "response_mask"), torch.ones(1, 2))
    with pytest.raises(FieldShapeError, match=f"^{name} is a list; expected a tensor$"):
        importance_sampling_metrics(**{**fields, name: [[0.0, 0.0]]})


def test_perplexities_stay_finite():
    """Log-probs of -500 in float32, where e to 500 is infinite; verl's own perplexities are infinite then."""
    old, rollout = torch.full((2, 3), -500.0), torch.full((2, 3), -1.0)
    for pair in ((old, rollout), (rollout, old)):
        metrics = importance_sampling_metrics(*pair, torch.ones(2, 3))
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert max(metrics["training_ppl"], metrics["rollout_ppl"]) == pytest.approx(math.exp(80), rel=1e-5)
    assert metrics["ppl_ratio"] == pytest.approx(math.exp(-80), rel=1e-5)
