"""Audits in verl's real engines: faults are found and named, faultless runs are found faultless, nothing changes."""

import math
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from audit_losses import OURS, fails_on_rank_one, local_mean, without_dp_size
from audit_runs import AuditResult, AuditRun, audit_all
from torch import nn

from trinity_loss.invariance.audit_report import AuditReport
from trinity_loss.verl.harness import BatchSpec, EngineCase
from trinity_loss.verl.harness.engine_case import EngineError
from trinity_loss.verl.harness.launch import fork_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ONE = EngineCase(OURS, batch=BatchSpec(layout="nested"), micro_batches=2)
TWO = replace(ONE, world_size=2, batch=BatchSpec())
TRAINED = {"steps": 3, "lr": 0.01}
_TEACHER = ("distillation.enabled=True", "distillation.distillation_loss.loss_mode=forward_kl_topk")
DISTILLED = AuditRun(
    replace(TWO, batch=BatchSpec(teacher=5)), bound=(*_TEACHER, "distillation.distillation_loss.topk=5")
)
TAUGHT = replace(
    DISTILLED,
    case=replace(TWO, batch=BatchSpec(teacher=5, taught_alone=True)),
    bound=(*DISTILLED.bound, "distillation.distillation_loss.use_task_rewards=False"),
)

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
    "Trinity-RFT": (AuditRun(TWO, trinity="stock"), "loss", "averages over its own micro-batch's tokens"),
    "faultless, Trinity-RFT scaled": (AuditRun(TWO, trinity="scaled"), "faultless", "rounding (float32)"),
    "faultless, not packed": (AuditRun(replace(ONE, packed=False)), "faultless", "rounding (float32)"),
    "faultless, by tokens": (AuditRun(replace(TWO, max_tokens=64)), "faultless", "rounding (float32)"),
    "faultless, offloaded": (AuditRun(TWO, "offload"), "faultless", "rounding (float32)"),
    "faultless, FSDP1": (AuditRun(TWO, "fsdp1"), "faultless", "in all 5 passes"),
    "faultless, FSDP1, tied": (AuditRun(TWO, "fsdp1 tied"), "faultless", "in all 5 passes"),
    "faultless, FSDP1, LoRA": (AuditRun(TWO, "fsdp1 lora"), "faultless", "in all 5 passes"),
    "faultless, tied": (AuditRun(TWO, "tied"), "faultless", "in all 5 passes"),
    "faultless, LoRA": (AuditRun(TWO, "lora"), "faultless", "in all 5 passes"),
    "faultless, distilled": (DISTILLED, "faultless", "in all 5 passes"),
    "faultless, taught alone": (TAUGHT, "faultless", "in all 5 passes"),
    "faultless, hybrid": (AuditRun(replace(TWO, world_size=4, fsdp_size=2)), "faultless", "in all 3 passes"),
}  # fmt: skip
MEGATRON = {
    "faultless, bf16": (AuditRun(replace(ONE, dtype="bfloat16")), "faultless", "rounding (bfloat16)"),
    "faultless, data parallel": (AuditRun(replace(TWO, distributed_optimizer=True)), "faultless", "(float32)"),
    "faultless, pipeline": (AuditRun(replace(TWO, pipeline=2)), "faultless", "rounding (float32)"),
    "faultless, tensor": (AuditRun(replace(TWO, tensor=2)), "faultless", "rounding (float32)"),
    "faultless, virtual pipeline": (
        AuditRun(replace(TWO, pipeline=2, virtual_pipeline=2)),
        "faultless",
        "in all 4 passes",
    ),
    "faultless, experts over ranks": (AuditRun(TWO, "experts over ranks"), "faultless", "rounding (float32)"),
    "faultless, pipeline, tied": (AuditRun(replace(TWO, pipeline=2), "tied"), "faultless", "rounding (float32)"),
    "faultless, expert bias": (AuditRun(ONE, "expert bias"), "faultless", "rounding (float32)"),
    "dropout": (
        AuditRun(TWO, "dropout in Megatron"),
        "model",
        "dropout or another random layer is on (hidden_dropout 0.1",
    ),
    "capacity": (AuditRun(ONE, "capacity"), "model", "without the capacity of experts they are not"),
    "no num_micro_batch": (AuditRun(ONE, "no num_micro_batch"), "engine", "divides by the number of micro-batches"),
    "router": (AuditRun(ONE, "router loss"), "engine", "without the auxiliary loss of the router it is not"),
}
#: Each with and without an audit.
SAME = {
    "fsdp": (
        AuditRun(TWO, **TRAINED),
        AuditRun(TWO, "offload", **TRAINED),
        AuditRun(TWO, "fsdp1", **TRAINED),
        AuditRun(replace(ONE, dtype="bfloat16"), "dropout", **TRAINED),
        replace(DISTILLED, **TRAINED),
    ),
    "megatron": (
        AuditRun(replace(TWO, distributed_optimizer=True), **TRAINED),
        AuditRun(replace(TWO, distributed_optimizer=True), "offload", **TRAINED),
        AuditRun(replace(TWO, pipeline=2), "expert bias", **TRAINED),
        AuditRun(replace(TWO, tensor=2), **TRAINED),
        AuditRun(replace(TWO, tensor=2), "dropout in Megatron", **TRAINED),
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
    assert first["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
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
    names = ("", ", two ranks", ", not packed", ", by tokens", ", offloaded", ", hybrid")
    same = [fsdp[f"faultless{name}"] for name in names]
    same += [megatron[f"faultless, {layout}"] for layout in ("data parallel", "pipeline", "tensor")]
    groups = [next(iter(result.reports.values()))["runs"][0]["gradient"] for result in same]
    for found in groups[1:]:
        assert found.keys() == groups[0].keys()
        for kind, deviation in found.items():
            assert deviation["norm"] == pytest.approx(groups[0][kind]["norm"], rel=1e-5), kind


def without_audit(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if not key.startswith("audit/")} for step in metrics]


def test_what_cannot_be_made_is_left_out(fsdp, megatron):
    def left_out(result: AuditResult) -> dict[str, str]:
        return dict(result.reports[1]["left_out"])

    hybrid = left_out(fsdp["faultless, hybrid"])
    assert hybrid["half"] == "no smaller micro-batch holds the longest row"
    assert hybrid["single"] == "every micro-batch is one row already"
    # Megatron's schedule wants a multiple of the stages.
    assert left_out(megatron["faultless, virtual pipeline"])["twice"].startswith("AssertionError: micro_batches")


@pytest.mark.parametrize("engine", SAME)
def test_an_audit_changes_nothing(engine):
    """Weights, optimizer, scheduler, buffers, random states, profiler and all numbers of all steps: the same bits."""
    pairs = [replace(run, audited=steps) for run in SAME[engine] for steps in ((1, 3), ())]
    results = audit_all(engine, pairs)
    for audited, plain in zip(results[::2], results[1::2], strict=True):
        assert sorted(audited.reports) == [1, 3]
        assert audited.state == plain.state
        assert without_audit(audited.metrics) == plain.metrics
        assert [any(key.startswith("audit/") for key in step) for step in audited.metrics] == [True, False, True]


#: What fails, on one rank or on all, and words of the warning: the audit is left out.
AUDIT_FAILS = {
    "little memory": (AuditRun(TWO, "little memory"), "bytes of host memory, 1000 are free"),
    "no train mode": (AuditRun(TWO, "no train mode"), "RuntimeError: no room at x"),
    "no shares": (AuditRun(TWO, "no shares"), "RuntimeError: no room at x"),
    "no comparison": (AuditRun(TWO, "no comparison"), "the mini-batch as configured: RuntimeError: no room at x"),
    "no report": (AuditRun(TWO, "no report"), "RuntimeError: no room at x"),
    "engine error at first": (AuditRun(TWO, "engine error at first"), "as configured: RuntimeError: no room at x"),
    "the loss": (AuditRun(TWO, shadow=fails_on_rank_one), "as configured: RuntimeError: a loss that fails at file.py"),
}
#: What fails on one rank in some pass, which pass, and why: the pass is left out.
PASS_FAILS = {
    "full device": (AuditRun(TWO, "full device"), ["twice"], "MemoryError: it takes 5.0 GiB of a device that has 3.6"),
    "no cut": (AuditRun(TWO, "no cut"), ["half"], "RuntimeError: no room at x"),
    "no room for logits": (AuditRun(TWO, "no room for logits"), ["half", "single"], "RuntimeError: no room at x"),
    "engine error": (AuditRun(TWO, "engine error"), ["half", "single"], "RuntimeError: no room at x"),
}


#: The same where Megatron's engine fails on every rank.
DISTRIBUTED = replace(TWO, distributed_optimizer=True)
MEGATRON_FAILS = {
    "engine error at first": (AuditRun(DISTRIBUTED, "engine error at first"), "RuntimeError: no room at x")
}
MEGATRON_PASS_FAILS = {
    "engine error": (AuditRun(DISTRIBUTED, "engine error"), ["half", "single"], "RuntimeError: no room at x"),
}


@pytest.mark.parametrize(
    ("engine", "case", "audit_fails", "pass_fails"),
    [("fsdp", TWO, AUDIT_FAILS, PASS_FAILS), ("megatron", DISTRIBUTED, MEGATRON_FAILS, MEGATRON_PASS_FAILS)],
    ids=["fsdp", "megatron"],
)
def test_an_error_of_its_own_is_a_warning(engine, case, audit_fails, pass_fails):
    """On one rank or on all: training goes on, to the bit as without an audit, and no rank waits for another."""
    fails = [replace(run, **TRAINED) for run, _ in audit_fails.values()]
    in_pass = [replace(run, **TRAINED) for run, _, _ in pass_fails.values()]
    started = time.monotonic()
    plain, *results = audit_all(engine, [AuditRun(case, audited=(), **TRAINED), *fails, *in_pass])
    assert time.monotonic() - started < 250  # A rank would wait for 300 s.
    for (name, (run, words)), result in zip(audit_fails.items(), results, strict=False):
        assert not result.reports, name
        assert len(result.warnings) == 1, name
        assert "audit of step 1 left out, training goes on: " in result.warnings[0], name
        assert words in result.warnings[0], name
        if run.shadow is None:
            assert (result.state, result.metrics) == (plain.state, plain.metrics), name
    for (name, (_, left_out, why)), result in zip(pass_fails.items(), results[len(fails) :], strict=True):
        assert [each for each, _ in result.reports[1]["left_out"]] == left_out, name
        assert all(why in text for _, text in result.reports[1]["left_out"]), name
        assert result.reports[1]["verdict"] == "faultless", name
        assert (result.state, without_audit(result.metrics)) == (plain.state, plain.metrics), name


def test_a_report_that_cannot_be_written_is_in_the_log():
    (result,) = audit_all("fsdp", [AuditRun(ONE, "unwritable")])
    assert result.warnings[0].startswith("audit of step 1 is not written: FileExistsError")
    assert result.metrics[0]["audit/fault"] == 0


def test_the_text_for_an_issue_names_no_machine(fsdp):
    for result in fsdp.values():
        (text,) = result.texts.values()
        assert not re.search(r"(/\w+){2,}", text)
        assert socket.gethostname() not in text
        assert os.path.expanduser("~") not in text


def test_an_engine_that_fails_on_one_rank_ends_the_run():
    """Within the model, where the others wait for this rank in a collective that it never reaches; soon, though."""
    started = time.monotonic()
    with pytest.raises(EngineError, match="EngineFailed: audit of step 1, half: RuntimeError: no room at"):
        audit_all("fsdp", [AuditRun(TWO, "engine error on one rank")])
    # Of 300 s that a rank would wait at most, a few: one second in this run, and ten times the longest pass.
    assert time.monotonic() - started < 120


def flat_shares(use_orig_params: bool) -> dict[str, float]:
    """FSDP1 on two ranks: the norm of each kind of parameter's gradient, and the same of the whole model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from trinity_loss.verl.gradients import Comparison, gradient_shares, joined, parameter_group

    store = os.environ["AUDIT_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
    torch.manual_seed(0)
    parts = {
        "embed": nn.Linear(5, 7),
        "self_attn": nn.Linear(7, 7),
        "mlp": nn.Sequential(nn.Linear(7, 9)),
        "norm": nn.LayerNorm(9),
    }
    whole = nn.Sequential()
    for name, part in parts.items():
        whole.add_module(name, part)
    inputs = torch.randn(2, 4, 5)
    whole(inputs.flatten(0, 1)).pow(3).sum().backward()
    expected: dict[str, float] = {}
    for name, parameter in whole.named_parameters():
        kind = parameter_group(name)
        expected[kind] = math.hypot(expected.get(kind, 0.0), float(parameter.grad.norm()))
        parameter.grad = None
    policy = ModuleWrapPolicy([nn.Sequential])
    module = FullyShardedDataParallel(
        whole, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    (module(inputs[dist.get_rank()]).pow(3).sum() * 2).backward()
    engine = type("Engine", (), {"module": module})()
    shares = gradient_shares(engine)
    comparison = Comparison(sorted(expected))
    for share in shares:
        part = share.read()
        comparison.add(share.group, part, part, share.weight)
    ranks: list[Any] = [None] * 2
    dist.all_gather_object(ranks, comparison)
    found = {name: distance.norm for name, distance in joined(ranks).items()}
    return {name: found[name] / value for name, value in expected.items()}


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_read_by_parameter(use_orig_params, tmp_path, monkeypatch):
    monkeypatch.setenv("AUDIT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    ratios = fork_ranks(partial(flat_shares, use_orig_params), 2, "spawn")
    assert sorted(ratios) == ["attention", "embedding", "mlp", "norms"]
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-5)
