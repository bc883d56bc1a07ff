"""A recorded mini-batch, cut by three token budgets: loss, gradient and every metric of the run, to rounding."""

import json
from collections.abc import Sequence

import pytest
from batches import build, cut, make_sequences
from forms import Form, make_leaves
from oracle import Sample, evaluate

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.cli import main
from trinity_loss.invariance import check_invariance
from trinity_loss.invariance.recorded import load_recording
from trinity_loss.metric_set import finish_metrics
from trinity_loss.recorder import Provenance, Recorder

SAMPLES = make_sequences(12, seed=3)
SETTINGS = {"loss_agg_mode": "prompt-mean", "entropy_coeff": 0.01, "use_kl_loss": True}
CONFIG = LossConfig(**SETTINGS, rollout_metrics="sequence")
PAIRS = tuple(s for s in make_sequences(13, seed=6) if s.tokens)[:12]
BUDGETS = (16, 32, 64)


def record(folder, config: LossConfig, samples: Sequence[Sample], ranks: int = 2) -> None:
    """What the training worker does while it trains, with pairs of answers in each micro-batch."""
    parts = cut(samples, 3, ranks)
    log_probs, entropy = make_leaves(samples)
    for rank, micro_batches in enumerate(build(parts, Form("nested", groups=True))):
        recorder = Recorder(2**20)
        for batch in micro_batches:
            recorder.add({"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}, batch.data)
        recorder.write(folder, Provenance("run", 1, 1, rank, ranks), config)


@pytest.mark.parametrize("mode", ["prompt-mean", "trajectory-mean"])
@pytest.mark.parametrize("loss", [EnginePolicyLoss, TrinityPolicyLoss])
def test_three_token_budgets(loss, mode, tmp_path):
    """The numbers themselves are the oracle's. A local mean, the same loss without its shares, shows in all of them."""
    settings = SETTINGS | {"loss_agg_mode": mode}
    config = LossConfig(**settings, rollout_metrics="sequence")
    record(tmp_path, config, SAMPLES)
    batch = load_recording(tmp_path)
    report = check_invariance(loss(config), batch, (1,), (1, 2), token_budgets=BUDGETS)
    rows = [row for row in report.rows if row.cut.kind == "budget"]
    assert [len(row.cut.ranks) for row in rows] == [1, 2] * 3
    assert len({row.cut.micro_batches for row in rows if len(row.cut.ranks) == 1}) == 3
    errors = [max([row.error, row.metric_error]) for row in rows]
    if loss is TrinityPolicyLoss:
        assert min(errors) > 0.01
        return
    assert max(errors) < 1e-10
    expected = evaluate(SAMPLES, **settings)
    for row in rows:
        assert row.gradients.keys() == {"gradient", "pg", "kl", "entropy"}
        assert row.loss.value == pytest.approx(expected.loss, rel=1e-10)
        found = {name: value.value for name, value in row.metrics.items()}
        finish_metrics(found)
        assert len(found) > 30
        for name, value in expected.metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-10), name


def test_the_command(tmp_path, capsys):
    record(tmp_path, CONFIG, SAMPLES)
    overrides = ["+actor_rollout_ref.actor.policy_loss.loss_agg_mode=prompt-mean"]
    overrides += [f"actor_rollout_ref.actor.{k}={v}" for k, v in {"entropy_coeff": 0.01, "use_kl_loss": True}.items()]
    arguments = ["--batch", str(tmp_path), "--token-budgets", ",".join(map(str, BUDGETS)), "--ranks", "1", *overrides]
    with pytest.raises(SystemExit) as left:
        main(["verify", "--micro-batches", "1", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert not left.value.code
    assert report["loss"] == "ours:vanilla prompt-mean"
    said = [row["cut"] for row in report["rows"] if row["kind"] == "budget"]
    assert [text.partition(", at ")[2] for text in said] == [f"most {n} tokens each" for n in BUDGETS]


def test_pairs_stay_together(tmp_path):
    """dpo: what was recorded says that two answers are one, whoever cuts it."""
    arguments = {"beta": 0.4, "label_smoothing": 0.1}
    config = LossConfig(loss_mode="dpo", loss_args=arguments)
    record(tmp_path, config, PAIRS)
    batch = load_recording(tmp_path)
    assert batch.group_size == 2
    report = check_invariance(EnginePolicyLoss(config), batch, (1, 3), (1, 2), token_budgets=BUDGETS)
    assert report.ok, str(report)
    assert {row.cut.kind for row in report.rows} >= {"even", "uneven", "recorded", "budget"}
    expected = evaluate(PAIRS, loss_mode="dpo", loss_args=arguments)
    assert all(row.loss.value == pytest.approx(expected.loss, rel=1e-10) for row in report.rows)
    with pytest.raises(SystemExit) as left:
        main(["verify", "--loss", "ours:dpo", "--batch", str(tmp_path), "--micro-batches", "1,3", "--ranks", "1"])
    assert not left.value.code
