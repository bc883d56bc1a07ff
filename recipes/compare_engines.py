"""Trains the first step with FSDP2 and with Megatron in each of its layouts, and compares what verl reports.

Within one model, all rows have to agree to `TOLERANCE`, relatively; else this ends with code 1. Later steps differ for
reasons that have nothing to do with a loss, see docs/engines.md. The table it prints is Markdown.

    python recipes/compare_engines.py            # about half a minute a row
    python recipes/compare_engines.py pipeline   # the rows whose name contains this, and the first of their model
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import ROOT, Training, TrainingFailed

TOLERANCE = 1e-6
FOLDER = ROOT / "runs" / "engines"
SCORE, LOSS, NORM, PIECES = "critic/score/mean", "actor/loss", "actor/grad_norm", "actor/micro_batches"

_ACTOR = "actor_rollout_ref.actor"
BUDGET = f"{_ACTOR}.ppo_max_token_len_per_gpu"
PADDED = "actor_rollout_ref.model.use_remove_padding=false"
EVEN, DEEP = (f"actor_rollout_ref.model.path=runs/toy/model_{name}" for name in ("even", "deep"))
TENSOR, PIPELINE, VIRTUAL = (
    f"{_ACTOR}.megatron.{name}_model_parallel_size=2" for name in ("tensor", "pipeline", "virtual_pipeline")
)
PER_TOKEN = f"+{_ACTOR}.megatron.override_transformer_config.calculate_per_token_loss=true"


@dataclass(frozen=True)
class Row:
    """One run of one step.

    Attributes:
        name: What it is.
        recipe: A recipe for the CPU.
        overrides: Of Hydra.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What trains it."""
        recipe = "" if self.recipe == "cpu_grpo" else f" RECIPE={self.recipe}"
        return f"make train STEPS=1{recipe}" + (f" ARGS={shlex.quote(' '.join(self.overrides))}" * bool(self.overrides))


def _megatron(name: str, *overrides: str) -> Row:
    return Row(f"Megatron, {name}", "cpu_megatron", overrides)


# By model: the rows of one agree with its first.
ROWS = {
    "model": (
        Row("FSDP2, two data-parallel ranks", "cpu_grpo"),
        Row("FSDP2, 512 tokens a micro-batch", "cpu_grpo", (f"{BUDGET}=512",)),
        Row("FSDP2, padded rows", "cpu_grpo", (PADDED,)),
        _megatron("two data-parallel ranks"),
        _megatron("64 tokens a micro-batch", f"{BUDGET}=64"),
        _megatron("512 tokens a micro-batch", f"{BUDGET}=512"),
        _megatron("padded rows", PADDED),
        _megatron("per-token loss", PER_TOKEN),
        _megatron("two pipeline stages", PIPELINE),
        _megatron("two pipeline stages, per-token loss", PIPELINE, PER_TOKEN),
    ),
    "model_even": (
        Row("FSDP2, 260 tokens", "cpu_grpo", (EVEN,)),
        _megatron("260 tokens, two tensor-parallel ranks", TENSOR, EVEN),
        _megatron("260 tokens, two tensor-parallel ranks, per-token loss", TENSOR, EVEN, PER_TOKEN),
    ),
    "model_deep": (
        Row("FSDP2, four layers", "cpu_grpo", (DEEP,)),
        _megatron("four layers, two stages of two chunks", PIPELINE, VIRTUAL, DEEP),
    ),
}


def first_step(row: Row, folder: Path) -> dict[str, Any]:
    """Train one step of a row in a folder and return what verl reports.

    Raises:
        TrainingFailed: If it does not get there.
    """
    checkpoints = [f"trainer.default_local_dir={folder / 'checkpoints'}"]
    with Training(folder, 1, [*checkpoints, *row.overrides], recipe=row.recipe) as training:
        (record,) = training.records()
    return record


def differences(record: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """Return how far score, loss and gradient norm are from another run's, relatively."""
    return {key: abs(record[key] - first[key]) / abs(first[key]) for key in (SCORE, LOSS, NORM)}


def main(wanted: list[str]) -> int:
    """Print a table, and return 1 if two rows of one model disagree."""
    print("| run | micro-batches | `actor/loss` | `actor/grad_norm` | loss, norm differ | |\n|---|---|---|---|---|---|")
    agree = True
    for rows in ROWS.values():
        chosen = [row for row in rows if all(word in row.name for word in wanted)]
        first: dict[str, Any] | None = None
        for row in dict.fromkeys([rows[0], *chosen] if chosen else []):
            try:
                record = first_step(row, FOLDER / "".join(c if c.isalnum() else "_" for c in row.name))
            except TrainingFailed as failure:
                print(f"\n{row.command}\n{failure}", file=sys.stderr)
                return 1
            first = first or record
            off = differences(record, first)
            agree &= max(off.values()) <= TOLERANCE
            cells = [row.name, f"{record[PIECES]:g}", f"{record[LOSS]:.10f}", f"{record[NORM]:.9f}"]
            cells += [", ".join(f"{off[key]:.0e}" if off[key] else "0" for key in (LOSS, NORM)), f"`{row.command}`"]
            print("| " + " | ".join(cells) + " |", flush=True)
    if not agree:
        print(f"rows of one model differ by more than {TOLERANCE:g}", file=sys.stderr)
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
