"""Audits in verl's real engines: faults are found and named, faultless runs are found faultless, nothing changes."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from audit_losses import OURS, fails_on_rank_one, local_mean, without_dp_size
from audit_runs import AuditResult, AuditRun, audit_all

from trinity_loss.invariance.audit_report import AuditReport
from trinity_loss.verl.harness import BatchSpec, EngineCase

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ONE = EngineCase(OURS, batch=BatchSpec(layout="nested"), micro_batches=2)
TWO = replace(ONE, world_size=2, batch=BatchSpec())
TRAINED = {"steps": 3, "lr": 0.01}

#: By name: a run, whose fault it is, and words of the sentence that names it.
FSDP = {
    "faultless": (AuditRun(ONE), "faultless", "rounding (float32)"),
    "faultless, verl's loss": (AuditRun(ONE, shadow=("vanilla", "token-mean")), "faultless", "all 5 passes"),
    "local mean": (AuditRun(ONE, shadow=local_mean), "loss", "averages over its own micro-batch's tokens"),
    "geo_mean": (AuditRun(ONE, shadow=("geo_mean", "token-mean")), "loss", "its own micro-batch's sequences"),
    "padded width": (AuditRun(ONE, shadow=("vanilla", "seq-mean-token-sum-norm")), "loss", "the padded width"),
    "dropout": (AuditRun(ONE, "dropout"), "model", "dropout or another random layer is on (attention_dropout 0.1)"),
    "leak": (AuditRun(ONE, "leak"), "model", "attention leaks between packed sequences"),
    "bf16 reduction": (AuditRun(ONE, "bf16 reduction"), "engine", "reduced or summed in bf16"),
    "faultless, bf16": (AuditRun(replace(ONE, dtype="bfloat16")), "faultless", "rounding (bfloat16)"),
    "faultless, two ranks": (AuditRun(TWO), "faultless", "rounding (float32)"),
    "no dp_size": (AuditRun(TWO, shadow=without_dp_size), "loss", "not multiplied by dp_size"),
    "bf16 reduction, two ranks": (
        AuditRun(replace(TWO, no_sync=False), "bf16 reduction"), "engine", "reduced or summed in bf16",
    ),
}  # fmt: skip
MEGATRON = {
    "faultless, bf16": (AuditRun(replace(ONE, dtype="bfloat16")), "faultless", "rounding (bfloat16)"),
    "faultless, data parallel": (AuditRun(replace(TWO, distributed_optimizer=True)), "faultless", "(float32)"),
    "faultless, pipeline": (AuditRun(replace(TWO, pipeline=2)), "faultless", "rounding (float32)"),
    "faultless, tensor": (AuditRun(replace(TWO, tensor=2)), "faultless", "rounding (float32)"),
    "no num_micro_batch": (AuditRun(ONE, "no num_micro_batch"), "engine", "divides by the number of micro-batches"),
    "router": (AuditRun(ONE, "router loss"), "engine", "without the auxiliary loss of the router it is not"),
}
#: With and without an audit, in pairs.
PAIRS = {
    "fsdp": (AuditRun(TWO, audited=(1, 3), **TRAINED), AuditRun(TWO, audited=(), **TRAINED)),
    "megatron": (
        AuditRun(replace(TWO, distributed_optimizer=True), audited=(1, 3), **TRAINED),
        AuditRun(replace(TWO, distributed_optimizer=True), audited=(), **TRAINED),
        AuditRun(replace(TWO, pipeline=2), "expert bias", audited=(1, 3), **TRAINED),
        AuditRun(replace(TWO, pipeline=2), "expert bias", audited=(), **TRAINED),
    ),
}


def by_name(engine: str, named: dict[str, tuple[AuditRun, str, str]]) -> dict[str, AuditResult]:
    return dict(zip(named, audit_all(engine, [run for run, _, _ in named.values()]), strict=True))


@pytest.fixture(scope="module")
def fsdp() -> dict[str, AuditResult]:
    return by_name("fsdp", FSDP)


@pytest.fixture(scope="module")
def megatron() -> dict[str, AuditResult]:
    return by_name("megatron", MEGATRON)


def assert_found(result: AuditResult, verdict: str, words: str) -> None:
    (report,) = map(AuditReport, result.reports.values())
    assert report.verdict == verdict, str(report)
    assert words in report.sentence, str(report)
    (metrics,) = result.metrics
    assert metrics["audit/fault"] == ("faultless", "loss", "model", "engine").index(verdict)
    # The first pass is the update that was then made.
    first = report.found["runs"][0]
    assert first["loss"] == metrics["loss"]
    assert first["gradient"]["all"]["norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
    assert not result.warnings


@pytest.mark.parametrize("name", FSDP)
def test_in_fsdp(fsdp, name):
    assert_found(fsdp[name], *FSDP[name][1:])


@pytest.mark.parametrize("name", MEGATRON)
def test_in_megatron(megatron, name):
    assert_found(megatron[name], *MEGATRON[name][1:])


def test_all_layouts_have_the_same_gradient(fsdp, megatron):
    """Each element counts once, wherever and how often it is held."""
    same = [fsdp["faultless"], fsdp["faultless, two ranks"]]
    same += [megatron[f"faultless, {layout}"] for layout in ("data parallel", "pipeline", "tensor")]
    groups = [next(iter(result.reports.values()))["runs"][0]["gradient"] for result in same]
    for found in groups[1:]:
        assert found.keys() == groups[0].keys()
        for kind, deviation in found.items():
            assert deviation["norm"] == pytest.approx(groups[0][kind]["norm"], rel=1e-5), kind


def without_audit(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if not key.startswith("audit/")} for step in metrics]


@pytest.mark.parametrize("engine", PAIRS)
def test_an_audit_changes_nothing(engine):
    """Weights, optimizer, scheduler, buffers, random states, and every number of every step have the same bits."""
    results = audit_all(engine, list(PAIRS[engine]))
    for audited, plain in zip(results[::2], results[1::2], strict=True):
        assert sorted(audited.reports) == [1, 3]
        assert audited.state == plain.state
        assert without_audit(audited.metrics) == plain.metrics
        assert [any(key.startswith("audit/") for key in step) for step in audited.metrics] == [True, False, True]


def test_an_audit_that_fails_is_a_warning():
    """A loss that fails on one rank, in the audit alone; a folder that cannot be made."""
    runs = [AuditRun(TWO, shadow=fails_on_rank_one, steps=2), AuditRun(TWO, "unwritable"), AuditRun(TWO)]
    one_rank, unwritable, plain = audit_all("fsdp", runs)
    assert "training goes on: RuntimeError: the mini-batch as configured" in one_rank.warnings[0]
    assert len(one_rank.metrics) == 2
    assert "FileExistsError" in unwritable.warnings[0]
    assert unwritable.metrics[0]["audit/fault"] == 0  # What was found is logged, though it could not be written.
    assert without_audit(unwritable.metrics) == without_audit(plain.metrics)


def test_the_text_for_an_issue_names_no_machine(fsdp):
    for result in fsdp.values():
        (text,) = result.texts.values()
        assert not re.search(r"(/\w+){2,}", text)
        assert socket.gethostname() not in text
        assert os.path.expanduser("~") not in text
