"""Faults that people met in code like this, each with its right value, in every mode and layout it can touch.

The numbers are small enough to check by hand. Token losses come from ``token_losses``: the ratio is 1, so the
ppo loss of a token is minus its advantage and so is its gradient. Modes with a divisor divide by 4 unless a
case says otherwise. ``value`` asks that loss, summed gradient and reported metric are the same number.
"""

import functools
import math
import re
import sys
import warnings
from dataclasses import fields, replace
from itertools import chain
from types import MethodType
from uuid import UUID

import numpy as np
import pytest
import torch
from batches import (
    build,
    cut,
    forward,
    given_cut,
    make_sequences,
    poisoned,
    run,
    sequence,
    token_losses,
)
from forms import LAYOUTS, NO_TOTALS, Form, flat_gradient, make_leaves
from omegaconf import OmegaConf
from oracle import AGGREGATIONS, GROUPS, MODES, OF_THE_MINI_BATCH, POLICY_LOSSES, REJECTION_RULES, aggregate
from ours import (
    BLIND_TO_EMPTY,
    SCALED,
    check,
    in_mode,
    oracle_value,
    run_ours,
    sent_by_worker,
    value,
)
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss
from workers import OURS, POLICY_LOSS, Outer, TrainingWorker, by_keyword, composed, jagged_rows, started, train

import trinity_loss.verl
from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss, aggregate_loss
from trinity_loss.aggregation import SeqMeanTokenSum, TokenMean, aggregation_mode_names, find_aggregation_mode
from trinity_loss.doctor import look, notes, traps
from trinity_loss.errors import (
    BatchError,
    ConfigError,
    FieldShapeError,
    MissingFieldError,
    MissingGraphError,
    TotalsError,
)
from trinity_loss.invariance import Value, check_invariance, make_mini_batch
from trinity_loss.invariance.recorded import load_recording
from trinity_loss.metric_set import finish_metrics
from trinity_loss.metrics import importance_sampling_metrics
from trinity_loss.recorder import Provenance, Recorder
from trinity_loss.registry import TokenLoss, get_policy_loss, policy_loss_names, register_policy_loss
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import find_count
from trinity_loss.verify import Options as VerifyOptions
from trinity_loss.verl import PolicyLossConfig, compat, policy_options
from trinity_loss.verl.composed import compose as read_configuration
from trinity_loss.verl.counting import Counting
from trinity_loss.verl.metric_reduction import reduce_over_ranks
from trinity_loss.verl.shadow import ShadowLoss

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_mode = pytest.mark.parametrize("mode", MODES)
ALIKE = functools.partial(pytest.approx, rel=1e-12, abs=1e-15)


def per_mode(otherwise, **values):
    """Parametrises over modes and their right values, the names written with underscores.

    A mode that is not named has what ``otherwise`` makes of it, by the oracle.
    """
    named = {name.replace("_", "-"): right for name, right in values.items()}
    # A row is a trajectory, unless prompts are shared.
    named = {"trajectory-mean": named["prompt-mean"]} | named
    named = {"trajectory-mean-token-sum-norm": named["seq-mean-token-sum-norm"]} | named
    assert set(named) <= set(MODES), f"no such mode: {sorted(set(named) - set(MODES))}"
    return pytest.mark.parametrize(
        ("mode", "right"), [(mode, named[mode] if mode in named else otherwise(mode)) for mode in MODES]
    )


def loss_of(samples, scale=4.0, **settings):
    """The oracle's loss of these sequences, by mode."""
    return lambda mode: oracle_value(samples, in_mode(mode, scale, **settings)).loss


def pieces(samples):
    """One micro-batch per sequence, on one rank."""
    return given_cut(samples, [[i] for i in range(len(samples))])


def ranks(samples):
    """One rank per sequence."""
    return given_cut(samples, *[[[i]] for i in range(len(samples))])


ONES_AND_FIVE = token_losses([1, 1, 1], [5])


@every_layout
@per_mode(
    loss_of(ONES_AND_FIVE),
    token_mean=2,
    token_sum=8,
    seq_mean_token_sum=4,
    seq_mean_token_mean=3,
    seq_mean_token_sum_norm=1,
    prompt_mean=3,
    constant=2,
)
def test_01_a_micro_batch_weighs_as_its_tokens(layout, mode, right):
    """Three tokens of loss 1 in one micro-batch, one of loss 5 in another."""
    assert value(in_mode(mode), pieces(ONES_AND_FIVE), layout) == ALIKE(right)
    assert value(in_mode(mode), cut(ONES_AND_FIVE), layout) == ALIKE(right)


@every_layout
def test_01_a_prompt_group_is_pooled_before_its_mean(layout):
    samples = token_losses([1, 1, 1], [5], same_prompt=True)
    assert value(in_mode("prompt-mean"), pieces(samples), layout) == ALIKE(2)
    assert value(in_mode("prompt-mean"), ranks(samples), layout) == ALIKE(2)


THOUSAND = token_losses([0.5] * 100, [0.3] * 900)


@every_layout
@per_mode(
    loss_of(THOUSAND, scale=1000),
    token_mean=0.32,
    token_sum=320,
    seq_mean_token_sum=160,
    seq_mean_token_mean=0.4,
    seq_mean_token_sum_norm=0.16,
    prompt_mean=0.4,
    constant=0.32,
)
def test_02_no_mean_of_means(layout, mode, right):
    """100 tokens of 0.5 and 900 of 0.3, as two micro-batches and as two ranks."""
    settings = in_mode(mode, scale=1000)
    assert value(settings, pieces(THOUSAND), layout) == ALIKE(right)
    assert value(settings, ranks(THOUSAND), layout) == ALIKE(right)


OPPOSITE = (
    sequence(1, log_probs=math.log(0.5), advantages=1.0, uid="a"),
    sequence(3, log_probs=math.log(0.5), advantages=-1.0, uid="b"),
)


def loss_and_slope(mode):
    """The slope is that of a parameter whose log sigmoid(0) every log-prob is."""
    right = oracle_value(OPPOSITE, in_mode(mode))
    return right.loss, 0.5 * sum(chain.from_iterable(right.log_prob_grad))


@every_layout
@per_mode(
    loss_and_slope,
    token_mean=(0.5, 0.25),
    token_sum=(2, 1),
    seq_mean_token_sum=(1, 0.5),
    seq_mean_token_mean=(0, 0),
    seq_mean_token_sum_norm=(0.25, 0.125),
    prompt_mean=(0, 0),
    constant=(0.5, 0.25),
)
def test_03_opposite_advantages_do_not_cancel(layout, mode, right):
    """One parameter behind every token: log sigmoid(0), lengths 1 and 3, advantages +1 and -1."""
    for parts in (pieces(OPPOSITE), ranks(OPPOSITE), cut(OPPOSITE)):
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        log_probs = torch.nn.functional.logsigmoid(theta).expand(make_leaves(OPPOSITE)[0].numel())
        loss = EnginePolicyLoss(LossConfig(**in_mode(mode)))
        total = forward(loss, parts, Form(layout, **sent_by_worker(in_mode(mode))), log_probs, None).total
        total.backward()
        assert (total.item(), theta.grad.item()) == ALIKE(right)


@pytest.mark.parametrize("term", ["pg", "entropy", "kl"])
@every_mode
def test_04_every_term_is_normalised_globally(mode, term):
    """The gradient of each term alone, in 32 micro-batches, over the gradient in one: 1.

    The layouts take turns; ``test_invariance`` has every term in every mode and layout.
    """
    layout = LAYOUTS[(MODES.index(mode) + len(term)) % 3]
    samples = make_sequences(33, seed=4)
    if term != "pg":
        samples = tuple(replace(s, advantages=(0.0,) * s.length) for s in samples)
    settings = (
        in_mode(mode)
        | {
            "pg": {},
            "entropy": {"entropy_coeff": 1.0},
            "kl": {"use_kl_loss": True, "kl_loss_coef": 1.0},
        }[term]
    )
    whole, many = (run_ours(settings, cut(samples, n), layout) for n in (1, 32))
    name = "entropy_grad" if term == "entropy" else "log_prob_grad"
    one, other = getattr(whole, name), getattr(many, name)
    assert one.norm() > 0
    assert (other.norm() / one.norm()).item() == pytest.approx(1, rel=1e-10)
    assert (other - one).norm() <= 1e-10 * one.norm()


SIX_ONES = token_losses([1] * 5, [1])


@every_layout
@per_mode(
    lambda mode: [row[0] for row in oracle_value(SIX_ONES, in_mode(mode)).log_prob_grad],
    token_mean=(1 / 6, 1 / 6),
    token_sum=(1, 1),
    seq_mean_token_sum=(1 / 2, 1 / 2),
    seq_mean_token_mean=(1 / 10, 1 / 2),
    seq_mean_token_sum_norm=(1 / 8, 1 / 8),
    prompt_mean=(1 / 10, 1 / 2),
    constant=(1 / 4, 1 / 4),
)
def test_05_ranks_share_one_denominator(layout, mode, right):
    """Five tokens on one rank, one on the other, every loss 1: what each token weighs."""
    got = run_ours(in_mode(mode), ranks(SIX_ONES), layout)
    expected = flat_gradient(SIX_ONES, [[right[0]] * 5, [right[1]]])
    torch.testing.assert_close(got.log_prob_grad, expected, rtol=1e-12, atol=1e-15)


@every_layout
@pytest.mark.parametrize(("mode", "right"), [("token-sum", 6), ("constant", 1.5)])
def test_06_a_sum_survives_the_average_over_ranks(mode, right, layout):
    samples = token_losses([1, 2], [3])
    assert value(in_mode(mode), ranks(samples), layout) == ALIKE(right)
    empty_rank = token_losses([1, 2, 3], None)
    assert value(in_mode(mode), ranks(empty_rank), layout) == ALIKE(right)


@every_layout
@every_mode
def test_07_megatron_schedules(mode, layout):
    """Megatron divides by the number of micro-batches, verl multiplies by it first: the loss must not know.

    In the per-token regime verl returns loss x routed tokens / dp_size and a local count, and Megatron divides
    the gradients, summed over ranks, by the sum of the counts.
    """
    samples = make_sequences(9, seed=7)
    n, dp = 2, 2
    parts = cut(samples, n, dp, "uneven")
    settings = in_mode(mode, entropy_coeff=0.2, use_kl_loss=True, kl_loss_coef=0.3)
    whole = run_ours(settings, cut(samples), layout)
    totals = (("num_micro_batch", n), ("routed_num_tokens", 1000))
    form = Form(layout, **sent_by_worker(settings), totals=totals)
    for regime in ("schedule", "per-token"):
        log_probs, entropy = make_leaves(samples)
        loss = EnginePolicyLoss(LossConfig(**settings))
        losses = forward(loss, parts, form, log_probs, entropy).losses
        if regime == "schedule":
            total = sum(x * n / n for x in chain.from_iterable(losses)) / dp
        else:
            total = sum(x * 1000 / dp for x in chain.from_iterable(losses)) / 1000
        total.backward()
        torch.testing.assert_close(log_probs.grad, whole.log_prob_grad, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(entropy.grad, whole.entropy_grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("count_empty", [True, False])
@every_layout
@every_mode
def test_08_a_fully_masked_row_is_no_token(mode, layout, count_empty):
    """Four valid tokens with and without a masked row: the same, but for the modes that count sequences."""
    settings = in_mode(mode, count_empty_sequences=count_empty)
    with_row, without = token_losses([2, 3, 1], None, [4]), token_losses([2, 3, 1], [4])
    share = 1.0
    if count_empty and mode not in BLIND_TO_EMPTY:
        share = 2 / 3
    alone = value(settings, cut(without), layout)
    for parts in (cut(with_row, 2), ranks(with_row)):
        assert value(settings, parts, layout) == ALIKE(share * alone)


@every_layout
@every_mode
def test_09_padding_rows_are_no_tokens(mode, layout):
    """Three masked rows added, in micro-batches of their own and beside others; packed, rows of padding only."""
    k = 3
    samples = token_losses([2, 3, 1], [4])
    alone = value(in_mode(mode), cut(samples), layout)
    more = (*samples, *token_losses(*[None] * k))
    more = tuple(replace(s, uid=f"{i}") for i, s in enumerate(more))
    share = 1.0 if mode in BLIND_TO_EMPTY else 2 / (2 + k)
    for parts in (pieces(more), cut(more, 2)):
        assert value(in_mode(mode), parts, layout) == ALIKE(share * alone)
    if layout == "packed":
        assert value(in_mode(mode), pieces(samples), layout, padding_rows=k) == ALIKE(alone)


ONE_MASKED = token_losses([1, 1, 1], [2], None, [3, 5])


@every_layout
@per_mode(
    lambda mode: tuple(loss_of(ONE_MASKED, count_empty_sequences=count)(mode) for count in (True, False)),
    token_mean=13 / 6,
    token_sum=13,
    seq_mean_token_sum=(13 / 4, 13 / 3),
    seq_mean_token_mean=(7 / 4, 7 / 3),
    seq_mean_token_sum_norm=(13 / 16, 13 / 12),
    prompt_mean=(7 / 4, 7 / 3),
    constant=13 / 4,
)
def test_10_rows_are_counted_as_they_are_averaged(layout, mode, right):
    """Sequence means 1, 2, (masked), 4: counted with the masked sequence, and without."""
    counted, left_out = right if isinstance(right, tuple) else (right, right)
    for parts in (cut(ONE_MASKED), given_cut(ONE_MASKED, [[0, 1], [2, 3]]), ranks(ONE_MASKED)):
        assert value(in_mode(mode), parts, layout) == ALIKE(counted)
        assert value(in_mode(mode, count_empty_sequences=False), parts, layout) == ALIKE(left_out)


@pytest.mark.parametrize("totals", [(), NO_TOTALS], ids=["totals", "no totals"])
@every_layout
@every_mode
def test_11_nothing_valid(mode, layout, totals):
    """No valid token in the whole mini-batch, cut in two: 0 with a graph, finite gradients and metrics."""
    samples = poisoned(token_losses(None, None, None))
    settings = in_mode(mode, entropy_coeff=0.1, use_kl_loss=True)
    for parts in (cut(samples), cut(samples, 2)) if totals else (cut(samples), cut(samples, 2), ranks(samples)):
        got = run_ours(settings, parts, layout, poison=True, totals=totals)
        assert got.loss == 0.0
        assert not got.log_prob_grad.any()
        assert not got.entropy_grad.any()
        assert {"actor/pg_loss", "actor/entropy_loss", "kl_loss", "actor/ppo_kl"} <= set(got.metrics)
        odd = {key: x for key, x in got.metrics.items() if not math.isfinite(x)}
        assert not odd


@every_layout
@every_mode
def test_11_a_micro_batch_without_a_token(mode, layout):
    """A micro-batch and a rank with nothing valid, beside others: they add nothing, and emit every metric."""
    samples = token_losses([1, 1, 1], None, [5, 2])
    settings = in_mode(mode)
    for parts in (pieces(samples), ranks(samples)):
        got = run_ours(settings, parts, layout)
        assert got.loss == ALIKE(oracle_value(samples, settings).loss)
        assert len({tuple(m) for m in chain.from_iterable(got.emitted)}) == 1


@every_layout
@every_mode
def test_12_a_masked_position_may_hold_anything(mode, layout):
    """NaN and infinities at every masked position of every field, and gaps there that exp cannot hold."""
    samples = make_sequences(9, seed=5, masked=2)
    settings = in_mode(mode, entropy_coeff=0.2, use_kl_loss=True, kl_loss_coef=0.3)
    far = tuple(
        replace(
            s,
            log_probs=tuple(x if m else -2.0 for x, m in zip(s.log_probs, s.mask, strict=True)),
            old_log_probs=tuple(x if m else -1e4 for x, m in zip(s.old_log_probs, s.mask, strict=True)),
            ref_log_prob=tuple(x if m else 91.0 for x, m in zip(s.ref_log_prob, s.mask, strict=True)),
        )
        for s in samples
    )
    for parts in (cut(poisoned(samples)), cut(poisoned(samples), 4, 1, "uneven"), cut(poisoned(samples), 2, 2)):
        check(settings, parts, layout, expected=samples, poison=True)
    check(settings, cut(far, 3), layout, expected=samples)


@every_layout
@pytest.mark.parametrize("kind", ["low_var_kl", "k3"])
@pytest.mark.parametrize("log_prob", [-100.0, -6.0])
def test_13_kl_is_clamped_without_nan(log_prob, kind, layout):
    """Log-prob -100 or -6 against -1: beyond both limits or that of the value alone, it is 10, the gradient 0."""
    samples = tuple(sequence(n, log_probs=log_prob, ref_log_prob=-1.0) for n in (1, 3))
    settings = in_mode("token-mean", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
    got = run_ours(settings, pieces(samples), layout)
    assert (got.loss, got.metrics["kl_loss"]) == ALIKE((10.0, 10.0))
    assert not got.log_prob_grad.any()


@every_layout
@pytest.mark.parametrize(
    ("kind", "right", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("kl", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("k3", 0.5 + math.exp(-0.5) - 1, 1 - math.exp(-0.5)),
        ("low_var_kl", 0.10653, 0.39347),
        ("k3+", 0.5 + math.exp(-0.5) - 1, 0.5),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k2+", 0.125, 0.5),
        ("low_var_kl+", 0.10653, 0.5),
    ],
)
def test_14_kl_estimators(kind, right, slope, layout):
    """Log-prob -1, reference -1.5: value and gradient of every estimator."""
    samples = tuple(sequence(n, log_probs=-1.0, ref_log_prob=-1.5) for n in (1, 3))
    settings = in_mode("token-sum", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
    got = run_ours(settings, pieces(samples), layout)
    bound = 1e-5 if "low" in kind else 1e-12
    assert got.loss == pytest.approx(4 * right, rel=bound * 10)
    expected = flat_gradient(samples, [[slope], [slope] * 3])
    torch.testing.assert_close(got.log_prob_grad, expected, rtol=bound * 10, atol=1e-15)


@pytest.mark.parametrize("packed", [False, True])
def test_15_counts_do_not_round(packed):
    """A bf16 mask of 257 ones counts 257 (256 in bf16), and so does a sum of bf16 losses."""
    mask = torch.zeros(2, 257, dtype=torch.bfloat16)
    mask[0], mask[1, :3] = 1, 1
    segments = (mask != 0).long() if packed else None
    ratio = aggregate_loss(torch.ones_like(mask), mask, "token-mean", segment_ids=segments)
    assert (ratio.numerator.item(), ratio.denominator.item(), ratio.value().item()) == (260, 260, 1)
    assert ratio.numerator.dtype in (torch.float32, torch.float64)
    one = aggregate_loss(torch.ones_like(mask), mask, "seq-mean-token-mean", segment_ids=segments)
    assert one.value().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_15_bf16_log_probs(mode):
    """Log-probs and mask in bf16, 257 + 3 tokens: the sums behind the loss are not."""
    samples = token_losses([1.0] * 257, [1.0] * 3)
    right = {"token-mean": 1.0, "seq-mean-token-mean": 1.0, "seq-mean-token-sum": 130.0}[mode]
    for loss in (EnginePolicyLoss, TrinityPolicyLoss):
        for layout in LAYOUTS:
            batch = build(cut(samples), Form(layout, dtype=torch.bfloat16))[0][0]
            leaf, _ = make_leaves(samples, torch.bfloat16)
            data = batch.data.clone(recurse=False)
            data["response_mask"] = data["response_mask"].to(torch.bfloat16)
            got, _ = loss(LossConfig(loss_agg_mode=mode))(
                model_output={"log_probs": batch.lay_out(leaf)}, data=data, dp_group=None
            )
            got.backward()
            assert got.dtype == torch.float32
            assert got.item() == pytest.approx(right, abs=1e-5)
            assert leaf.grad.double().sum().item() == pytest.approx(right, rel=5e-3)


RATIO_OF_TEN = (
    sequence(3, old_log_probs=-1.0 - math.log(10.0), advantages=-1.0, uid="a"),
    sequence(1, old_log_probs=-1.0 - math.log(10.0), advantages=1.0, uid="b"),
)


@every_layout
@per_mode(
    loss_of(RATIO_OF_TEN),
    token_mean=1.95,
    token_sum=7.8,
    seq_mean_token_sum=3.9,
    seq_mean_token_mean=0.9,
    seq_mean_token_sum_norm=0.975,
    prompt_mean=0.9,
    constant=1.95,
)
def test_16_the_dual_clip_has_a_condition(layout, mode, right):
    """Ratio 10: with advantage -1 the loss is c = 3, with +1 it is -1.2, and neither has a gradient."""
    got = run_ours(in_mode(mode), pieces(RATIO_OF_TEN), layout)
    assert got.loss == ALIKE(right)
    assert not got.log_prob_grad.any()
    assert got.metrics["actor/pg_clipfrac"] == ALIKE(0.25)
    assert got.metrics["actor/pg_clipfrac_lower"] == ALIKE(0.75)


def test_17_arguments_that_nobody_reads_are_refused():
    with pytest.raises(TypeError, match="clip_ratio_C"):
        LossConfig(clip_ratio_C=3.0)
    with pytest.raises(ValueError, match="tau_pos"):
        LossConfig(loss_mode="ppo", loss_args={"tau_pos": 1.0})
    with pytest.raises(ValueError, match=r"tau_neg.*loss_mode 'ppo'"):
        LossConfig(loss_args={"tau_neg": 1.0})
    with pytest.raises(ValueError, match="token-mean"):
        LossConfig(loss_agg_mode="token_mean")
    with pytest.raises(ValueError, match="low_var_kl"):
        LossConfig(use_kl_loss=True, kl_loss_type="low-var-kl")
    with pytest.raises(ValueError, match="ppo"):
        LossConfig(loss_mode="pppo")
    with pytest.raises(ValueError, match="loss_scale_factor"):
        LossConfig(loss_scale_factor=4.0)


def broadcast_batch(layout, **fields):
    """Two sequences in a tensor of width two, with the fields given in place of the batch's own."""
    samples = (
        sequence(1, advantages=-1.0, uid="a"),
        sequence(2, advantages=-1.0, uid="b"),
    )
    form = Form(layout, width=None if layout == "packed" else 2, groups=True, counts=True)
    batch = build(cut(samples), form)[0][0]
    # A plain dictionary: a TensorDict would refuse some of these shapes itself.
    data = {name: batch.data[name] for name in batch.data.keys()} | fields  # noqa: SIM118
    leaf, _ = make_leaves(samples)
    output = {"log_probs": batch.lay_out(leaf)}
    return lambda mode: EnginePolicyLoss(LossConfig(**in_mode(mode)))(model_output=output, data=data, dp_group=None)


@pytest.mark.parametrize("layout", ["nested", "padded"])
@per_mode(
    loss_of(token_losses([1], [3, 3])),
    token_mean=7 / 3,
    token_sum=7,
    seq_mean_token_sum=7 / 2,
    seq_mean_token_mean=2,
    seq_mean_token_sum_norm=7 / 8,
    prompt_mean=2,
    constant=7 / 4,
)
def test_18_one_number_per_sequence(mode, right, layout):
    """[B, 1] is one number per sequence, also where B equals the width: weights 1 and 3, token losses 1."""
    column = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    loss, _ = broadcast_batch(layout, rollout_is_weights=column)(mode)
    assert loss.item() == ALIKE(right)
    loss, _ = broadcast_batch(layout, advantages=-column)(mode)
    assert loss.item() == ALIKE(right)


@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("name", ["rollout_is_weights", "advantages", "old_log_probs"])
def test_18_a_vector_is_refused(name, layout):
    """[B] could be either, so it is neither; nor does [1, T] spread over rows, or a wrong count over anything."""
    for shape in ((2,), (1, 2), (1,), (3,), (3, 1), (1, 1), (2, 2, 1), ()):
        call = broadcast_batch(layout, **{name: torch.ones(shape, dtype=torch.float64)})
        with pytest.raises(ValueError, match=name):
            call("token-mean")


@pytest.mark.parametrize("name", ["rollout_is_weights", "advantages", "old_log_probs"])
def test_18_packed_rows_have_no_number_of_their_own(name):
    """Two sequences in one row of five: neither a number per row nor one per sequence fits it."""
    for shape in ((1, 1), (1,), (2,), (5,), (2, 1), (1, 2), ()):
        call = broadcast_batch("packed", **{name: torch.ones(shape, dtype=torch.float64)})
        with pytest.raises(ValueError, match=name):
            call("token-mean")


SEVEN_AND_TWO = token_losses([1] * 7, [10] * 2)
of_seven_and_two = per_mode(
    loss_of(SEVEN_AND_TWO),
    token_mean=3,
    token_sum=27,
    seq_mean_token_sum=13.5,
    seq_mean_token_mean=5.5,
    seq_mean_token_sum_norm=27 / 8,
    prompt_mean=5.5,
    constant=27 / 4,
)


@every_layout
@of_seven_and_two
def test_19_a_packed_row_is_several_sequences(layout, mode, right):
    """Lengths 7 and 2, packed into one row: (mean + mean) / 2, not the pooled mean of nine tokens."""
    assert value(in_mode(mode), cut(SEVEN_AND_TWO), layout, per_row=(2,)) == ALIKE(right)


@of_seven_and_two
def test_19_aggregate_loss_of_a_packed_row(mode, right):
    """The same through aggregate_loss, which takes each layout, with masked tokens that hold NaN."""
    nan = float("nan")
    rows = torch.tensor([[1.0] * 7 + [10.0] * 2 + [nan] * 2], dtype=torch.float64)
    segments = torch.tensor([[4] * 7 + [2] * 2 + [0, 0]])
    wide = torch.tensor([[1.0] * 7, [10.0] * 2 + [nan] * 5], dtype=torch.float64)
    scale = {"loss_scale_factor": 4.0} if mode in SCALED else {}
    of_rows, of_tokens, groups = {}, {}, GROUPS.get(AGGREGATIONS[mode].total)
    if groups is not None:
        keys = [groups.key(s) for s in SEVEN_AND_TWO]
        one, two = map(keys.index, keys)
        of_rows[groups.ids], of_tokens[groups.ids] = torch.tensor([one, two]), torch.tensor([[one] * 7 + [two] * 4])
    packed = aggregate_loss(rows, segments != 0, mode, segment_ids=segments, **of_tokens, **scale)
    padded = aggregate_loss(wide, ~wide.isnan(), mode, **of_rows, **scale)
    assert packed.value().item() == ALIKE(right)
    assert padded.value().item() == ALIKE(right)
    assert (packed.numerator / packed.denominator).item() == ALIKE(right)


def test_19_packed_fixture():
    """The rectangle [[9, 2, 4], [6], [8, 10]] as packed rows, with masked tokens and a row of padding."""
    losses = torch.tensor([[9.0, 2, 4, 6, 0], [8, 10, 0, 0, 0], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    segments = torch.tensor([[1, 1, 1, 2, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    rectangle = torch.tensor([[9.0, 2, 4], [6, 0, 0], [8, 10, 0]])
    valid = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 0]])
    for mode, right in (
        ("token-mean", 6.0),
        ("token-sum", 30.0),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-mean", 6.0),
        ("seq-mean-token-sum-norm", 2.5),
        ("constant", 7.5),
    ):
        scale = {"loss_scale_factor": 4.0} if mode in SCALED else {}
        for count_empty in (True, False):
            extra = scale | {"count_empty_sequences": count_empty}
            assert aggregate_loss(losses, mask, mode, segment_ids=segments, **extra).value() == ALIKE(right)
            assert aggregate_loss(rectangle, valid, mode, **extra).value() == ALIKE(right)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@every_mode
def test_21_the_width_is_no_norm(mode, layout):
    """Four tokens of loss 1, width 4 and 8; the constant is asked for."""
    samples = token_losses([1, 1, 1], [1])
    narrow, wide = (value(in_mode(mode), cut(samples), layout, width=width) for width in (4, 8))
    assert narrow == ALIKE(wide)
    if mode in SCALED:
        for wrong in (None, 0, -3, float("inf"), float("nan"), True):
            with pytest.raises(ValueError, match="loss_scale_factor"):
                LossConfig(loss_agg_mode=mode, loss_scale_factor=wrong)
        with pytest.raises(ValueError, match="loss_scale_factor"):
            aggregate_loss(torch.ones(2, 3), torch.ones(2, 3), mode)


WEIGHTED = (
    sequence(3, ref_log_prob=-2.0, entropy=1.0, old_log_probs=0.0, uid="a"),
    sequence(1, ref_log_prob=-6.0, entropy=5.0, old_log_probs=4.0, uid="b"),
)


@every_layout
@per_mode(
    lambda mode: oracle_value(WEIGHTED, in_mode(mode)).metrics["actor/entropy_loss"],
    token_mean=2,
    token_sum=8,
    seq_mean_token_sum=4,
    seq_mean_token_mean=3,
    seq_mean_token_sum_norm=1,
    prompt_mean=3,
    constant=2,
)
def test_22_metrics_are_weighted(layout, mode, right):
    """KL 1 on three tokens and 5 on one; entropy and ppo_kl likewise, the last a token mean in any mode."""
    settings = in_mode(mode, use_kl_loss=True, kl_loss_type="k1", entropy_coeff=0.5)
    for parts in (cut(WEIGHTED), pieces(WEIGHTED), ranks(WEIGHTED)):
        metrics = run_ours(settings, parts, layout).metrics
        assert metrics["kl_loss"] == ALIKE(right)
        assert metrics["actor/entropy_loss"] == ALIKE(right)
        assert metrics["actor/ppo_kl"] == ALIKE(2.0)
        assert metrics["kl_coef"] == ALIKE(0.001)


@every_layout
@every_mode
def test_23_a_name_says_how_a_metric_is_reduced(mode, layout):
    """verl's driver goes by the key: max and min are in it exactly when the metric is one."""
    settings = in_mode(mode, entropy_coeff=0.1, use_kl_loss=True)
    got = run_ours(settings, cut(make_sequences(9, seed=1), 3), layout)
    for metrics in got.emitted[0]:
        for key, metric in metrics.items():
            named = "max" if "max" in key else "min" if "min" in key else None
            if isinstance(metric, Metric):
                kinds = {AggregationType.MAX: "max", AggregationType.MIN: "min"}
                assert kinds.get(metric.aggregation) == named, key
            else:
                assert named is None, key


PADDED_RATIOS = {"level": "sequence"}, {"level": "geometric"}, {"level": "token"}


@pytest.mark.parametrize("options", PADDED_RATIOS, ids=lambda o: o["level"])
@pytest.mark.parametrize("packed", [False, True])
def test_24_padding_has_no_weight(options, packed):
    """Sequence weights 0.9 and 1.1, and two rows of padding: they are neither the minimum nor in the mean."""
    nan = float("nan")
    low, high = math.log(0.9), math.log(1.1)
    if options["level"] == "sequence":
        low, high = low / 2, high / 3
    if packed:
        old = torch.tensor([[low, low, nan, high, high, high], [nan] * 6, [nan] * 6], dtype=torch.float64)
        segments = torch.tensor([[3, 3, 0, 1, 1, 1], [0] * 6, [0] * 6])
        mask = segments != 0
    else:
        old = torch.tensor([[low, low, nan], [high] * 3, [nan] * 3, [nan] * 3], dtype=torch.float64)
        segments, mask = None, ~old.isnan()
    rollout = torch.where(mask, 0.0, old)
    metrics = importance_sampling_metrics(old, rollout, mask, segment_ids=segments, **options)
    assert metrics["rollout_is_seq_min"] == ALIKE(0.9)
    assert metrics["rollout_is_seq_max"] == ALIKE(1.1)
    assert metrics["rollout_is_seq_mean"] == ALIKE(1.0)
    assert metrics["rollout_is_min"] == ALIKE(0.9)
    assert metrics["rollout_is_max"] == ALIKE(1.1)
    assert metrics["rollout_is_seq_max_deviation"] == pytest.approx(0.1, rel=1e-10)
    assert metrics["rollout_is_seq_std"] == pytest.approx(math.sqrt(0.02), rel=1e-10)
    assert metrics["rollout_is_mean"] == ALIKE((2 * 0.9 + 3 * 1.1) / 5)


def test_24_perplexities_of_real_rows():
    """Log-perplexities 2 (trainer) and 1 (rollout) in one row, and one row of padding."""
    old = torch.tensor([[-1.0, -2.0, -3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    metrics = importance_sampling_metrics(old, rollout, mask)
    assert metrics["log_ppl_diff"] == ALIKE(1.0)
    assert metrics["training_ppl"] == ALIKE(math.exp(2.0))
    assert metrics["rollout_ppl"] == ALIKE(math.exp(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_25_rollout_log_probs_that_are_no_numbers(bad):
    """At a valid token: an error that names the sequence and the position. At a masked one: nothing."""
    old = torch.full((2, 4), -1.0)
    rollout = torch.full((2, 4), -1.2)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    rollout[0, 3] = bad
    clean = importance_sampling_metrics(old, rollout, mask)
    assert all(math.isfinite(x) for x in clean.values())
    rollout[1, 2] = bad
    with pytest.raises(ValueError, match=r"rollout.*token 2 of sequence 1"):
        importance_sampling_metrics(old, rollout, mask)


@every_layout
@pytest.mark.parametrize("name", ["rollout_is_weights", "advantages", "old_log_probs", "log_probs"])
def test_25_no_field_may_be_nan_where_it_counts(name, layout):
    """The same for what the loss reads: it names the field, the token and the sequence."""
    good = sequence(2, advantages=1.0)
    bad = sequence(3, advantages=1.0, mask=[1, 0, 1])
    bad = replace(bad, **{name: (1.0, 1.0, float("nan"))})
    where = "segment 2 of row 0" if layout == "packed" else "sequence 1"
    with pytest.raises(ValueError, match=rf"{name}.*token 2 of {where}"):
        run_ours(in_mode("token-mean"), cut((good, bad)), layout, with_entropy=False)


@every_layout
def test_26_the_exponential_is_clamped(layout):
    """Log-ratio 29 in k3: the input is clamped to 20, the output to 10; ppo's ratio is exp(20) and clipped."""
    samples = tuple(sequence(n, log_probs=-30.0, ref_log_prob=-1.0) for n in (1, 3))
    settings = in_mode("token-mean", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3")
    got = run_ours(settings, pieces(samples), layout)
    assert got.metrics["kl_loss"] == ALIKE(10.0)
    assert not got.log_prob_grad.any()
    far = tuple(sequence(n, old_log_probs=-800.0, advantages=1.0) for n in (1, 3))
    got = run_ours(in_mode("token-mean"), pieces(far), layout)
    assert got.loss == ALIKE(-1.2)
    assert got.metrics["actor/ppo_kl"] == ALIKE(-20.0)


@every_layout
@every_mode
def test_local_means_are_the_same_without_a_cut(mode, layout):
    """TrinityPolicyLoss on the whole batch is the oracle, with plain floats as metrics."""
    samples = make_sequences(9, seed=8)
    settings = in_mode(mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.5)
    got = run(TrinityPolicyLoss(LossConfig(**settings)), cut(samples), layout, totals=NO_TOTALS)
    expected = oracle_value(samples, settings)
    assert got.loss == pytest.approx(expected.loss, rel=1e-10)
    reference = flat_gradient(samples, expected.log_prob_grad)
    torch.testing.assert_close(got.log_prob_grad, reference, rtol=1e-10, atol=1e-13)
    emitted = got.emitted[0][0]
    assert all(type(x) is float for x in emitted.values()), emitted
    for key, right in expected.metrics.items():
        assert emitted[key] == pytest.approx(right, rel=1e-10, abs=1e-14), key


@pytest.mark.parametrize(
    ("field", "bad", "expected"),
    [
        ("loss_mode", 3, "a name"),
        ("loss_agg_mode", None, "a name"),
        ("clip_ratio", "0.2", "a finite number, 0 or more"),
        ("clip_ratio_low", [0.2], "null or a finite number, 0 or more"),
        ("clip_ratio_c", "3", "a number above 1"),
        ("loss_args", "tau=1", "a mapping"),
        ("entropy_coeff", "0", "a finite number"),
        ("entropy_agg_mode", True, "null or a name"),
        ("kl_agg_mode", ["token-mean"], "null or a name"),
        ("use_kl_loss", "no", "true or false"),
        ("kl_loss_coef", True, "a finite number"),
        ("kl_loss_type", ["k1"], "one of kl"),
        ("count_empty_sequences", "false", "true or false"),
        ("count_padding_rows", 0, "true or false"),
        ("count_rejected_tokens", None, "true or false"),
        ("nonfinite", None, "one of error, neutral"),
        ("rollout_metrics", True, "one of null, token, sequence, geometric"),
        ("rollout_metrics_upper", "2", "a finite number above 0"),
    ],
)
def test_34_every_field_has_a_type(field, bad, expected):
    """Words for booleans, text for numbers, a list for a word: refused when the configuration is made."""
    with pytest.raises(ConfigError, match=rf"{field} is .*; expected {expected}"):
        LossConfig(**{field: bad})


@pytest.mark.parametrize("field", [f.name for f in fields(LossConfig)])
def test_34_no_field_takes_anything(field):
    with pytest.raises(ConfigError, match=rf"{field}.* is <object"):
        LossConfig(**{field: object()})


def bool_mean(inputs):
    return TokenLoss(-inputs.advantages * inputs.log_prob, means={"actor/good": inputs.advantages > 0})


def integer_maximum(inputs):
    lengths = inputs.tokens.per_token(inputs.tokens.counts)
    return TokenLoss(-inputs.advantages * inputs.log_prob, maxima={"actor/length_max": lengths})


def values_and_metrics(inputs):
    return -inputs.advantages * inputs.log_prob, {}


def metric_with_min(inputs):
    return TokenLoss(-inputs.advantages * inputs.log_prob, means={"actor/num_minima": inputs.log_prob})


def of_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return log_prob.sum(), {}


NO_FUNCTION = 3.0


class OverNothing(TokenMean):
    total = "batch_num_wishes"


def test_37_a_users_function_is_looked_at_before_the_first_step():
    samples = token_losses([1, 1, -1], [5])
    settings = in_mode("token-mean", loss_mode=f"{__name__}:bool_mean")
    assert run_ours(settings, pieces(samples), "nested").metrics["actor/good"] == ALIKE(0.25)
    settings = in_mode("token-mean", loss_mode=f"{__name__}:integer_maximum")
    assert run_ours(settings, pieces(samples), "nested").metrics["actor/length_max"] == 3
    for name, says in (
        ("values_and_metrics", "returned a tuple of a tensor"),
        ("metric_with_min", "'actor/num_minima' is a ratio, but verl reduces a key of this name as a min"),
        ("of_verl", "verl's own policy losses"),
        ("NO_FUNCTION", "is a float; expected a function"),
    ):
        with pytest.raises(ConfigError, match=rf"{__name__}:{name}.*{says}"):
            LossConfig(loss_mode=f"{__name__}:{name}")
    with pytest.raises(ConfigError, match="OverNothing': total is 'batch_num_wishes'; expected one of"):
        LossConfig(loss_agg_mode=f"{__name__}:OverNothing")


def detached(inputs):
    return -inputs.advantages * inputs.log_prob.detach()


def whole_numbers(inputs):
    return (-inputs.advantages * inputs.log_prob).long()


@pytest.mark.parametrize("function", [detached, whole_numbers])
def test_31_a_users_function_without_a_graph_is_refused(function):
    with pytest.raises(ConfigError, match="values without a graph, so that it would train nothing"):
        LossConfig(loss_mode=f"{__name__}:{function.__name__}")


def clamping(inputs):
    inputs.old_log_prob.clamp_(min=-1)
    return -inputs.advantages * (inputs.log_prob - inputs.old_log_prob)


def clamping_far_away(inputs):
    inputs.old_log_prob.clamp_(min=-50)
    return -inputs.advantages * inputs.log_prob


def clamping_in_the_field(inputs):
    if inputs.tokens.size > 5:
        inputs.old_log_prob.clamp_(min=-1)
    return -inputs.advantages * inputs.log_prob


def writing_by_numpy(inputs):
    inputs.advantages.numpy()[:] = 0
    return -inputs.advantages * inputs.log_prob


def writing_a_count(inputs):
    inputs.tokens.counts.clamp_(min=1)
    return -inputs.advantages * inputs.log_prob


def writing_a_metric(inputs):
    return TokenLoss(-inputs.advantages * inputs.log_prob, means={"actor/x": inputs.advantages.abs_()})


@pytest.mark.parametrize("function", [clamping, clamping_far_away, writing_by_numpy, writing_a_count, writing_a_metric])
def test_38_a_users_function_writes_into_its_inputs(function):
    with pytest.raises(ConfigError, match=rf"{function.__name__}.*writes into"):
        LossConfig(loss_mode=f"{__name__}:{function.__name__}")


class ClampingCounts(SeqMeanTokenSum):
    def sequence_weights(self, tokens, dtype):
        return tokens.counts.clamp_(min=1).to(dtype).reciprocal()


class DoublingTheIndicator(TokenMean):
    def token_weights(self, tokens, dtype):
        return tokens.indicator(dtype).mul_(2)


@pytest.mark.parametrize("mode", [ClampingCounts, DoublingTheIndicator])
def test_38_so_does_a_users_mode(mode):
    with pytest.raises(ConfigError, match=rf"{mode.__name__}', which writes into tokens\.(counts|indicator)"):
        LossConfig(loss_agg_mode=f"{__name__}:{mode.__name__}")


@every_layout
def test_38_one_that_does_so_later_is_refused_then(layout):
    settings = in_mode("token-mean", loss_mode=f"{__name__}:clamping_in_the_field")
    samples = token_losses([1, 1, 1], [2, 2, 2])
    with pytest.raises(ConfigError, match="writes into its inputs"):
        run_ours(settings, cut(samples), layout)


def test_every_loss_mode_is_in_the_oracle():
    """A loss mode that the oracle does not know is a loss mode without a test."""
    known = {name for name in policy_loss_names() if get_policy_loss(name).fn.__module__.startswith("trinity_loss.")}
    assert known == set(POLICY_LOSSES) | OF_THE_MINI_BATCH | {"dpo", "bypass_mode", "mix", "mix_chord"}


def test_every_mode_is_in_the_oracle():
    """A mode that the oracle does not know is a mode without a test."""
    known = {name for name in aggregation_mode_names() if find_aggregation_mode(name).__module__.startswith("trinity")}
    assert known == set(MODES)


@pytest.mark.parametrize("weights", [None, "token", "sequence"])
@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_43_rollout_correction_has_verls_metrics(rule, weights):
    """verl's keys, all of them and no others, with verl's values on a batch in one piece; under cuts the same."""
    samples = tuple(s for s in make_sequences(9, seed=4) if s.tokens)
    threshold = "0.5_2" if rule.endswith("k1") else "0.1"
    settings = in_mode("token-mean", loss_mode="bypass_mode")
    settings["loss_args"] = {"rollout_rs": rule, "rollout_rs_threshold": threshold, "rollout_is": weights}
    settings["loss_args"] |= {"rollout_is_threshold": "0.5_1.5"} if weights == "token" else {}

    def padded(values):
        width = max(s.length for s in samples)
        return torch.tensor([[*getattr(s, values), *[0] * (width - s.length)] for s in samples], dtype=torch.float64)

    right = compute_rollout_correction_and_rejection_mask(
        padded("log_probs"),
        padded("old_log_probs"),
        padded("mask"),
        rollout_is=weights,
        rollout_is_threshold=settings["loss_args"].get("rollout_is_threshold", 2.0),
        rollout_rs=rule,
        rollout_rs_threshold=threshold,
    )[2]
    assert 0 < right["rollout_corr/rollout_rs_masked_fraction"] < 1
    for micro, ranks_ in ((1, 1), (3, 1), (2, 2)):
        metrics = run_ours(settings, cut(samples, micro, ranks_, "uneven"), "nested", counts=True).metrics
        ours = {key: x for key, x in metrics.items() if key.startswith("rollout_corr/")}
        assert ours.keys() == right.keys()
        for key, expected in right.items():
            # verl adds 1e-8 to what it divides by, and takes fractions in float32.
            assert ours[key] == pytest.approx(expected, rel=1e-6, abs=1e-7), key


@pytest.fixture
def verls_worker(monkeypatch):
    """A training worker without an engine in verl's place."""
    monkeypatch.setattr(engine_workers.ActorRolloutRefWorker, "actor_worker_cls", TrainingWorker)


CORRECTION, OWN = "algorithm.rollout_correction", f"+{POLICY_LOSS}.rollout_correction"
BYPASS = (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2")
#: Of log-ratios 0 and 1, the second of which is rejected, and counts.
REJECTED = (sequence(2, log_probs=[-1.0, 0.0], old_log_probs=-1.0, advantages=1.0),)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    "also",
    [
        (),
        (f"{POLICY_LOSS}.loss_mode=ppo",),
        (f"{POLICY_LOSS}.loss_mode=bypass_mode",),
        (f"{OWN}=${{{CORRECTION}}}",),
        (f"{OWN}.rollout_rs=token_k1", f"{OWN}.rollout_rs_threshold=2"),
    ],
)
def test_27_options_of_the_algorithm_reach_the_loss(also):
    _, worker = started(*BYPASS, *also)
    metrics = train(worker, REJECTED)
    assert metrics["loss"] == ALIKE(-0.5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


@pytest.mark.usefixtures("verls_worker")
def test_27_the_weights_of_reinforce_reach_the_loss():
    """Weights 1 and e, of which 2 is the bound: the losses are 1 * 1 and 2 * 0."""
    options = (f"{CORRECTION}.{option}" for option in ("bypass_mode=True", "rollout_is=token", "loss_type=reinforce"))
    _, worker = started(*options)
    assert train(worker, REJECTED)["loss"] == ALIKE(0.5)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    ("also", "says"),
    [
        (
            f"{POLICY_LOSS}.loss_mode=gspo",
            r"is 'gspo'; actor_rollout_ref\.actor\.policy_loss\.loss_mode=bypass_mode makes",
        ),
        (f"{OWN}.rollout_rs=token_k2", r"rollout_rs is 'token_k1', but actor.*\.rollout_rs is 'token_k2'; \+actor"),
    ],
)
def test_27_what_cannot_reach_the_loss_ends_the_run_at_its_start(also, says):
    with pytest.raises(ConfigError, match=says):
        started(*BYPASS, also)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*BYPASS, f"+{POLICY_LOSS}.loss_args.rollout_rs=token_k2"), r"loss_args\.rollout_rs is 'token_k2'; leave one"),
        ((*BYPASS, f"+{POLICY_LOSS}.loss_args.rollout_rs_threshold=5"), "rollout_rs_threshold is 2, but .* is 5"),
        (
            (
                *(f"{CORRECTION}.{option}" for option in ("bypass_mode=True", "rollout_is_threshold=0.52")),
                f"{OWN}.rollout_is_threshold='0.5_2'",
            ),
            r"rollout_is_threshold is 0\.52, but .*rollout_is_threshold is '0\.5_2'",
        ),
        ((*BYPASS[:2], f"{CORRECTION}.rollout_rs_threshold=0.5_2"), "which takes 0.5_2 for the number 0.52"),
        ((f"+{CORRECTION}.rolout_rs=token_k1",), r"^algorithm\.rollout_correction has rolout_rs; expected some of"),
        ((f"{CORRECTION}.bypass_mode='no'",), r"bypass_mode is 'no'; expected true or false"),
        (
            (
                f"{POLICY_LOSS}.loss_mode=sapo",
                f"+{POLICY_LOSS}.loss_args.tau_pos=1.5",
                "actor_rollout_ref.actor.tau_pos=2",
            ),
            r"^actor_rollout_ref\.actor\.tau_pos is 2, but .*loss_args\.tau_pos is 1\.5; leave one of them out",
        ),
        (
            (
                f"{POLICY_LOSS}.loss_mode=kl_cov",
                f"+{POLICY_LOSS}.loss_args.kl_cov_ratio=0.3",
                f"{POLICY_LOSS}.kl_cov_ratio=0.1",
            ),
            r"policy_loss\.kl_cov_ratio is 0\.1, but .*loss_args\.kl_cov_ratio is 0\.3",
        ),
    ],
)
def test_27_an_option_that_is_said_twice_is_said_alike(overrides, says):
    with pytest.raises(ConfigError, match=says):
        started(*overrides)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("threshold", ["'2'", "2", "2.0", "'2.0'"])
def test_27_a_number_is_the_same_as_text(threshold):
    own = (f"{OWN}.rollout_rs=token_k1", f"{OWN}.rollout_rs_threshold={threshold}")
    assert train(started(*BYPASS, *own)[1], REJECTED)["loss"] == ALIKE(-0.5)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((f"{OWN}.rollout_rs=token_k1", f"{OWN}.rollout_rs_threshold=2"), "which only loss_mode=bypass_mode reads"),
        ((f"{OWN}.bypass_mode=True",), "which the trainer reads: it computes old_log_probs"),
        ((f"{POLICY_LOSS}.loss_mode=bypass_mode",), "takes them for those of the rollout"),
        ((f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5"), "threshold is 0.55, so that"),
    ],
)
def test_27_what_nothing_reads_is_named_in_the_log(overrides, says, caplog):
    started(*overrides)
    assert says in caplog.text
    caplog.clear()
    started(f"{OWN}=${{{CORRECTION}}}", f"{CORRECTION}.rollout_is=token")
    assert "WARNING" not in caplog.text


@pytest.mark.usefixtures("verls_worker")
def test_27_without_options_another_loss_keeps_its_ratio_against_the_rollout():
    _, worker = started(f"{CORRECTION}.bypass_mode=True", f"{POLICY_LOSS}.loss_mode=gspo")
    assert worker.loss_fn.config.loss_mode == "gspo"


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("loss_mode", ["vanilla", "bypass_mode", "sapo"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{OWN}.rollout_is=token", {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None}),
        (f"{OWN}=${{{CORRECTION}}}", {"rollout_is": None, "rollout_rs": None}),
        (f"{OWN}={{rollout_rs: token_k1, rollout_rs_threshold: 3}}", {"rollout_is": None, "rollout_rs_threshold": 3}),
        (f"{OWN}=null", {"rollout_is": "sequence"}),
    ],
)
def test_28_a_plain_mapping_is_taken_as_verl_takes_it(override, expected, loss_mode):
    _, worker = started(override, f"{POLICY_LOSS}.loss_mode={loss_mode}")
    if loss_mode == "bypass_mode":
        assert expected.items() <= worker.loss_fn.config.loss_args.items()
    with pytest.raises(Exception, match="rollout_correction has rolout_is; expected some of rollout_is, "):
        started(f"{OWN}.rolout_is=token")


@pytest.mark.parametrize(
    ("field", "bad", "expected"),
    [
        ("shadow", "no", "true or false"),
        ("shadow", 1, "true or false"),
        ("record_steps", 3, "a list, each entry a training step, 1 or more"),
        ("record_steps", "[3]", "a list, each entry a training step, 1 or more"),
        ("record_steps", ["3"], "a list, each entry a training step, 1 or more"),
        ("record_steps", [0], "a list, each entry a training step, 1 or more"),
        ("record_steps", [True], "a list, each entry a training step, 1 or more"),
        ("record_dir", 3, "null or a folder"),
        ("record_max_megabytes", "512", "a finite number above 0"),
        ("count_empty_sequences", "off", "true or false"),
        ("nonfinite", "ignore", "one of error, neutral"),
        ("loss_agg_mode", 1, "null or a name"),
        ("loss_args", "{beta: 1}", "a mapping"),
        ("rollout_metrics", "tokens", "one of null, token, sequence, geometric"),
        ("rollout_metrics_upper", "2", "a finite number above 0"),
        ("dro_beta", "1", "null or a finite number"),
        ("ppo_kl_coef", "0.1", "a finite number"),
        ("record_dir", "  ", "null or a folder"),
        ("record_dir", "hdfs://cluster/recordings", "null or a folder of this machine"),
        ("record_dir", "None", "null or a folder"),
        ("row_weights", "None", "null or a name"),
        ("rollout_correction", "token", "a mapping"),
    ],
)
def test_34_every_field_of_policy_loss_has_a_type(field, bad, expected):
    with pytest.raises(ConfigError, match=rf"^policy_loss\.{field} is .*; expected {expected}"):
        PolicyLossConfig(**{field: bad})


@pytest.mark.parametrize(
    ("option", "bad", "says"),
    [
        ("rollout_is", "tokn", "rollout_is is 'tokn'; expected one of null, token, sequence"),
        ("rollout_is", True, "rollout_is is True; expected one of null, token, sequence"),
        ("rollout_is_threshold", "x", "rollout_is_threshold is 'x'; expected a number above 0, or 'lower_upper'"),
        ("rollout_is_batch_normalize", "no", "rollout_is_batch_normalize is 'no'; expected true or false"),
        ("bypass_mode", "no", "bypass_mode is 'no'; expected true or false"),
        ("loss_type", "ppo", "loss_type is 'ppo'; expected one of ppo_clip, reinforce"),
        ("rollout_rs", "token_k1", "rollout_rs_threshold is None; expected one threshold"),
        ("rollout_rs", ["token_k1"], "rollout_rs is .*token_k1.*; expected null or a name"),
    ],
)
@pytest.mark.usefixtures("verls_worker")
def test_34_options_of_rollout_correction_are_checked_in_both_places(option, bad, says):
    if "rollout_rs_threshold" not in says:  # Which may stand in the other.
        with pytest.raises(ConfigError, match=rf"^policy_loss\.rollout_correction[.:] ?{says}"):
            PolicyLossConfig(rollout_correction={option: bad})
    config = composed()
    OmegaConf.update(config, f"algorithm.rollout_correction.{option}", bad, force_add=True)
    with pytest.raises(ConfigError, match=rf"^algorithm\.rollout_correction[.:] ?{says}"):
        Outer(config).init_model(by_keyword)


def test_34_every_field_of_policy_loss_is_checked():
    """What nothing would do for any field: an object of no type that a configuration knows."""
    for field in fields(PolicyLossConfig):
        if field.name != "_target_":
            with pytest.raises(ConfigError, match=field.name):
                PolicyLossConfig(**{field.name: object()})


def test_34_what_hydra_hands_over_is_taken():
    made = PolicyLossConfig(record_steps=OmegaConf.create([3, 4]), record_dir="/r", loss_args=OmegaConf.create({}))
    assert list(made.record_steps) == [3, 4]


def recording(folder, *overrides):
    record = (f"+{POLICY_LOSS}.record_steps=[1,3]", f"+{POLICY_LOSS}.record_dir={folder}")
    return started(*record, *overrides)


def recorded(folder):
    return {str(file.parent.relative_to(folder)): file for file in folder.rglob("rank-0.pt")}


@pytest.mark.usefixtures("verls_worker")
def test_35_a_run_that_goes_on_writes_under_its_own_step(tmp_path):
    outer, worker = recording(tmp_path)
    outer.update_weights(global_steps=0)
    train(worker, token_losses([1]))
    outer, worker = recording(tmp_path)
    worker.load_checkpoint("checkpoints/global_step_2/actor")
    outer.update_weights(global_steps=2)
    train(worker, token_losses([5]))
    found = recorded(tmp_path)
    assert sorted(found) == ["step-1/mini-batch-1", "step-3/mini-batch-1"]
    advantages = [load_recording(tmp_path / name).token_fields["advantages"].item() for name in sorted(found)]
    assert advantages == [-1, -5]
    origins = [torch.load(found[name])["provenance"] for name in sorted(found)]
    assert [origin["training_step"] for origin in origins] == [1, 3]
    assert len({origin["run"] for origin in origins}) == 2


@pytest.mark.usefixtures("verls_worker")
def test_35_nothing_is_written_over(tmp_path):
    for loss in (1, 5, 7):
        train(recording(tmp_path)[1], token_losses([loss]))
    first, *others = sorted(recorded(tmp_path))
    assert first == "step-1/mini-batch-1"
    assert load_recording(tmp_path / first).token_fields["advantages"].item() == -1
    assert sorted(load_recording(tmp_path / n).token_fields["advantages"].item() for n in others) == [-7, -5]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"run": "another"}, ConfigError, "rank-1.pt in .* is of run 'another'; expected 'one'"),
        ({"training_step": 2}, ConfigError, "rank-1.pt in .* is of training_step 2; expected 1"),
        ({"mini_batch": 2}, ConfigError, "rank-1.pt in .* is of mini_batch 2; expected 1"),
        ({"ranks": 3}, ConfigError, "rank-1.pt in .* is of ranks 3; expected 2"),
        ({"rank": 0}, ConfigError, "rank-1.pt in .* is of rank 0; expected 1"),
        ("totals", ConfigError, "rank-1.pt in .* is of dp_size 4; expected 2"),
        ("config", ConfigError, "rank-1.pt in .* is of entropy_coeff 0.1; expected 0.0"),
        ("missing", MissingFieldError, "lacks rank-1.pt; expected the parts of 2 ranks"),
        ("surplus", ConfigError, "holds rank-2.pt; expected the parts of 2 ranks"),
        ("cut short", ConfigError, "rank-1.pt cannot be read: .*; expected what torch.save"),
        ("empty", ConfigError, "rank-1.pt cannot be read: "),
        ("alone", ConfigError, "is one rank's share of a mini-batch of 2 ranks"),
    ],
)
def test_35_files_that_do_not_belong_together_are_refused(change, error, says, tmp_path):
    samples = token_losses([1], [5])
    for rank in (0, 1):
        form = Form("nested", totals=(("dp_size", 4),) if change == "totals" and rank else (("dp_size", 2),))
        ((batch,),) = build(cut(samples), form)
        recorder = Recorder(2**20)
        recorder.add({"log_probs": batch.lay_out(make_leaves(samples)[0])}, batch.data)
        origin = Provenance("one", 1, 1, rank, 2)
        if rank and isinstance(change, dict):
            origin = replace(origin, **change)
        config = LossConfig(entropy_coeff=0.1 if change == "config" and rank else 0.0)
        recorder.write(tmp_path, replace(origin, rank=rank), config)
        if rank and change == {"rank": 0}:
            recorder.write(tmp_path / "wrong", replace(origin, rank=0), config)
            (tmp_path / "wrong" / "rank-0.pt").replace(tmp_path / "rank-1.pt")
    if change in ("cut short", "empty"):
        content = (tmp_path / "rank-1.pt").read_bytes()
        (tmp_path / "rank-1.pt").write_bytes(content[: len(content) // 2 if change == "cut short" else 0])
    if change == "missing":
        (tmp_path / "rank-1.pt").unlink()
    if change == "surplus":
        (tmp_path / "rank-2.pt").write_bytes((tmp_path / "rank-0.pt").read_bytes())
    with pytest.raises(error, match=says):
        load_recording(tmp_path / "rank-0.pt" if change == "alone" else tmp_path)


@pytest.mark.usefixtures("verls_worker")
def test_36_a_step_of_several_batches_is_one_step(tmp_path):
    """An asynchronous trainer: four batches, then the weights."""
    outer, worker = recording(tmp_path)
    for step in range(4):
        outer.update_weights(global_steps=step)
        for _ in range(4):
            train(worker, token_losses([1]))
    assert sorted(recorded(tmp_path)) == [f"step-{step}/mini-batch-{k}" for step in (1, 3) for k in (1, 2, 3, 4)]


@pytest.mark.usefixtures("verls_worker")
def test_36_a_mini_batch_by_itself_is_a_batch(tmp_path):
    """A trainer that calls ``train_batch``, as Tinker's API has it, and one that begins with its critic."""
    _, worker = recording(tmp_path)
    worker.train_mini_batch = worker.train_batch
    for _ in range(3):
        train(worker, token_losses([1]))
    assert sorted(recorded(tmp_path)) == ["step-1/mini-batch-1", "step-3/mini-batch-1"]
    _, worker = started("trainer.critic_warmup=3")
    steps = [train(worker, token_losses([1])) and worker.steps.step for _ in range(2)]
    assert steps == [3, 4]


class Bound:
    """A trainer of verl's loss that keeps its configuration under a name of its own."""

    def __init__(self, actor):
        self.actor = actor

    def __call__(self, model_output, data, dp_group=None):
        return ppo_loss(self.actor, model_output, data, dp_group)

    def loss(self, **given):
        loss, metrics = ppo_loss(config=self.actor, **given)
        return loss, metrics

    @staticmethod
    def named(config, model_output, data, dp_group=None):
        return ppo_loss(config, model_output, data)


def wrapped(actor):
    @functools.wraps(ppo_loss)
    def inner(*values, **named):
        return ppo_loss(actor, *values, **named)

    return inner


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    "bind",
    [
        lambda a: functools.partial(ppo_loss, a),
        lambda a: functools.partial(functools.partial(ppo_loss, config=a), dp_group=None),
        lambda a: MethodType(ppo_loss, a),
        lambda a: lambda **given: ppo_loss(config=a, **given),
        lambda a: lambda model_output, data, dp_group=None, c=a: ppo_loss(c, model_output, data),
        Bound,
        lambda a: Bound(a).loss,
        lambda a: functools.partial(Bound.named, a),
        wrapped,
    ],
)
def test_39_verls_loss_is_ours_however_it_is_bound(bind):
    verls = ppo_loss.__code__
    worker = started(bind=bind)[1]
    metrics = train(worker, token_losses([1, 1, 1], [5]))
    assert isinstance(worker.loss_fn, EnginePolicyLoss)
    assert metrics["loss"] == ALIKE(2)
    assert metrics["actor/micro_batches"] == 1
    assert ppo_loss.__code__ is verls


def with_a_bonus(actor):
    def loss(**given):
        value, metrics = ppo_loss(config=actor, **given)
        return value + 1, metrics

    return loss


def with_a_metric(actor):
    def loss(**given):
        value, metrics = ppo_loss(config=actor, **given)
        metrics["mine"] = 1.0
        return value, metrics

    return loss


def of_half_the_rows(actor):
    return lambda model_output, data, dp_group=None: ppo_loss(actor, model_output, data[: len(data) // 2])


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("bind", [with_a_bonus, with_a_metric, of_half_the_rows])
def test_39_what_does_more_than_verls_loss_trains_and_is_named(bind, caplog):
    _, worker = started(bind=bind)
    assert worker.loss_fn.__qualname__.startswith(bind.__name__)
    assert f"it does not train: a trainer set test_field_cases.{bind.__name__}.<locals>" in caplog.text


@pytest.mark.usefixtures("verls_worker")
def test_39_a_loss_that_was_put_in_its_place_is_named_once(caplog):
    _, worker = started()
    worker.loss_fn = of_a_trainer
    for _ in range(2):
        train(worker, token_losses([1, 1, 1], [5]))
    assert caplog.text.count("it does not train: a trainer set test_field_cases.of_a_trainer as the loss") == 1


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("carry", [lambda ours: ours, lambda ours: ours.__call__, lambda ours: functools.partial(ours)])
def test_39_what_carries_our_configuration_is_ours(carry, caplog):
    loss = carry(EnginePolicyLoss(LossConfig()))
    _, worker = started(bind=lambda actor: loss)
    assert worker.loss_fn == loss
    metrics = train(worker, token_losses([1, 1, 1], [5]))
    assert (metrics["loss"], metrics["actor/micro_batches"]) == (ALIKE(2), 1)
    assert "does not train" not in caplog.text


def of_a_trainer(model_output, data, dp_group=None, config=None):
    return model_output["log_probs"].values().sum(), {}


class WithoutFunc:
    def __call__(self, **given):
        return of_a_trainer(**given)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("later", [of_a_trainer, functools.partial(of_a_trainer, config=None), WithoutFunc()])
def test_39_another_loss_is_named_in_the_log(later, caplog):
    outer, worker = started()
    outer.set_loss_fn(later)
    assert worker.loss_fn is later
    (said,) = (r.getMessage() for r in caplog.records if r.name.startswith("trinity_loss") and r.levelname == "WARNING")
    assert said.startswith("trinity_loss: actor.policy_loss selects this loss, but it does not train: a trainer set")


@pytest.mark.usefixtures("verls_worker")
def test_39_a_loss_bound_to_our_configuration_is_named_in_the_log(caplog):
    _, worker = started(bind=lambda actor: functools.partial(of_a_trainer, config=actor))
    assert worker.loss_fn.func is of_a_trainer
    assert "a trainer set test_field_cases.of_a_trainer as the loss" in caplog.text


@pytest.mark.usefixtures("verls_worker")
def test_47_prompt_groups_without_uid_are_recorded(tmp_path):
    """Rows of 3 and 1 tokens of losses 1 and 5, one prompt: 8 / 4, in whatever pieces it is cut again."""
    samples = token_losses([1, 1, 1], [5], same_prompt=True)
    _, worker = recording(tmp_path, f"+{POLICY_LOSS}.loss_agg_mode=prompt-mean")
    assert train(worker, samples, leave_out=("uid",))["loss"] == ALIKE(2)
    batch = load_recording(tmp_path / "step-1" / "mini-batch-1")
    report = check_invariance(worker.loss_fn, batch, micro_batches=(1, 2), dp_sizes=(1, 2))
    assert report.ok, str(report)
    assert [row.loss.value for row in report.rows] == [ALIKE(2)] * len(report.rows)


def of_its_own(inputs):
    return -inputs.fields["my_reward"] * inputs.log_prob


register_policy_loss("of-a-field-of-its-own", fields=("advantages", "my_reward"))(of_its_own)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("session", [UUID(int=7), 2**80, "a", 0.5, -1], ids=str)
def test_47_a_field_of_a_loss_and_any_name_of_a_group_are_recorded(session, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = (f"{POLICY_LOSS}.loss_mode=of-a-field-of-its-own", f"+{POLICY_LOSS}.loss_agg_mode=trajectory-mean")
    _, worker = recording("'~/recordings'", *options)
    samples = token_losses([1, 1, 1], [5], same_prompt=True)
    more = {"my_reward": jagged_rows([torch.tensor([2.0, 0, 1]), torch.tensor([9.0])])}
    more["session_id"] = NonTensorStack(session, session)
    assert train(worker, samples, more=more)["loss"] == ALIKE(3)
    batch = load_recording(tmp_path / "recordings" / "step-1" / "mini-batch-1")
    report = check_invariance(worker.loss_fn, batch=batch, micro_batches=(1, 2), dp_sizes=(1, 2))
    assert report.ok, str(report)
    assert [row.loss.value for row in report.rows] == [ALIKE(3)] * len(report.rows)


@pytest.mark.usefixtures("verls_worker")
def test_52_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    _, worker = recording(tmp_path)
    with pytest.warns(UserWarning, match=r"training goes on without it: OSError: .*No space left.*rank-0\.pt"):
        assert train(worker, token_losses([1, 1, 1], [5]))["loss"] == ALIKE(2)
    assert recorded(tmp_path) == {}


@pytest.mark.usefixtures("verls_worker")
def test_52_an_error_of_shadow_mode_ends_no_training(monkeypatch):
    monkeypatch.setattr(EnginePolicyLoss, "__call__", lambda *_, **__: 1 / 0)
    _, worker = started(f"+{POLICY_LOSS}.shadow=True")
    with pytest.warns(UserWarning, match="shadow mode failed, and training goes on without it: ZeroDivisionError"):
        metrics = train(worker, token_losses([1, 1, 1], [5]))
    assert metrics["loss"] == ALIKE(2)
    assert not any(name.startswith("shadow") for name in metrics)


@pytest.mark.usefixtures("verls_worker")
def test_52_shadow_mode_draws_nothing_of_what_trains():
    """verl's clip_cov draws tokens: the same with and without ours beside it, and so does whatever draws next."""
    options = (f"{POLICY_LOSS}.{option}" for option in ("loss_mode=clip_cov", "clip_cov_lb=-9", "clip_cov_ratio=0.3"))
    options = tuple(options)
    drawn = []
    for shadow in (True, False):
        actor = omega_conf_to_dataclass(composed(*options, f"+{POLICY_LOSS}.shadow=True").actor_rollout_ref.actor)
        verls = functools.partial(ppo_loss, config=actor)
        torch.manual_seed(3)
        loss = ShadowLoss(verls, EnginePolicyLoss(LossConfig())) if shadow else verls
        got = run(loss, cut(make_sequences(12, seed=5), 2), "nested", with_entropy=False)
        drawn.append((got.log_prob_grad.tolist(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("loss_mode", ["m2po", "ppo"])
def test_34_shadow_mode_beside_a_loss_that_verl_has_not_is_refused(loss_mode):
    with pytest.raises(ConfigError, match=rf"shadow is True, but verl, .* has no loss_mode '{loss_mode}'; expected"):
        started(f"+{POLICY_LOSS}.shadow=True", f"{POLICY_LOSS}.loss_mode={loss_mode}")


def cuts_of(samples):
    """One micro-batch, two, one each, and one rank each."""
    return [cut(samples), cut(samples, 2), pieces(samples), ranks(samples)]


ALONE = token_losses(*[[1]] * 6)
ALL_ONES = [[torch.tensor(1.0)]] * 6


@every_layout
@per_mode(
    lambda mode: aggregate(ALONE, ALL_ONES, mode, loss_scale_factor=4.0)[0].item() / 4,
    token_mean=1.5,
    token_sum=6,
    seq_mean_token_sum=1.5,
    seq_mean_token_mean=1.5,
    seq_mean_token_sum_norm=0.375,
    prompt_mean=1.5,
    constant=1.5,
)
def test_29_a_total_below_what_is_there_divides_in_every_cut(layout, mode, right, recwarn):
    """Six rows of one token of loss 1, and whoever counts sends 4.

    A count of groups that only our worker sends is refused in every cut with a micro-batch that proves it wrong, and
    divides in the others.
    """
    total = AGGREGATIONS[mode].total
    exact = total is not None and getattr(find_count(total), "exact", False)
    totals = tuple((of.total, 4) for of in AGGREGATIONS.values() if of.total is not None)
    for parts in cuts_of(ALONE):
        if exact and max(len(rows) for rank in parts.ranks for rows in rank) > 4:
            with pytest.raises(TotalsError, match=f"{total} is 4, but this micro-batch alone holds 6"):
                value(in_mode(mode), parts, layout, totals=totals)
            continue
        assert value(in_mode(mode), parts, layout, totals=totals) == ALIKE(right)


def test_29_it_is_said_once():
    loss = EnginePolicyLoss(LossConfig(**in_mode("seq-mean-token-mean")))
    parts, totals = cut(token_losses(*[[1]] * 6)), (("global_batch_size", 4),)
    with pytest.warns(UserWarning, match="global_batch_size is 4, but 6 are there"):
        run(loss, parts, "nested", totals=totals)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loss, parts, "nested", totals=totals)


@pytest.mark.usefixtures("verls_worker")
def test_29_the_worker_says_it_whatever_the_cut():
    _, worker = started("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean")
    step = functools.partial(train, worker, token_losses(*[[1]] * 6), totals=(("global_batch_size", 4),))
    with pytest.warns(UserWarning, match="global_batch_size is 4, but the mini-batch has 6"):
        assert step()["loss"] == ALIKE(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step()["loss"] == ALIKE(1.5)


@every_layout
@pytest.mark.parametrize(
    ("mode", "total"),
    [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size"), ("dpo", "global_batch_size")],
)
def test_29_nothing_at_all_is_refused_in_every_cut(layout, mode, total):
    samples = token_losses([1], [1])
    for parts in (cut(samples), pieces(samples)) if mode != "dpo" else (cut(samples),):
        if mode == "dpo" and layout == "packed":
            continue
        settings = {"loss_agg_mode": "token-mean", "loss_mode": "dpo"} if mode == "dpo" else in_mode(mode)
        with pytest.raises(TotalsError, match=f"{total} is 0|batch_num_pairs is 0"):
            run_ours(settings, parts, layout, totals=((total, 0),))


@every_layout
@pytest.mark.parametrize("settings", [{"entropy_coeff": 0.1}, {"top_entropy_quantile": 0.5}], ids=str)
def test_31_entropy_that_is_not_there_is_refused(layout, settings):
    ((batch,),) = build(cut(token_losses([1, 2], [3])), Form(layout))
    output = {"log_probs": batch.lay_out(make_leaves(token_losses([1, 2], [3]))[0])}
    with pytest.raises(MissingFieldError, match=f"^{next(iter(settings))} is .*no 'entropy'; .*calculate_entropy=True"):
        TrinityPolicyLoss(LossConfig(**settings))(model_output=output, data=batch.data)


class Rejected:
    """A loss whose micro-batches carry what the engine counted: the mask before four tokens were rejected."""

    def __init__(self, **settings):
        self.loss = EnginePolicyLoss(LossConfig(**settings))

    def __call__(self, *, model_output, data, dp_group=None):
        mask = data["response_mask"]
        if mask.is_nested:
            ones = torch.nested.nested_tensor_from_jagged(torch.ones_like(mask.values()), offsets=mask.offsets())
        else:
            ones = torch.ones_like(mask)
            if "segment_ids" in data.keys():  # noqa: SIM118
                ones *= data["segment_ids"] != 0
            else:
                ones *= data["attention_mask"][:, -mask.shape[1] :]
        return self.loss(model_output=model_output, data=dict(data.items()) | {"loss_mask": ones}, dp_group=dp_group)


@every_layout
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_30_no_count_stands_in_for_another(layout, mode):
    """Ten tokens counted, six left, log-ratio 0.3, and nobody counted the six."""
    rest = {"log_probs": -0.7, "old_log_probs": -1.0, "advantages": 1.0}
    samples = tuple(sequence(len(m), mask=m, **rest) for m in ([1, 1, 0, 1, 0], [1, 0], [0, 1, 1]))
    totals = (("batch_num_tokens", 10),)
    for parts in (cut(samples), pieces(samples), ranks(samples)):
        found = run(Rejected(**in_mode(mode)), parts, layout, totals=totals).metrics
        assert found["actor/ratio_mean"] == ALIKE(math.exp(0.3))
        assert found["actor/ppo_kl"] == ALIKE(-0.3)
        assert found["actor/pg_clipfrac"] == ALIKE(1)
    whole = run(EnginePolicyLoss(LossConfig(**in_mode(mode))), cut(samples), layout, totals=totals).metrics
    assert whole["actor/ratio_mean"] == ALIKE(math.exp(0.3))


@every_layout
def test_30_what_the_worker_counted_comes_first(layout):
    """Log-ratios 0.3 on three tokens and 0.1 on one, of ten: the mean is over the four, however they are cut."""
    samples = (
        sequence(7, mask=[1, 1, 1, 0, 0, 0, 0], log_probs=-0.7, old_log_probs=-1.0),
        sequence(3, mask=[1, 0, 0], log_probs=-0.9, old_log_probs=-1.0),
    )
    totals = (("batch_num_tokens", 10), ("batch_num_valid_tokens", 4))
    for parts in cuts_of(samples):
        assert run(Rejected(), parts, layout, totals=totals).metrics["actor/ppo_kl"] == ALIKE(-0.25)


@every_layout
@pytest.mark.parametrize("make", [EnginePolicyLoss, TrinityPolicyLoss])
def test_31_entropy_without_a_graph_is_refused(layout, make):
    samples = token_losses([1, 2], [3])
    ((batch,),) = build(cut(samples), Form(layout))
    log_probs, entropy = make_leaves(samples)
    for with_graph, without in ((log_probs, entropy.detach()), (entropy, log_probs.detach())):
        names = ("log_probs", "entropy") if with_graph is log_probs else ("entropy", "log_probs")
        output = dict(zip(names, map(batch.lay_out, (with_graph, without)), strict=True))
        loss = make(LossConfig(entropy_coeff=0.1))
        with pytest.raises(MissingGraphError, match=f"'{names[1]}' of the model output has no graph"):
            loss(model_output=output, data=batch.data)
        with torch.no_grad():
            loss(model_output=output, data=batch.data)
        if with_graph is log_probs:  # Reported, and not trained by.
            make(LossConfig())(model_output=output, data=batch.data)[0].backward()


LONG = 2**17 - 29  # Of a power of two, sums of equal shares are exact in any order.


def near(settings, rows, dtype, **fields):
    """Loss and gradient of rows of equal tokens."""
    shape = (rows, LONG)
    values = {name: torch.full(shape, number, dtype=torch.float32).to(dtype) for name, number in fields.items()}
    log_probs = values.pop("log_probs").requires_grad_()
    data = values | {"response_mask": torch.ones(shape), "batch_num_tokens": rows * LONG, "global_batch_size": rows}
    loss, metrics = EnginePolicyLoss(LossConfig(**settings))(model_output={"log_probs": log_probs}, data=data)
    loss.backward()
    names = [name for name in metrics if not name.startswith("trinity_loss/")]
    return loss.item(), log_probs.grad.double(), {name: float(metrics[name].aggregate()) for name in names}


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("mode", ["ppo", "gspo", "gmpo", "cispo", "luspo", "vespo", "dpo"])
def test_32_sums_in_float32_are_those_in_float64(mode, agg):
    """A sequence of 128k tokens; one after the other, float32 is 1e-3 off."""
    rows = 2 if mode == "dpo" else 1
    fields = {"log_probs": -0.9, "old_log_probs": -1.0, "ref_log_prob": -1.0, "advantages": 0.1}
    narrow, wide = (near({"loss_mode": mode, "loss_agg_mode": agg}, rows, t, **fields) for t in DTYPES)
    assert narrow[0] == pytest.approx(wide[0], rel=1e-6)
    assert (narrow[1] - wide[1]).norm() <= 1e-6 * wide[1].norm()
    for name, number in wide[2].items():
        assert narrow[2][name] == pytest.approx(number, rel=1e-6, abs=1e-12), name


DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("packed", [False, True])
def test_32_sums_of_a_sequence_in_every_layout(packed):
    values = torch.full((2, LONG), 0.1)
    mask, segments = torch.ones_like(values), torch.ones(2, LONG, dtype=torch.int64)
    tokens = ResponseTokens.from_packed(mask, segments) if packed else ResponseTokens.from_padded(mask)
    jagged = ResponseTokens.from_jagged(mask.reshape(-1), torch.tensor([0, LONG, 2 * LONG]))
    for found in (tokens, jagged):
        sums = found.sum_per_sequence(values.reshape(-1))
        assert sums[found.counts > 0].tolist() == [pytest.approx(values[0].double().sum().item(), rel=1e-7)] * 2


def of_near_policies(dtype):
    """Metrics of bypass mode where log-ratios are about 1e-3: what is left of e^x - 1 - x is half a millionth."""
    draw = torch.Generator().manual_seed(1)
    old = -0.5 - 0.4 * torch.rand(2, LONG, generator=draw)
    log_probs = (old + 1e-3 * torch.randn(2, LONG, generator=draw)).to(dtype)
    data = {"old_log_probs": old.to(dtype), "advantages": torch.ones(2, LONG), "response_mask": torch.ones(2, LONG)}
    rejecting = {"rollout_rs": "seq_sum_k3,token_k3,seq_max_k3", "rollout_rs_threshold": "9"}
    loss = TrinityPolicyLoss(LossConfig(loss_mode="bypass_mode", loss_args=rejecting | {"rollout_is": "token"}))
    return loss(model_output={"log_probs": log_probs.requires_grad_()}, data=data)[1]


def test_32_divergences_of_near_policies():
    narrow, wide = map(of_near_policies, DTYPES)
    for name, right in wide.items():
        if any(word in name for word in ("k3", "chi2")):
            assert narrow[name] == pytest.approx(right, rel=1e-6, abs=1e-10), name


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_32_weights_and_perplexities(level):
    rollout = torch.full((1, LONG), -1.0)
    old = rollout + (1.0 if level != "sequence" else 5 / LONG) * 0.1
    narrow, wide = (
        importance_sampling_metrics(old.to(t), rollout.to(t), torch.ones(1, LONG), level=level) for t in DTYPES
    )
    for name in ("rollout_is_mean", "rollout_is_seq_mean", "training_ppl", "rollout_ppl", "log_ppl_diff", "ppl_ratio"):
        assert narrow[name] == pytest.approx(wide[name], rel=1e-6), name


def test_32_a_margin_of_two_long_answers():
    """Answers whose log-ratios differ by one token in a hundred thousand."""
    log_probs = torch.full((2, LONG), -0.9)
    log_probs[0, 7] = -0.4

    def margin(dtype):
        data = {"response_mask": torch.ones(2, LONG), "ref_log_prob": torch.full((2, LONG), -1.0, dtype=dtype)}
        loss = TrinityPolicyLoss(LossConfig(loss_mode="dpo"))
        return loss(model_output={"log_probs": log_probs.to(dtype)}, data=data)[0].item()

    assert margin(torch.float32) == pytest.approx(margin(torch.float64), rel=1e-7)
    assert margin(torch.float64) == pytest.approx(math.log1p(math.exp(-0.05)), rel=1e-6)


SHARED = {
    "one-for-all": lambda rows: NonTensorData("ab", batch_size=[rows]),
    "one-number-for-all": lambda rows: NonTensorData(7, batch_size=[rows]),
    "list": lambda rows: ["ab"] * rows,
    "tuple": lambda rows: ("ab",) * rows,
    "objects": lambda rows: np.array(["ab"] * rows, dtype=object),
    "texts": lambda rows: np.array(["ab"] * rows),
    "numbers": lambda rows: np.full(rows, 7),
    "tensor": lambda rows: torch.full((rows,), 7),
    "column": lambda rows: torch.full((rows, 1), 7),
    "stack": lambda rows: NonTensorStack(*["ab"] * rows),
    "list-for-all": lambda rows: NonTensorData(["ab"] * rows, batch_size=[rows]),
    "text": lambda rows: "ab",
    "one-true-for-all": lambda rows: [True, 1][:rows],
    "whole-and-not": lambda rows: [1, 1.0][:rows],
    "uuids": lambda rows: [UUID(int=7)] * rows,
    "array-for-all": lambda rows: NonTensorData(np.array(["ab"] * rows), batch_size=[rows]),
}


@pytest.mark.parametrize("form", SHARED)
def test_33_values_per_row_in_every_form(form):
    """Three tokens of loss 1 and one of loss 5, of one prompt: 2, counted by the loss itself and by the worker."""
    data = {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]), "uid": SHARED[form](2)}
    data |= {"advantages": torch.tensor([[-1.0, -1, -1], [-5, 0, 0]]), "old_log_probs": torch.zeros(2, 3)}
    loss = TrinityPolicyLoss(LossConfig(loss_agg_mode="prompt-mean"))
    output = {"log_probs": torch.zeros(2, 3, requires_grad=True)}
    assert loss(model_output=output, data=data)[0].item() == 2
    if form not in ("list", "tuple", "text"):  # A TensorDict makes other forms of these.
        assert loss(model_output=output, data=TensorDict(data, batch_size=[2]))[0].item() == 2
    whole = TensorDict(data, batch_size=[2])
    Counting().attach(whole, loss.config, None)
    assert whole["prompt_num_tokens"].tolist() == [4, 4]
    engine, total = EnginePolicyLoss(loss.config), 0.0
    for i in range(2):
        piece = {name: value[i : i + 1] for name, value in data.items() if name != "uid"} | {"uid": SHARED[form](1)}
        piece |= {"batch_num_prompts": 1, "prompt_num_tokens": whole["prompt_num_tokens"][i : i + 1]}
        total += engine(model_output={"log_probs": output["log_probs"][i : i + 1]}, data=piece)[0].item()
    assert total == 2


@pytest.mark.parametrize(
    "uid",
    [
        *({"a", "b"}, {"a": 1, "b": 2}, iter("ab"), ["a"], ["a", "c"] * 2, torch.zeros(2, 2), [["a"], ["b"]], object()),
        *(["a", None], [None] * 2, [math.nan] * 2, torch.tensor([1.0, math.nan]), np.array(["a", None], dtype=object)),
        *([frozenset("ab")] * 2, [object()] * 2, [torch.ones(1)] * 2, range(2), np.array(3)),
    ],
    ids=lambda uid: type(uid).__name__,
)
@pytest.mark.parametrize("settings", [{"loss_agg_mode": "prompt-mean"}, {"count_padding_rows": False}], ids=str)
def test_33_another_form_is_refused(uid, settings):
    data = {"response_mask": torch.ones(2, 3), "uid": uid, "old_log_probs": torch.zeros(2, 3)}
    data["advantages"] = torch.zeros(2, 3)
    with pytest.raises(FieldShapeError, match=r"^uid .*expected one"):
        TrinityPolicyLoss(LossConfig(**settings))(model_output={"log_probs": torch.zeros(2, 3)}, data=data)


def test_33_a_form_that_nothing_asks_for_is_left_alone():
    whole = TensorDict({"response_mask": torch.ones(2, 3), "uid": [None, None]}, batch_size=[2])
    Counting().attach(whole, LossConfig(), None)
    assert whole["batch_num_valid_tokens"] == 6
    with pytest.raises(FieldShapeError, match="uid of row 0 is None"):
        Counting().attach(whole, LossConfig(count_padding_rows=False), None)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(("mode", "right"), [("token-mean", -0.75), ("prompt-mean", -1.2)])
def test_41_no_group_is_no_other_rank(mode, right, monkeypatch):
    """Two ranks of one replica; 8 tokens, of which nobody may count 16."""

    def of_the_world(*values, **named):
        raise AssertionError("a collective over the world")

    for name in ("all_reduce", "all_gather_object", "get_world_size"):
        monkeypatch.setattr(torch.distributed, name, of_the_world)
    samples = (
        sequence(3, log_probs=-0.5, old_log_probs=-1.0, uid="a"),
        sequence(5, log_probs=-0.5, old_log_probs=-1.0, uid="b"),
    )
    _, worker = started(f"+{POLICY_LOSS}.loss_agg_mode={mode}")
    metrics = train(worker, samples)
    assert metrics["actor/ppo_kl"] == ALIKE(-0.5)
    per_prompt = (
        replace(samples[0], log_probs=(-1.0,) * 3, advantages=(0.4,) * 3),
        replace(samples[1], log_probs=(-1.0,) * 5, advantages=(2.0,) * 5),
    )
    expected = {"token-mean": -(3 * 0.4 + 5 * 2) / 8, "prompt-mean": right}[mode]
    assert train(worker, per_prompt)["loss"] == ALIKE(expected)


@pytest.mark.parametrize("ranks_in_group", [2, 4])
def test_42_a_group_with_ranks_that_share_their_data_is_refused(ranks_in_group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks_in_group)
    ((batch,),) = build(cut(token_losses([1])), Form("nested"))
    log_probs = batch.lay_out(make_leaves(token_losses([1]))[0])
    loss, times = EnginePolicyLoss(LossConfig()), ranks_in_group
    with pytest.raises(TotalsError, match=rf"dp_size is 1, .*context parallelism.* {times} times too large"):
        loss(model_output={"log_probs": log_probs}, data=batch.data, dp_group="a group")


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("token_k1", ("masked_fraction", "seq_fraction_high", "seq_fraction_low", "fraction_low")),
        ("seq_max_k2", ("mean", "max", "seq_max", "seq_fraction_high")),
    ],
)
def test_43_verls_keys_are_in_what_a_worker_reports(rule, keys):
    threshold = "0.5_2" if rule.endswith("k1") else "2"
    options = ("bypass_mode=True", f"rollout_rs={rule}", f"rollout_rs_threshold='{threshold}'")
    _, worker = started(*(f"{CORRECTION}.{option}" for option in options))
    metrics = train(worker, REJECTED)
    assert {f"rollout_corr/rollout_rs_{rule}_{key}" for key in keys} <= set(metrics)


@pytest.mark.parametrize("old", ["0.8.0", "0.8.0.post1", "0.8.1.dev3", "0.4.1"])
def test_44_a_version_that_is_too_old_is_one_sentence(old, monkeypatch):
    """Where the class is made, where a configuration names it, and where the doctor looks."""
    says = f"verl {old} is too old: trinity_loss needs verl 0.9.0 or later"
    monkeypatch.setattr(compat, "version", lambda _: old)
    for ask in (PolicyLossConfig, lambda: trinity_loss.verl.PolicyLossConfig):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
            ask()
    assert look_at(OURS)[0].failure == says


def look_at(*overrides):
    """What the doctor sees of a configuration in this process, and the configuration."""
    config = read_configuration(overrides=overrides)
    return look(OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True), None), config


def test_45_the_doctor_names_the_worker_that_goes_around():
    seen, config = look_at(OURS)
    (said,) = notes(seen)
    tinker = "verl.workers.engine_workers_tinker.TinkerActorRolloutRefWorker"
    assert said == f"{tinker}, wherever it is used, sets a training worker of its own, which goes around our loss"
    assert traps(config, seen) == []


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize("tinker", [True, False])
def test_45_the_run_names_it_too(tinker, caplog):
    look_at(OURS)  # Imports verl's, as nothing else here does.
    theirs = sys.modules["verl.workers.engine_workers_tinker"].TinkerTrainingWorker if tinker else TrainingWorker

    class Mine(Outer):
        actor_worker_cls = theirs

    try:
        PolicyLossConfig()
        assert Mine(composed()).actor_worker_cls is theirs
        assert f"does not train: Mine trains with {theirs.__module__}.{theirs.__name__}" in caplog.text
    finally:
        del Mine.actor_worker_cls


class InItsPlace(Outer):
    """Worker classes of somebody else, each of which makes a training worker in a way of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.actor_worker_cls = TrainingWorker


class Declared(Outer):
    """One that says it in its class."""


class ByItself(Outer):
    def init_model(self, bind):
        self.actor = TrainingWorker()
        self.actor.set_loss_fn(bind(omega_conf_to_dataclass(self.config.actor)))
        return self.actor


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(
    ("made", "declared"),
    [
        (InItsPlace, None),
        (ByItself, None),
        (Declared, property(lambda self: TrainingWorker)),
        (Declared, functools.partial(TrainingWorker)),
    ],
)
def test_45_a_training_worker_that_came_another_way_is_named(made, declared, caplog, monkeypatch):
    if declared is not None:
        monkeypatch.setattr(made, "actor_worker_cls", declared, raising=False)
        seen, config = look_at(OURS)
        assert f"{__name__}.Declared sets a training worker of its own, which goes around" in str(traps(config, seen))
    monkeypatch.setattr(policy_options, "_bypass_said", [])
    worker = made(composed()).init_model(by_keyword)
    for _ in range(2):
        train(worker, token_losses([1, 1, 1], [5]))
    assert caplog.text.count("actor.policy_loss selects this loss, but it does not train: ") == 1
    caplog.clear()
    monkeypatch.setattr(policy_options, "_bypass_said", [])
    train(started(f"+{POLICY_LOSS}.shadow=True")[1], token_losses([1, 1, 1], [5]))
    assert "does not train" not in caplog.text


@pytest.mark.parametrize("plugins", ["none", " NONE ", "", "somebody_else", "auto"])
def test_51_a_loss_needs_no_plugin(plugins, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    seen, config = look_at(OURS)
    assert (traps(config, seen), seen.ours) == ([], True)


PAIR_LENGTHS = (9, 8, 1, 7, 2, 3, 6, 4)


@pytest.mark.parametrize("stages", [None, 2])
def test_53_pairs_of_dpo_stay_together(stages):
    """Chosen and rejected in turn; by their lengths alone verl takes them apart."""
    from test_trinity_rft import algorithm, mini_batch

    from trinity_loss.trinity_rft import ScaledTrinityPolicyLoss, prepare_mini_batch

    data = mini_batch([(i // 2, length, False) for i, length in enumerate(PAIR_LENGTHS)])
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=30)

    def cuts():
        batches, _ = prepare_micro_batches(data.copy(), num_batches_divided_by=stages)
        return [batch["prompts"][:, 0].tolist() for batch in batches]

    assert any(prompts[::2] != prompts[1::2] for prompts in cuts())
    loss = ScaledTrinityPolicyLoss(algorithm("dpo", "token-mean"))
    prepare_mini_batch(data, loss, None)
    assert len(cuts()) > 1
    assert all(prompts[::2] == prompts[1::2] for prompts in cuts())
    with pytest.raises(BatchError, match="are no pairs on 1 ranks; expected chosen and rejected in turn"):
        prepare_mini_batch(mini_batch([(i // 2, 2, False) for i in range(5)]), loss, None)
    with pytest.raises(BatchError, match="are no pairs on 1 ranks"):
        prepare_mini_batch(mini_batch([(i % 2, 2, False) for i in range(4)]), loss, None)


@pytest.mark.usefixtures("verls_worker")
@pytest.mark.parametrize(("rows", "together"), [(None, True), (1, True), (3, True), (4, False)])
def test_53_so_do_pairs_of_our_own_dpo(rows, together):
    """By their lengths, or a fixed number of rows; a trainer that reorders them is refused."""
    samples = [sequence(n, uid=f"{i // 2}") for i, n in enumerate(PAIR_LENGTHS)]
    samples = [replace(s, prompt_length=1 + i // 2) for i, s in enumerate(samples)]
    _, worker = started(f"{POLICY_LOSS}.loss_mode=dpo")

    def mini_batch(order):
        ((batch,),) = build(cut(tuple(samples[i] for i in order)), Form("nested"))
        tu.assign_non_tensor(batch.data, use_dynamic_bsz=rows is None, max_token_len_per_gpu=30)
        if rows is not None:
            tu.assign_non_tensor(batch.data, micro_batch_size_per_gpu=rows)
        return batch.data

    data = mini_batch(range(8))
    worker.count(data, worker.loss_fn.config)
    assert tu.get(data, "force_group_size", default=1) == (2 if together else 1)
    if rows is None:
        lengths = [b["prompts"].offsets().diff().tolist() for b in prepare_micro_batches(data)[0]]
        assert len(lengths) > 1
        assert all(prompts[::2] == prompts[1::2] for prompts in lengths)
    for order in ((0, 2, 1, 3, 4, 6, 5, 7), (0, 1, 2)):
        with pytest.raises(BatchError, match="are no pairs, which loss_mode 'dpo' is about; expected chosen and rejec"):
            worker.count(mini_batch(order), worker.loss_fn.config)
    with pytest.raises(ConfigError, match=r"actor\.shuffle is True, which takes pairs of loss_mode 'dpo' apart"):
        started(f"{POLICY_LOSS}.loss_mode=dpo", "actor_rollout_ref.actor.shuffle=True")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("rec", ("actor/pg_loss", "final_loss", "actor/kl_loss", "actor/entropy_loss")),
        ("ppo", ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_loss")),
    ],
)
def test_54_a_metric_of_trinity_is_that_of_the_mini_batch(name, keys):
    from test_trinity_rft import NO_TOTALS, SAMPLES, STOCK, algorithm, play

    from trinity_loss.trinity_rft import ScaledTrinityPolicyLoss

    config = algorithm(name, "token-mean")
    right = play(STOCK(config), cut(SAMPLES), **NO_TOTALS).metrics
    scaled = ScaledTrinityPolicyLoss(config)
    for parts in (cut(SAMPLES), cut(SAMPLES, 8), cut(SAMPLES, 4, 1, "uneven"), cut(SAMPLES, 2, 2)):
        found = play(scaled, parts).metrics
        assert {key: found[key] for key in keys} == pytest.approx({key: right[key] for key in keys}, rel=1e-6)


def overflowing(inputs):
    """A loss with extremes that are infinite at a token that counts."""
    large = (400 * inputs.advantages).exp()
    values = -inputs.advantages * inputs.log_prob
    return TokenLoss(values, maxima={"actor/x_max": large}, minima={"actor/x_min": -large})


@every_layout
def test_46_an_infinity_is_no_empty_extreme(layout):
    settings = LossConfig(loss_mode=f"{__name__}:overflowing")
    samples = token_losses([-1000, 1], [2], None)
    for parts in (cut(samples), pieces(samples), ranks(samples)):
        found = run(EnginePolicyLoss(settings), parts, layout).metrics
        finish_metrics(found)
        assert (found["actor/x_max"], found["actor/x_min"]) == (math.inf, -math.inf)
    ((batch,),) = build(cut(samples), Form(layout))
    output = {"log_probs": batch.lay_out(make_leaves(samples)[0])}
    local = TrinityPolicyLoss(settings)(model_output=output, data=batch.data)[1]
    assert (local["actor/x_max"], local["actor/x_min"]) == (math.inf, -math.inf)


def test_46_an_extreme_of_nothing_is_0_and_verls_own_stay():
    metrics = {"actor/x_max": -math.inf, "actor/x_min": math.inf, "perf/max_memory": math.inf, "y_min": -math.inf}
    finish_metrics(metrics)
    assert metrics == {"actor/x_max": 0.0, "actor/x_min": 0.0, "perf/max_memory": math.inf, "y_min": -math.inf}
    metrics = {"critic/min": math.inf, "actor/x_max": [Metric("max", -math.inf)], "actor/y_max": [Metric("max", 1.0)]}
    reduce_over_ranks(metrics)
    assert metrics["critic/min"] == math.inf
    assert (metrics["actor/x_max"], metrics["actor/y_max"]) == (0.0, 1.0)


def test_48_synthetic_prompts_count_in_the_instrument_as_in_the_worker():
    """prompt-mean without padding rows: a reference that counted them found a fault that was none."""
    batch = make_mini_batch(16)
    uids = [*batch.uids[:12], *(f"pad-{i}" for i in range(4))]
    mask = batch.response_mask.clone()
    mask[batch.starts[12] :] = 0
    batch = replace(batch, uids=uids, response_mask=mask)
    for count in (True, False):
        config = LossConfig(loss_agg_mode="prompt-mean", count_padding_rows=count)
        report = check_invariance(EnginePolicyLoss(config), batch, (1, 3), (1, 2))
        assert report.ok, str(report)
        assert report.findings == ()


def test_49_a_tolerance_of_0_is_taken():
    def off(*, model_output, data, dp_group):
        loss = -model_output["log_probs"].values().sum() * data["dp_size"] / data["batch_num_tokens"]
        return loss * (1 if len(data) == 14 else 1 + 1e-9), {}

    options = {"batch": make_mini_batch(14), "micro_batches": (1, 2), "dp_sizes": (1,)}
    assert check_invariance(off, **options).ok
    assert not check_invariance(off, tolerance=0, **options).ok
    with pytest.raises(ConfigError, match="tolerance is -1; expected null or a finite number, 0 or more"):
        check_invariance(off, tolerance=-1, **options)


@pytest.mark.parametrize(
    ("field", "bad", "expected"),
    [
        ("micro_batches", 2, "whole numbers above 0"),
        ("micro_batches", (1.5,), "whole numbers above 0"),
        ("dp_sizes", (), "whole numbers above 0"),
        ("seed", "3", "a whole number, 0 or more"),
        ("token_budgets", (0,), "a list, each entry a whole number above 0"),
        ("token_budgets", 64, "a list, each entry a whole number above 0"),
        ("tolerance", "1e-6", "null or a finite number, 0 or more"),
        ("strict", "no", "null or true or false"),
        ("layouts", ("dense",), "a list, each entry one of nested, padded, packed"),
        ("dtype", "float32", "torch.float64 or torch.float32"),
    ],
)
def test_34_the_options_of_a_check_are_checked(field, bad, expected):
    with pytest.raises(ConfigError, match=rf"^{field} is .*; expected {expected}"):
        check_invariance(EnginePolicyLoss(LossConfig()), make_mini_batch(6), **{field: bad})


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("micro_batches", (1, 2)),
        ("ranks", (1,)),
        ("seed", 3),
        ("dtype", "float32"),
        ("token_budgets", (64,)),
        ("group_size", 2),
        ("fields", {"reward": "token"}),
        ("plot", "figure.png"),
    ],
)
def test_49_what_an_engine_does_not_take_is_refused(option, given):
    with pytest.raises(ConfigError, match="has no effect with --engine"):
        VerifyOptions(engine="fsdp", **{option: given})


def test_50_every_cut_ran_or_is_listed():
    batch = make_mini_batch(5)
    report = check_invariance(EnginePolicyLoss(LossConfig()), batch, (1, 2, 4, 8), (1, 2, 4))
    asked = {(m, d) for m in (1, 2, 4, 8) for d in (1, 2, 4)} - {(1, 1)}
    ran = {(row.cut.micro_batches, len(row.cut.ranks)) for row in report.rows if row.cut.kind == "even"}
    left_out = {(m, d) for m, d in asked if (f"{m} × {d} pieces", "the mini-batch has 5 sequences") in report.skipped}
    assert ran | left_out == asked
    assert ran == {(m, d) for m, d in asked if m * d <= 5}


def test_50_a_mini_batch_that_cannot_be_cut_proves_nothing():
    batch = replace(make_mini_batch(4), group_size=4)
    with pytest.raises(ConfigError, match="it cannot be cut, and so proves nothing"):
        check_invariance(EnginePolicyLoss(LossConfig()), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_55_what_nearly_cancels_is_measured_against_its_contributions(dtype):
    """Log-ratios of +0.1 and -0.1 in turn: their mean is rounding, and so are sums of advantages centred by group."""
    batch = make_mini_batch(16, masked=0)
    index = torch.arange(batch.num_tokens)
    old = batch.log_probs + torch.where(index % 2 == 0, 0.1, -0.1) + 1e-6 * torch.sin(index.double())
    sign = torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0).double()
    advantages = torch.repeat_interleave(sign, batch.response_lengths) / torch.repeat_interleave(
        batch.response_lengths, batch.response_lengths
    )
    batch = batch.with_fields(old_log_probs=old, advantages=advantages)
    for mode in ("token-mean", "seq-mean-token-sum"):
        config = LossConfig(loss_agg_mode=mode, loss_mode="ppo")
        report = check_invariance(EnginePolicyLoss(config), batch, (1, 2, 3), (1, 3), dtype=dtype)
        assert report.ok, str(report)
        kl = [row.metrics["actor/ppo_kl"] for row in report.rows]
        assert max(abs(value.value) for value in kl) < 0.02
        assert min(value.size for value in kl) > 0.02


def test_55_a_deviation_that_is_one_is_seen_in_spite_of_it():
    assert Value(5.119e-4, 5.1191e-4, size=0.1).error < 1e-5
    assert Value(5.119e-4, 6e-4, size=0.1).error > 1e-5
    assert Value(math.nan, math.nan).error == 0
    assert Value(math.nan, 1.0).error == math.inf
