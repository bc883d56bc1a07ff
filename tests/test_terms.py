"""What can be added to any loss: the off-policy mask, the unbiased KL, likelihood of good answers, weights of rows."""

import inspect
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from batches import assert_equals_oracle, cut, make_sequences, poisoned, run, sequence
from forms import LAYOUTS
from oracle import MODES, POLICY_LOSSES, evaluate
from ours import check, in_mode, oracle_value, run_ours

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.errors import ConfigError, FieldShapeError, FieldValueError, MissingFieldError
from trinity_loss.invariance import check_invariance
from trinity_loss.kl import KL_TYPES

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_mode = pytest.mark.parametrize("mode", MODES)


def _with_weights(samples):
    """A weight per row in a field that no loss reads unless it is asked to."""
    return tuple(replace(s, rollout_log_probs=(0.25 + 0.5 * (i % 4),) * s.length) for i, s in enumerate(samples))


SAMPLES = _with_weights(make_sequences(11, seed=2))
WEIGHTS = {"row_weights": "rollout_log_probs"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
OPTIONS = {
    "off-policy mask": {"off_policy_mask": 0.1},
    "unbiased KL": {**KL, "kl_unbiased": True},
    "likelihood": {"nll_on_positives": 0.4},
    "weights": WEIGHTS | KL | {"entropy_coeff": 0.2},
    "all": {"off_policy_mask": 0.05, "kl_unbiased": True, "nll_on_positives": 0.4, "entropy_coeff": 0.2} | KL | WEIGHTS,
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


@pytest.mark.parametrize("loss_mode", [*POLICY_LOSSES, "bypass_mode"])
def test_the_mask_goes_with_any_loss(loss_mode):
    settings = {"loss_args": POLICY_LOSSES[loss_mode].tried} if loss_mode in POLICY_LOSSES else {}
    settings |= in_mode("token-mean", loss_mode=loss_mode, off_policy_mask=0.1, use_weights=True)
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


@every_layout
def test_likelihood_by_hand(layout):
    """Three tokens of good answers in two micro-batches and none in a third: a mean over those three."""
    samples = (
        sequence(2, log_probs=-1.0, old_log_probs=-1.0, advantages=1.0),
        sequence(3, log_probs=-7.0, old_log_probs=-7.0, advantages=-1.0),
        sequence(1, log_probs=-4.0, old_log_probs=-4.0, advantages=2.0),
    )
    settings = in_mode("seq-mean-token-mean", nll_on_positives=0.5)
    for micro, ranks in ((1, 1), (3, 1), (1, 3)):
        got = run_ours(settings, cut(samples, micro, ranks), layout, counts=True)
        assert got.metrics["actor/nll_on_positives"] == pytest.approx(2.0, rel=1e-12)
        assert got.loss == pytest.approx(0.5 * 2.0 - (1 - 1 + 2) / 3, rel=1e-12)


def test_nothing_is_positive():
    samples = tuple(sequence(2, advantages=-1.0) for _ in range(2))
    got = run_ours(in_mode("token-mean", nll_on_positives=0.5), cut(samples, 2), "nested", counts=True)
    assert got.metrics["actor/nll_on_positives"] == 0.0


def test_likelihood_beside_a_number_that_is_none():
    """A good answer's token without a log-prob weighs 0 and counts, over the mini-batch as in a batch alone."""
    settings = in_mode("token-mean", loss_mode="gpg", nll_on_positives=0.5, nonfinite="neutral")
    nan = sequence(2, log_probs=[-1.0, float("nan")], old_log_probs=-1.0, advantages=1.0)
    samples = (nan, sequence(2, log_probs=-3.0, old_log_probs=-3.0, advantages=1.0))
    alone = run(TrinityPolicyLoss(LossConfig(**settings)), cut(samples), "nested")
    assert alone.metrics["actor/nll_on_positives"] == pytest.approx((1 + 3 + 3) / 4, rel=1e-12)
    for micro in (1, 2):
        got = run_ours(settings, cut(samples, micro), "nested", counts=True)
        assert got.metrics["actor/nll_on_positives"] == pytest.approx((1 + 3 + 3) / 4, rel=1e-12)
        assert got.loss == pytest.approx(alone.loss, rel=1e-12)


FORMS = {
    "[rows]": lambda w: w,
    "[rows, 1]": lambda w: w[:, None],
    "float32": lambda w: w.to(torch.float32),
    "whole": lambda w: (4 * w).to(torch.int64),
    "list": lambda w: w.tolist(),
    "array": lambda w: w.numpy(),
}


class Weighing:
    """A loss whose rows have a weight in that form, beside the same weights per token."""

    def __init__(self, loss, form):
        self.loss, self.form = loss, form

    def __call__(self, *, model_output, data, dp_group):
        values = data["rollout_log_probs"]
        weights = values.values()[values.offsets()[:-1]] if values.is_nested else values[:, 0]
        return self.loss(model_output=model_output, data={**data, "loss_weight": self.form(weights)}, dp_group=dp_group)


@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_for_each_row(form, layout):
    settings = in_mode("seq-mean-token-sum", use_weights=True, **WEIGHTS)
    expected = oracle_value(SAMPLES, settings)
    scale = 4.0 if form == "whole" else 1.0
    loss = Weighing(
        EnginePolicyLoss(LossConfig(loss_agg_mode="seq-mean-token-sum", row_weights="loss_weight")), FORMS[form]
    )
    for micro, ranks in ((1, 1), (3, 1), (2, 2)):
        got = run(loss, cut(SAMPLES, micro, ranks, "uneven"), layout, with_entropy=False)
        assert got.loss == pytest.approx(scale * expected.loss, rel=1e-10)


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
@every_layout
def test_a_weight_that_is_none(layout, bad):
    samples = (*SAMPLES[:2], replace(SAMPLES[2], rollout_log_probs=(bad,) * SAMPLES[2].length))
    assert samples[2].tokens
    loss = EnginePolicyLoss(LossConfig(row_weights="rollout_log_probs"))
    with pytest.raises(FieldValueError, match="rollout_log_probs has a weight that is negative or not finite"):
        run(loss, cut(samples), layout)


def test_weights_that_do_not_fit():
    loss = EnginePolicyLoss(LossConfig(row_weights="loss_weight"))
    with pytest.raises(MissingFieldError, match="'loss_weight'"):
        run(loss, cut(SAMPLES), "nested")
    for form, says in ((lambda w: w[:-1], "loss_weight has shape"), (lambda w: w[:-1].tolist(), "one per row")):
        with pytest.raises(FieldShapeError, match=says):
            run(Weighing(loss, form), cut(SAMPLES), "nested")


@pytest.mark.parametrize("mode", ["token-mean", "trajectory-mean"])
def test_the_instrument_counts_as_the_worker_does(mode):
    """Everything at once over the drawn mini-batch, whose good tokens it counts itself."""
    options = {
        "nll_on_positives": 0.3,
        "off_policy_mask": 0.1,
        "kl_unbiased": True,
        "row_weights": "rollout_is_weights",
    }
    report = check_invariance(EnginePolicyLoss(LossConfig(loss_agg_mode=mode, **KL, **options)))
    assert report.ok
    assert not report.skipped
    assert "actor/nll_on_positives" in report.rows[0].metrics


#: Options of the loss that the oracle does not know, and the test that does.
ELSEWHERE = {
    "distillation": "test_distillation.py",
    **dict.fromkeys(("top_entropy_quantile", "selection_pass", "selection_seed"), "test_selecting_losses.py"),
    **dict.fromkeys(("entropy_agg_mode", "kl_agg_mode"), "test_invariance.py"),
    **dict.fromkeys(("count_padding_rows", "count_rejected_tokens"), "test_invariance.py"),
    "nonfinite": "test_generated.py",
    **dict.fromkeys(("rollout_metrics", "rollout_metrics_upper", "rollout_metrics_lower"), "test_generated.py"),
}


def test_every_option_of_the_loss_is_in_a_test():
    of_the_oracle = set(inspect.signature(evaluate).parameters) - {"samples", "use_weights", "counted"}
    assert {f.name for f in fields(LossConfig)} == of_the_oracle | ELSEWHERE.keys()
    for option, file in ELSEWHERE.items():
        assert option in (Path(__file__).parent / file).read_text(), f"{option} is not in {file}"


def test_weights_that_nobody_asked_for(monkeypatch):
    monkeypatch.setattr("trinity_loss.loss._warned", set())
    loss = Weighing(EnginePolicyLoss(LossConfig()), FORMS["[rows]"])
    with pytest.warns(UserWarning, match="'loss_weight', which nothing reads") as caught:
        run(loss, cut(SAMPLES, 3), "nested")
    assert len([w for w in caught if "loss_weight" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kl_unbiased": True}, "use_kl_loss is False"),
        ({"kl_unbiased": "yes"}, "kl_unbiased is 'yes'; expected true or false"),
        ({"off_policy_mask": "0.1"}, "off_policy_mask is '0.1'; expected null or a finite number, 0 or more"),
        ({"off_policy_mask": -0.1}, "off_policy_mask is -0.1; expected null or a finite number, 0 or more"),
        ({"off_policy_mask": True}, "off_policy_mask is True"),
        ({"nll_on_positives": -1}, "nll_on_positives is -1; expected a finite number, 0 or more"),
        ({"row_weights": 3}, "row_weights is 3; expected null or a name"),
        ({"loss_mode": "dpo", "row_weights": "w"}, "row_weights is 'w', but 'dpo' is no loss per token"),
        ({"loss_mode": "dpo", "off_policy_mask": 0.1}, "off_policy_mask is 0.1, but 'dpo'"),
        ({"loss_mode": "sft_phi", "loss_args": {"cutoff_prob": 0}}, r"cutoff_prob.*above 0, at most 1"),
        ({"loss_mode": "ipo", "loss_args": {"threshold": 0}}, r"threshold.*above 0"),
        ({"loss_mode": "vespo", "loss_args": {"k_pos": -1}}, r"k_pos.*0 or more"),
    ],
)
def test_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        LossConfig(**settings)
