"""What is wrong with a loss, in plain sentences; the experiments behind them are in ``causes.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trinity_loss.invariance.causes import causes
from trinity_loss.invariance.cuts import Cut, Layout, whole
from trinity_loss.invariance.measure import Subject, describe, variant
from trinity_loss.invariance.memory import what_it_keeps
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.probe import Cause, with_masked
from trinity_loss.invariance.rows import TERMS, Finding, Row, Value

_RANKS = Cause("rank identity", "{} asks which rank it is on")
_LAYOUT = Cause("layout", "{} is another one in another layout of the same sequences")


def explain(subject: Subject, rows: Sequence[Row], tolerance: float) -> list[Finding]:
    """Findings on gradient and reported loss, the gravest first; never empty where a row is above the tolerance
    and two calls agree.

    Args:
        subject: The loss.
        rows: What was measured.
        tolerance: Largest deviation that is taken for rounding.
    """
    off = [row for row in rows if row.error > tolerance]
    findings = []
    wrong = _wrong_terms(subject, off, tolerance)
    terms = [t for t in subject.whole.terms if t != "gradient"]
    for cause, of in wrong.items():
        everything = len(of) >= len(terms)
        shown = (["gradient"], of) if everything else (of, ["gradient"])
        found = next(filter(None, (_typical(cause, rows, names, tolerance) for names in shown)), None)
        if found is None:
            continue
        row, how = found
        part = "" if everything else f" of the {' and '.join(TERMS[t] for t in of)}"
        who = (
            "the loss"
            if everything
            else f"its {' and '.join(TERMS[t] for t in of)} term".replace("its other terms term", "the rest of it")
        )
        findings.append(Finding(cause.name, f"gradient{part} is {how} at {row.cut.place}: {cause.said_of(who)}"))
    broken = [row for row in off if row.failure or not math.isfinite(row.error)]
    if broken:
        findings.append(_broken(subject, broken[0]))
    reported = [row for row in off if row not in broken]
    if reported and all(row.gradient_error <= tolerance for row in rows):
        row = reported[0]
        text = f"the reported loss is {_two(row.loss)} at {row.cut.place}, though its gradient is right"
        findings.append(Finding("reported loss", text + _few_digits(subject)))
    if off and not findings and subject.noise is None:
        row = max(off, key=lambda row: row.gradient_error)
        term = max(row.gradients, key=lambda t: row.gradients[t].worst)
        tried = "not width, order, the values or the number of other sequences, ranks, or numbers of micro-batches"
        kinds = ", ".join(sorted({row.cut.label for row in off}, key=len)[:3])
        part = "" if term == "gradient" else f" of the {TERMS[term]}"
        text = f"gradient{part} is {_how_wrong(row, term)} at {row.cut.place}, and no experiment says why"
        findings.append(Finding("unexplained", f"{text}: {tried} (off at {kinds})"))
    return findings


def _wrong_terms(subject: Subject, off: Sequence[Row], tolerance: float) -> dict[Cause, list[str]]:
    """The causes, each with the terms it was found in."""
    wrong: dict[Cause, list[str]] = {}
    finite = [row for row in off if row.failure is None and math.isfinite(row.error)]
    kinds = {row.cut.kind for row in finite}
    everything = ["gradient", *(t for t in subject.whole.terms)]
    if finite and subject.noise is None and (subject.remembers or kinds == {"fresh"}):
        return {Cause("state between calls", f"{{}} {what_it_keeps(subject)}"): everything}
    if kinds == {"ranks"}:
        return {_RANKS: everything}
    for term in [t for t in TERMS if t != "gradient"]:
        shown = [row for row in finite if term in row.gradients and row.gradients[term].worst > tolerance]
        if shown:
            plainest = min(shown, key=lambda row: row.cut.micro_batches * len(row.cut.ranks))
            pieces = [rows for rank in plainest.cut.ranks for rows in rank]
            for cause in causes(subject, term, max(row.gradients[term].worst for row in shown), pieces):
                merged = next(((one, both) for one in wrong if (both := one.with_other(cause)) is not None), None)
                if merged is not None:
                    wrong = {merged[1] if one is merged[0] else one: terms for one, terms in wrong.items()}
                wrong.setdefault(cause if merged is None else merged[1], []).append(term)
    worst = max((row.gradient_error for row in finite), default=0.0)
    if not wrong and worst > tolerance:
        everything = list(subject.whole.terms)
        if finite and all(row.cut.layout != subject.base for row in finite):
            return {_LAYOUT: everything}
        # A cut that is not taken apart into terms, or a term that none of them is.
        for term in [name for name in TERMS if name in subject.whole.terms and name != "gradient"]:
            for cause in causes(subject, term, worst):
                wrong.setdefault(cause, []).append(term)
            if wrong and term == "pg":
                return dict.fromkeys(wrong, everything)
    return wrong


def _how_wrong(row: Row, term: str) -> str:
    deviation = row.gradients[term]
    if math.isinf(deviation.ratio):
        return "not 0"
    if deviation.ratio > 1.1:
        return f"{deviation.ratio:.3g} times too large"
    if deviation.ratio < 0.9:
        return f"{1 / deviation.ratio:.3g} times too small" if deviation.ratio else "0"
    return f"{deviation.error:.2g} of its norm off" if deviation.error >= 1 else f"{100 * deviation.error:.2g} % off"


def _typical(cause: Cause, rows: Sequence[Row], terms: list[str], tolerance: float) -> tuple[Row, str] | None:
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
                return row, _how_wrong(row, term)
    return None


def _few_digits(subject: Subject) -> str:
    """That the loss was added up in a type of few digits, where it is a number of that type."""
    totals = [1, *(subject.batch.all_totals[name] for name in ("batch_num_tokens", "global_batch_size"))]
    for value in (torch.tensor(subject.outcome.loss * total, dtype=torch.float64) for total in totals):
        for dtype in (torch.bfloat16, torch.float16):
            if value and torch.allclose(value, value.to(dtype).double(), rtol=1e-12, atol=0.0):
                return f": it is added up in {str(dtype).removeprefix('torch.')}"
    return ""


def _two(value: Value) -> str:
    """Two numbers with as many digits as tell them apart."""
    for digits in (4, 6, 9, 12):
        if f"{value.value:.{digits}g}" != f"{value.whole:.{digits}g}":
            break
    return f"{value.value:.{digits}g}, {value.whole:.{digits}g} on the whole mini-batch"


def _broken(subject: Subject, row: Row) -> Finding:
    """What a cut fails on."""
    missing = _missing_metrics(subject, row) if row.failure is not None and "metric" in row.failure else None
    if missing is not None:
        return Finding("fails on a cut", f"at {row.cut.place}: {missing}, and verl cannot reduce the others")
    empty = _empty_micro_batch(subject)
    valid = [group for group in subject.batch.groups if all(subject.batch.valid_counts[i] for i in group)]
    # What as few valid sequences do too is not for want of a token.
    if empty is not None and _failure(subject, [i for group in valid[:2] for i in group], 1) is None:
        text = f"a micro-batch without a valid token {empty} (as at {row.cut.place})"
        return Finding("empty micro-batch", text)
    where = f"at {row.cut.place}"
    for rows in (rows for rank in row.cut.ranks for rows in rank):
        what = _failure(subject, rows, len(row.cut.ranks))
        if what is not None:
            tokens = sum(subject.batch.valid_counts[i] for i in rows)
            where += f", on a micro-batch of {len(rows)} sequence{'s' * (len(rows) > 1)} and {tokens} valid tokens"
            return Finding("fails on a cut", f"{where}: it {what}")
    return Finding("fails on a cut", f"{where}: {row.failure or 'NaN or infinity'}")


def _missing_metrics(subject: Subject, row: Row) -> str | None:
    """Which metrics a micro-batch of this cut does not emit, in words."""
    for rows in (rows for rank in row.cut.ranks for rows in rank):
        try:
            emitted = subject.run(Cut("even", ((rows,),), subject.base), None, {"dp_size": len(row.cut.ranks)}).metrics
        except Exception:
            return None
        if missing := [name for name in subject.outcome.metrics if name not in emitted]:
            tokens = sum(subject.batch.valid_counts[i] for i in rows)
            return f"a micro-batch with {tokens} valid tokens does not emit {', '.join(missing)}"
    return None


def _empty_micro_batch(subject: Subject) -> str | None:
    """What happens on a micro-batch of masked sequences, None if all is well."""
    batch, rows = with_masked(subject, 3, 2)
    return _failure(subject, rows, 1, batch)


def _failure(subject: Subject, rows: Sequence[int], ranks: int, batch: MiniBatch | None = None) -> str | None:
    """What is wrong with one micro-batch, None if all is well."""
    try:
        outcome = subject.run(Cut("even", ((tuple(rows),),), subject.base), batch, {"dp_size": ranks})
    except Exception as error:
        return f"raises {describe(error)}"
    if outcome.without_graph:
        return "gives a loss without a graph to the log-probs, so that backward raises there or other ranks wait"
    return None if outcome.finite else "gives NaN or infinity"


def not_finite(subject: Subject, what: str = "the whole mini-batch") -> Finding | None:
    """Whether the whole mini-batch gives a number at all."""
    if subject.outcome.finite:
        return None
    valid = [i for i, count in enumerate(subject.batch.valid_counts) if count]
    without = subject.batch.group_size == 1 and len(valid) < subject.batch.num_sequences
    why = ""
    if without and _failure(subject, valid, 1) is None:
        why = ": a sequence without a valid token makes it so"
    return Finding("not finite", f"loss or gradient of {what} is NaN or infinite{why}")


def masked_values(subject: Subject) -> Finding | None:
    """Whether NaN or infinity at masked tokens reaches loss or gradient, and by which field."""
    if not subject.outcome.finite:
        return None
    for value in ("NaN", "infinity"):
        number = math.nan if value == "NaN" else math.inf
        reached = _reached(subject, number, (), subject.layouts)
        if reached is not None:
            names = ["log_probs", "entropy", *subject.batch.token_fields]
            culprits = [name for name in names if _reached(subject, number, (name,), (subject.base,)) is not None]
            where = f" of {', '.join(culprits)}" if culprits else ""
            return Finding("masked NaN", f"{value} at a masked token{where} reaches {reached}")
    return None


def _reached(subject: Subject, number: float, names: tuple[str, ...], layouts: Sequence[Layout]) -> str | None:
    poisoned = variant(subject.batch, "with_masked_tokens_at", number, *names)
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
    healthy = subject.healthy(layout)
    gradient, clean = outcome.gradient, healthy.gradient
    if not torch.allclose(gradient[counted], clean[counted], rtol=1e-6, atol=1e-12 * float(clean.abs().max())):
        return "the gradient"
    if not bool(torch.isfinite(gradient).all()):
        return "the gradient of the masked token itself"
    for key, value in outcome.metrics.items():
        if not math.isfinite(value) and math.isfinite(healthy.metrics.get(key, math.nan)):
            return f"the metric {key}"
    return None


def metric_finding(rows: Sequence[Row], tolerance: float) -> Finding | None:
    """The metric that is furthest from that of the whole, and the names of the others that are off."""
    worst: dict[str, tuple[Row, Value]] = {}
    for row in rows:
        for key, value in row.metrics.items():
            if value.error > tolerance and (key not in worst or value.error > worst[key][1].error):
                worst[key] = (row, value)
    if not worst:
        return None
    key, (row, value) = max(worst.items(), key=lambda item: item[1][1].error)
    others = f" (and {len(worst) - 1} more: {', '.join(k for k in worst if k != key)})" if len(worst) > 1 else ""
    return Finding("metric depends on the cut", f"{key} reads {_two(value)} at {row.cut.place}{others}")


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
