"""Loss, gradient and every metric are those of the whole mini-batch, whatever the cut.

Every mode in every layout, cut into 1 to 8 micro-batches on 1 to 4 ranks, evenly, unevenly (one micro-batch
then holds nothing but a fully masked sequence) and as verl's dynamic batch size would; against the oracle,
which knows no cut.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from batches import LAYOUTS, Cut, cut, make_sequences, run, sequence
from oracle import MODES
from ours import check, in_mode, run_ours, value

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
    """ppo, entropy and KL together, for all twelve numbers of pieces; the ways to cut take turns."""
    settings = in_mode(mode, 3.5, **TERMS["all"])
    turn = MODES.index(mode) + LAYOUTS.index(layout)
    for i, (micro, ranks) in enumerate(PIECES):
        parts = cut(samples_for(micro * ranks), micro, ranks, HOW[(i + turn) % 3], seed=micro)
        got = check(settings, parts, layout)
        assert got.log_prob_grad.abs().max() > 1e-3


@pytest.mark.parametrize("term", ["pg", "entropy", "kl"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_term_alone(mode, layout, term):
    settings = in_mode(mode, 3.5, **TERMS[term])
    for micro, ranks, how in ((4, 1, "uneven"), (2, 2, "dynamic")):
        check(settings, cut(samples_for(micro * ranks, term), micro, ranks, how), layout)


@pytest.mark.parametrize("mode", MODES)
def test_float32(mode):
    settings = in_mode(mode, 3.5, **TERMS["all"])
    for layout in LAYOUTS:
        for micro, ranks, how in ((1, 1, "even"), (8, 1, "dynamic"), (4, 2, "uneven")):
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
    parts = cut(samples, 4, 2, "uneven")
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
