"""What can be added to any loss: the off-policy mask, the unbiased KL."""

import math
from dataclasses import replace

import pytest
import torch
from batches import assert_equals_oracle, cut, make_sequences, poisoned, run, sequence
from forms import LAYOUTS
from oracle import MODES, evaluate
from ours import check, in_mode, oracle_value, run_ours

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.errors import ConfigError
from trinity_loss.kl import KL_TYPES

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_mode = pytest.mark.parametrize("mode", MODES)


def _with_weights(samples):
    """A weight per row in a field that no loss reads unless it is asked to."""
    return tuple(replace(s, rollout_log_probs=(0.25 + 0.5 * (i % 4),) * s.length) for i, s in enumerate(samples))


SAMPLES = _with_weights(make_sequences(11, seed=2))
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
OPTIONS = {
    "off-policy mask": {"off_policy_mask": 0.1},
    "unbiased KL": {**KL, "kl_unbiased": True},
    "both": {"off_policy_mask": 0.05, "kl_unbiased": True, "entropy_coeff": 0.2} | KL,
}


@every_mode
@pytest.mark.parametrize("name", OPTIONS)
def test_on_cuts(name, mode):
    """Micro-batches, one without a token, and ranks, in every layout and mode; masked places hold anything."""
    settings = in_mode(mode, 3.5, use_weights=True) | OPTIONS[name]
    for i, (micro, ranks, how) in enumerate(((3, 1, "uneven"), (1, 2, "dynamic"), (2, 2, "uneven"))):
        layout = LAYOUTS[(i + MODES.index(mode)) % 3]
        got = check(
            settings, cut(poisoned(SAMPLES), micro, ranks, how), layout, expected=SAMPLES, counts=True, poison=True
        )
        assert got.log_prob_grad.abs().max() > 1e-3


@every_layout
@pytest.mark.parametrize("name", OPTIONS)
def test_float32_and_one_batch_alone(name, layout):
    settings = in_mode("seq-mean-token-mean", use_weights=True) | OPTIONS[name]
    check(settings, cut(SAMPLES, 2), layout, 1e-5, dtype=torch.float32, counts=True)
    own = {k: v for k, v in settings.items() if k != "use_weights"}
    alone = run(TrinityPolicyLoss(LossConfig(**own)), cut(SAMPLES), layout)
    assert alone.loss == pytest.approx(oracle_value(SAMPLES, settings).loss, rel=1e-10)


@pytest.mark.parametrize("loss_mode", ["gspo", "gmpo", "cispo", "gpg", "vespo", "luspo", "bypass_mode"])
def test_the_mask_goes_with_any_loss(loss_mode):
    settings = in_mode("token-mean", loss_mode=loss_mode, off_policy_mask=0.1, use_weights=True)
    settings |= {"weight_floor": 1e-10} if loss_mode == "gmpo" else {}
    if loss_mode == "vespo":
        settings["loss_args"] = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    if loss_mode == "bypass_mode":
        no_rejection = {"rollout_rs": None, "rollout_rs_threshold": None}
        settings["loss_args"] = {
            "loss_type": "reinforce",
            "rollout_is": "token",
            "rollout_is_threshold": "2",
        } | no_rejection
    for micro, ranks in ((1, 1), (3, 1), (2, 2)):
        check(settings, cut(SAMPLES, micro, ranks, "uneven"), "nested", counts=True)


@every_layout
def test_the_mask_by_hand(layout):
    """δ 0.5. A bad answer that drifted by 1 weighs 0, but counts; a good one, or one that stayed, weighs 1."""
    gone = sequence(2, log_probs=-2.0, old_log_probs=-1.0, advantages=-1.0)
    good = sequence(1, log_probs=-2.0, old_log_probs=-1.0, advantages=1.0)
    near = sequence(1, log_probs=-1.0, old_log_probs=-1.0, advantages=-1.0)
    empty = sequence(2, mask=[0, 0], log_probs=-9.0, old_log_probs=-1.0, advantages=-1.0)
    settings = in_mode("token-mean", loss_mode="gpg", off_policy_mask=0.5)
    for micro in (1, 2, 4):
        got = run_ours(settings, cut((gone, good, near, empty), micro), layout)
        assert got.loss == pytest.approx((2.0 - 1.0) / 4, rel=1e-12)
        assert got.metrics["actor/off_policy_frac"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_unbiased_kl_of_every_estimator(kind):
    """Value, and gradient through the ratio as well; a clamped ratio does not move."""
    settings = in_mode("token-mean", kl_unbiased=True, kl_loss_type=kind, **KL)
    far = tuple(replace(s, old_log_probs=tuple(x - 25 for x in s.log_probs)) for s in SAMPLES[:3])
    for samples in (SAMPLES, far):
        scale = 1.0 if samples is SAMPLES else math.exp(20)
        expected = evaluate(samples, **settings)
        got = run_ours(settings, cut(samples, 3), "nested")
        assert_equals_oracle(got, expected, samples, 1e-10 * scale)


def test_unbiased_kl_by_hand():
    """k1 of -1 against -1.5 is 0.5; at a ratio of e the value is 0.5 e, its gradient e (1 + 0.5)."""
    one = (sequence(1, log_probs=-1.0, old_log_probs=-2.0, ref_log_prob=-1.5, advantages=0.0),)
    settings = in_mode("token-mean", use_kl_loss=True, kl_loss_coef=1.0, kl_unbiased=True, kl_loss_type="k1")
    got = run_ours(settings, cut(one), "nested")
    assert got.metrics["kl_loss"] == pytest.approx(0.5 * math.e)
    assert got.log_prob_grad.sum().item() == pytest.approx(1.5 * math.e)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kl_unbiased": True}, "use_kl_loss is False"),
        ({"kl_unbiased": "yes"}, "kl_unbiased is 'yes'; expected true or false"),
        ({"off_policy_mask": "0.1"}, "off_policy_mask is '0.1'; expected null or a finite number"),
        ({"off_policy_mask": True}, "off_policy_mask is True"),
        ({"loss_mode": "dpo", "off_policy_mask": 0.1}, "off_policy_mask is 0.1, but 'dpo'"),
        ({"loss_mode": "sft_phi", "loss_args": {"cutoff_prob": 0}}, r"cutoff_prob.*above 0, at most 1"),
        ({"loss_mode": "ipo", "loss_args": {"threshold": 0}}, r"threshold.*above 0"),
        ({"loss_mode": "vespo", "loss_args": {"k_pos": -1}}, r"k_pos.*0 or more"),
    ],
)
def test_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        LossConfig(**settings)
