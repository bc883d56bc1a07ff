"""``trinity-loss verify --engine``: the cuts of a check through verl's own engines, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.check import LAYOUTS, check_invariance
from trinity_loss.invariance.cuts import Cut, Engine
from trinity_loss.invariance.diagnosis import metric_finding
from trinity_loss.invariance.draw import make_mini_batch, with_teacher
from trinity_loss.invariance.engine import BoundLoss
from trinity_loss.invariance.measure import Subject, is_ours
from trinity_loss.invariance.report import Report
from trinity_loss.invariance.rows import Deviation, Finding, Row, Value
from trinity_loss.verl.gradients import parameter_group
from trinity_loss.verl.harness import BatchSpec, EngineCase, EngineError, EngineResult, run_cases
from trinity_loss.verl.harness.engine_case import EngineName

#: The engines compute in float32.
TOLERANCE = 1e-5
#: With it, a step moves the weights of the small model by much more than their rounding.
LEARNING_RATE = 0.1
#: Not of the loss, or of the cut by definition.
_NO_METRICS = ("perf/", "lr", "mfu", "grad_norm", "actor/micro_batches")


def check_in_engine(
    bound: BoundLoss,
    engine: EngineName,
    *,
    tolerance: float | None = None,
    strict: bool | None = None,
    steps: int | None = None,
) -> Report:
    """Runs a loss through one of verl's engines, cut in every way that a CPU can reach.

    Compared are the parameters' gradient, all of it and by kind of parameter, loss and metrics of one mini-batch, and
    with ``steps`` how far the weights of a small model came.

    Args:
        bound: The loss; it must be picklable.
        engine: ``fsdp``: one and two ranks, padded and nested. ``megatron``: one rank, two data-parallel ranks,
            two pipeline stages, each with and without ``calculate_per_token_loss``.
        tolerance: Largest relative deviation that is taken for rounding; None: 1e-5.
        strict: Whether metrics count; None: for the losses of this package only.
        steps: Optimizer steps of plain gradient descent, each on a mini-batch of its own; None: none is taken.

    Raises:
        ConfigError: The loss cannot be pickled, or an engine run failed.
    """
    tolerance = TOLERANCE if tolerance is None else tolerance
    ours = is_ours(bound.loss_fn)
    strict = ours if strict is None else strict
    teacher = bound.distillation
    told = 0 if teacher is None else (teacher.topk or 1) if teacher.use_topk else 1
    base = EngineCase(loss=bound.loss_fn, trinity_worker=ours, batch=BatchSpec(teacher=told))
    if steps is not None:
        base = replace(base, steps=steps, learning_rate=LEARNING_RATE)
    try:
        results = run_cases(engine, _cases(base, engine))
    except (EngineError, TypeError) as error:
        last = str(error).strip().splitlines()[-1]
        raise ConfigError(f"{bound.name} in the {engine} engine: {last}") from error
    sizes = _sizes(bound)
    rows = tuple(_row(result, results[0], engine, sizes) for result in results[1:])
    findings = _findings(bound, rows, tolerance)
    metrics = metric_finding(rows, tolerance)
    if metrics is not None:
        findings.append(replace(metrics, counts=strict))
    return Report(
        f"{bound.name} in {engine}", rows, tuple(findings), tolerance=tolerance, strict=strict, contract=bound.contract
    )


def _cases(base: EngineCase, engine: EngineName) -> list[EngineCase]:
    """The whole first; what shares an engine stands together."""
    if engine == "fsdp":
        nested = replace(base, batch=replace(base.batch, layout="nested"))
        one = [replace(base, micro_batches=n) for n in (1, 2, 4)] + [replace(nested, micro_batches=4)]
        two = [replace(case, world_size=2, micro_batches=n) for case in (base, nested) for n in (1, 2)]
        return [*one, replace(base, max_tokens=40), *two, replace(base, world_size=2, max_tokens=40)]
    layouts: list[dict[str, Any]] = [{}, {"world_size": 2}, {"world_size": 2, "pipeline": 2}]
    return [
        replace(base, micro_batches=n, per_token_loss=per_token, **layout)
        for layout in layouts
        for per_token in (False, True)
        for n in (1, 2, 4)
    ]


def _sizes(bound: BoundLoss) -> dict[str, float]:
    """What loss and metrics are measured against, where contributions nearly cancel: an engine tells sums only."""
    try:
        batch = replace(with_teacher(make_mini_batch(16), bound.distillation), group_size=bound.group_size)
        return Subject(bound.loss_fn, batch, LAYOUTS, 0).sizes
    except Exception:
        return {}


def _row(result: EngineResult, whole: EngineResult, engine: EngineName, sizes: Mapping[str, float]) -> Row:
    case = result.case
    notes = {
        f"{case.pipeline} pipeline stages": case.pipeline > 1,
        f"at most {case.max_tokens} tokens each": case.max_tokens is not None,
        "per-token loss": case.per_token_loss,
    }
    played: Engine = "megatron per token" if case.per_token_loss else engine
    ranks = (((),) * result.micro_batches,) * (case.world_size // case.pipeline)
    note = ", ".join(text for text, holds in notes.items() if holds)
    cut = Cut("engine", ranks, case.batch.layout, engine=played, note=note)
    names = [name for name in whole.metrics if not name.startswith(_NO_METRICS)]
    return Row(
        cut,
        gradients=_deviations(result, whole),
        loss=Value(result.loss, whole.loss, sizes.get("loss", 0.0)),
        metrics={
            name: Value(result.metrics.get(name, float("nan")), whole.metrics[name], sizes.get(name, 0.0))
            for name in names
        },
    )


def _deviations(result: EngineResult, whole: EngineResult) -> dict[str, Deviation]:
    """Of the whole gradient, of each kind of parameter, and of what the weights went."""
    mine, theirs = (one.by_group(one.gradient, parameter_group) for one in (result, whole))
    found = {"gradient": Deviation.between(result.gradient, whole.gradient)}
    found |= {group: Deviation.between(mine[group], theirs[group]) for group in theirs}
    if result.moved is not None and whole.moved is not None:
        found["weights"] = Deviation.between(result.moved, whole.moved)
    return found


def _findings(bound: BoundLoss, rows: Sequence[Row], tolerance: float) -> list[Finding]:
    """Why, from the experiments of :func:`check_invariance`: an engine only shows that."""
    off = [row for row in rows if row.error > tolerance]
    if not off:
        return []
    batch = replace(with_teacher(make_mini_batch(36), bound.distillation), group_size=bound.group_size)
    played = check_invariance(bound.loss_fn, batch, (1, 2), (1, 2))
    found = [finding for finding in played.findings if finding.counts]
    row = off[0]
    shown = f"gradient norm times {row.gradients['gradient'].ratio:.3g}, loss {row.loss.value:.4g} instead of "
    return found or [Finding("unexplained", f"at {row.cut.label}: {shown}{row.loss.whole:.4g}")]
