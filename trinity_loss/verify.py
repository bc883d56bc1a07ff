"""What ``trinity-loss verify`` does, apart from its arguments."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from trinity_loss.errors import ConfigError, TrinityLossError
from trinity_loss.invariance.check import LAYOUTS, check_invariance, check_subject
from trinity_loss.invariance.draw import make_mini_batch
from trinity_loss.invariance.engine import Builder
from trinity_loss.invariance.layouts import remembering
from trinity_loss.invariance.measure import Subject, describe
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.report import Report
from trinity_loss.loss import TrinityPolicyLoss
from trinity_loss.losses_by_name import Candidate, Maker, candidates
from trinity_loss.tables import print_table
from trinity_loss.verl.harness.engine_case import EngineName

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: ``:all`` tries every loss in every mode on fewer cuts of a smaller mini-batch. Three ranks: a division by two
#: does not round, and then every gradient of a loss that is right has the very bits of the whole.
_FEW_SEQUENCES, _FEW_MICRO_BATCHES, _FEW_RANKS = 14, (1, 3), (1, 3)


@dataclass(frozen=True)
class Options:
    """Arguments of the command, see ``trinity-loss verify --help``."""

    losses: tuple[str, ...]
    batch: MiniBatch | None = None
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    dp_sizes: tuple[int, ...] = (1, 2, 4)
    seed: int = 0
    token_budgets: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    tolerance: float | None = None
    strict: bool | None = None
    json: bool = False
    plot: str | None = None
    engine: EngineName | None = None


def verify(options: Options, config: DictConfig) -> bool:
    """Verifies losses and prints what was found.

    Returns:
        Whether all of them passed.

    Raises:
        ConfigError: A name, a configuration or a mini-batch does not make a loss that can be run.
    """
    # What a loss prints, or a library that it imports, must not stand in the JSON.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        reports = _all_reports(options, config)
    if options.json:
        plain = [report.to_dict() for report in reports]
        json.dump(plain[0] if len(plain) == 1 else plain, sys.stdout, indent=2)
        print()
    elif len(reports) == 1 or options.engine is not None:
        for report in reports:
            print_table(*report.table())
            print("\n".join(report.summary()))
    if options.plot is not None:
        from trinity_loss.invariance.figure import draw

        draw(reports[:4], options.plot)
    return all(report.ok for report in reports)


def _all_reports(options: Options, config: DictConfig) -> list[Report]:
    if options.engine is not None:
        return [
            _verify_in_engine(make(), options, options.engine) for s in options.losses for make in candidates(s, config)
        ]
    if len(options.losses) == 1 and not options.losses[0].endswith(":all"):
        return [_verify(make(), options) for make in candidates(options.losses[0], config)]
    return _verify_many(options, config)


def _batch(candidate: Candidate, options: Options) -> MiniBatch:
    batch = options.batch
    if batch is None:
        batch = make_mini_batch(max(36, max(options.micro_batches) * max(options.dp_sizes) + 2), options.seed)
    if batch.group_size != candidate.group_size and candidate.group_size > 1:
        batch = replace(batch, group_size=candidate.group_size)
    return batch


def _verify(candidate: Candidate, options: Options) -> Report:
    try:
        return check_invariance(
            candidate.loss_fn,
            _batch(candidate, options),
            options.micro_batches,
            options.dp_sizes,
            options.seed,
            token_budgets=options.token_budgets or candidate.token_budgets,
            tolerance=options.tolerance,
            strict=options.strict,
            name=candidate.name,
            dtype=options.dtype,
        )
    except TrinityLossError as error:
        raise ConfigError(f"{candidate.name}: {error}") from error
    except Exception as error:
        # What a loss raises on the whole mini-batch is nobody else's fault, and a traceback would hide it.
        raise ConfigError(f"{candidate.name} cannot be run: {describe(error)}") from error


def _verify_in_engine(candidate: Candidate, options: Options, engine: EngineName) -> Report:
    from trinity_loss import engine_check

    tolerance = options.tolerance or engine_check.TOLERANCE
    return engine_check.check_in_engine(candidate, engine, tolerance=tolerance, strict=options.strict)


def _verify_many(options: Options, config: DictConfig) -> list[Report]:
    """A line per loss, on two cores where there are two."""
    makers = [make for spec in options.losses for make in candidates(spec, config)]
    start = time.perf_counter()
    reports = []
    if any(spec.endswith(":all") for spec in options.losses):
        work = partial(_verify_briefly, options, makers, remembering())
    else:
        work = partial(_verify_one_of, options, makers)
    for report in _in_two_processes(work, len(makers)):
        reports.append(report)
        if not options.json:
            names = ", ".join(("" if f.counts else "note: ") + f.name for f in report.findings)
            verdict = "ok" if report.ok else "NOT INVARIANT"
            print(f"{report.loss_name:44} {verdict:14} {report.max_relative_error:8.1e}  {names}", flush=True)
    if not options.json:
        failed = sum(not report.ok for report in reports)
        print(f"{len(reports)} losses, {failed} not invariant, {time.perf_counter() - start:.0f} s")
    return reports


def _in_two_processes(work: Callable[[int], Report], count: int) -> Iterator[Report]:
    """``work(0)``, ``work(1)``, …, in order. Forks, so that the child has verl imported already."""
    if count < 4 or (os.cpu_count() or 1) < 2 or not hasattr(os, "fork"):
        yield from map(work, range(count))
        return
    global _work
    _work = work
    try:
        with multiprocessing.get_context("fork").Pool(2, torch.set_num_threads, (1,)) as pool:
            yield from pool.imap(_call_work, range(count))
    finally:
        _work = None


_work: Callable[[int], Report] | None = None


def _call_work(number: int) -> Report:
    assert _work is not None
    return _work(number)


def _verify_one_of(options: Options, makers: Sequence[Maker], number: int) -> Report:
    return _verify(makers[number](), options)


def _verify_briefly(options: Options, makers: Sequence[Maker], build: Builder, number: int) -> Report:
    candidate = makers[number]()
    strict = isinstance(candidate.loss_fn, TrinityPolicyLoss) if options.strict is None else options.strict
    batch = options.batch or make_mini_batch(_FEW_SEQUENCES, options.seed)
    if candidate.group_size > 1:
        batch = replace(batch, group_size=candidate.group_size)
    try:
        subject = Subject(candidate.loss_fn, batch.to(options.dtype), LAYOUTS, options.seed, build)
        return check_subject(
            subject,
            _FEW_MICRO_BATCHES,
            _FEW_RANKS,
            token_budgets=options.token_budgets,
            tolerance=options.tolerance,
            strict=strict,
            name=candidate.name,
        )
    except Exception as error:
        raise ConfigError(f"{candidate.name} cannot be run: {describe(error)}") from error
