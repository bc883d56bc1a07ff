"""Lines of the package by part, docstrings and blank lines included: ``make lines``, or ``ARGS=`` and a commit."""

import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
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
    "recorder and shadow": (
        *("recorder", "recording", "verl/recording", "verl/shadow"),
        *("verl/observer", "verl/diagnostic"),
    ),
    "verl on a CPU": ("verl/cpu/", "verl/plugin"),
    "engine harness": ("verl/harness/", "engine_check"),
    "bench": ("bench/",),
    "verify, doctor, command": (
        *("invariance/", "verify", "losses_by_name", "candidates", "doctor", "cli", "tables", "kept_twice"),
        "verl/composed",
    ),
    "adapter to verl": ("verl/",),
    "core": ("",),
}


def files(commit: str | None) -> Iterator[tuple[str, str]]:
    """Names and texts of the package as it is, or as it was at a commit."""
    if commit is None:
        yield from ((str(path.relative_to(PACKAGE)), path.read_text()) for path in PACKAGE.rglob("*.py"))
        return
    command = ["git", "archive", commit, PACKAGE.name]
    done = subprocess.run(command, cwd=PACKAGE.parent, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)):
                yield member.name.removeprefix(f"{PACKAGE.name}/"), file.read().decode()


def main(commit: str | None = None) -> None:
    """Prints a line per part, the largest first."""
    lines: Counter[str] = Counter()
    for name, text in files(commit):
        part = next(part for part, starts in PARTS.items() if name.startswith(starts))
        lines[part] += len(text.splitlines())
    for part, count in [*lines.most_common(), ("all", lines.total())]:
        print(f"{count:6d}  {part}")


if __name__ == "__main__":
    main(*sys.argv[1:])
