"""``mix`` and ``mix_chord`` through verl's FSDP2 engine: what the worker counts of each kind of rows, and the step."""

import pytest
from engine_losses import TOLERANCE, assert_same, by_label, config, ours

from trinity_loss import TrinityPolicyLoss
from trinity_loss.mixtures import scheduled_weight
from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIX = {"loss_mode": "mix", "loss_args": {"mu": 0.3}}
CHORD = {"mu_warmup_steps": 4, "mu_decay_steps": 8, "mu_peak": 0.5, "mu_valley": 0.1}
MODES = ("token-mean", "seq-mean-token-mean")
NESTED = BatchSpec(layout="nested")


@pytest.fixture(scope="module")
def results():
    """The expert's rows are all on the first rank, and in the last case in one of its micro-batches."""
    cases = [
        EngineCase(TrinityPolicyLoss(config(mode, **MIX)), f"alone {mode}", NESTED, trinity_worker=True)
        for mode in MODES
    ]
    two = {"world_size": 2, "trinity_worker": True}
    for mode in MODES:
        cases.append(EngineCase(ours(mode, **MIX), mode, NESTED, micro_batches=2, **two))
        spec = BatchSpec(expert_rows=(0, 1))
        cases.append(EngineCase(ours(mode, **MIX), f"one-sided {mode}", spec, micro_batches=4, **two))
    for pieces in (1, 2, 4):
        loss = ours(loss_mode="mix_chord", loss_args=CHORD)
        cases.append(EngineCase(loss, "chord", NESTED, micro_batches=pieces, **two))
    alone = [
        EngineCase(TrinityPolicyLoss(config(mode, **MIX)), f"one-sided alone {mode}", spec, trinity_worker=True)
        for mode in MODES
    ]
    return by_label(run_cases("fsdp", [*alone, *cases]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", ["", "one-sided "])
def test_counts_over_ranks_are_those_of_the_whole(results, rows, mode):
    (whole,), (cut,) = results[f"{rows}alone {mode}"], results[f"{rows}{mode}"]
    assert whole.metrics["actor/expert_loss"] > 0
    assert_same(cut, whole)


def test_the_weight_is_that_of_the_step(results):
    """Every case is a step of its engine; four of another loss were there before."""
    cuts = results["chord"]
    for step, cut in enumerate(cuts, start=5):
        mu = scheduled_weight(step, 4, 8, 0.5, 0.1)
        assert cut.metrics["actor/mu"] == pytest.approx(mu)
        parts = (1 - mu) * cut.metrics["actor/pg_loss"] + mu * cut.metrics["actor/expert_loss"]
        parts += 0.1 * cut.metrics["kl_loss"] - 0.01 * cut.metrics["actor/entropy_loss"]
        assert cut.loss == pytest.approx(parts, rel=TOLERANCE)
        for key in ("actor/pg_loss", "actor/expert_loss"):
            assert cut.metrics[key] == pytest.approx(cuts[0].metrics[key], rel=TOLERANCE)
