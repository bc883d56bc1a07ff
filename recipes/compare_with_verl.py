"""Trains the same first steps with the loss of trinity_loss and with verl's own, and compares what verl reports.

Ends with code 1 if the first step's numbers differ by more than `TOLERANCE`, relatively.
"""

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from training import ROOT, Training, TrainingFailed

TOLERANCE = 1e-5
TARGETS = {
    "trinity_loss": "trinity_loss.verl.PolicyLossConfig",
    "verl": "verl.workers.config.PolicyLossConfig",
}
OURS_ALONE = "actor/micro_batches"  # Reported by the loss of trinity_loss and not by verl's.
METRICS = ("critic/score/mean", "actor/loss", "actor/grad_norm")


def train(name: str, steps: int, overrides: list[str], console: Console) -> list[dict[str, Any]]:
    """Return the metrics of each step of one run."""
    target = f"actor_rollout_ref.actor.policy_loss._target_={TARGETS[name]}"
    folder = ROOT / "runs" / "compare" / name
    message = f"training {steps} step(s) with the loss of {name}"
    with console.status(message), Training(folder, steps, [target, *overrides]) as training:
        return list(training.records())


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1, help="steps to train (default: 1)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of recipes/cpu_grpo.yaml")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        ours, theirs = (train(name, options.steps, options.overrides, console) for name in TARGETS)
    except TrainingFailed as failure:
        console.print(f"[bold red]training failed[/]: {escape(str(failure))}", soft_wrap=True)
        return 1
    if OURS_ALONE not in ours[0] or OURS_ALONE in theirs[0]:
        console.print("[bold red]the two runs did not train with the two losses[/]: see runs/compare/*/output.log")
        return 1
    table = Table("step", "metric", *TARGETS, "relative difference")
    first_differences = []
    for mine, verls in zip(ours, theirs, strict=True):
        for key in METRICS:
            difference = abs(mine[key] - verls[key]) / max(abs(mine[key]), abs(verls[key]), 1e-12)
            table.add_row(str(mine["step"]), key, f"{mine[key]:.9g}", f"{verls[key]:.9g}", f"{difference:.1e}")
            if mine["step"] == 1:
                first_differences.append(difference)
    console.print(table)
    if max(first_differences) > TOLERANCE:
        console.print(f"[bold red]the first step differs by more than {TOLERANCE:g}[/]")
        return 1
    console.print(f"the first step agrees to {TOLERANCE:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
