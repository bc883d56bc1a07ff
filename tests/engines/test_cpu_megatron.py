"""verl's own `main_ppo` on a CPU with Megatron: its first step is FSDP2's in every layout."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SEVERAL = {"Megatron, 512 tokens a micro-batch": 2, "FSDP2, 512 tokens a micro-batch": 2}


def cases():
    """Every row with the first of its model."""
    from compare_engines import ROWS

    return [pytest.param(rows[0], row, id=row.name) for rows in ROWS.values() for row in rows[1:]]


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
    """From a row to what verl reports of its first step; each is trained once."""
    from compare_engines import first_step

    done = {}

    def report(row):
        if row not in done:
            done[row] = first_step(row, tmp_path_factory.mktemp("step"))
        return done[row]

    return report


@pytest.mark.parametrize(("first", "row"), cases())
def test_the_first_step_is_the_same(first_steps, first, row):
    from compare_engines import LOSS, NORM, PIECES, TOLERANCE, differences

    whole, record = first_steps(first), first_steps(row)
    assert max(differences(record, whole).values()) < TOLERANCE
    assert abs(record[LOSS]) > 1e-3
    assert record[NORM] > 0.1
    # A layout that verl ignored would not show in the numbers, a budget would here.
    assert record[PIECES] == SEVERAL[row.name] if row.name in SEVERAL else record[PIECES] > 2


def test_the_layout_is_what_the_row_says(first_steps):
    """Pipeline stages and tensor-parallel ranks hold the same rows, so each has about twice as many micro-batches."""
    from compare_engines import PIECES, ROWS

    by_name = {row.name: row for rows in ROWS.values() for row in rows}
    pieces = {name: first_steps(row)[PIECES] for name, row in by_name.items()}
    for name in pieces:
        if "stages" in name or "tensor-parallel" in name:
            assert pieces[name] > 1.5 * pieces["Megatron, two data-parallel ranks"], name
    assert pieces["Megatron, 64 tokens a micro-batch"] > pieces["Megatron, two data-parallel ranks"]


def test_a_resumed_run_repeats_the_numbers(tmp_path):
    from test_train_cpu import METRICS, finish, read_log, start

    options = ("--recipe", "cpu_megatron", "--steps", "4")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    finish(start(whole, *options, "trainer.max_actor_ckpt_to_keep=3"))
    shutil.copytree(whole, resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / "checkpoints" / f"global_step_{step}")
    finish(start(resumed, *options, "--resume"))
    kept, again = read_log(whole), read_log(resumed)
    assert [record["step"] for record in again] == [1, 2, 3, 4]
    # The second step after a checkpoint is the first to see an optimizer that was not restored.
    for key in METRICS:
        for step in (2, 3):
            assert again[step][key] == pytest.approx(kept[step][key], rel=1e-6, abs=1e-9), (key, step + 1)
    assert again[3]["seconds"] != kept[3]["seconds"]
    assert json.loads((resumed / "overrides.json").read_text())
