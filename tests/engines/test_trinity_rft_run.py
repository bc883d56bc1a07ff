"""`make trinity-rft`: Trinity-RFT's own trainer under Ray, with two FSDP2 ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_loss.invariance.audit_report import load_audit

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "recipes" / "trinity_rft_cpu"))

from train import read_metrics  # noqa: E402

#: make ends with 2, whatever the code of what it runs.
FAILED = 1 if os.environ.get("TRINITY_RFT_PYTHON") else 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def trinity_rft(folder, *arguments):
    """Run the recipe; TRINITY_RFT_PYTHON is the Python of an environment that is made already."""
    made = os.environ.get("TRINITY_RFT_PYTHON")
    call = [*arguments, "--folder", str(folder)]
    script = "recipes/trinity_rft_cpu/train.py"
    command = (
        [made, script, *call] if made else ["make", "trinity-rft", f"ARGS={' '.join(call)}", f"PYTHON={sys.executable}"]
    )
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_stock_gradient_grows_and_the_scaled_one_does_not(tmp_path):
    run = trinity_rft(tmp_path, "--micro-batches", "1", "4", "--steps", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    norms = [float(line.split("gradient norm")[1].split()[0]) for line in run.stdout.splitlines() if "  loss " in line]
    assert len(norms) == 4
    assert norms[1] > 3 * norms[0]
    assert norms[3] == pytest.approx(norms[2], rel=1e-5)
    assert "metrics agree" in run.stdout
    assert (tmp_path / "gradient_norm.png").stat().st_size > 10_000


def test_with_megatron(tmp_path):
    megatron = ("trainer.trainer_strategy=megatron", "--losses", "adapter", "--micro-batches", "1", "4")
    run = trinity_rft(tmp_path, *megatron)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "metrics agree" in run.stdout
    assert "gradient norm 0.39366" in run.stdout  # FSDP2's, on the same experiences.


@pytest.mark.parametrize("algorithm", ["dpo", "mix", "mix_chord", "rec", "sft", "sft_is", "sft_phi"])
def test_other_losses_do_not_depend_on_the_micro_batches(tmp_path, algorithm):
    run = trinity_rft(tmp_path, "--losses", "adapter", "--algorithm", algorithm, "--micro-batches", "1", "4")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "metrics agree" in run.stdout


def test_it_fails_when_training_fails_though_trinity_run_ends_with_0(tmp_path):
    """A row of 60 tokens does not fit into 20."""
    run = trinity_rft(
        tmp_path, "--losses", "stock", "--micro-batches", "4", "--steps", "1", "trainer.max_token_len_per_gpu=20"
    )
    assert run.returncode == FAILED
    assert "training failed: trinity run ended with code 0" in run.stdout
    assert "max_token_len" in run.stdout


def test_what_cannot_be_exact_is_refused_before_anything_starts(tmp_path):
    run = trinity_rft(
        tmp_path, "buffer.train_batch_size=6", "--losses", "adapter", "--algorithm", "dpo", "--micro-batches", "4"
    )
    assert run.returncode == FAILED
    assert "buffer.train_batch_size is 6 on 2 data-parallel ranks, which takes pairs of DPO apart" in run.stdout
    assert "init_model" not in (tmp_path / "dpo-adapter-4" / "output.log").read_text()


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_its_run_is_audited(tmp_path, algorithm, monkeypatch):
    monkeypatch.setenv("TRINITY_LOSS_AUDIT_STEPS", "1,2")
    monkeypatch.setenv("TRINITY_LOSS_AUDIT_DIR", str(tmp_path / "audits"))
    run = trinity_rft(tmp_path, "--losses", "adapter", "--algorithm", algorithm, "--micro-batches", "4")
    assert run.returncode == 0, run.stdout + run.stderr
    log = (tmp_path / f"{algorithm}-adapter-4" / "output.log").read_text()
    for step in (1, 2):
        report = load_audit(tmp_path / "audits" / f"audit-step-{step}.json")
        assert report.verdict == "faultless", str(report)
        assert report.found["replay"]["ok"]
        assert "ScaledTrinityPolicyLoss" in report.found["loss"]
        assert f"audit of step {step}: FAULTLESS" in log
    # Not of the log: Ray does not always bring the last step's line before it ends.
    metrics = read_metrics(tmp_path / f"{algorithm}-adapter-4")
    assert [step["actor/audit/fault"] for step in metrics] == [0, 0]
