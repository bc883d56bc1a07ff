"""Sessions of one to four rows through verl's whole trainer: `recipes/cpu_trajectories.yaml`."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ONE_ROW = "actor_rollout_ref.rollout.agent.default_agent_loop=sessions_in_one_row"
MEAN_OVER_ROWS = "actor_rollout_ref.actor.policy_loss.loss_agg_mode=seq-mean-token-mean"


def first_step(folder, *overrides):
    """The metrics of the first step, and how many rows its 32 sessions had."""
    from training import Training

    given = [f"trainer.default_local_dir={folder / 'checkpoints'}", *overrides]
    with Training(folder, 1, given, stall_timeout=1200, recipe="cpu_trajectories") as training:
        (record,) = training.records()
    log = training.log.read_text()
    assert "trinity_loss: training with EnginePolicyLoss(" in log
    return record, int(re.search(r"Upsampled batch from (\d+) to 128", log)[1])


def test_the_rows_of_a_session_are_no_concern_of_the_gradient(tmp_path):
    split, rows = first_step(tmp_path / "split")
    whole, sessions = first_step(tmp_path / "whole", ONE_ROW)
    assert sessions == 32 < rows
    assert split["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-6)
    for name in ("actor/loss", "actor/pg_loss", "actor/entropy_loss", "actor/kl_loss"):
        assert split[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name
    over_rows, _ = first_step(tmp_path / "rows", MEAN_OVER_ROWS)
    assert abs(over_rows["actor/grad_norm"] / whole["actor/grad_norm"] - 1) > 0.05
