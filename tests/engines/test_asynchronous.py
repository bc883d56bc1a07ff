"""verl's asynchronous trainers on a CPU: the loss is ours, and what it reports adds up over every mini-batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAID = "trinity_loss: training with EnginePolicyLoss("


def assert_terms_add_up(record):
    total = record["actor/pg_loss"] - 0.001 * record["actor/entropy_loss"] + 0.001 * record["actor/kl_loss"]
    assert total == pytest.approx(record["actor/loss"], rel=1e-4)
    assert record["actor/micro_batches"] > 1


@pytest.mark.parametrize("override", ["trainer.v1.trainer_mode=colocate_async", "+asynchronous=separate"])
def test_by_one_override(override, tmp_path):
    from training import Training

    overrides = [override, f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]
    with Training(tmp_path, 3, overrides) as training:
        records = list(training.records())
    assert [record["step"] for record in records] == [1, 2, 3]
    assert SAID in training.log.read_text()
    for record in records:
        assert_terms_add_up(record)


def test_one_step_off(tmp_path):
    subprocess.run([sys.executable, RECIPES / "toy" / "task.py", RECIPES.parent / "runs" / "toy"], check=True)
    metrics = tmp_path / "verl.jsonl"
    environment = {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics), "OMP_NUM_THREADS": "1"}
    environment |= {"TQ_NUM_THREADS": "1", "RAY_worker_register_timeout_seconds": "600"}
    command = [sys.executable, "-m", "verl.experimental.one_step_off_policy.main_ppo", "--config-dir", str(RECIPES)]
    command += ["--config-name", "cpu_grpo", "+asynchronous=one_step_off", "trainer.total_training_steps=2"]
    command += [f"trainer.default_local_dir={tmp_path / 'checkpoints'}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    ran = subprocess.run(
        command, cwd=RECIPES.parent, env=os.environ | environment, capture_output=True, text=True, timeout=800
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert SAID in ran.stdout + ran.stderr
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        assert_terms_add_up(record)
