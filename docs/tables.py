"""Writes the tables of docs/invariance.md from what ``trinity-loss verify --json`` found.

trinity-loss verify --loss ours:all --json > runs/ours.json
trinity-loss verify --loss verl:all --json > runs/verl.json
trinity-loss verify --loss trinity:all --json > runs/trinity.json
python docs/tables.py runs/ours.json runs/verl.json runs/trinity.json > docs/invariance.md
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

HEAD = """# What depends on the cut

Made by `python docs/tables.py`, whose head names the commands. A mini-batch of ragged sequences, with holes in masks
and fully masked ones is cut into micro-batches (even, uneven, by verl's dynamic batch size), dealt to ranks, reordered,
padded to other widths, packed, and scaled as FSDP and as Megatron do, in float64.
"""


def reports(path: str) -> list[dict[str, Any]]:
    """The reports of one call."""
    found = json.loads(Path(path).read_text())
    return found if isinstance(found, list) else [found]


def number(value: Any) -> float:
    """A deviation; what is not finite is written as a word."""
    return float(value) if value is not None else math.nan


def written(error: float) -> str:
    """A cell: plain where it is rounding, bold where it is not."""
    if math.isnan(error):
        return "–"
    return f"{error:.0e}" if error <= 1e-10 else f"**{error:.1%}**" if error < 1e3 else "**∞**"


def worst(report: dict[str, Any]) -> float:
    """The largest relative deviation of any gradient, each term alone, over all cuts."""
    errors = [number(d["error"]) for row in report["rows"] for d in row["gradients"].values()]
    errors += [math.inf for row in report["rows"] if row["failure"]]
    return max((e for e in errors if not math.isnan(e)), default=math.nan)


def gradient_table(found: list[dict[str, Any]]) -> list[str]:
    """Rows are losses, columns are modes."""
    cells = {}
    for report in found:
        loss, _, mode = report["loss"].partition(":")[2].partition(" ")
        cells[loss, mode] = worst(report)
    losses, modes = list(dict.fromkeys(k[0] for k in cells)), list(dict.fromkeys(k[1] for k in cells))
    lines = ["| loss | " + " | ".join(f"`{m}`" for m in modes) + " |", "|---" * (len(modes) + 1) + "|"]
    for loss in losses:
        row = (written(cells.get((loss, mode), math.nan)) for mode in modes)
        lines.append(f"| `{loss}` | " + " | ".join(row) + " |")
    return lines


def metric_errors(found: list[dict[str, Any]]) -> dict[str, float]:
    """Each metric's largest relative deviation over all losses, modes and cuts."""
    worst_of: dict[str, float] = {}
    for report in found:
        if "seq-mean-token-sum-norm/None" in report["loss"]:
            continue
        for row in report["rows"]:
            for key, deviation in row["metrics"].items():
                error = number(deviation["error"])
                if not math.isnan(error):
                    worst_of[key] = max(worst_of.get(key, 0.0), error)
    return worst_of


def main(paths: list[str]) -> None:
    """Prints the page."""
    families = {Path(path).stem: reports(path) for path in paths}
    print(HEAD)
    titles = {"ours": "trinity_loss", "verl": "verl 0.9.1", "trinity": "Trinity-RFT 0.6.0"}
    for family, found in families.items():
        print(f"## Gradient: {titles.get(family, family)}\n")
        print("Largest relative deviation over all cuts, each term alone. `–`: there is no such combination.\n")
        print("\n".join(gradient_table(found)), "\n")
    print("## Metrics\n\nLargest relative deviation of each metric over all losses, modes and cuts.\n")
    columns = {family: metric_errors(found) for family, found in families.items()}
    print("| metric | " + " | ".join(titles.get(f, f) for f in columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for key in sorted({key for errors in columns.values() for key in errors}):
        print(f"| `{key}` | " + " | ".join(written(errors.get(key, math.nan)) for errors in columns.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
