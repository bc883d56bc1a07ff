"""Loss, gradient and every metric are those of the whole mini-batch, whatever the cut.

Every mode in every layout, cut into 1 to 8 micro-batches on 1 to 4 ranks, evenly, unevenly (one micro-batch
then holds nothing but a fully masked sequence) and as verl's dynamic batch size would; against the oracle,
which knows no cut.
"""

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from batches import Cut, cut, make_sequences, run, sequence
from forms import LAYOUTS, NO_TOTALS, flat_gradient
from oracle import MODES
from ours import BLIND_TO_EMPTY, OF_GROUPS, check, in_mode, oracle_value, run_ours, value

from trinity_loss.invariance.cuts import Layout

PIECES = [(micro, ranks) for ranks in (1, 2, 4) for micro in (1, 2, 4, 8)]
HOW = ("even", "uneven", "dynamic")
TERMS = {
    "pg": {},
    "entropy": {"entropy_coeff": 0.4},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.6, "kl_loss_type": "k3+"},
    "all": {"entropy_coeff": 0.4, "use_kl_loss": True, "kl_loss_coef": 0.6, "clip_ratio_c": 1.6},
}


@cache
def samples_for(pieces: int, term: str = "all"):
    """Barely more sequences than micro-batches; a term alone comes without the policy gradient."""
    samples = make_sequences(max(11, pieces + 2), seed=2)
    if term in ("entropy", "kl"):
        samples = tuple(replace(s, advantages=(0.0,) * s.length) for s in samples)
    return samples


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_cut_is_the_whole(mode, layout):
    """ppo, entropy and KL together, for all twelve numbers of pieces; the ways to cut take turns.

    The counts of prompts are there in every mode, so modes share the batches that were built.
    """
    settings = in_mode(mode, 3.5, **TERMS["all"])
    for i, (micro, ranks) in enumerate(PIECES):
        how = HOW[(i + i // 3 + LAYOUTS.index(layout)) % 3]
        got = check(settings, cut(samples_for(micro * ranks), micro, ranks, how), layout, groups=True)
        assert got.log_prob_grad.abs().max() > 1e-3


@pytest.mark.parametrize("term", ["pg", "entropy", "kl"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_term_alone(mode, layout, term):
    settings = in_mode(mode, 3.5, **TERMS[term])
    for micro, ranks, how in ((3, 1, "uneven"), (1, 2, "dynamic")):
        check(settings, cut(samples_for(micro * ranks, term), micro, ranks, how), layout)


@pytest.mark.parametrize("mode", MODES)
def test_float32(mode):
    settings = in_mode(mode, 3.5, **TERMS["all"])
    for layout in LAYOUTS:
        for micro, ranks, how in ((1, 1, "even"), (4, 1, "dynamic"), (2, 2, "uneven")):
            parts = cut(samples_for(micro * ranks), micro, ranks, how)
            check(settings, parts, layout, 1e-5, dtype=torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_left_out(mode):
    """count_empty_sequences=False: the oracle without the fully masked sequences is the same thing."""
    settings = in_mode(mode, 3.5, **TERMS["all"], count_empty_sequences=False)
    samples = make_sequences(11, seed=2, masked=3)
    without = tuple(s for s in samples if s.tokens)
    for layout in LAYOUTS:
        for micro, ranks, how in ((1, 1, "even"), (4, 1, "uneven"), (2, 2, "dynamic")):
            parts = cut(samples, micro, ranks, how)
            got = check(settings, parts, layout)
            shorter = run_ours(settings, cut(without), layout)
            assert got.loss == pytest.approx(shorter.loss, rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_order_does_not_matter(mode, layout):
    """Ranks, micro-batches and the sequences within, all in the opposite order."""
    samples = samples_for(8)
    parts = cut(samples, 2, 2, "uneven")
    turned = Cut(samples, tuple(tuple(m[::-1] for m in rank[::-1]) for rank in parts.ranks[::-1]))
    settings = in_mode(mode, 3.5, **TERMS["all"])
    assert parts.ranks != turned.ranks
    check(settings, parts, layout)
    check(settings, turned, layout)


@pytest.mark.parametrize("mode", MODES)
def test_width_and_packing_do_not_matter(mode):
    """Padded width, sequences per packed row, and rows of nothing change no number."""
    settings = in_mode(mode, 3.5, **TERMS["all"])
    parts = cut(samples_for(4), 4, 1, "uneven")
    for width in (6, 13, 40):
        check(settings, parts, "padded", width=width)
    for per_row in ((1,), (4,), (1, 3), (11,)):
        check(settings, parts, "packed", per_row=per_row)
    check(settings, parts, "packed", padding_rows=3, width=70)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("term", ["all", "entropy", "kl"])
def test_modes_of_the_terms_may_differ(term, layout):
    """A mode per term: each is weighted by its own count, so their sum is the sum of the terms alone."""
    samples = samples_for(8)
    shared = {"clip_ratio_c": 1.6}
    chosen = {"entropy": {"entropy_agg_mode": "token-sum"}, "kl": {"kl_agg_mode": "seq-mean-token-sum"}}
    chosen["all"] = chosen["entropy"] | chosen["kl"]
    terms = TERMS[term]
    alone = [run_ours(in_mode("seq-mean-token-mean", **shared), cut(samples), layout).loss]
    zero = tuple(replace(s, advantages=(0.0,) * s.length) for s in samples)
    if "entropy_coeff" in terms:
        settings = in_mode("token-sum", entropy_coeff=terms["entropy_coeff"])
        alone.append(run_ours(settings, cut(zero), layout).loss)
    if "use_kl_loss" in terms:
        settings = in_mode("seq-mean-token-sum", **{k: v for k, v in terms.items() if "kl" in k})
        alone.append(run_ours(settings, cut(zero), layout).loss)
    settings = in_mode("seq-mean-token-mean", **chosen[term], **(terms | shared))
    for micro, ranks in ((1, 1), (8, 1), (2, 4)):
        got = run_ours(settings, cut(samples, micro, ranks, "uneven"), layout)
        assert got.loss == pytest.approx(sum(alone), rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_rejected_before_the_loss(mode, layout):
    """verl's v1 trainer rejects after it counted: batch_num_tokens holds tokens that response_mask no longer has.

    A token mean divides by them, or by what is left; every other mode, and every token metric, knows only
    what is left.
    """
    samples = samples_for(4)
    left = tuple(replace(s, mask=(0, *s.mask[1:])) if i % 3 == 0 else s for i, s in enumerate(samples))
    before, after = (sum(s.tokens for s in group) for group in (samples, left))
    assert 0 < after < before
    parts = cut(left, 3, 1, "uneven")
    totals = (("batch_num_tokens", before),)
    for count_rejected in (True, False):
        settings = in_mode(mode, 3.5)
        expected = oracle_value(left, settings)
        share = after / before if count_rejected and mode == "token-mean" else 1.0
        got = run_ours(settings | {"count_rejected_tokens": count_rejected}, parts, layout, totals=totals, counts=True)
        assert got.loss == pytest.approx(expected.loss * share, rel=1e-10)
        assert got.metrics["actor/pg_loss"] == pytest.approx(expected.loss * share, rel=1e-10)
        for key in ("actor/pg_clipfrac", "actor/ppo_kl"):
            assert got.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-10)
        reference = flat_gradient(left, expected.log_prob_grad) * share
        torch.testing.assert_close(got.log_prob_grad, reference, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_synthetic_rows(mode, layout):
    """Rows that verl appends to make a batch divide: masked, their uid begins with pad; counted or not."""
    real = samples_for(4)
    added = tuple(sequence(1 + k, mask=[0] * (1 + k), uid=f"pad-{k}", advantages=9.0) for k in range(5))
    samples = (*real, *added)
    settings = in_mode(mode, 3.5)
    without = oracle_value(real, settings)
    counted = oracle_value(samples, settings)
    assert (counted.loss != without.loss) is (mode not in BLIND_TO_EMPTY)
    for how, micro, ranks in (("even", 4, 1), ("uneven", 3, 2)):
        parts = cut(samples, micro, ranks, how)
        assert run_ours(settings, parts, layout).loss == pytest.approx(counted.loss, rel=1e-10)
        if mode not in OF_GROUPS:
            left_out = settings | {"count_padding_rows": False}
            got = run_ours(left_out, parts, layout, counts=True)
            assert got.loss == pytest.approx(without.loss, rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_totals_that_are_wrong_or_missing(layout):
    """Missing ones are an error where ranks would differ by them, negative ones always; too small ones divide."""
    samples = samples_for(4)
    one, two = cut(samples, 2), cut(samples, 1, 2)
    for mode, total in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=total):
            run_ours(in_mode(mode), two, layout, totals=((total, None),))
        whole = oracle_value(samples, in_mode(mode)).loss
        counted = {"batch_num_tokens": sum(s.tokens for s in samples), "global_batch_size": len(samples)}[total]
        assert run_ours(in_mode(mode), one, layout, totals=((total, 1),)).loss == pytest.approx(whole * counted)
        for wrong in (-1, 2.5, 0):
            with pytest.raises(ValueError, match=total):
                run_ours(in_mode(mode), one, layout, totals=((total, wrong),))
        other = {"batch_num_tokens": "global_batch_size", "global_batch_size": "batch_num_tokens"}[total]
        for unneeded in (None, 10**9):
            totals = ((other, unneeded),)
            got = run_ours(in_mode(mode), one, layout, totals=totals)
            assert got.loss == pytest.approx(oracle_value(samples, in_mode(mode)).loss, rel=1e-10)
    with pytest.raises(ValueError, match="prompt"):
        run_ours(in_mode("prompt-mean"), one, layout, groups=False)
    with pytest.raises(ValueError, match="dp_size"):
        run_ours(in_mode("token-mean"), one, layout, totals=(("dp_size", 0),))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [m for m in MODES if m not in OF_GROUPS])
def test_no_totals_means_local_means(mode, layout):
    """Without totals a micro-batch is a batch: the same choice of which sequences count."""
    samples = samples_for(4)
    for count_empty in (True, False):
        settings = in_mode(mode, 3.5, count_empty_sequences=count_empty)
        got = run_ours(settings, cut(samples), layout, totals=NO_TOTALS, counts=False)
        expected = oracle_value(samples, settings)
        assert got.loss == pytest.approx(expected.loss, rel=1e-10)
        reference = flat_gradient(samples, expected.log_prob_grad)
        torch.testing.assert_close(got.log_prob_grad, reference, rtol=1e-10, atol=1e-13)


def test_every_layout_is_in_the_tests():
    assert get_args(Layout) == LAYOUTS


class LocalMeans:
    """What this package repairs: means over each micro-batch's own tokens, all weighing the same."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def __call__(self, *, model_output, data, dp_group):
        losses = [
            -lp[-1 - a.numel() : -1] * a
            for lp, a in zip(model_output["log_probs"].unbind(), data["advantages"].unbind(), strict=True)
        ]
        return torch.cat(losses).mean() / self.micro_batches, {}


def test_uniform_lengths_hide_what_ragged_ones_show():
    """Case 20, and the proof that these tests can fail: a mean of means passes on equal lengths only."""
    uniform = tuple(sequence(4, advantages=[i, 1, -i, 2]) for i in range(8))
    ragged = tuple(sequence(1 + i, advantages=[i - 3.0] * (1 + i)) for i in range(8))
    for samples, deceived in ((uniform, True), (ragged, False)):
        whole = run(LocalMeans(1), cut(samples), "nested")
        pieces = run(LocalMeans(4), cut(samples, 4), "nested")
        same = torch.allclose(whole.log_prob_grad, pieces.log_prob_grad, rtol=1e-6)
        assert same is deceived
        assert value(in_mode("token-mean"), cut(samples, 4), "nested") == pytest.approx(
            value(in_mode("token-mean"), cut(samples), "nested"), rel=1e-12
        )
