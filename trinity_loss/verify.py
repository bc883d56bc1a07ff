"""What ``trinity-loss verify`` does, apart from its arguments."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trinity_loss.errors import ConfigError, TrinityLossError
from trinity_loss.invariance.check import check_invariance, drawn_for
from trinity_loss.invariance.measure import describe
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.invariance.report import Report
from trinity_loss.losses_by_name import Maker, candidates
from trinity_loss.tables import print_table
from trinity_loss.verl.harness.engine_case import EngineName

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MICRO_BATCHES, _RANKS = (1, 2, 4, 8), (1, 2, 4)
#: ``:all`` tries every loss in every mode on fewer cuts of a smaller mini-batch. Three ranks: a division by two
#: does not round, and then every gradient of a loss that is right has the very bits of the whole.
_FEW_SEQUENCES, _FEW_MICRO_BATCHES, _FEW_RANKS = 14, (1, 3), (1, 3)
_PANELS = 4
_FIGURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".eps", ".webp")


@dataclass(frozen=True)
class Options:
    """Arguments of the command, see ``trinity-loss verify --help``; what is None was not given."""

    losses: Sequence[str] = ("ours",)
    contract: str = "verl"
    weight_fn: str | None = None
    batch: MiniBatch | None = None
    micro_batches: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    seed: int | None = None
    token_budgets: tuple[int, ...] | None = None
    group_size: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    tolerance: float | None = None
    strict: bool | None = None
    json: bool = False
    markdown: bool = False
    plot: str | None = None
    engine: EngineName | Literal["fsdp2"] | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.plot is not None and Path(self.plot).suffix.lower() not in _FIGURES:
            raise ConfigError(f"--plot is {self.plot!r}; expected a file that ends in one of {', '.join(_FIGURES)}")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"--group-size is {self.group_size}; expected a whole number above 0")
        if self.engine is None:
            if self.steps is not None:
                raise ConfigError("--steps has no effect without --engine: only an engine has weights")
            return
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}; expected a whole number above 0")
        if self.contract != "verl":
            raise ConfigError(f"--engine runs verl's own engines, which know no --contract {self.contract}")
        if self.batch is not None:
            raise ConfigError("--engine makes its own mini-batch: a recorded one has no tokens for a model to read")
        without_effect = ("micro_batches", "ranks", "token_budgets", "seed", "dtype", "group_size", "fields", "plot")
        for name in without_effect:
            if getattr(self, name) not in (None, {}):
                option = {"fields": "field"}.get(name, name).replace("_", "-")
                raise ConfigError(f"--{option} has no effect with --engine, which makes its own mini-batch and cuts")


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
        print(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
    elif options.markdown:
        print("\n\n".join(report.markdown() for report in reports))
    elif len(reports) == 1 or options.engine is not None:
        for report in reports:
            print_table(*report.table())
            print("\n".join(report.summary()))
    if options.plot is not None:
        from trinity_loss.invariance.figure import draw

        draw(reports, options.plot)
    return all(report.ok for report in reports)


def _all_reports(options: Options, config: DictConfig) -> list[Report]:
    makers = [make for spec in options.losses for make in candidates(spec, config, options.contract, options.weight_fn)]
    if options.plot is not None and len(makers) > _PANELS:
        raise ConfigError(f"--plot draws {_PANELS} losses at most; here are {len(makers)}")
    brief = any(spec.endswith(":all") for spec in options.losses)
    if len(makers) == 1 or options.engine is not None:
        return [_verify(options, brief, makers, number) for number in range(len(makers))]
    start = time.perf_counter()
    reports = []
    silent = options.json or options.markdown
    for report in _in_two_processes(partial(_verify, options, brief, makers), len(makers)):
        reports.append(report)
        if not silent:
            names = ", ".join(("" if f.counts else "note: ") + f.name for f in report.findings)
            verdict = "ok" if report.ok else "NOT INVARIANT"
            print(f"{report.loss_name:44} {verdict:14} {report.max_relative_error:8.1e}  {names}", flush=True)
    if not silent:
        failed = sum(not report.ok for report in reports)
        print(f"{len(reports)} losses, {failed} not invariant, {time.perf_counter() - start:.0f} s")
    return reports


def _in_two_processes(work: partial[Report], count: int) -> Iterator[Report]:
    """``work(0)``, ``work(1)``, …, in order. Forks, so that the child has verl imported already."""
    if count < 4 or (os.cpu_count() or 1) < 2 or not hasattr(os, "fork"):
        yield from map(work, range(count))
        return
    with ProcessPoolExecutor(2, get_context("fork"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(work, range(count))


def _verify(options: Options, brief: bool, makers: Sequence[Maker], number: int) -> Report:
    bound = makers[number]()
    try:
        if options.engine is not None:
            from trinity_loss.engine_check import check_in_engine

            engine: EngineName = "fsdp" if options.engine == "fsdp2" else options.engine
            return check_in_engine(
                bound, engine, tolerance=options.tolerance, strict=options.strict, steps=options.steps
            )
        micro_batches = options.micro_batches or (_FEW_MICRO_BATCHES if brief else _MICRO_BATCHES)
        ranks = options.ranks or (_FEW_RANKS if brief else _RANKS)
        seed = options.seed or 0
        bound = replace(bound, fields=options.fields, group_size=options.group_size or bound.group_size)
        at_least = _FEW_SEQUENCES if brief else 36
        return check_invariance(
            bound,
            options.batch or drawn_for(bound, micro_batches, ranks, seed, at_least=at_least),
            micro_batches,
            ranks,
            seed,
            token_budgets=options.token_budgets or (),
            tolerance=options.tolerance,
            strict=options.strict,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            special=options.batch is None and not brief,
        )
    except TrinityLossError as error:
        raise ConfigError(f"{bound.name}: {error}") from error
    except (Exception, SystemExit) as error:
        # What a loss raises on the whole mini-batch is nobody else's fault, and a traceback would hide it.
        raise ConfigError(f"{bound.name} cannot be run: {describe(error)}{_hint(error)}") from error


def _hint(error: BaseException) -> str:
    """How to supply a field that a loss asks for."""
    named = re.search(r"""key ["']([^"']+)["'] not found""", str(error))
    key: Any = named[1] if named else error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str) or not key.isidentifier():
        return ""
    return f"; if it is a field of your own, --field {key}=token, {key}=sequence or {key}=NUMBER supplies it"
