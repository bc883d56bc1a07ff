"""Plays the identity of a rank: environment and ``torch.distributed``, without its collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

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
