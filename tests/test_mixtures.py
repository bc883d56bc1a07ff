"""``mix`` and ``mix_chord``: usual rows and an expert's, each over its own count of the mini-batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import cut, make_sequences, run, sequence
from forms import LAYOUTS
from oracle import MODES, evaluate
from ours import OF_GROUPS, in_mode

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.errors import ConfigError, FieldShapeError, FieldValueError, MissingFieldError, TotalsError
from trinity_loss.metric_set import finish_metrics
from trinity_loss.mixtures import scheduled_weight
from trinity_loss.totals import count_names, find_count

SAMPLES = make_sequences(13, seed=6)
EXPERT = [i % 3 == 1 for i in range(len(SAMPLES))]
SPLIT_MODES = [mode for mode in MODES if mode not in OF_GROUPS]
CHORD = {"mu_warmup_steps": 4, "mu_decay_steps": 8, "mu_peak": 0.5, "mu_valley": 0.1}
LOSSES = {
    "mix": ("mix", {"mu": 0.3}, 0.3, "sft"),
    "chord": ("mix_chord", CHORD, 0.5 * 0.75, "sft_phi"),
    "chord without phi": ("mix_chord", {**CHORD, "enable_phi_function": False}, 0.5 * 0.75, "sft"),
}
STEP = 3


class Marking:
    """A loss whose rows are marked as an expert's, as a trainer marks them, each by its log-probs of before."""

    def __init__(self, loss, samples=SAMPLES, expert=EXPERT, form=lambda flags: flags, **fields):
        self.loss, self.form, self.fields = loss, form, fields
        self.of = {s.advantages[0]: flag for s, flag in zip(samples, expert, strict=True)}
        assert len(self.of) == len(samples)

    def __call__(self, *, model_output, data, dp_group):
        advantages = data["advantages"]
        if "segment_ids" in data:
            segments, flags = data["segment_ids"], torch.zeros_like(data["segment_ids"])
            for row in range(len(segments)):
                for segment in set(segments[row].tolist()) - {0}:
                    here = segments[row] == segment
                    found = [self.of[x] for x in advantages[row][here].tolist() if x in self.of]
                    flags[row][here] = int(found[0])
        else:
            first = advantages.values()[advantages.offsets()[:-1]] if advantages.is_nested else advantages[:, 0]
            flags = torch.tensor([self.of[x] for x in first.tolist()])
        fields = {"expert_mask": self.form(flags), "step": STEP} | self.fields
        return self.loss(model_output=model_output, data={**data, **fields}, dp_group=dp_group)


def counts(samples, expert, before=None):
    """What the training worker counts of both kinds of rows; ``before`` are the samples before tokens were rejected."""
    totals = []
    for kind in ("usual", "expert"):
        which = [i for i, flag in enumerate(expert) if flag == (kind == "expert")]
        rows = [samples[i] for i in which]
        found = {
            "tokens": sum((before or samples)[i].tokens for i in which),
            "valid_tokens": sum(s.tokens for s in rows),
            "rows": len(rows),
            "nonempty_rows": sum(s.tokens > 0 for s in rows),
            "real_rows": sum(not s.uid.startswith("pad") for s in rows),
        }
        totals += [(f"batch_num_{kind}_{what}", number) for what, number in found.items()]
    return tuple(totals)


def oracle(samples, expert, name, mode, **settings):
    """(1 - µ) × the usual rows as a mini-batch of their own + µ × the expert's as one."""
    both, gradient, metrics = parts_of_oracle(samples, expert, name, mode, **settings)
    return sum(both), gradient, metrics


def parts_of_oracle(samples, expert, name, mode, **settings):
    """Each part of the loss with its weight, the gradient of both, and the metrics."""
    _, _, mu, expert_loss = LOSSES[name]
    usual_rows, expert_rows = (
        [s for s, e in zip(samples, expert, strict=True) if e == which] for which in (False, True)
    )
    plain = in_mode(mode, 3.5)
    usual = evaluate(usual_rows, **plain, **settings)
    theirs = evaluate(
        expert_rows, loss_mode=expert_loss, loss_args={"cutoff_prob": 1.0}, use_weights=False, **plain, **settings
    )
    gradients = iter(usual.log_prob_grad), iter(theirs.log_prob_grad)
    weights = 1 - mu, mu
    gradient = [[weights[e] * x for x in next(gradients[e])] for e in map(int, expert)]
    metrics = {"actor/pg_loss": usual.metrics["actor/pg_loss"], "actor/expert_loss": theirs.metrics["actor/pg_loss"]}
    metrics |= {key: usual.metrics[key] for key in ("actor/ppo_kl", "actor/pg_clipfrac")}
    return ((1 - mu) * usual.loss, mu * theirs.loss), gradient, metrics | {"actor/mu": mu}


def agree(got, expected, samples, tolerance=1e-10):
    from forms import flat_gradient

    loss, gradient, metrics = expected
    assert got.loss == pytest.approx(loss, rel=tolerance)
    assert (got.log_prob_grad - flat_gradient(samples, gradient)).abs().max() < tolerance
    for key, value in metrics.items():
        assert got.metrics[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def config(name, mode="token-mean", **settings):
    loss_mode, loss_args, *_ = LOSSES[name]
    return LossConfig(loss_mode=loss_mode, loss_args=loss_args, **in_mode(mode, 3.5, **settings))


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_on_cuts(name, mode):
    """One micro-batch has no row of the expert's, one has no other."""
    expected = oracle(SAMPLES, EXPERT, name, mode)
    loss = Marking(EnginePolicyLoss(config(name, mode)))
    totals = counts(SAMPLES, EXPERT)
    assert len(SAMPLES) == 13
    for i, (micro, ranks, how) in enumerate(((1, 1, "even"), (13, 1, "even"), (2, 2, "uneven"))):
        layout = LAYOUTS[(i + MODES.index(mode)) % 3]
        got = run(loss, cut(SAMPLES, micro, ranks, how), layout, counts=True, totals=totals)
        finish_metrics(got.metrics)
        agree(got, expected, SAMPLES)


def test_every_count_is_here():
    known = (find_count(name) for name in count_names())
    assert {count.name for count in known if getattr(count, "of_mixture", False)} == dict(
        counts(SAMPLES, EXPERT)
    ).keys()


def test_empty_rows_that_do_not_count():
    expected = oracle(SAMPLES, EXPERT, "mix", "seq-mean-token-mean", count_empty_sequences=False)
    assert any(not s.tokens for s in SAMPLES)
    loss = Marking(EnginePolicyLoss(config("mix", "seq-mean-token-mean", count_empty_sequences=False)))
    got = run(loss, cut(SAMPLES, 3, 2), "nested", counts=True, totals=counts(SAMPLES, EXPERT))
    agree(got, expected, SAMPLES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_tokens_rejected_before_the_loss(mode, layout):
    """A token mean divides by the tokens of each kind before rejection, or by those that are left."""
    left = tuple(replace(s, mask=(0, *s.mask[1:])) if i % 4 else s for i, s in enumerate(SAMPLES))
    parts, totals = cut(left, 3, 2, "uneven"), counts(left, EXPERT, SAMPLES)
    before, after = dict(counts(SAMPLES, EXPERT)), dict(totals)
    for counted in (True, False):
        (usual, theirs), gradient, metrics = parts_of_oracle(left, EXPERT, "mix", mode)
        shares = [
            after[f"batch_num_{kind}_valid_tokens"] / before[f"batch_num_{kind}_tokens"]
            if counted and mode == "token-mean"
            else 1.0
            for kind in ("usual", "expert")
        ]
        gradient = [[shares[e] * x for x in row] for e, row in zip(map(int, EXPERT), gradient, strict=True)]
        metrics["actor/pg_loss"] *= shares[0]
        metrics["actor/expert_loss"] *= shares[1]
        loss = Marking(EnginePolicyLoss(config("mix", mode, count_rejected_tokens=counted)), left)
        got = run(loss, parts, layout, counts=True, totals=totals)
        agree(got, (shares[0] * usual + shares[1] * theirs, gradient, metrics), left)


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_synthetic_rows_that_do_not_count(layout):
    """verl's v1 trainer copies a row to make a batch divisible, an expert's too."""
    added = tuple(sequence(1 + k, mask=[0] * (1 + k), uid=f"pad-{k}", advantages=9.0 + k) for k in range(5))
    samples, expert = (*SAMPLES, *added), [*EXPERT, False, True, True, False, True]
    expected = oracle(SAMPLES, EXPERT, "mix", "seq-mean-token-mean")[0]
    assert oracle(samples, expert, "mix", "seq-mean-token-mean")[0] != pytest.approx(expected, rel=1e-3)
    loss = EnginePolicyLoss(config("mix", "seq-mean-token-mean", count_padding_rows=False))
    got = run(Marking(loss, samples, expert), cut(samples, 4, 2), layout, counts=True, totals=counts(samples, expert))
    assert got.loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_batch_alone(layout):
    none = (("batch_num_tokens", None), ("global_batch_size", None), ("dp_size", None))
    got = run(Marking(TrinityPolicyLoss(config("chord"))), cut(SAMPLES), layout, totals=none)
    assert got.loss == pytest.approx(oracle(SAMPLES, EXPERT, "chord", "token-mean")[0], rel=1e-10)


FORMS = {
    "[rows, 1]": lambda flags: flags[:, None],
    "numbers": lambda flags: flags.to(torch.float32),
    "list": lambda flags: flags.tolist(),
    "array": lambda flags: flags.numpy(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_mark(form):
    loss = Marking(EnginePolicyLoss(config("mix")), form=FORMS[form])
    got = run(loss, cut(SAMPLES, 3), "padded", counts=True, totals=counts(SAMPLES, EXPERT))
    agree(got, oracle(SAMPLES, EXPERT, "mix", "token-mean"), SAMPLES)


@pytest.mark.parametrize("flag", [False, True])
def test_one_kind_alone(flag):
    """No NaN where there is no row of the other kind."""
    expert = [flag] * len(SAMPLES)
    loss = Marking(EnginePolicyLoss(config("mix", "seq-mean-token-mean")), expert=expert)
    got = run(loss, cut(SAMPLES, 3), "nested", counts=True, totals=counts(SAMPLES, expert))
    finish_metrics(got.metrics)
    assert all(map(math.isfinite, got.metrics.values()))
    assert got.metrics["actor/pg_loss" if flag else "actor/expert_loss"] == 0


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_trinity_rfts_value_on_one_batch(name):
    chord = pytest.importorskip("trinity.algorithm.policy_loss_fn.chord_policy_loss")
    from trinity.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn

    samples = [sequence(n, log_probs=-0.3 * n, old_log_probs=-1.0, advantages=0.5 - n) for n in (1, 2, 3, 4, 5)]
    expert, (usual, theirs) = [False, True, False, True, False], (3, 2)
    sizes = {"ppo_mini_batch_size": 5, "ppo_micro_batch_size_per_gpu": 5, "use_dynamic_bsz": False}
    sizes |= {"train_batch_size_usual": usual, "train_batch_size_expert": theirs, "clip_range": 0.2}
    part = (MIXPolicyLossFn if name == "mix" else chord.MIXCHORDPolicyLossFn)(**sizes)
    width = max(s.length for s in samples)

    def rectangle(field):
        return torch.tensor([[*getattr(s, field), *[0] * (width - s.length)] for s in samples], dtype=torch.float64)

    expected, _ = part(
        logprob=rectangle("log_probs"),
        old_logprob=rectangle("old_log_probs"),
        action_mask=rectangle("mask").bool(),
        advantages=rectangle("advantages"),
        expert_mask=torch.tensor(expert),
        step=torch.zeros(5, dtype=torch.int64),
    )
    loss = Marking(EnginePolicyLoss(LossConfig(loss_mode=name)), samples, expert)
    got = run(loss, cut(tuple(samples), 5), "nested", counts=True, totals=counts(samples, expert))
    assert got.loss == pytest.approx(expected.item(), rel=1e-6)


def test_the_schedule():
    values = [scheduled_weight(step, 4, 8, 0.5, 0.1) for step in range(14)]
    assert values[:5] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])
    assert values[8] == pytest.approx(0.3)
    assert values[12:] == [0.1, 0.1]
    assert list(np.diff(values[4:13]) < 0) == [True] * 8


@pytest.mark.parametrize("mode", OF_GROUPS)
def test_modes_that_are_refused(mode):
    with pytest.raises(ConfigError, match=rf"loss_agg_mode is '{mode}'.*expert's rows apart"):
        config("mix", mode)


def test_bad_input():
    with pytest.raises(ConfigError, match=r"mu.*a number from 0 to 1"):
        LossConfig(loss_mode="mix", loss_args={"mu": 1.5})
    with pytest.raises(ConfigError, match="takes"):
        LossConfig(loss_mode="mix_chord", loss_args={"mu": 0.5})
    loss = EnginePolicyLoss(config("chord"))
    with pytest.raises(MissingFieldError, match="no 'expert_mask', expected one number per row"):
        run(loss, cut(SAMPLES), "nested")
    with pytest.raises(MissingFieldError, match=r"no 'step'.*attaches it"):
        run(Marking(loss, step=None), cut(SAMPLES), "nested", totals=counts(SAMPLES, EXPERT))
    with pytest.raises(FieldShapeError, match="expert_mask has shape"):
        run(Marking(loss, form=lambda flags: flags[:-1]), cut(SAMPLES), "nested")
    with pytest.raises(
        FieldShapeError, match="expert_mask has entries that are no numbers; expected one number, 0 or 1"
    ):
        run(Marking(loss, form=lambda flags: ["expert" if flag else "usual" for flag in flags]), cut(SAMPLES), "nested")
    for wrong in (0.5, math.nan, -1, 2):
        with pytest.raises(FieldValueError, match="expert_mask holds a number that is neither 0 nor 1"):
            run(Marking(loss, form=lambda flags: flags * wrong), cut(SAMPLES), "nested")  # noqa: B023
    with pytest.raises(FieldValueError, match="expert_mask differs within a packed segment"):
        run(Marking(loss, form=lambda flags: flags * (torch.arange(flags.shape[1]) % 2)), cut(SAMPLES), "packed")
    with pytest.raises(TotalsError, match="batch_num_usual_tokens is missing"):
        run(Marking(loss), cut(SAMPLES, 1, 2), "nested")
