"""The oracle agrees with verl and Trinity-RFT wherever they are right: on one micro-batch.

verl rounds its indicator metrics to float32, hence the looser bound on those.
"""

import functools
import math

import oracle
import pytest
import torch
from batches import assert_equals_oracle, cut, make_sequences, run, sequence
from oracle import VERL_GUARD, evaluate, importance_metrics
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

VERL_MODES = oracle.MODES[:5]
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
ROUNDED = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")
#: Metrics that verl does not have.
OURS = ("actor/ratio_mean", "actor/ratio_max", "actor/ratio_min")
SAMPLES = make_sequences(11, seed=2)
REC = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.3,
    "epsilon_low_prime": 0.4,
    "epsilon_high_prime": 0.5,
    "clip_mode": "none",
    "weight": "none",
    "regularizer": "none",
    "regularizer_coef": 0.1,
    "temp": 0.7,
}


def verl_loss(loss_mode: str, mode: str, **overrides):
    policy = PolicyLossConfig(loss_mode=loss_mode, **({"dro_beta": 0.3} if loss_mode == "dro" else {}))
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=policy,
        **overrides,
    )
    return functools.partial(ppo_loss, config=config)


BYPASS = {
    "plain": {},
    "weights": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "1.4"},
    "icepop": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.5_1.6"},
    "token": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
    "both": {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.3,1.8"},
    "sum": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "0.5", "loss_type": "reinforce"},
    "max": {"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": "0.9"},
}
NO_BYPASS = {
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": "2.0",
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}


@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("name", BYPASS)
def test_bypass_mode(name, mode):
    """verl's bypass mode on one micro-batch; a token mean divides by the tokens before rejection."""
    arguments = NO_BYPASS | BYPASS[name]
    policy = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=RolloutCorrectionConfig(**arguments))
    settings = {"loss_scale_factor": 7} if mode == "seq-mean-token-sum-norm" else {}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=policy,
        **settings,
    )
    got = run(functools.partial(ppo_loss, config=config), cut(SAMPLES), "nested", with_entropy=False)
    expected = evaluate(SAMPLES, loss_mode="bypass_mode", loss_agg_mode=mode, loss_args=arguments, **settings)
    assert_equals_oracle(got, expected, SAMPLES, 1e-10, ("actor/pg_loss", "actor/ppo_kl"))
    for key in ROUNDED:
        if key in expected.metrics:
            assert got.metrics[key] == pytest.approx(expected.metrics[key], abs=1e-6)
    if "rollout_rs" in BYPASS[name]:
        assert 0 < got.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


def padded_tensors(samples, *names):
    """[rows, longest] tensors of the fields, a mask, and a leaf of log-probs."""
    longest = max(s.length for s in samples)

    def rows(name):
        return torch.tensor([[*getattr(s, name), *[0] * (longest - s.length)] for s in samples], dtype=torch.float64)

    return [rows(name) for name in names], rows("mask").bool()


@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "gpg", "dppo_tv", "dppo_kl", "dro"])
def test_whole_loss(loss_mode, layout, mode):
    settings = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25, "clip_ratio_c": 1.6, "entropy_coeff": 0.3}
    settings |= {"use_kl_loss": True, "kl_loss_coef": 0.7}
    settings |= {"loss_scale_factor": 7} if mode == "seq-mean-token-sum-norm" else {}
    got = run(verl_loss(loss_mode, mode, **settings), cut(SAMPLES), layout)
    loss_args = {"dro_beta": 0.3} if loss_mode == "dro" else {}
    expected = evaluate(SAMPLES, loss_mode=loss_mode, loss_agg_mode=mode, loss_args=loss_args, **settings)
    exact = [key for key in expected.metrics if key not in (*ROUNDED, *OURS)]
    assert_equals_oracle(got, expected, SAMPLES, 1e-10, exact)
    for key in ROUNDED:
        if key in expected.metrics:
            assert got.metrics[key] == pytest.approx(expected.metrics[key], abs=1e-6)


@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("loss_mode", ["sapo", "geo_mean"])
def test_losses_that_aggregate_by_themselves(loss_mode, layout):
    """verl's sapo and geo_mean ignore the mode: they are means over sequences, empty ones counted."""
    config = verl_loss(loss_mode, "token-mean", tau_pos=1.3, tau_neg=1.7, clip_ratio_low=0.3, clip_ratio_high=0.2)
    got = run(config, cut(SAMPLES), layout, with_entropy=False)
    expected = evaluate(
        SAMPLES,
        loss_mode=loss_mode,
        loss_agg_mode="seq-mean-token-mean",
        loss_args={"tau_pos": 1.3, "tau_neg": 1.7} if loss_mode == "sapo" else {},
        clip_ratio_low=0.3,
        clip_ratio_high=0.2,
    )
    assert_equals_oracle(got, expected, SAMPLES, 1e-10, ("actor/pg_loss", "actor/ppo_kl"))
    for key in ROUNDED:
        assert got.metrics[key] == pytest.approx(expected.metrics[key], abs=1e-6)
    assert loss_mode != "geo_mean" or expected.metrics["actor/pg_clipfrac_lower"] > 0


def test_settings_reach_every_branch():
    """The data above clip on either side, clip twice, and drop tokens: nothing agrees by never happening."""
    settings = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25, "clip_ratio_c": 1.6}
    for loss_mode in ("vanilla", "dppo_tv", "dppo_kl"):
        metrics = evaluate(SAMPLES, loss_mode=loss_mode, **settings).metrics
        assert 0 < metrics["actor/pg_clipfrac"] < 1, loss_mode
        assert 0 < metrics["actor/pg_clipfrac_lower"] < 1, loss_mode
    for loss_mode in ("gspo", "cispo"):
        assert 0 < evaluate(SAMPLES, loss_mode=loss_mode, **settings).metrics["actor/pg_clipfrac"] < 1, loss_mode


@pytest.mark.parametrize("kind", [k + plus for k in KL_KINDS for plus in ("", "+")])
def test_kl_estimators(kind):
    pairs = [
        (-1.0, -1.5),
        (-2.0, -0.3),
        (-1.0, -1.0),
        (-100.0, -1.0),
        (-1.0, -100.0),
        (-30.0, -1.0),
        (-4.2, -1.0),
    ]
    for log_prob, ref in pairs:
        theirs = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
        value = core_algos.kl_penalty(theirs, torch.tensor([ref], dtype=torch.float64), kind)
        value.sum().backward()
        mine = torch.tensor(log_prob, dtype=torch.float64, requires_grad=True)
        estimate = oracle.kl_estimate(mine, ref, kind)
        (estimate + 0 * mine).backward()
        assert estimate.item() == pytest.approx(value.item(), rel=1e-12, abs=1e-15)
        if log_prob != ref or kind != "abs":
            assert mine.grad.item() == pytest.approx(theirs.grad.item(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("mode", VERL_MODES)
def test_aggregation(mode):
    """Against verl's agg_loss with totals (empty sequences count) and without (they do not)."""
    (losses,), mask = padded_tensors(SAMPLES, "advantages")
    values = [[oracle.scalar(x) for x in s.valid(s.advantages)] for s in SAMPLES]
    totals = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(SAMPLES), "dp_size": 1}
    for count_empty, given in ((True, totals), (False, {})):
        theirs = core_algos.agg_loss(losses, mask, mode, loss_scale_factor=5, **given)
        numerator, denominator = oracle.aggregate(
            SAMPLES, values, mode, loss_scale_factor=5, count_empty_sequences=count_empty
        )
        assert (numerator / denominator).item() == pytest.approx(theirs.item(), rel=1e-12)


def test_modes_of_our_own():
    """Means over groups and constant, which verl lacks, on numbers that a hand can check."""
    rows = {"a": [[1.0, 3.0], [5.0]], "b": [[]], "c": [[7.0]]}
    samples = [sequence(len(row), uid=uid) for uid in rows for row in rows[uid]]
    values = [[oracle.scalar(x) for x in row] for uid in rows for row in rows[uid]]
    numerator, denominator = oracle.aggregate(samples, values, "prompt-mean")
    assert (numerator.item(), denominator) == (10.0, 3.0)
    numerator, denominator = oracle.aggregate(samples, values, "trajectory-mean-token-sum-norm", loss_scale_factor=4)
    assert (numerator.item(), denominator) == (4.0, 3.0)
    numerator, denominator = oracle.aggregate(samples, values, "constant", loss_scale_factor=4)
    assert (numerator.item(), denominator) == (4.0, 1.0)


def trinity_loss_class(name):
    """Trinity-RFT is installed beside its declared dependencies, so a checkout may be without it."""
    return pytest.importorskip("trinity.algorithm.policy_loss_fn").POLICY_LOSS_FN.get(name)


def trinity_value(name, arguments, mode):
    """Loss, gradient and metrics of one of Trinity-RFT's losses, called as its trainer calls it."""
    names = ("log_probs", "old_log_probs", "advantages")
    (log_probs, old, advantages), mask = padded_tensors(SAMPLES, *names)
    log_probs.requires_grad_()
    settings = dict(arguments) if name == "rec" else {**arguments, "loss_agg_mode": mode}
    fn = trinity_loss_class(name)(backend="verl", **settings)
    loss, metrics = fn(logprob=log_probs, old_log_probs=old, response_mask=mask, advantages=advantages)
    loss.backward()
    return loss.item(), log_probs.grad, metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("importance_sampling", {}),
        ("topr", {"advantage_threshold": 0.2}),
        ("opmd", {"tau": 0.6}),
        ("sppo", {"epsilon": 0.3}),
        ("sft", {}),
    ],
)
def test_trinity_losses(name, arguments, mode):
    loss, gradient, metrics = trinity_value(name, arguments, mode)
    expected = evaluate(SAMPLES, loss_mode=name, loss_args=arguments, loss_agg_mode=mode, use_weights=False)
    compare_with_trinity(loss, gradient, metrics, expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"clip_mode": "two-side", "weight": "importance_sampling"},
        {"clip_mode": "one-side", "weight": "advantage", "regularizer": "k2"},
        {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
        {"clip_mode": "ring", "regularizer": "forward-kl"},
    ],
    ids=lambda a: a.get("clip_mode", "none"),
)
def test_trinity_rec(arguments):
    mode = "seq-mean-token-mean" if arguments.get("clip_mode") == "gspo-one-side" else "token-mean"
    loss, gradient, metrics = trinity_value("rec", REC | arguments, mode)
    expected = evaluate(
        SAMPLES,
        loss_mode="rec",
        loss_args=REC | arguments,
        loss_agg_mode=mode,
        use_weights=False,
    )
    assert not arguments or 0 < expected.metrics["actor/pg_clipfrac"] < 1
    compare_with_trinity(loss, gradient, metrics, expected)


def compare_with_trinity(loss, gradient, metrics, expected):
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    for i, s in enumerate(SAMPLES):
        mine = torch.tensor(expected.log_prob_grad[i], dtype=torch.float64)
        torch.testing.assert_close(gradient[i, : s.length], mine, rtol=1e-10, atol=1e-14)
    if "pg_clipfrac" in metrics:
        assert metrics["pg_clipfrac"] == pytest.approx(expected.metrics["actor/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_trinity_dpo_on_one_pair(smoothing):
    """Trinity's dpo sums a micro-batch into one pair, so one pair is where it is right."""
    pair = tuple(s for s in SAMPLES if s.tokens)[:2]
    (log_probs, ref), mask = padded_tensors(pair, "log_probs", "ref_log_prob")
    log_probs.requires_grad_()
    fn = trinity_loss_class("dpo")(backend="verl", beta=0.4, label_smoothing=smoothing)
    loss, _ = fn(logprob=log_probs, ref_log_prob=ref, response_mask=mask)
    loss.backward()
    arguments = {"beta": 0.4, "label_smoothing": smoothing}
    expected = evaluate(pair, loss_mode="dpo", loss_args=arguments)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-12)
    for i, s in enumerate(pair):
        mine = torch.tensor(expected.log_prob_grad[i], dtype=torch.float64)
        torch.testing.assert_close(log_probs.grad[i, : s.length], mine, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("upper", [1.1, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_sampling_metrics(level, upper):
    """verl is right where no sequence is fully masked, at the two levels it has."""
    samples = tuple(s for s in SAMPLES if s.tokens)
    (old, rollout), mask = padded_tensors(samples, "old_log_probs", "rollout_log_probs")
    mask = mask.double()
    _, theirs = compute_rollout_correction_weights(old - rollout, mask, level, upper)
    theirs |= compute_offpolicy_metrics(old, rollout, mask)
    mine = importance_metrics(
        [s.valid(s.old_log_probs) for s in samples],
        [s.valid(s.rollout_log_probs) for s in samples],
        level=level,
        upper=upper,
        lower=1 / upper,
        guard=VERL_GUARD,
    )
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        loose = "fraction" in key
        assert mine[key] == pytest.approx(value, rel=1e-6 if loose else 1e-10, abs=1e-12), key
    assert 0 < mine["rollout_is_ratio_fraction_high"] < 1


def test_importance_sampling_fixture():
    """Log-perplexities 2 and 1 over three tokens, beside a sequence that has no token."""
    metrics = importance_metrics([[-1.0, -2.0, -3.0], []], [[-1.0, -1.0, -1.0], []])
    assert metrics["log_ppl_diff"] == pytest.approx(1.0)
    assert metrics["training_ppl"] == pytest.approx(math.exp(2.0))


def test_the_data_are_ragged_and_the_cuts_complete():
    samples = make_sequences(34)
    assert len({s.length for s in samples}) > 3
    assert any(0 < s.tokens < s.length for s in samples)
    assert sum(not s.tokens for s in samples) == 1
    for how in ("even", "uneven", "dynamic"):
        parts = cut(samples, 8, 4, how)
        assert [len(rank) for rank in parts.ranks] == [8] * 4
    lonely = [m for rank in cut(samples, 8, 4, "uneven").ranks for m in rank if len(m) == 1]
    assert any(samples[m[0]].tokens == 0 for m in lonely)
