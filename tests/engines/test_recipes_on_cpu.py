"""The recipes for machines with GPUs, scaled down to a CPU and run."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 2


@pytest.mark.parametrize("recipe", ["fsdp_grpo", "dapo", "dr_grpo", "gspo", "megatron_grpo"])
def test_two_steps(recipe, tmp_path):
    from training import Training

    scale = "cpu_megatron" if recipe == "megatron_grpo" else "cpu"
    overrides = [f"+scale={scale}", f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]
    with Training(tmp_path, STEPS, overrides, stall_timeout=1200, recipe=recipe) as training:
        records = list(training.records())
    assert [record["step"] for record in records] == [1, 2]
    said = training.log.read_text()
    assert "trinity_loss: training with EnginePolicyLoss(" in said
    for record in records:
        assert record["actor/grad_norm"] > 0
        assert record["actor/micro_batches"] > 1
        kl = 0.001 * record["actor/kl_loss"] if recipe in ("fsdp_grpo", "megatron_grpo") else 0.0
        assert record["actor/pg_loss"] + kl == pytest.approx(record["actor/loss"], rel=1e-4, abs=1e-7)
    # Scores are shares of digits. DAPO takes up to 1 from an answer in the buffer, and only DAPO does.
    assert (min(record["critic/score/min"] for record in records) < 0) is (recipe == "dapo")
