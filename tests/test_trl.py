"""``GRPOTrainer._compute_loss`` itself under ``--contract trl``, where TRL is installed.

It is not beside verl, whose engines do not start then: verl 0.9.1 imports a class from where TRL 1.16 no longer has it.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from test_contracts import sequences, token_mean

from trinity_loss.errors import ConfigError
from trinity_loss.invariance import check_invariance, make_mini_batch
from trinity_loss.invariance.contracts import CONTRACTS, Played
from trinity_loss.invariance.cuts import Cut
from trinity_loss.invariance.engine import BoundLoss, run

ROOT = Path(__file__).resolve().parents[1]
VERSION = "1.16.0"


@pytest.mark.slow
def test_in_an_environment_that_has_it(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"trl=={VERSION}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_trl.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


@pytest.fixture
def trl():
    return pytest.importorskip("trl", minversion=VERSION)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"loss_type": "grpo"}, None),
        ({"loss_type": "dapo", "beta": 0.04}, None),
        ({"loss_type": "cispo"}, None),
        ({"loss_type": "dr_grpo"}, None),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, None),
        # A mean over the tokens of a micro-batch, by definition; so is the entropy bonus in every type.
        ({"loss_type": "bnpo"}, "local mean"),
        ({"loss_type": "dapo", "entropy_coef": 0.01}, "local mean"),
        ({"loss_type": "dapo", "top_entropy_quantile": 0.5}, "selection inside the micro-batch"),
    ],
)
def test_its_own_trainer(trl, options, cause, tmp_path):
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **options)
    contract = CONTRACTS["trl"]
    loss_fn = Played(contract, partial(trl.GRPOTrainer, args=args))
    report = check_invariance(BoundLoss("trl", loss_fn, contract=contract), micro_batches=(1, 2, 4), dp_sizes=(1, 2))
    assert report.ok is (cause is None)
    assert [finding.name for finding in report.findings if finding.counts][:1] == ([cause] if cause else [])
    assert not [row.cut for row in report.rows if len({len(rows) for rank in row.cut.ranks for rows in rank}) > 1]


def test_dapo_is_the_mean_over_tokens(trl, tmp_path):
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], loss_type="dapo", epsilon=9.0
    )
    batch = make_mini_batch(12)
    first = torch.tensor(batch.starts[:-1])
    advantages = torch.repeat_interleave(batch.token_fields["advantages"][first], batch.response_lengths)
    batch = batch.with_fields(advantages=advantages)
    log_probs, pieces = sequences(batch, "old_log_probs")
    token_mean(range(12), pieces).backward()
    cut = Cut("even", (((0, 1, 2), (3, 4, 5)), ((6, 7, 8), (9, 10, 11))), "padded")
    played = run(Played(CONTRACTS["trl"], partial(trl.GRPOTrainer, args=args)), batch, cut, worker=False)
    torch.testing.assert_close(played.log_prob_gradient, log_probs.grad, rtol=1e-10, atol=1e-14)


def test_another_class_is_refused(trl):
    with pytest.raises(ConfigError, match="dict is no subclass of trl"):
        Played(CONTRACTS["trl"], dict)
