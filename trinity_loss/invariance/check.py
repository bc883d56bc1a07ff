"""The check itself: every cut measured and compared with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.cuts import Cut, Layout, all_cuts
from trinity_loss.invariance.diagnosis import explain, masked_values, totals_finding
from trinity_loss.invariance.draw import make_mini_batch
from trinity_loss.invariance.engine import LossFn
from trinity_loss.invariance.measure import Subject, describe, variant
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.report import Report
from trinity_loss.invariance.rows import Deviation, Finding, Row, Value
from trinity_loss.loss import TrinityPolicyLoss

#: Largest relative deviation that is taken for rounding, by the type that is computed in.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}
LAYOUTS: tuple[Layout, ...] = ("nested", "padded", "packed")


def check_invariance(
    loss_fn: LossFn,
    batch: MiniBatch | None = None,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    dp_sizes: Sequence[int] = (1, 2, 4),
    seed: int = 0,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    token_budgets: Sequence[int] = (),
    tolerance: float | None = None,
    strict: bool | None = None,
    name: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Cuts a mini-batch every way and compares gradient, reported loss and metrics with the whole.

    The loss is called as verl's engines call it, in every layout that it takes. Deviations are
    taken term by term, since a large term hides a wrong small one.

    Args:
        loss_fn: Any callable of verl's engine contract: called with ``model_output=``, ``data=``, ``dp_group=``,
            it returns a loss and a dictionary of metrics.
        batch: The mini-batch; None: one is drawn in which every wrong denominator shows.
        micro_batches: Numbers of micro-batches per rank.
        dp_sizes: Numbers of data-parallel ranks.
        seed: Of the mini-batch, of the cuts that are drawn, and of losses that draw.
        layouts: Layouts to try: ``nested`` is verl's v1 trainer, ``padded`` its v0 trainer, ``packed`` dense rows
            with ``segment_ids``. A layout that the loss does not take is left out, and the report says so.
        token_budgets: Further cuts by verl's dynamic batch size, with these token budgets.
        tolerance: Largest relative deviation that is taken for rounding; None: that of ``dtype``, 1e-6 in float64
            and 1e-5 in float32.
        strict: Whether metrics that depend on the cut, and NaN at masked tokens, make the loss fail too; None:
            only for the losses of this package. They are reported in any case.
        name: Name of the loss in the report.
        dtype: What everything is computed in.

    Returns:
        The report. :attr:`Report.ok` says whether gradient and reported loss are those of the whole.

    Raises:
        ConfigError: A number of pieces is not positive, or the type is neither float64 nor float32.
        Exception: What the loss raises on the whole mini-batch, where it takes no layout at all.

    Example:
        A loss that averages over its own micro-batch:

        >>> import torch
        >>> def local_mean(*, model_output, data, dp_group):
        ...     ratio = model_output["log_probs"].values() * 1.0
        ...     return ratio.mean(), {}
        >>> report = check_invariance(local_mean, micro_batches=(1, 2), dp_sizes=(1,))
        >>> report.ok, report.findings[0].name
        (False, 'local mean')
    """
    micro_batches, dp_sizes = _numbers("micro_batches", micro_batches), _numbers("dp_sizes", dp_sizes)
    if batch is None:
        batch = make_mini_batch(max(36, max(micro_batches) * max(dp_sizes) + 2), seed)
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype is {dtype!r}; expected torch.float64 or torch.float32")
    batch = batch.to(dtype)
    subject = Subject(loss_fn, batch, tuple(layouts), seed)
    return check_subject(
        subject,
        micro_batches,
        dp_sizes,
        token_budgets=token_budgets,
        tolerance=tolerance,
        strict=isinstance(loss_fn, TrinityPolicyLoss) if strict is None else strict,
        name=name or name_of(loss_fn),
    )


def check_subject(
    subject: Subject,
    micro_batches: Sequence[int],
    dp_sizes: Sequence[int],
    *,
    token_budgets: Sequence[int] = (),
    tolerance: float | None = None,
    strict: bool = False,
    name: str = "",
) -> Report:
    """:func:`check_invariance` of a loss that was tried on its mini-batch already."""
    skipped = list(subject.skipped)
    batch, seed = subject.batch, subject.seed
    tolerance = tolerance or TOLERANCES[batch.log_probs.dtype]
    cuts = all_cuts(batch, micro_batches, dp_sizes, seed, subject.layouts, token_budgets, skipped)
    rows = tuple(measure_row(subject, cut) for cut in cuts)
    return Report(
        loss_name=name,
        rows=rows,
        findings=tuple(_findings(subject, rows, tolerance, strict)),
        skipped=tuple(skipped),
        tolerance=tolerance,
        strict=strict,
        accuracy=_float32_error(subject),
    )


def assert_invariant(loss_fn: LossFn, batch: MiniBatch | None = None, **options: Any) -> Report:
    """For a test suite: raises with the table where :func:`check_invariance` finds a fault.

    Args:
        loss_fn: Any callable of verl's engine contract.
        batch: The mini-batch; None: one is drawn.
        **options: Other arguments of :func:`check_invariance`.

    Returns:
        The report, where all is well.

    Raises:
        AssertionError: The loss depends on the cut; the message holds the table and what is wrong.

    Example:
        >>> def token_mean(*, model_output, data, dp_group):
        ...     losses = -model_output["log_probs"].values()
        ...     return losses.sum() * data["dp_size"] / data["batch_num_tokens"], {}
        >>> assert_invariant(token_mean, micro_batches=(1, 4), dp_sizes=(1, 2)).ok
        True
    """
    report = check_invariance(loss_fn, batch, **options)
    if not report.ok:
        raise AssertionError(f"{report.sentence}\n\n{report}")
    return report


def _numbers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(values))
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        raise ConfigError(f"{name} is {values!r}; expected whole numbers above 0")
    return numbers


def name_of(loss_fn: Any) -> str:
    """What to call a loss in a report."""
    if isinstance(loss_fn, partial):
        return name_of(loss_fn.func)
    named = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    if named is not loss_fn and named.__repr__ is not object.__repr__:
        return repr(loss_fn)
    return f"{named.__module__}.{named.__qualname__}"


def measure_row(subject: Subject, cut: Cut) -> Row:
    """One cut, compared with the whole."""
    reference = subject.whole
    try:
        measured = subject.measure(cut)
    except Exception as error:
        return Row(cut, failure=describe(error))
    failure = None
    if measured.outcome.without_graph:
        failure = "the loss of a micro-batch has no graph: backward raises"
    names = [*reference.outcome.metrics, *(k for k in measured.outcome.metrics if k not in reference.outcome.metrics)]
    nan = float("nan")
    return Row(
        cut,
        gradients={t: Deviation.between(measured.terms[t], gradient) for t, gradient in reference.terms.items()},
        loss=Value(measured.outcome.loss, reference.outcome.loss),
        metrics={
            key: Value(measured.outcome.metrics.get(key, nan), reference.outcome.metrics.get(key, nan)) for key in names
        },
        failure=failure,
    )


def _findings(subject: Subject, rows: Sequence[Row], tolerance: float, strict: bool) -> list[Finding]:
    findings = []
    totals = totals_finding(subject.batch)
    if totals is not None:
        findings.append(totals)
    if any(row.error > tolerance for row in rows):
        findings += explain(subject, rows, tolerance)
    masked = masked_values(subject, tolerance)
    for finding in (masked, metric_finding(rows, tolerance)):
        if finding is not None:
            findings.append(Finding(finding.name, finding.text, counts=strict))
    return findings


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
    return Finding(
        "metric depends on the cut",
        f"{key} reads {value.value:.4g} at {row.cut.label}, {value.whole:.4g} on the whole mini-batch{others}",
    )


def _float32_error(subject: Subject) -> float:
    """Relative difference between float32 and float64 on the whole mini-batch; NaN where there is no float64."""
    if subject.batch.log_probs.dtype != torch.float64:
        return float("nan")
    single = variant(subject.batch, "to", torch.float32)
    try:
        outcome = subject.run(Cut("even", ((tuple(range(single.num_sequences)),),), subject.base), single)
    except Exception:
        return float("nan")
    gradient = torch.cat([outcome.log_prob_gradient, outcome.entropy_gradient])
    return Deviation.between(gradient, subject.whole.terms["gradient"]).error
