"""What a check found: a row per cut, what is wrong by name, one plain sentence, a table, a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from trinity_loss.invariance.contracts import CONTRACTS, Contract
from trinity_loss.invariance.cuts import ENGINE_LAYOUTS
from trinity_loss.invariance.rows import CAUSES, PARTS, TERMS, Deviation, Finding, Row
from trinity_loss.tables import plain_table

_VERSIONS = ("trinity-loss", "verl", "torch", "tensordict")


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        loss_name: The loss.
        rows: A row per cut.
        findings: What is wrong, the gravest first.
        skipped: Cuts that were left out, with the reason.
        tolerance: Largest relative deviation that is taken for rounding.
        strict: Whether metrics and masked values count.
        accuracy: Relative difference of the whole mini-batch's gradient in float32 from float64, which says
            how well the loss computes, not whether the cut matters; NaN where it was not measured.
        contract: Whose engine calls the loss.
    """

    loss_name: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-6
    strict: bool = False
    accuracy: float = math.nan
    contract: Contract = CONTRACTS["verl"]

    @property
    def ok(self) -> bool:
        """Whether the loss passed: every row within the tolerance, and nothing else that counts was found."""
        return self.max_relative_error <= self.tolerance and not any(finding.counts for finding in self.findings)

    @property
    def max_relative_error(self) -> float:
        """Largest deviation of the gradient, of any term's, or of the reported loss, over all cuts."""
        return max((row.error for row in self.rows), default=0.0)

    @property
    def sentence(self) -> str:
        """What was found, in one plain sentence."""
        counting = [finding for finding in self.findings if finding.counts]
        if counting:
            return counting[0].text
        engines = [f"{layout} layout" for layout in ENGINE_LAYOUTS]
        left_out = [label for label, _ in self.skipped if label in engines]
        unknown = (
            f"; nothing is known of the {' and the '.join(left_out)}, which verl's engines send" if left_out else ""
        )
        return (
            f"gradient and reported loss are those of the whole mini-batch in all {len(self.rows)} cuts "
            f"(largest deviation {self.max_relative_error:.1e}){unknown}"
        )

    @property
    def change(self) -> str | None:
        """What to change in the loss, by the first finding that counts; None where there is no general answer."""
        first = next((finding.name for finding in self.findings if finding.counts), None)
        return None if first is None else self.contract.change(first)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON; what is not finite becomes its name."""
        plain = {
            "loss": self.loss_name,
            "ok": self.ok,
            "sentence": self.sentence,
            "change": self.change,
            "contract": self.contract.name,
            "max_relative_error": self.max_relative_error,
            "tolerance": self.tolerance,
            "strict": self.strict,
            "float32_error": self.accuracy,
            "findings": [vars(finding) for finding in self.findings],
            "rows": [row.to_dict() for row in self.rows],
            "skipped": [{"cut": label, "reason": reason} for label, reason in self.skipped],
        }
        named: dict[str, Any] = _name_non_finite(plain)
        return named

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and cells of the table of cuts."""
        names = TERMS | {part: part for part in PARTS}
        terms = [t for t in names if any(t in row.gradients for row in self.rows)]
        if len(terms) == 2:
            terms = terms[:1]  # a single term is the gradient
        headers = ["cut", "layout", "gradient ×", *(f"{names[t]} off" for t in terms), "mean off", "loss off"]
        headers += ["metrics off"]
        cells = []
        for row in self.rows:
            if row.failure is not None:
                cells.append([row.cut.label, row.cut.layout, row.failure, *[""] * (len(terms) + 3)])
                continue
            everything = row.gradients["gradient"]
            cells.append(
                [
                    row.cut.label,
                    row.cut.layout,
                    f"{everything.ratio:.6g}",
                    *(_off(row.gradients.get(t), self.tolerance) for t in terms),
                    _percent(everything.mean, self.tolerance),
                    _percent(row.loss.error, self.tolerance),
                    _percent(row.metric_error, self.tolerance),
                ]
            )
        return headers, cells

    def __str__(self) -> str:
        return "\n".join([*plain_table(*self.table()), "", *self.summary()])

    def summary(self) -> list[str]:
        """The verdict, every finding, and what was left out, a line each."""
        lines = [f"{self.loss_name}: {'ok' if self.ok else 'NOT INVARIANT'}: {self.sentence}"]
        for finding in self.findings:
            said = finding.text == self.sentence
            kind = "fault" if finding.counts else "note"
            lines.append(f"  {kind}: {finding.name}: {CAUSES[finding.name] if said else finding.text}")
        if self.change is not None:
            lines.append(f"  change: {self.change}")
        lines += [f"  left out: {label}: {reason}" for label, reason in self.skipped]
        if not math.isnan(self.accuracy):
            lines.append(f"  accuracy: in float32 the whole mini-batch's gradient is {self.accuracy:.1e} off float64")
        return lines

    def markdown(self) -> str:
        """Verdict, findings, versions and table, to paste into an issue; it names no path."""
        versions = ", ".join(f"{name} {version(name)}" for name in _VERSIONS if find_spec(name.replace("-", "_")))
        headers, cells = self.table()
        lines = [headers, ["---"] * len(headers), *cells]
        table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"**{self.summary()[0]}**", "", *self.summary()[1:], "", *table, "", versions])

    def curve(self, ranks: int, term: str = "gradient") -> dict[int, float]:
        """Gradient norm over that of the whole, by number of micro-batches, for even cuts on so many ranks."""
        points = {1: 1.0} if ranks == 1 else {}
        for row in self.rows:
            if row.cut.kind == "even" and len(row.cut.ranks) == ranks and term in row.gradients:
                points[row.cut.micro_batches] = row.gradients[term].ratio
        return points


def _off(deviation: Deviation | None, tolerance: float) -> str:
    """``mean`` has a column of its own; a cut that is not taken apart has no terms."""
    return "" if deviation is None else _percent(max(deviation.error, deviation.largest), tolerance)


def _percent(error: float, tolerance: float) -> str:
    if math.isinf(error):
        return "broken"
    if error <= tolerance:
        return f"{error:.0e}" if error else "0"
    return f"{error:.2%}" if error >= 1e-3 else f"{100 * error:.2g}%"


def _name_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _name_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_name_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
