"""The check itself: every cut measured and compared with the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import torch

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.contracts import CONTRACTS, Contract
from trinity_loss.invariance.cuts import Cut, Layout, all_cuts, even, whole
from trinity_loss.invariance.diagnosis import explain, masked_values, metric_finding, not_finite, totals_finding
from trinity_loss.invariance.draw import make_mini_batch, special_mini_batches, with_extra_fields, with_teacher
from trinity_loss.invariance.engine import BoundLoss, LossFn
from trinity_loss.invariance.measure import Subject, describe, is_ours, variant
from trinity_loss.invariance.memory import reads_the_clock, what_it_keeps
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.ranks import CollectiveError, as_rank
from trinity_loss.invariance.report import Report
from trinity_loss.invariance.rows import Deviation, Finding, Row, Value
from trinity_loss.rules import BOOLEAN, COUNT, NOT_NEGATIVE, Rule, check, list_of, number, one_of, optional

#: Largest relative deviation that is taken for rounding, by the type that is computed in.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}
LAYOUTS: tuple[Layout, ...] = ("nested", "padded", "packed")
_WHOLE = number("a whole number above 0", lambda value: isinstance(value, int) and value > 0)


def check_invariance(
    loss_fn: LossFn | BoundLoss,
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
    dtype: torch.dtype | None = None,
    special: bool | None = None,
) -> Report:
    """Cuts a mini-batch every way and compares gradient, reported loss and metrics with the whole.

    The loss is called as verl's engines call it, in every layout that it takes. Deviations are
    taken term by term, since a large term hides a wrong small one.

    Args:
        loss_fn: Any callable of verl's engine contract: called with ``model_output=``, ``data=``, ``dp_group=``,
            it returns a loss and a dictionary of metrics; or one that was bound by name
            (:func:`trinity_loss.losses_by_name.bind_loss`).
        batch: The mini-batch; None: one is drawn in which every wrong denominator shows, and then some that are
            special.
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
        dtype: What everything is computed in; None: float64, or what the loss's contract asks for.
        special: Whether special mini-batches are tried too; None: where ``batch`` is None.

    Returns:
        The report. :attr:`Report.ok` says whether gradient and reported loss are those of the whole.

    Raises:
        ConfigError: A number of pieces is not positive, the type is neither float64 nor float32, or the
            mini-batch cannot be cut.
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
    bound = loss_fn if isinstance(loss_fn, BoundLoss) else BoundLoss(name_of(loss_fn), loss_fn)
    contract = bound.contract
    if special is None:
        special = batch is None
    if batch is None:
        batch = drawn_for(bound, micro_batches, dp_sizes, seed)
    if bound.group_size > 1:
        batch = replace(batch, group_size=bound.group_size)
    if bound.fields:
        batch = with_extra_fields(batch, bound.fields)
    if dtype is None:
        dtype = getattr(torch, contract.dtype)
    if contract.equal_rows and token_budgets:
        raise ConfigError(f"token_budgets has no effect with the contract {contract.name}: its pieces have equal rows")
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype is {dtype!r}; expected torch.float64 or torch.float32")
    for field, value, rule in (
        ("seed", seed, COUNT),
        ("tolerance", tolerance, optional(NOT_NEGATIVE)),
        ("strict", strict, optional(BOOLEAN)),
        ("special", special, optional(BOOLEAN)),
        ("token_budgets", token_budgets, list_of(_WHOLE)),
        ("layouts", layouts, list_of(one_of(*LAYOUTS))),
    ):
        check(field, value, rule)
    if len(batch.groups) < 2:
        raise ConfigError(
            f"the mini-batch holds {batch.num_sequences} sequence{'s that stay together' * (batch.num_sequences > 1)}: "
            "it cannot be cut, and so proves nothing"
        )
    return check_subject(
        Subject(
            bound.loss_fn,
            batch.to(dtype),
            tuple(layout for layout in contract.layouts if layout in layouts) or contract.layouts,
            seed,
            bound.fresh,
        ),
        micro_batches,
        dp_sizes,
        token_budgets=token_budgets or bound.token_budgets,
        tolerance=tolerance,
        strict=is_ours(bound.loss_fn) if strict is None else strict,
        name=name or bound.name,
        special=special,
        contract=contract,
    )


def drawn_for(
    bound: BoundLoss, micro_batches: Sequence[int], dp_sizes: Sequence[int], seed: int = 0, *, at_least: int = 36
) -> MiniBatch:
    """The mini-batch that is drawn for these cuts: none is left out for want of sequences.

    Args:
        bound: The loss.
        micro_batches: As in :func:`check_invariance`, and so are the next two.
        dp_sizes: Likewise.
        seed: Likewise.
        at_least: Sequences.
    """
    if bound.contract.equal_rows:
        sequences = multiple = lcm(bound.group_size, 8, *(m * d for m in micro_batches for d in dp_sizes))
    else:
        sequences, multiple = max(at_least, max(micro_batches) * max(dp_sizes) + 2), bound.group_size
    return with_teacher(make_mini_batch(sequences + -sequences % multiple, seed), bound.distillation, seed)


def check_subject(
    subject: Subject,
    micro_batches: Sequence[int],
    dp_sizes: Sequence[int],
    *,
    token_budgets: Sequence[int] = (),
    tolerance: float | None = None,
    strict: bool = False,
    name: str = "",
    special: bool = False,
    contract: Contract = CONTRACTS["verl"],
) -> Report:
    """:func:`check_invariance` of a loss that was tried on its mini-batch already.

    Args:
        subject: The loss.
        micro_batches: As there, and so are all others.
        dp_sizes: Likewise.
        token_budgets: Likewise.
        tolerance: Likewise.
        strict: Likewise.
        name: Likewise.
        special: Whether special mini-batches are tried too, where the ordinary one shows nothing.
        contract: Whose engine calls the loss.
    """
    skipped = list(subject.skipped)
    batch, seed = subject.batch, subject.seed
    if tolerance is None:
        tolerance = TOLERANCES[batch.log_probs.dtype]
    findings = _before_any_cut(subject)
    cuts = all_cuts(
        batch,
        micro_batches,
        dp_sizes,
        seed,
        subject.layouts,
        token_budgets,
        skipped,
        equal_rows=contract.equal_rows,
        engines=contract.engines,
    )
    rows = [measure_row(subject, cut) for cut in cuts]
    if any(row.error > tolerance for row in rows):
        # What remembers its calls answers no experiment.
        findings += [] if subject.noise == "state between calls" else explain(subject, rows, tolerance)
    elif not findings:
        for more, found in _further(subject, tolerance, special, skipped, contract.equal_rows):
            rows += more
            if found:
                findings += found
                break
    notes = [masked_values(subject), metric_finding(rows, tolerance)]
    # NaN that a metric alone shows is the lesser fault of it.
    for finding in notes[::-1] if notes[0] is not None and "reaches the metric" in notes[0].text else notes:
        if finding is not None:
            findings.append(replace(finding, counts=strict))
    return Report(
        loss_name=name,
        rows=tuple(rows),
        findings=tuple(findings),
        skipped=tuple(skipped),
        tolerance=tolerance,
        strict=strict,
        accuracy=_float32_error(subject),
        contract=contract,
    )


def _before_any_cut(subject: Subject) -> list[Finding]:
    """What is wrong with the whole mini-batch already, or with two calls on it."""
    found = [totals_finding(subject.batch), not_finite(subject)]
    if subject.changes_inputs:
        text = "two calls on the same tensors differ: the loss writes into what it is given"
        found.append(Finding("inputs changed in place", text))
    elif subject.noise is not None and found[1] is None:
        text, name = "two calls on the same whole mini-batch differ", subject.noise
        if name == "random numbers":
            text += ": the loss draws random numbers"
        elif reads_the_clock(subject):
            text, name = f"{text}, and agree where no time passes: the loss reads the clock", "random numbers"
        else:
            text += f": the loss {what_it_keeps(subject)}"
        found.append(Finding(name, text))
    return [finding for finding in found if finding is not None]


def _further(
    subject: Subject, tolerance: float, special: bool, skipped: list[tuple[str, str]], equal_rows: bool
) -> Iterator[tuple[list[Row], list[Finding]]]:
    """What an ordinary mini-batch and one loss object do not show, a few cuts each."""
    batch, base = subject.batch, subject.base
    pieces = 2 if equal_rows else min(3, len(batch.groups))
    cut = Cut("fresh", even(batch, pieces, 1), base, note="never called before")
    rows = [measure_row(subject, cut, subject.fresh())]
    cut = Cut("ranks", even(batch, 1, 2), base, note="each knowing its rank")
    row = measure_row(subject, cut)
    if row.failure is not None and CollectiveError.__name__ in row.failure:
        skipped.append(("process group", "the loss calls a collective, which is not played here"))
    else:
        rows.append(row)
    for row in rows:
        yield [row], explain(subject, [row], tolerance)
    for what, other_batch in special_mini_batches(batch, subject.seed) if special else ():
        many = other_batch.num_sequences < batch.num_sequences
        some = [(other_batch.num_sequences, 1)] if many else [(pieces, 1), (2, 2)]
        try:
            other = subject.on(other_batch)
        except Exception as error:
            cut = replace(whole(other_batch, base), kind="special", note=what)
            row = Row(cut, failure=describe(error))
            yield [row], [Finding("fails on a cut", f"with {what}, the whole mini-batch raises {describe(error)}")]
            continue
        rows = [measure_row(other, Cut("special", even(other_batch, m, d), base, note=what)) for m, d in some]
        broken = not_finite(other, f"a whole mini-batch with {what}")
        found = [] if broken is None else [broken]
        if many and broken is not None:
            if _is_finite_on_policy(subject, other_batch):
                skipped.append((what, "the ratios of so long sequences overflow"))
                continue
            text = f"{broken.text}, and that of short ones is not: a count or a sum exceeds its type"
            found = [Finding("counts in low precision", text)]
        elif many and max(row.error for row in rows) > tolerance:
            text = f"gradient or loss is {max(row.error for row in rows):.2g} off at {rows[0].cut.place}"
            found.append(Finding("counts in low precision", f"{text}, and right with short ones"))
        yield rows, found or explain(other, rows, tolerance)


def _is_finite_on_policy(subject: Subject, batch: MiniBatch) -> bool:
    """Whether the whole mini-batch gives a number where all policies are the same."""
    policies = {name: batch.log_probs.detach().clone() for name in batch.token_fields if "log_prob" in name}
    try:
        return subject.on(batch.with_fields(**policies)).outcome.finite
    except Exception:
        return False


def assert_invariant(loss_fn: LossFn | BoundLoss, batch: MiniBatch | None = None, **options: Any) -> Report:
    """For a test suite: raises with the table where :func:`check_invariance` finds a fault.

    Args:
        loss_fn: Any callable of verl's engine contract, or a loss by name:
            ``bind_loss("my_package.my_module:my_policy_loss", "actor_rollout_ref.actor.clip_ratio=0.1")``.
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
    rule = Rule(lambda given: bool(given) and list_of(_WHOLE).holds(given), "whole numbers above 0")
    check(name, values, rule)
    return tuple(dict.fromkeys(values))


def name_of(loss_fn: Any) -> str:
    """What to call a loss in a report."""
    if isinstance(loss_fn, partial):
        return name_of(loss_fn.func)
    named = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    if named is not loss_fn and named.__repr__ is not object.__repr__:
        return repr(loss_fn)
    return f"{named.__module__}.{named.__qualname__}"


def measure_row(subject: Subject, cut: Cut, loss_fn: LossFn | None = None) -> Row:
    """One cut, compared with the whole.

    Args:
        subject: The loss.
        cut: The cut.
        loss_fn: Another loss instead, which is not taken apart into terms.
    """
    reference, alone = subject.whole, loss_fn is not None or cut.kind in ("special", "ranks")
    try:
        if alone:
            outcome = subject.run(cut, loss_fn=loss_fn, identity=as_rank if cut.kind == "ranks" else None)
            terms = {"gradient": outcome.gradient}
        else:
            measured = subject.measure(cut)
            outcome, terms = measured.outcome, dict(measured.terms)
    except Exception as error:
        return Row(cut, failure=describe(error))
    failure = None
    if outcome.without_graph:
        failure = "the loss of a micro-batch has no graph: backward raises"
    zero = torch.zeros_like(reference.terms["gradient"])
    nothing = subject.nothing * max(float(reference.terms["gradient"].norm()), 1e-3)
    names = [*reference.outcome.metrics, *(k for k in outcome.metrics if k not in reference.outcome.metrics)]
    nan, sizes = float("nan"), subject.sizes
    return Row(
        cut,
        gradients={
            t: Deviation.between(gradient, reference.terms.get(t, zero[: gradient.numel()]), nothing)
            for t, gradient in terms.items()
        },
        loss=Value(outcome.loss, reference.outcome.loss, sizes["loss"]),
        metrics={
            key: Value(
                outcome.metrics.get(key, nan), reference.outcome.metrics.get(key, nan), _size(subject, outcome, key)
            )
            for key in names
            if subject.of_the_batch(key)
        },
        failure=failure,
    )


def _size(subject: Subject, outcome: Any, key: str) -> float:
    return max(subject.sizes.get(key, 0.0), outcome.sizes.get(key, 0.0))


def _float32_error(subject: Subject) -> float:
    """Relative difference between float32 and float64 on the whole mini-batch; NaN where there is no float64."""
    if subject.batch.log_probs.dtype != torch.float64:
        return float("nan")
    single = variant(subject.batch, "to", torch.float32)
    try:
        outcome = subject.run(whole(single, subject.base), single)
    except Exception:
        return float("nan")
    return Deviation.between(outcome.gradient, subject.whole.terms["gradient"]).error
