"""Why two calls of a loss on the same micro-batch differ."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from trinity_loss.invariance.contracts import Played
from trinity_loss.invariance.cuts import Cut, even, whole
from trinity_loss.invariance.engine import Outcome
from trinity_loss.invariance.measure import Subject, same, variant
from trinity_loss.invariance.minibatch import MiniBatch

#: Calls that come before, as a loss that counts them may wait for some, or for every second or fourth.
_CALLS = 31
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")
_BY_VALUES = "keeps what earlier calls computed from their values: a running mean, a cache, a coefficient"
_UNKNOWN = "keeps something between calls, or draws from a generator of its own"


@contextlib.contextmanager
def _stopped_clocks() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stopped: dict[Any, Any] = {}
        for name in _CLOCKS:
            now = getattr(time, name)()
            stopped[getattr(time, name)] = lambda now=now: now
            stopped[getattr(time, f"{name}_ns")] = lambda now=now: int(now * 1e9)
        # Wherever one was imported by name too.
        for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
            for name, value in [*vars(module).items()]:
                if isinstance(value, BuiltinFunctionType) and value in stopped:
                    stack.enter_context(mock.patch.object(module, name, stopped[value]))
        yield


def reads_the_clock(subject: Subject) -> bool:
    """Whether calls that differ agree where no time passes."""
    everything = whole(subject.batch, subject.base)
    if same(subject.run(everything), subject.run(everything)):  # What remembers the last call may agree with itself.
        return False
    with _stopped_clocks():
        first = subject.run(everything)
        return all(same(subject.run(everything), first) for _ in range(_CALLS))


def _generators(loss_fn: Any, deep: int = 2) -> list[Any]:
    """Generators of random numbers that a loss has in reach: its attributes, defaults, closure and module."""
    if isinstance(loss_fn, partial):
        return _generators(loss_fn.func) + _known([*loss_fn.args, *loss_fn.keywords.values()])
    if isinstance(loss_fn, Played):
        return _generators(loss_fn.loss_fn)
    call: Any = loss_fn if inspect.isroutine(loss_fn) else type(loss_fn).__call__
    code, found = getattr(call, "__code__", None), [*getattr(loss_fn, "__dict__", {}).values()]
    if code is not None:
        found += [call.__globals__.get(name) for name in code.co_names]
        found += [*(call.__defaults__ or ()), *(call.__kwdefaults__ or {}).values()]
        found += [cell.cell_contents for cell in call.__closure__ or () if cell.cell_contents is not cell]
    inner = [value for value in found if inspect.isfunction(value) and value.__module__ == call.__module__]
    return _known(found) + [generator for function in inner if deep for generator in _generators(function, deep - 1)]


def _known(values: list[Any]) -> list[Any]:
    known = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [value for value in values if isinstance(value, known)]


def _state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate())


def _draws_by_itself(subject: Subject) -> bool:
    """Whether a call moves a generator that the loss has."""
    generators = _generators(subject.loss_fn)
    before = [_state(generator) for generator in generators]
    if generators:
        subject.run(whole(subject.batch, subject.base))
    return before != [_state(generator) for generator in generators]


def what_it_keeps(subject: Subject) -> str:
    """What a loss keeps between calls, as the end of a sentence that starts with its name.

    It is made anew and called on some sequences, on the same ones with other values, or on fewer of them, before it
    is called on the whole: what these make of the whole says what it took along.
    """
    batch = subject.batch
    first, second = even(batch, 2, 1)[0]
    others = [variant(batch, "with_other_content", scale, *first) for scale in (1.7, 0.05)]
    fewer = first[: max(1, len(first) // 2)]

    def after(*calls: tuple[tuple[int, ...], MiniBatch]) -> Outcome:
        loss_fn = subject.fresh()
        for rows, of in calls:
            subject.run(Cut("even", ((rows,),), subject.base), of, loss_fn=loss_fn)
        return subject.run(whole(batch, subject.base), loss_fn=loss_fn)

    try:
        if _draws_by_itself(subject):
            return "draws from a random generator of its own, which goes on from call to call"
        one, many = after((first, batch)), after(*[(first, batch)] * _CALLS)
        new = after()
        if not same(new, after()):
            return _UNKNOWN
        if not same(new, one) and same(one, after((first, batch), (second, batch), (fewer, batch))):
            return "keeps what its first call computed"
        if subject.keeps_values:
            return _BY_VALUES
        by_values = [after(*[(first, other)] * _CALLS) for other in others]
        by_number = after(*[(fewer, batch)] * _CALLS)
    except Exception:  # No answer is no verdict.
        return _UNKNOWN
    if not all(same(many, other) for other in by_values):
        return _BY_VALUES
    if not same(many, by_number):
        return "counts calls, sequences or tokens, or draws from a generator of its own"
    if not same(new, many):
        return "counts its calls"
    return _UNKNOWN
