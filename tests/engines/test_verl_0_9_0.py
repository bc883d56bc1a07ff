"""The older of the two versions of verl that are declared, in an environment of its own over the one of the tests.

The selection, the recipes, one FSDP2 run and two steps of ``main_ppo`` in both engines run with it as they do with the
newer one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.9.0"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What makes a process find that version of verl, the rest as it is installed."""
    folder = tmp_path_factory.mktemp("verl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"verl=={VERSION}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    found = run("-c", "import verl, importlib.metadata as m; print(verl.__version__, m.version('verl'))", changed)
    assert found.split() == [VERSION, VERSION]
    return changed


def run(*arguments):
    *command, environment = arguments
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    "tests",
    [
        ["tests/test_selection.py", "tests/test_worker.py", "tests/test_doctor.py", "tests/test_compat.py"],
        ["tests/test_recipes.py", "tests/test_trinity_verl_0_9.py"],
        ["tests/engines/test_one_run.py", "-k", "fsdp"],
    ],
    ids=["selection", "recipes", "fsdp2"],
)
def test_the_same_tests_pass(environment, tests):
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, environment)
    assert " passed" in said


@pytest.mark.parametrize("recipe", ["cpu_grpo", "cpu_megatron"])
def test_main_ppo_trains(environment, tmp_path, recipe):
    options = ["--recipe", recipe, "--steps", "2", "--folder", tmp_path / "run"]
    said = run("recipes/train_cpu.py", *options, environment)
    assert "step   2/2  score" in said
    assert "trinity_loss EnginePolicyLoss" in said
