"""Reads the mini-batches that :mod:`trinity_loss.recorder` wrote in a run, and puts the ranks' parts together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from trinity_loss.errors import ConfigError, MissingFieldError
from trinity_loss.invariance.minibatch import MiniBatch, load_plain
from trinity_loss.loss_config import LossConfig
from trinity_loss.recorder import concatenate

_FILE = re.compile(r"rank-(\d+)\.pt")


def load_recording(path: str | Path) -> MiniBatch:
    """Reads a recorded mini-batch, or one that ``torch.save(batch.to_dict(), path)`` wrote.

    Args:
        path: The folder of a mini-batch, whose ranks are put together, or one file.

    Raises:
        ConfigError: A file cannot be read, or holds the share of one rank among others; the files of a folder are not
            of one mini-batch of one run.
        MissingFieldError: The folder lacks a rank; the file holds something else.
    """
    return join_ranks(_parts_at(Path(path)))


def recorded_config(path: str | Path) -> LossConfig:
    """What trained while the mini-batch was recorded.

    Args:
        path: As :func:`load_recording` takes it.

    Raises:
        MissingFieldError: Nothing says it, as in a file that no training worker wrote.
    """
    provenance = _parts_at(Path(path))[0].get("provenance")
    if not provenance:
        raise MissingFieldError(f"{path} does not say what trained")
    return LossConfig(**json.loads(provenance["config"]))


def _parts_at(path: Path) -> list[dict[str, Any]]:
    """The parts of a mini-batch in the order of their ranks: all of them, and no others."""
    if path.is_dir():
        files = {int(m[1]): file for file in path.iterdir() if (m := _FILE.fullmatch(file.name))}
        if not files:
            raise MissingFieldError(f"{path} holds no rank-0.pt; expected the folder of a recorded mini-batch")
        parts = {rank: load_plain(file) for rank, file in sorted(files.items())}
        _check_together(path, {rank: _origin(part) for rank, part in parts.items()})
        return list(parts.values())
    part = load_plain(path)
    ranks = (part.get("provenance") or {}).get("ranks", 1)
    if ranks > 1:
        raise ConfigError(
            f"{path} is one rank's share of a mini-batch of {ranks} ranks; expected its folder, {path.parent}"
        )
    return [part]


def _origin(part: Mapping[str, Any]) -> dict[str, Any]:
    """What all parts of a mini-batch have in common, by name, and the rank."""
    provenance = dict(part.get("provenance") or {})
    config = json.loads(provenance.pop("config", "{}"))
    return dict(part.get("totals") or {}) | config | provenance


def _check_together(folder: Path, origins: dict[int, dict[str, Any]]) -> None:
    first = next(iter(origins.values()))
    ranks = first.get("ranks", len(origins))
    for rank, origin in origins.items():
        for name in first | origin:
            expected = rank if name == "rank" else first.get(name)
            if rank < ranks and origin.get(name) != expected:
                raise ConfigError(
                    f"rank-{rank}.pt in {folder} is of {name} {origin.get(name)!r}; expected {expected!r}, as in the "
                    "other parts of the mini-batch"
                )
    missing = [f"rank-{rank}.pt" for rank in range(ranks) if rank not in origins]
    if missing:
        raise MissingFieldError(f"{folder} lacks {', '.join(missing)}; expected the parts of {ranks} ranks")
    surplus = [f"rank-{rank}.pt" for rank in origins if rank >= ranks]
    if surplus:
        raise ConfigError(f"{folder} holds {', '.join(surplus)}; expected the parts of {ranks} ranks")


def join_ranks(ranks: list[dict[str, Any]]) -> MiniBatch:
    """The parts of a mini-batch, one per rank, as one."""
    starts = [0, *accumulate(part["response_lengths"].numel() for part in ranks)]
    cut = [
        [[row + start for row in rows] for rank in part.get("cut") or () for rows in rank]
        for part, start in zip(ranks, starts, strict=False)
    ]
    plain = concatenate([{k: v for k, v in part.items() if k not in ("cut", "provenance")} for part in ranks])
    return MiniBatch.from_dict(plain | ({"cut": cut} if any(cut) else {}))
