"""Audits the first step of the toy run in verl's FSDP2 engine and in its Megatron engine, and shows both verdicts.

Leaves in ``runs/audit/NAME/reports`` of each run the report, as JSON and as a text for an issue, and in
``runs/audit/audit.png`` a figure of both.
Ends with code 1 if a fault is found.

    python recipes/audit.py actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
"""

import argparse
import sys

from rich.console import Console
from rich.markup import escape
from training import ROOT, Training, TrainingFailed

from trinity_loss.invariance.audit_report import AuditReport, load_audit, plot_audits

RECIPES = {"FSDP2": "cpu_grpo", "Megatron": "cpu_megatron"}
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


def audit(name: str, recipe: str, overrides: list[str], console: Console) -> AuditReport:
    """Train one step and return what its audit found."""
    folder = ROOT / "runs" / "audit" / recipe
    report = folder / "reports" / "audit-step-1.json"
    report.unlink(missing_ok=True)
    asked = [f"+{POLICY_LOSS}.audit_steps=[1]", f"+{POLICY_LOSS}.audit_dir={report.parent}"]
    with console.status(f"one step in {name}"), Training(folder, 1, [*asked, *overrides], recipe=recipe) as training:
        list(training.records())
    return load_audit(report)


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of both recipes")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    found = {}
    for name, recipe in RECIPES.items():
        try:
            found[name] = audit(name, recipe, options.overrides, console)
        except TrainingFailed as failure:
            console.print(f"[bold red]training failed in {name}[/]: {escape(str(failure))}", soft_wrap=True)
            return 1
        print(f"{name}, {found[name]}\n")
    plot_audits(list(found.values()), str(ROOT / "runs" / "audit" / "audit.png"))
    for name, report in found.items():
        print(f"{name}: {report.verdict}: {report.sentence}")
    return 0 if all(report.verdict == "faultless" for report in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
