"""The bench command: what it measures is there, and the losses it measures are the same loss. No times."""

import gc
import json

import psutil
import pytest
import torch

from trinity_loss.bench.cases import GOALS, Case, make_micro_batch
from trinity_loss.bench.cost import measure
from trinity_loss.bench.peers import LOSS_NAMES, make_losses
from trinity_loss.cli import main

TINY = ["bench", "--sequences", "2,5", "--longest", "12", "--fill", "0.5", "--runs", "1"]


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main([*TINY, *arguments])
    return exit.value.code


def test_json_has_every_case_and_cost(capsys):
    modes = "token-mean,seq-mean-token-mean,seq-mean-token-sum,seq-mean-token-sum-norm"
    assert bench("--modes", modes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["cases"]) == 8
    for case in report["cases"]:
        assert {"verl", "ours"} <= set(case["losses"]) <= set(LOSS_NAMES)
        for cost in case["losses"].values():
            assert cost["seconds"] > 0
            assert cost["loss_error"] <= 1e-6
            assert cost["gradient_error"] <= 1e-6
        ours, verl = case["losses"]["ours"], case["losses"]["verl"]
        assert ours["host_reads"] == 1 < verl["host_reads"]
        assert 0 < ours["operations"] < verl["operations"]
        assert ours["peak_bytes"] > 0


def test_table_and_figure(capsys, tmp_path):
    assert bench("--losses", "verl,ours", "--plot", str(tmp_path / "speed.png")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("2×12 fill 0.5" in line for line in lines) == 1
    assert any("B/token" in line for line in lines)
    assert (tmp_path / "speed.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "mine"], "--losses takes"),
        (["--fill", "1.5"], "no list of numbers above 0 and up to 1"),
        (["a.b=c"], "is a Hydra override"),
    ],
)
def test_wrong_calls_say_what_is_wrong(arguments, message, capsys):
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("case", [*GOALS, Case(512, 64, 0.3, masked_rows=7), Case(1, 100, 1.0)])
def test_lengths_are_what_the_case_says(case):
    lengths = case.lengths(seed=0)
    assert len(lengths) == case.sequences
    assert lengths.min() >= 1
    assert lengths.max() == case.longest
    assert lengths.sum().item() == pytest.approx(case.fill * case.sequences * case.longest, rel=0.02)


def test_masked_rows_change_no_value():
    """The bench compares their cost; they are there, and none of their tokens counts."""
    batch = make_micro_batch(Case(3, 20, 0.5, masked_rows=4))
    assert len(batch.offsets) == 8
    assert batch.data["response_mask"].values().sum() == batch.num_tokens


def test_memory_and_operations_follow_the_tokens_that_count(request):
    """Not the longest response, nor rows without a token, nor the number of sequences."""
    # With several threads a sum calls itself once per thread, which the profiler counts.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))

    def cost(case):
        result = measure(case, {"ours": make_losses(["ours"])["ours"]("token-mean")}, runs=1)
        ours = result.costs["ours"]
        return ours.peak_bytes / result.num_tokens, ours.operations, ours.traffic_bytes / result.num_tokens

    base, operations, moved = cost(Case(16, 2000, 0.5))
    # What must be read and written at least: six vectors and two gradients.
    assert 29 < moved < 1000
    for same in (Case(16, 4000, 0.25), Case(160, 2000, 0.5), Case(1, 16000, 1.0), Case(512, 32, 1.0)):
        bytes_per_token, count, moved_here = cost(same)
        assert bytes_per_token == pytest.approx(base, rel=0.05)
        # The gradients cover the prompts too, of 160 tokens each.
        assert moved_here - moved < 60 * same.sequences * 160 / (same.sequences * same.longest * same.fill)
        # A sum of many numbers is made of two operations more.
        assert abs(count - operations) <= 4
    # 16 tokens each that do not count: a tenth more.
    assert cost(Case(16, 2000, 0.5, masked_rows=100))[0] == pytest.approx(1.1 * base, rel=0.05)


def test_a_loss_that_differs_is_reported():
    case = Case(3, 20, 0.5)

    def double(*, model_output, data):
        return 2 * model_output["log_probs"].values().sum() + model_output["entropy"].values().sum(), {}

    def single(*, model_output, data):
        return model_output["log_probs"].values().sum() + model_output["entropy"].values().sum(), {}

    assert measure(case, {"single": single, "same": single}, runs=1).agrees
    assert not measure(case, {"single": single, "double": double}, runs=1).agrees


def test_calls_leave_no_memory():
    """A thousand calls after two hundred: the process is as large as before."""
    loss_fn, batch = make_losses(["ours"])["ours"]("token-mean"), make_micro_batch(Case(8, 64, 0.5))

    def call(times):
        for _ in range(times):
            loss, _ = loss_fn(model_output=batch.model_output(), data=batch.data)
            loss.backward()
        gc.collect()
        return psutil.Process().memory_info().rss

    before = call(200)
    # Four kilobytes left by each call, one vector of its tokens, would be more.
    assert call(1000) - before < 4000 * 1024


def test_one_and_many_sequences_cost_the_same_per_token(monkeypatch):
    """What 512 sequences cost more is the prompts that come with them: with hardly any, the same bytes are moved."""
    monkeypatch.setattr("trinity_loss.bench.cases.SHORTEST_PROMPT", 2)
    monkeypatch.setattr("trinity_loss.bench.cases.LONGEST_PROMPT", 4)
    losses = {"ours": make_losses(["ours"])["ours"]("token-mean")}
    one, many = (measure(case, losses, runs=1).costs["ours"] for case in (Case(1, 65536, 1.0), Case(512, 128, 1.0)))
    assert many.traffic_bytes == pytest.approx(one.traffic_bytes, rel=0.01)
