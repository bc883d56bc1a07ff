"""Every policy loss in every mode, on cuts in every layout, against the oracle: value, gradient and metrics."""

import inspect
import math
import pickle
from dataclasses import replace

import pytest
import torch
from batches import assert_equals_oracle, build, cut, make_sequences, poisoned, run, sequence
from forms import LAYOUTS, Form, make_leaves
from oracle import MODES, OF_THE_MINI_BATCH, POLICY_LOSSES, REJECTION_RULES, evaluate, kl_estimate
from ours import check, in_mode, run_ours

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.errors import ConfigError
from trinity_loss.kl import KL_TYPES, kl_penalty
from trinity_loss.registry import CLIP_ARGUMENTS, get_policy_loss

CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25, "clip_ratio_c": 1.6}
#: Arguments that take a loss through its other branches.
BRANCHES = {
    "dppo_tv": {"without the square": {"kl_tau": 0.0}},
    "rec": {
        "none": {"clip_mode": "none", "weight": "none", "regularizer": "none"},
        "one-side": {"clip_mode": "one-side", "weight": "advantage", "regularizer_coef": 0.1},
        "gspo": {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling", "regularizer": "none"},
        "ring": {"clip_mode": "ring", "weight": "none", "regularizer": "forward-kl"},
    },
}
LOSSES = {
    name: {"loss_mode": name, "loss_args": loss.tried} for name, loss in POLICY_LOSSES.items() if name == loss.name
}
LOSSES |= {
    f"{name} {branch}": {"loss_mode": name, "loss_args": POLICY_LOSSES[name].tried | arguments}
    for name, branches in BRANCHES.items()
    for branch, arguments in branches.items()
}
SAMPLES = make_sequences(11, seed=2)

every_loss = pytest.mark.parametrize("name", LOSSES)
every_mode = pytest.mark.parametrize("mode", MODES)


def settings_of(name, mode="token-mean", **more):
    return in_mode(mode, 3.5) | CLIP | LOSSES[name] | more


@every_loss
@every_mode
def test_on_cuts(mode, name):
    """Cut into three micro-batches, one without a token, and over two ranks; the layouts take turns."""
    settings = settings_of(name, mode)
    turn = MODES.index(mode) + list(LOSSES).index(name)
    for i, (micro, ranks, how) in enumerate(((3, 1, "uneven"), (1, 2, "dynamic"))):
        got = check(settings, cut(SAMPLES, micro, ranks, how, seed=3), LAYOUTS[(i + turn) % 3])
        assert got.log_prob_grad.abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@every_loss
def test_without_rollout_weights(name, layout):
    settings = settings_of(name, use_weights=False)
    check(settings, cut(SAMPLES, 4, 1, "uneven"), layout, leave_out=("rollout_is_weights",))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_loss
def test_masked_positions_may_hold_anything(name, layout):
    """NaN and infinities where the mask is 0, padding included; one micro-batch holds nothing else."""
    parts = cut(poisoned(SAMPLES), 4, 1, "uneven")
    check(settings_of(name), parts, layout, expected=SAMPLES, poison=True)


@every_loss
def test_the_policy_has_not_moved(name):
    """The first step after a rollout: ratio 1 at every token, on the kink of nothing."""
    samples = tuple(replace(s, old_log_probs=s.log_probs) for s in SAMPLES)
    assert any(s.tokens for s in samples)
    for layout in LAYOUTS:
        check(settings_of(name, "seq-mean-token-mean"), cut(samples, 3), layout)


@every_loss
def test_advantages_of_zero(name):
    """A group whose answers are all alike: advantage 0 at some tokens and at whole sequences."""
    samples = tuple(
        replace(s, advantages=tuple(0.0 if (i + t) % 3 else a for t, a in enumerate(s.advantages)))
        for i, s in enumerate(SAMPLES)
    )
    samples = (replace(samples[0], advantages=(0.0,) * samples[0].length), *samples[1:])
    check(settings_of(name), cut(samples, 3), "nested")


EXTREME = [n for n in LOSSES if not n.startswith("rec") and n not in ("dro", "sft", "opmd", "gpg")]


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("gap", [15.0, -15.0, 60.0, -60.0])
def test_log_ratios_far_from_zero(name, gap):
    """Policies that have drifted apart, up and down, beside tokens that have not: the clamps of the definitions."""
    samples = tuple(
        replace(
            s,
            log_probs=tuple(x - 61 if i % 2 else x for x in s.log_probs),
            old_log_probs=tuple(x - 61 - gap if i % 2 else x for x in s.log_probs),
        )
        for i, s in enumerate(SAMPLES)
    )
    reference = evaluate(samples, **settings_of(name))
    assert math.isfinite(reference.loss)
    got = run_ours(settings_of(name), cut(samples, 3), "nested")
    scale = max(1.0, abs(reference.loss), max(abs(g) for row in reference.log_prob_grad for g in row))
    assert_equals_oracle(got, reference, samples, 1e-10 * scale)


@every_loss
def test_float32(name):
    """Loss and gradient in float32, whole and cut."""
    settings = settings_of(name, "seq-mean-token-mean")
    for parts, layout in ((cut(SAMPLES), "padded"), (cut(SAMPLES, 4, 1, "uneven"), "nested")):
        check(settings, parts, layout, 1e-5, dtype=torch.float32)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_arguments_and_defaults_are_those_of_the_origin(name):
    """What the oracle does not name is not tested; and verl's and Trinity-RFT's defaults are the oracle's."""
    loss = get_policy_loss(name)
    own = {k: v for k, v in loss.arguments.items() if k not in CLIP_ARGUMENTS}
    assert own.keys() == POLICY_LOSSES[name].arguments.keys()
    assert {k: v for k, v in own.items() if v is not inspect.Parameter.empty} == POLICY_LOSSES[name].defaults
    mine = in_mode("token-mean", loss_mode=name)
    if missing := own.keys() - POLICY_LOSSES[name].defaults.keys():
        with pytest.raises(ValueError, match=missing.pop()):
            LossConfig(**mine)
    else:
        check(mine, cut(SAMPLES, 2), "nested")


def test_every_argument_of_every_loss_is_named_in_a_test():
    """Of those losses, too, which have an oracle of their own."""
    named = {
        "dpo": {"beta", "label_smoothing"},
        "bypass_mode": {*NO_BYPASS, "rollout_is_batch_normalize"},
        "clip_cov": {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
        "kl_cov": {"kl_cov_ratio", "ppo_kl_coef"},
        "m2po": {"m2_threshold"},
    }
    assert named.keys() == OF_THE_MINI_BATCH | {"dpo", "bypass_mode"}
    assert {name: set(get_policy_loss(name).arguments) - set(CLIP_ARGUMENTS) for name in named} == named


@pytest.mark.parametrize(
    ("alias", "name"), [(alias, loss.name) for alias, loss in POLICY_LOSSES.items() if alias != loss.name]
)
def test_aliases(alias, name):
    settings = settings_of(name) | {"loss_mode": alias}
    check(settings, cut(SAMPLES, 3), "nested")
    assert run_ours(settings, cut(SAMPLES), "nested").loss == run_ours(settings_of(name), cut(SAMPLES), "nested").loss


@pytest.mark.parametrize("layout", LAYOUTS)
@every_loss
def test_nothing_valid(name, layout):
    """No valid token anywhere: 0 with a graph, no gradient, finite metrics."""
    samples = poisoned(tuple(replace(s, mask=(0,) * s.length) for s in SAMPLES[:3]))
    got = run_ours(settings_of(name), cut(samples, 2), layout, poison=True)
    assert got.loss == 0.0
    assert not got.log_prob_grad.any()
    assert not {key: x for key, x in got.metrics.items() if not math.isfinite(x)}


@every_loss
def test_every_micro_batch_emits_every_metric(name):
    """Ranks that emitted different keys would not reduce; an empty micro-batch is where they could."""
    got = run_ours(settings_of(name), cut(SAMPLES, 2, 2, "uneven"), "nested")
    keys = {tuple(sorted(m)) for rank in got.emitted for m in rank}
    assert len(keys) == 1
    assert "actor/pg_loss" in keys.pop()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extremes_of_the_ratio(layout):
    """The ratio's largest and smallest over the mini-batch, wherever they lie."""
    ratios = [
        math.exp(x - o) for s in SAMPLES for x, o in zip(s.valid(s.log_probs), s.valid(s.old_log_probs), strict=True)
    ]
    for micro, ranks in ((1, 1), (4, 1), (2, 2)):
        metrics = run_ours(settings_of("ppo"), cut(SAMPLES, micro, ranks, "uneven"), layout).metrics
        assert metrics["actor/ratio_max"] == pytest.approx(max(ratios), rel=1e-10)
        assert metrics["actor/ratio_min"] == pytest.approx(min(ratios), rel=1e-10)
        assert metrics["actor/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dppo_kl_of_certain_tokens(dtype):
    """Probabilities of exactly 1, as float32 log-probs of confident tokens are: neither 0/0 nor log 0.

    The divergence from 1 to 0.9999 is 1e-4 and from 0.9999 to 1 about 8e-4: both are kept, in either type.
    """
    near, one = math.log(0.9999), 0.0
    base = SAMPLES[0]
    pairs = [
        (near, one, 1.0),
        (near, one, -1.0),
        (one, near, 1.0),
        (one, near, -1.0),
        (one, one, 1.0),
        (one, one, -1.0),
    ]
    samples = tuple(
        replace(
            base,
            mask=(1,) * n,
            uid=f"{i}",
            **{
                field: (x,) * n
                for field, x in (
                    ("log_probs", new),
                    ("old_log_probs", old),
                    ("advantages", advantage),
                    ("ref_log_prob", -1.0),
                    ("entropy", 1.0),
                    ("rollout_is_weights", 1.0),
                    ("rollout_log_probs", -1.0),
                )
            },
        )
        for i, (new, old, advantage) in enumerate(pairs)
        for n in (1 + i % 3,)
    )
    expected = evaluate(samples, **settings_of("dppo_kl"))
    assert expected.metrics["actor/pg_clipfrac"] == 0.0
    got = run_ours(settings_of("dppo_kl"), cut(samples, 2), "nested", dtype=dtype)
    assert_equals_oracle(got, expected, samples, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_loss
def test_inputs_stay_as_they_were(name, layout):
    """Nothing of the micro-batch or of the model output is written to."""
    loss = EnginePolicyLoss(LossConfig(**settings_of(name), entropy_coeff=0.1, use_kl_loss=True))
    batch = build(cut(SAMPLES), Form(layout))[0][0]
    log_probs, entropy = make_leaves(SAMPLES)
    output = {"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}

    def flat(tensors):
        return {
            k: (v.values() if v.is_nested else v).detach().clone() for k, v in tensors if isinstance(v, torch.Tensor)
        }

    before = flat(batch.data.items()) | flat(output.items())
    loss(model_output=output, data=batch.data, dp_group=None)[0].backward()
    after = flat(batch.data.items()) | flat(output.items())
    assert before.keys() == after.keys() >= {"advantages", "log_probs", "entropy"}
    assert [k for k in before if not torch.equal(before[k], after[k])] == []


@every_loss
def test_without_gradients_the_value_is_the_same(name):
    """The engine's forward-only pass: no graph, the same loss; and a loss that was pickled on its way."""
    loss = EnginePolicyLoss(LossConfig(**settings_of(name)))
    batch = build(cut(SAMPLES), Form("nested"))[0][0]
    output = {"log_probs": batch.lay_out(make_leaves(SAMPLES)[0])}
    with_graph, metrics = loss(model_output=output, data=batch.data, dp_group=None)
    with torch.no_grad():
        without, _ = loss(model_output=output, data=batch.data, dp_group=None)
    assert not without.requires_grad
    assert without.item() == with_graph.item()
    again, metrics_again = pickle.loads(pickle.dumps(loss))(model_output=output, data=batch.data, dp_group=None)
    assert again.item() == with_graph.item()
    assert metrics.keys() == metrics_again.keys()


PAIRS = tuple(s for s in make_sequences(13, seed=6) if s.tokens)[:12]


@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_a_mean_over_pairs(smoothing, layout):
    """Pairs stay together in a micro-batch (verl: force_group_size=2); the mean is over those of the mini-batch."""
    arguments = {"beta": 0.4, "label_smoothing": smoothing}
    expected = evaluate(PAIRS, loss_mode="dpo", loss_args=arguments)
    loss = EnginePolicyLoss(LossConfig(loss_mode="dpo", loss_args=arguments))
    chosen = [sum(s.valid(s.log_probs)) - sum(s.valid(s.ref_log_prob)) for s in PAIRS[::2]]
    rejected = [sum(s.valid(s.log_probs)) - sum(s.valid(s.ref_log_prob)) for s in PAIRS[1::2]]
    for micro, ranks in ((1, 1), (3, 1), (6, 1), (3, 2), (2, 3)):
        got = run(loss, cut(PAIRS, micro, ranks), layout, with_entropy=False)
        assert_equals_oracle(got, expected, PAIRS, keys=("actor/pg_loss",))
        assert got.metrics["actor/chosen_reward"] == pytest.approx(0.4 * sum(chosen) / 6)
        assert got.metrics["actor/rejected_reward"] == pytest.approx(0.4 * sum(rejected) / 6)
        right = sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 6
        assert got.metrics["actor/accuracy"] == pytest.approx(right)
        assert len(got.metrics) == 4


def test_dpo_refuses_half_a_pair():
    loss = EnginePolicyLoss(LossConfig(loss_mode="dpo"))
    with pytest.raises(ValueError, match="pairs"):
        run(loss, cut(PAIRS[:3]), "nested", with_entropy=False)


NO_BYPASS = {
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": "2.0",
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
BYPASS = {
    "plain": {},
    "token weights": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "1.4"},
    "icepop": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.5_1.6"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
    "two rules": {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.3,1.8"},
    "seq_sum_k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "0.5", "loss_type": "reinforce"},
    "seq_max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.6"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BYPASS)
def test_bypass_mode_on_cuts(name, mode):
    """verl's bypass mode: the loss weighs and rejects by itself. A mean over the tokens of the mini-batch, or of a
    prompt group, divides by the rejected ones too."""
    settings = in_mode(mode, 3.5) | CLIP
    settings |= {"loss_mode": "bypass_mode", "loss_args": NO_BYPASS | BYPASS[name]}
    turn = MODES.index(mode) + list(BYPASS).index(name)
    for i, (micro, ranks, how) in enumerate(((1, 1, "even"), (3, 1, "uneven"), (1, 2, "dynamic"))):
        check(settings, cut(SAMPLES, micro, ranks, how), LAYOUTS[(i + turn) % 3], counts=True)


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_every_rejection_rule(rule):
    arguments = NO_BYPASS | {"rollout_rs": rule, "rollout_rs_threshold": "0.6_1.5" if "k1" in rule else "0.3"}
    settings = in_mode("token-mean", loss_mode="bypass_mode", loss_args=arguments)
    got = check(settings, cut(SAMPLES, 3, 1, "uneven"), "nested", counts=True)
    assert 0 < got.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_there_is_no_other_rejection_rule():
    with pytest.raises(ConfigError, match=f"expected some of {', '.join(REJECTION_RULES)}$"):
        LossConfig(loss_mode="bypass_mode", loss_args={"rollout_rs": "unknown", "rollout_rs_threshold": "1"})


def test_rejection_leaves_the_size_of_a_prompt_group():
    """Four tokens of two answers, one of them rejected: the others weigh a quarter each, together and apart."""
    one = sequence(3, log_probs=[-1.0, -1.0, -1.0], old_log_probs=[-1.0, -1.0, -4.0], advantages=[1.0] * 3)
    two = sequence(1, log_probs=[-1.0], old_log_probs=[-1.0], advantages=[1.0])
    arguments = NO_BYPASS | {"rollout_rs": "token_k2", "rollout_rs_threshold": "1"}
    settings = in_mode("prompt-mean") | {"loss_mode": "bypass_mode", "loss_args": arguments}
    for layout in LAYOUTS:
        for micro in (1, 2):
            assert run_ours(settings, cut((one, two), micro), layout).loss == pytest.approx(-3 / 4, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_that_the_loss_rejects_stays_a_sequence(layout):
    """It counts where fully masked sequences do not, with the totals of the mini-batch and without any."""
    one, two = (sequence(2, log_probs=-1.0, old_log_probs=old, advantages=1.0) for old in (-1.0, -4.0))
    arguments = NO_BYPASS | {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": "1"}
    config = LossConfig("bypass_mode", "seq-mean-token-mean", loss_args=arguments, count_empty_sequences=False)
    samples = (one, two, sequence(2, mask=[0, 0]))
    for loss in (EnginePolicyLoss(config), TrinityPolicyLoss(config)):
        assert run(loss, cut(samples), layout, counts=True).loss == pytest.approx(-1 / 2, rel=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "prompt-mean"])
def test_bypass_mode_cannot_count_what_it_will_keep(mode):
    """How many tokens the whole mini-batch keeps is not known while its first micro-batch is computed."""
    with pytest.raises(ValueError, match="count_rejected_tokens"):
        LossConfig(loss_mode="bypass_mode", loss_agg_mode=mode, count_rejected_tokens=False)


def test_bypass_mode_reports_what_it_rejected():
    """The share of tokens, and of sequences with a token, that were rejected: over the mini-batch."""
    arguments = NO_BYPASS | BYPASS["token_k1"]
    settings = in_mode("token-mean") | {"loss_mode": "bypass_mode", "loss_args": arguments}
    valid = [s for s in SAMPLES if s.tokens]
    outside = [
        [
            not math.log(0.6) <= o - x <= math.log(1.5)
            for x, o in zip(s.valid(s.log_probs), s.valid(s.old_log_probs), strict=True)
        ]
        for s in valid
    ]
    tokens = sum(map(sum, outside)) / sum(map(len, outside))
    sequences = sum(map(any, outside)) / len(valid)
    assert 0 < tokens < sequences < 1
    for layout in LAYOUTS:
        for micro, ranks in ((1, 1), (3, 1), (2, 2)):
            metrics = run_ours(settings, cut(SAMPLES, micro, ranks, "uneven"), layout).metrics
            for key in ("rollout_rs", "rollout_rs_token_k1"):
                assert metrics[f"rollout_corr/{key}_masked_fraction"] == pytest.approx(tokens, rel=1e-10)
                assert metrics[f"rollout_corr/{key}_seq_masked_fraction"] == pytest.approx(sequences, rel=1e-10)


def test_a_clipped_token_that_overflows_pulls_with_nothing():
    """advantage × ratio is beyond float32, but the clipped value is not: a gradient of 0, not of 0 × infinity."""
    one = sequence(1, log_probs=[0.0], old_log_probs=[-30.0], advantages=[1e30])
    got = run(EnginePolicyLoss(LossConfig()), cut((one,)), "nested", with_entropy=False, dtype=torch.float32)
    assert got.loss == pytest.approx(-1.2e30)
    assert got.log_prob_grad.abs().max() == 0


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_estimators_within_and_beyond_their_limits(kind):
    """An estimate that its limit holds back pulls with nothing, at either end and at either limit."""
    gaps = [-25.0, -20.5, -19.0, -3.0, -2.6, -2.4, -0.5, 0.0, 0.5, 2.0, 9.0, 10.5, 11.5, 19.0, 25.0]
    for gap in gaps:
        log_prob = torch.tensor(-1.0 + gap, dtype=torch.float64, requires_grad=True)
        expected = kl_estimate(log_prob, -1.0, kind) + 0 * log_prob  # held back it has no graph
        (slope,) = torch.autograd.grad(expected, log_prob)
        value, derivative = kl_penalty(log_prob.detach(), torch.tensor(-1.0, dtype=torch.float64), kind)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(derivative, slope, rtol=1e-10, atol=1e-10)
