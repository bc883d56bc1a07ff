"""Lines of the package by part, docstrings and blank lines included: ``make lines``."""

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "trinity_loss"
#: How the names of a part's files begin. The first part that fits has the file.
PARTS = {
    "audit of a run": (
        "audit_",
        "trinity_audit",
        "invariance/audit_",
        "verl/audit",
        "verl/gradients",
        "verl/kept_state",
    ),
    "Trinity-RFT": ("trinity_",),
    "selection, trajectories, distillation": (
        *("selection", "selecting_losses", "sequence_groups", "distillation"),
        *("verl/selecting", "verl/distilling", "verl/agreement"),
    ),
    "recorder and shadow": ("recorder", "verl/recording", "verl/shadow", "verl/observer", "verl/diagnostic"),
    "verl on a CPU": ("verl/cpu/", "verl/plugin"),
    "engine harness": ("verl/harness/", "engine_check"),
    "bench": ("bench/",),
    "verify, doctor, command": (
        *("invariance/", "verify", "losses_by_name", "doctor", "cli", "tables", "kept_twice", "verl/composed"),
    ),
    "adapter to verl": ("verl/",),
    "core": ("",),
}


def main() -> None:
    """Prints a line per part, the largest first."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        part = next(part for part, starts in PARTS.items() if name.startswith(starts))
        lines[part] += len(path.read_text().splitlines())
    for part, count in [*lines.most_common(), ("all", lines.total())]:
        print(f"{count:6d}  {part}")


if __name__ == "__main__":
    main()
