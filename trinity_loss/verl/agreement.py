"""What all ranks of a worker do together on the host, so that none waits for one that has failed."""

from __future__ import annotations

import pickle
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SECONDS = 300  # That a rank waits for the others.


class StageFailed(RuntimeError):
    """Some rank failed in what every rank did by itself; raised on all of them, with the words of the first."""


class Agreement:
    """All ranks, in a group of their own on the host; every rank must make it and call its methods alike."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SECONDS))
        self._held_up = False

    def close(self) -> None:
        """Ends the group."""
        if not self._held_up:  # Else it would wait for what is under way.
            dist.destroy_process_group(self._group)

    def each(self, compute: Callable[[], Any]) -> list[Any]:
        """What each rank computes by itself, in the order of the ranks, the same on all of them.

        Args:
            compute: Nothing within may wait for another rank. What it returns must be picklable.

        Raises:
            StageFailed: On every rank, where it raised on one.
        """
        cause: Exception | None = None
        try:
            mine = (pickle.dumps(compute()), "")
        except Exception as error:
            mine, cause = (b"", said(error)), error
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        failed = [text for _, text in everyone if text]
        if failed:
            raise StageFailed(failed[0]) from cause
        return [pickle.loads(content) for content, _ in everyone]

    def meet(self, seconds: float) -> None:
        """Waits for the others, who may be held up where no one can reach them.

        Raises:
            RuntimeError: Some rank has not come within so many seconds.
        """
        work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        try:
            work.wait(timedelta(seconds=min(seconds, _SECONDS)))
        except RuntimeError:
            self._held_up = True
            raise


def said(error: BaseException) -> str:
    """An error in one line that names no place.

    Example:
        >>> said(ValueError("no room at /home/me/file.py"))
        'ValueError: no room at file.py'
    """
    return without_places(" ".join(f"{type(error).__name__}: {error}".split()))[:200]


def without_places(text: str) -> str:
    """A text without folders, addresses and the name of this machine.

    Example:
        >>> without_places("peer [10.0.0.7]:29500 left, see /scratch/me/run.log (verl 0.9.1)")
        'peer [HOST] left, see run.log (verl 0.9.1)'
    """
    text = re.sub(r"(?<![\w.:)\]])/(?:[\w.\-+@]+/)*(?=[\w.])", "", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(\]?):\d+", r"HOST\1", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "HOST", text)
    return re.sub(rf"(?<![\w.\-]){re.escape(socket.gethostname())}(?![\w\-])", "HOST", text)
