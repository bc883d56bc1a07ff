"""``trinity-loss verify --engine``: the command itself, through verl's real engines."""

import json

import pytest
from engine_losses import TOLERANCE

from trinity_loss import engine_check
from trinity_loss.cli import main

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

    def call(loss, engine):
        with pytest.raises(SystemExit) as left:
            main(["verify", "--loss", loss, "--engine", engine, "--json"])
        return left.value.code or 0, json.loads(capsys.readouterr().out)

    return call


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


def test_a_local_mean_fails(verify, monkeypatch):
    cases = engine_check._cases
    monkeypatch.setattr(engine_check, "_cases", lambda *arguments: cases(*arguments)[:2])
    code, report = verify("verl:geo_mean", "fsdp")
    assert code == 1
    assert report["findings"][0]["name"] == "local mean"
