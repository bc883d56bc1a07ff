"""A recorded mini-batch gives back the loss and gradient of the run it was recorded in."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import build, cut, make_sequences
from forms import Form, make_leaves

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.errors import ConfigError, MissingFieldError
from trinity_loss.invariance import check_invariance
from trinity_loss.invariance.recorded import load_recording
from trinity_loss.recorder import Provenance, Recorder

CONFIG = LossConfig(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01, use_kl_loss=True)
PARTS = cut(make_sequences(12, seed=3), 3, 2, "uneven")


FROM = Provenance("a run", training_step=3, mini_batch=1, rank=0, ranks=2)


def record(folder, layout: str = "nested", max_bytes: int = 2**20, **other) -> None:
    log_probs, entropy = make_leaves(PARTS.samples)
    for rank, micro_batches in enumerate(build(PARTS, Form(layout))):
        recorder = Recorder(max_bytes)
        for batch in micro_batches:
            recorder.add({"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}, batch.data)
        recorder.write(folder, replace(FROM, rank=rank, **other), CONFIG)


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_replay(layout, tmp_path):
    record(tmp_path, layout)
    batch = load_recording(tmp_path)
    assert [len(rank) for rank in batch.cut] == [len(rank) for rank in PARTS.ranks]
    assert batch.totals["global_batch_size"] == 12
    assert [len(rows) for rank in batch.cut for rows in rank] == [len(rows) for rank in PARTS.ranks for rows in rank]
    report = check_invariance(EnginePolicyLoss(CONFIG), batch=batch, micro_batches=(1, 3), dp_sizes=(1, 2))
    assert report.ok, str(report)
    order = [i for rank in PARTS.ranks for rows in rank for i in rows]
    recorded = batch.log_probs[batch.response_mask != 0].tolist()
    samples = [PARTS.samples[i] for i in order]
    assert recorded == [x for s in samples for x, m in zip(s.log_probs, s.mask, strict=True) if m]
    assert list(batch.uids) == [s.uid for s in samples]


def test_weights_of_rows_are_kept(tmp_path):
    """One number a row in the run, one a token in the recording."""
    config = replace(CONFIG, row_weights="loss_weight")
    log_probs, entropy = make_leaves(PARTS.samples)
    losses = []
    for rank, micro_batches in enumerate(build(PARTS, Form("nested"))):
        recorder = Recorder(2**20, config.row_weights)
        for batch, rows in zip(micro_batches, PARTS.ranks[rank], strict=True):
            batch.data["loss_weight"] = torch.tensor([0.5 + row for row in rows])
            output = {"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}
            recorder.add(output, batch.data)
            losses.append(EnginePolicyLoss(config)(model_output=output, data=batch.data, dp_group=None)[0].item())
        recorder.write(tmp_path, replace(FROM, rank=rank), config)
    report = check_invariance(EnginePolicyLoss(config), batch=load_recording(tmp_path), micro_batches=(1, 3))
    assert report.ok, str(report)
    assert report.rows[0].loss.value == pytest.approx(sum(losses) / 2, rel=1e-10)


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_what_marks_an_experts_rows_is_kept_and_the_step(layout, tmp_path):
    arguments = {"mu_warmup_steps": 4, "mu_peak": 0.5}
    config = LossConfig(loss_mode="mix_chord", loss_args=arguments, loss_agg_mode="seq-mean-token-mean")
    log_probs, entropy = make_leaves(PARTS.samples)
    samples = PARTS.samples
    which = [i for i in range(len(samples)) if i % 3 == 1]
    totals = []
    for kind, rows in (("usual", [i for i in range(len(samples)) if i not in which]), ("expert", which)):
        totals.append((f"batch_num_{kind}_rows", len(rows)))
        totals.append((f"batch_num_{kind}_valid_tokens", sum(samples[i].tokens for i in rows)))
    losses = []
    for rank, micro_batches in enumerate(build(PARTS, Form(layout, counts=True, totals=tuple(totals)))):
        recorder = Recorder(2**20, expert_rows=True)
        for batch, rows in zip(micro_batches, PARTS.ranks[rank], strict=True):
            batch.data["expert_mask"] = torch.tensor([float(row in which) for row in rows])
            batch.data.set_non_tensor("step", 2)
            output = {"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}
            recorder.add(output, batch.data)
            losses.append(EnginePolicyLoss(config)(model_output=output, data=batch.data, dp_group=None)[0].item())
        recorder.write(tmp_path, replace(FROM, rank=rank), config)
    report = check_invariance(EnginePolicyLoss(config), batch=load_recording(tmp_path), micro_batches=(1, 3))
    assert report.ok, str(report)
    assert report.rows[0].loss.value == pytest.approx(sum(losses) / 2, rel=1e-10)


def test_the_configuration_is_saved(tmp_path):
    record(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["loss_agg_mode"] == "seq-mean-token-mean"
    assert LossConfig(**saved) == CONFIG


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    """A full disk while writing: the error names the file, and neither a part nor a temporary file is left."""
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:100])
        raise OSError(28, "No space left on device")  # Without a name, as Python does it.

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*rank-0\.pt"):
        record(tmp_path)
    assert os.listdir(tmp_path) == []


def test_too_large_a_part_is_named_and_left_out(tmp_path):
    with pytest.warns(UserWarning, match="not recorded.*record_max_megabytes"):
        record(tmp_path / "step", max_bytes=10)
    assert not (tmp_path / "step").exists()


def test_a_missing_rank_is_an_error(tmp_path):
    record(tmp_path)
    (tmp_path / "rank-0.pt").unlink()
    with pytest.raises(MissingFieldError, match=r"lacks rank-0\.pt; expected the parts of 2 ranks"):
        load_recording(tmp_path)


def test_one_file_among_several_is_no_mini_batch(tmp_path):
    """Its totals are those of all ranks, so a loss that is right would seem wrong."""
    record(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"one rank's share of a mini-batch of 2 ranks; expected its folder, {tmp_path}"
    ):
        load_recording(tmp_path / "rank-0.pt")
