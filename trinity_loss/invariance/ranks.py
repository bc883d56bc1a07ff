"""Plays ranks: the identity of one, without collectives, and several in threads that add up over each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch import Tensor

from trinity_loss.selection import Ranks

_T = TypeVar("_T")
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce", "gather")


class CollectiveError(RuntimeError):
    """A loss called a collective, which one process cannot play."""


def _collective(*args: Any, **kwargs: Any) -> NoReturn:
    raise CollectiveError("the loss calls a collective, which is not played here")


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Whoever asks within is told that this is that rank of so many."""
    distributed = torch.distributed
    answers = {"is_initialized": True, "get_rank": rank, "get_world_size": ranks}
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(distributed, name, lambda *_, answer=answer, **__: answer))
        for name in _COLLECTIVES:
            stack.enter_context(mock.patch.object(distributed, name, _collective))
        yield


def on_ranks(size: int, play: Callable[[Ranks], _T]) -> list[_T]:
    """What ``play`` returns on each of so many ranks, which are threads and add up over each other."""
    barrier, sent = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def on_rank(rank: int) -> _T:
        def add_up(tensor: Tensor) -> Tensor:
            sent[rank] = tensor
            barrier.wait()
            total = torch.stack(sent).sum(0)
            barrier.wait()
            return total

        return play(Ranks(add_up, rank, size))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on_rank, range(size)))
