"""``trinity-loss verify --engine``: the command itself, through verl's real engines."""

import json

import pytest
import torch
from engine_losses import TOLERANCE, config

from trinity_loss import EnginePolicyLoss, engine_check
from trinity_loss.cli import main
from trinity_loss.verl.gradients import parameter_group
from trinity_loss.verl.harness import EngineCase, run_cases

pytestmark = pytest.mark.engine

LAYOUTS = {
    "fsdp": {"1 ranks, ", "2 ranks, ", "1 ranks, at most 40 tokens each", "2 ranks, at most 40 tokens each"},
    "megatron": {
        f"{ranks} ranks, {', '.join(filter(None, notes))}"
        for ranks, stages in ((1, ""), (2, ""), (1, "2 pipeline stages"))
        for notes in ((stages, ""), (stages, "per-token loss"))
    },
}


@pytest.fixture
def verify(capsys):
    """Calls the command; returns the exit code and the report."""

    def call(loss, engine, *arguments):
        with pytest.raises(SystemExit) as left:
            main(["verify", "--loss", loss, "--engine", engine, "--json", *arguments])
        return left.value.code or 0, json.loads(capsys.readouterr().out)

    return call


#: Of the toy model's parameters.
GROUPS = {"embedding", "attention", "mlp", "norms", "head"}


@pytest.mark.parametrize("engine", LAYOUTS)
def test_ours_is_the_whole_in_every_layout(verify, engine):
    code, report = verify("ours", engine)
    assert code == 0
    rows = report["rows"]
    seen = {f"{row['ranks']} ranks, " + ", ".join(row["cut"].split(", ")[1 + (row["ranks"] > 1) :]) for row in rows}
    assert seen == LAYOUTS[engine]
    assert max(row["micro_batches"] for row in rows) == 4
    for row in rows:
        errors = [max(d["error"], d["largest"], d["mean"]) for d in row["gradients"].values()]
        errors += [row["loss"]["error"], *(metric["error"] for metric in row["metrics"].values())]
        assert max(errors) <= TOLERANCE
        assert len(row["metrics"]) > 3
        assert set(row["gradients"]) == {"gradient", *GROUPS}


def test_a_local_mean_fails(verify, monkeypatch):
    cases = engine_check._cases
    monkeypatch.setattr(engine_check, "_cases", lambda *arguments: cases(*arguments)[:2])
    code, report = verify("verl:geo_mean", "fsdp")
    assert code == 1
    assert report["findings"][0]["name"] == "local mean"


@pytest.mark.parametrize("engine", LAYOUTS)
def test_a_step_goes_down_the_gradient(engine):
    """By a learning rate, whatever the weights were before; a second one goes elsewhere."""
    loss = EnginePolicyLoss(config("token-mean"))
    once, twice = run_cases(engine, [EngineCase(loss, steps=steps, learning_rate=0.1) for steps in (1, 2)])
    torch.testing.assert_close(once.moved, -0.1 * once.gradient, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(once.gradient, twice.gradient)
    assert float((twice.moved - 2 * once.moved).norm()) > 0.1 * float(once.moved.norm())
    assert set(once.by_group(once.moved, parameter_group)) == GROUPS


@pytest.mark.parametrize(("engine", "loss", "code"), [("fsdp2", "ours", 0), ("megatron", "verl:geo_mean", 1)])
def test_weights_after_some_steps(verify, monkeypatch, engine, loss, code):
    cases = engine_check._cases
    few = slice(0, 3) if engine == "megatron" else slice(None)
    monkeypatch.setattr(engine_check, "_cases", lambda *arguments: cases(*arguments)[few])
    got, report = verify(loss, engine, "--steps", "3")
    assert got == code
    for row in report["rows"]:
        assert set(row["gradients"]) == {"gradient", "weights", *GROUPS}
        assert (row["gradients"]["weights"]["error"] <= TOLERANCE) is (code == 0)
        if code:  # Three steps of it: the weights went too far by about the factor.
            assert row["gradients"]["weights"]["ratio"] == pytest.approx(row["micro_batches"], rel=0.35)
