"""`recipes/gpu/check.py` where there is no GPU: it says so, and those of its parts that a CPU can run do."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trinity_loss.verl.harness import EngineCase, EngineResult
from trinity_loss.verl.harness.engine_case import SeenMicroBatch, SeenRank

CHECK = Path(__file__).resolve().parents[2] / "recipes" / "gpu" / "check.py"


def check(*arguments):
    return subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True)


# With CUDA the same call would run all checks, for ten minutes.
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA, and so no such line")
def test_without_cuda_it_says_so_in_a_line():
    done = check()
    assert done.returncode == 2
    assert done.stdout == "no CUDA on this machine: nothing was checked\n"


@pytest.mark.slow
def test_its_parts_run_on_a_cpu():
    done = check("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if " passed " in line or " skipped " in line]
    assert sum(" passed " in line for line in results) == 5
    assert sum("needs CUDA" in line for line in results) == 10


@pytest.fixture
def recipe(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", CHECK)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # Where its dataclasses look for it.
    spec.loader.exec_module(module)
    return module


def seen(lengths, layout=None, **options):
    pieces = tuple(SeenMicroBatch(1, length, length, True, (1, length), False) for length in lengths)
    case = EngineCase("a:b", **options)
    return EngineResult(case, torch.ones(1), (("w", 1),), 0.0, 0.0, {}, (SeenRank(layout or {}, pieces),) * 2, 0.0)


def test_the_error_of_context_parallelism_is_taken_out(recipe):
    assert recipe.too_large(seen([7, 4], sequence_parallel=2, per_token_loss=True)) == pytest.approx(11 / 10)
    assert recipe.too_large(seen([8, 4], sequence_parallel=2, per_token_loss=True)) == 1
    assert recipe.too_large(seen([7, 4], sequence_parallel=2)) == 1


def test_an_option_that_has_no_effect_is_named(recipe):
    results = [seen([7], {"tensor": 1, "pipeline": 2})]
    assert recipe.ignored(results, {"pipeline": 2, "dtype": "bfloat16"}) is None
    assert recipe.ignored(results, {"pipeline": 2, "tensor": 2}) == "tensor is 1, not 2"
