"""The recipes for machines with GPUs, run: FSDP's scaled down to a CPU, Megatron's loss through its engine."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from engine_losses import assert_same

pytest.importorskip("verl")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 2


@pytest.mark.parametrize("recipe", ["fsdp_grpo", "dapo", "dr_grpo", "gspo"])
def test_two_steps(recipe, tmp_path):
    from training import Training

    checkpoints = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
    with Training(tmp_path, STEPS, ["+scale=cpu", checkpoints], stall_timeout=1200, recipe=recipe) as training:
        records = list(training.records())
    assert [record["step"] for record in records] == [1, 2]
    said = training.log.read_text()
    assert "trinity_loss: training with EnginePolicyLoss(" in said
    for record in records:
        assert record["actor/grad_norm"] > 0
        assert record["actor/micro_batches"] > 1
        kl = 0.001 * record["actor/kl_loss"] if recipe == "fsdp_grpo" else 0.0
        assert record["actor/pg_loss"] + kl == pytest.approx(record["actor/loss"], rel=1e-4, abs=1e-7)
    # Scores are shares of digits. DAPO takes up to 1 from an answer in the buffer, and only DAPO does.
    assert (min(record["critic/score/min"] for record in records) < 0) is (recipe == "dapo")


def test_megatrons_loss_through_megatrons_engine():
    from verl.workers.utils.losses import ppo_loss

    from trinity_loss.verl.composed import actor_config, compose
    from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases
    from trinity_loss.verl.worker import engine_loss

    recipe = compose(str(RECIPES), "megatron_grpo")
    actor = actor_config(recipe)
    loss = engine_loss(partial(ppo_loss, config=actor))
    whole = EngineCase(loss, batch=BatchSpec(layout="nested"), trinity_worker=True)
    # The recipe's own layout, of which one replica is enough here.
    megatron = recipe.actor_rollout_ref.actor.megatron
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    assert tensor * pipeline > 1
    case = replace(whole, world_size=tensor * pipeline, tensor=tensor, pipeline=pipeline)
    cuts = [replace(case, micro_batches=pieces) for pieces in (1, 2, 4)] + [replace(case, max_tokens=40)]
    whole, *cuts = run_cases("megatron", [whole, *cuts], timeout=900)
    assert [cut.micro_batches for cut in cuts] == [1, 2, 4, 3]
    for cut in cuts:
        assert [rank.layout["tensor"] for rank in cut.ranks] == [2, 2]
        assert_same(cut, whole)
    assert whole.metrics["actor/kl_loss" if "actor/kl_loss" in whole.metrics else "kl_loss"] > 0
