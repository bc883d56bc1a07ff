"""`recipes/gpu/check.py` where there is no GPU: it says so, and those of its parts that a CPU can run do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert sum("needs CUDA" in line for line in results) == 6
