"""What is wrong with a loss, in plain sentences; the experiments behind them are in ``probe.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trinity_loss.invariance.cuts import Cut, Layout, whole
from trinity_loss.invariance.measure import Subject, describe, variant
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.probe import Cause, causes, with_masked
from trinity_loss.invariance.rows import TERMS, Finding, Row


def explain(subject: Subject, rows: Sequence[Row], tolerance: float) -> list[Finding]:
    """Findings on gradient and reported loss, the gravest first.

    Args:
        subject: The loss.
        rows: What was measured.
        tolerance: Largest deviation that is taken for rounding.
    """
    findings = []
    wrong: dict[Cause, list[str]] = {}
    for term in [t for t in TERMS if t in subject.whole.terms and t != "gradient"]:
        if any(term in row.gradients and row.gradients[term].worst > tolerance for row in rows):
            for cause in causes(subject, term):
                wrong.setdefault(cause, []).append(term)
    terms = [t for t in subject.whole.terms if t != "gradient"]
    broken = [row for row in rows if row.failure or not math.isfinite(row.error)]
    for cause, of in wrong.items():
        row, deviation = _typical(cause, rows, of if len(of) < len(terms) else ["gradient"], tolerance)
        if row is None:
            continue
        part = "" if len(of) == len(terms) else f" of the {' and '.join(TERMS[t] for t in of)}"
        who = "the loss" if len(of) == len(terms) else f"its {' and '.join(TERMS[t] for t in of)} term"
        text = f"gradient{part} is {_how_wrong(*deviation)} at {row.cut.label}: {cause.why.format(who)}"
        findings.append(Finding(cause.name, text))
    findings += _broken_findings(subject, broken, bool(wrong))
    gradients_fine = all(row.gradient_error <= tolerance for row in rows)
    off = [row for row in rows if tolerance < row.loss.error < math.inf and not row.failure]
    if off and gradients_fine:
        loss = off[0].loss
        findings.append(
            Finding(
                "reported loss",
                f"the reported loss is {loss.value:.6g} at {off[0].cut.label} and {loss.whole:.6g} on the whole "
                "mini-batch, though its gradient is right",
            )
        )
    return findings


def _how_wrong(ratio: float, error: float) -> str:
    if ratio > 1.1:
        return f"{ratio:.3g} times too large"
    if ratio < 0.9:
        return f"{1 / ratio:.3g} times too small" if ratio else "0"
    return f"{error:.2g} of its norm off" if error >= 1 else f"{error:.1%} off"


def _typical(
    cause: Cause, rows: Sequence[Row], terms: list[str], tolerance: float
) -> tuple[Row | None, tuple[float, float]]:
    """The plainest cut on which the cause shows, and how far off it is there."""

    def rank(row: Row) -> tuple[bool, bool, int, int]:
        ranks = len(row.cut.ranks)
        other_axis = {
            "missing dp_size": ranks == 1,
            "padded width as the norm": row.cut.kind not in ("width", "even"),
            "number of micro-batches": row.cut.engine == "fsdp",
            "order of the sequences": row.cut.kind != "order",
        }.get(cause.name, ranks > 1)
        return other_axis, row.cut.kind != "even", ranks, row.cut.micro_batches

    for row in sorted(rows, key=rank):
        for term in terms:
            deviation = row.gradients.get(term)
            if deviation and math.isfinite(deviation.worst) and deviation.worst > tolerance:
                return row, (deviation.ratio, deviation.error)
    return None, (1.0, 0.0)


def _broken_findings(subject: Subject, broken: Sequence[Row], explained: bool) -> list[Finding]:
    if not broken:
        return []
    empty = _empty_micro_batch(subject)
    if empty is not None:
        text = f"a micro-batch without a valid token {empty} (as at {broken[0].cut.label})"
        return [Finding("empty micro-batch", text)]
    row = broken[0]
    return [Finding("fails on a cut", f"at {row.cut.label}, {row.cut.layout}: {row.failure or 'NaN or infinity'}")]


def _empty_micro_batch(subject: Subject) -> str | None:
    """What happens on a micro-batch of masked sequences, None if all is well."""
    batch, rows = with_masked(subject, 3, 2)
    try:
        outcome = subject.run(Cut("even", ((tuple(rows),),), subject.base), batch)
    except Exception as error:
        return f"raises {describe(error)}"
    if outcome.without_graph:
        return "gives a loss without a graph, so that backward raises there"
    gradients = torch.cat([outcome.log_prob_gradient, outcome.entropy_gradient])
    if not math.isfinite(outcome.loss) or not bool(torch.isfinite(gradients).all()):
        return "gives NaN or infinity"
    return None


def masked_values(subject: Subject, tolerance: float) -> Finding | None:
    """Whether NaN at masked tokens reaches loss or gradient, and by which field."""
    reached = _reached_by_nan(subject, (), subject.layouts)
    if reached is None:
        return None
    names = ["log_probs", "entropy", *subject.batch.token_fields]
    culprits = [name for name in names if _reached_by_nan(subject, (name,), (subject.base,)) is not None]
    where = f" of {', '.join(culprits)}" if culprits else ""
    return Finding("masked NaN", f"NaN at a masked token{where} reaches {reached}")


def _reached_by_nan(subject: Subject, names: tuple[str, ...], layouts: Sequence[Layout]) -> str | None:
    poisoned = variant(subject.batch, "with_nan_at_masked", *names)
    reached = [_reached_in_layout(subject, poisoned, layout) for layout in layouts]
    return next((what for what in reached if what is not None), None)


def _reached_in_layout(subject: Subject, poisoned: MiniBatch, layout: Layout) -> str | None:
    cut = whole(poisoned, layout)
    try:
        outcome = subject.run(cut, poisoned)
    except Exception as error:
        return f"a check that raises {describe(error)}"
    if not math.isfinite(outcome.loss):
        return "the loss"
    counted = (poisoned.response_mask != 0).repeat(2)
    gradient = torch.cat([outcome.log_prob_gradient, outcome.entropy_gradient])
    healthy = subject.healthy(layout)
    clean = torch.cat([healthy.log_prob_gradient, healthy.entropy_gradient])
    if not torch.allclose(gradient[counted], clean[counted], rtol=1e-6, atol=1e-12 * float(clean.abs().max())):
        return "the gradient"
    if not bool(torch.isfinite(gradient).all()):
        return "the gradient of the masked token itself"
    return None


def totals_finding(batch: MiniBatch) -> Finding | None:
    """Whether recorded totals contradict the mini-batch that they were recorded with."""
    wrong = [
        f"{name} is {said}, the mini-batch has {batch.counted_totals[name]} "
        f"(its shares add up to {batch.counted_totals[name] / said if said else math.inf:.4g})"
        for name, said in batch.totals.items()
        if name in batch.counted_totals and said != batch.counted_totals[name]
    ]
    if batch.cut is not None and batch.totals.get("dp_size", len(batch.cut)) != len(batch.cut):
        wrong.append(f"dp_size is {batch.totals['dp_size']}, the mini-batch came from {len(batch.cut)} ranks")
    if not wrong:
        return None
    return Finding("totals that do not describe this mini-batch", "; ".join(wrong))
