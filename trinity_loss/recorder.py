"""Records the mini-batches of a run, one file per rank, so that a check can replay them offline.

A recording is a folder with ``rank-0.pt``, ``rank-1.pt``, … (:meth:`MiniBatch.to_dict` of that rank's part,
with the cut that the engine made) and ``config.json``, the :class:`trinity_loss.LossConfig` that trained.
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import BatchError, ConfigError, MissingFieldError
from trinity_loss.invariance.minibatch import MiniBatch, load_mini_batch
from trinity_loss.loss_config import LossConfig
from trinity_loss.micro_batch import MicroBatch, read_micro_batch
from trinity_loss.row_values import MicroBatchData, get_value, row_values

_FIELDS = (
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "loss_mask",
)


class Recorder:
    """Collects one rank's micro-batches of a mini-batch.

    Args:
        max_bytes: A part larger than this is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: list[dict[str, Any]] = []

    def add(self, model_output: Mapping[str, Any], data: MicroBatchData) -> None:
        """Copies what the loss of this micro-batch looks at to host memory."""
        batch = read_micro_batch(model_output, data)
        if batch.tokens.offsets is None:
            raise BatchError("a packed micro-batch cannot be recorded: its rows are not sequences")
        part = _flat_part(batch)
        self._bytes += sum(v.numel() * v.element_size() for v in part.values() if isinstance(v, Tensor))
        # Past the limit nothing is held back in memory either; `write` says so.
        self._parts = [] if self._bytes > self._max_bytes else [*self._parts, part]

    def write(self, folder: Path, rank: int, config: LossConfig) -> None:
        """Writes this rank's part; a file is there whole or not at all.

        Args:
            folder: Of the mini-batch; made where missing.
            rank: Data-parallel rank.
            config: What trained.

        Raises:
            OSError: The file, which is named, cannot be written, as on a full disk.
        """
        if self._bytes > self._max_bytes:
            warnings.warn(
                f"not recorded in {folder}: rank {rank} holds {self._bytes / 2**20:.0f} MiB, above "
                f"record_max_megabytes, {self._max_bytes / 2**20:.0f}",
                stacklevel=2,
            )
            return
        folder.mkdir(parents=True, exist_ok=True)
        merged = _concatenate(self._parts)
        sizes = [part["response_lengths"].numel() for part in self._parts]
        ends = list(accumulate(sizes))
        merged["cut"] = [[list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]]
        merged["group_size"] = max(mode.group_size for mode in config.aggregation_modes.values())
        # In memory first: torch's error for a full disk says neither that it is full nor which file it was.
        content = io.BytesIO()
        torch.save(MiniBatch(**merged).to_dict(), content)
        _write_atomically(folder / f"rank-{rank}.pt", content.getvalue())
        if rank == 0:
            text = json.dumps(asdict(config), indent=2, default=str)
            _write_atomically(folder / "config.json", text.encode())


def _flat_part(batch: MicroBatch) -> dict[str, Any]:
    tokens, data = batch.tokens, batch.data
    assert tokens.offsets is not None
    lengths = tokens.lengths
    part: dict[str, Any] = {"prompt_lengths": _prompt_lengths(batch), "response_lengths": lengths}
    # Padding of a dense field is no token of the sequence, but it does not count either.
    part["response_mask"] = tokens.mask.to(torch.int64)
    part["log_probs"] = batch.log_probs.gather()
    if batch.entropy is not None:
        part["entropy"] = batch.entropy.gather()
    for name in _FIELDS:
        if batch.has(name):
            part[name] = batch.raw(name)
    part = {name: value.detach().to("cpu").clone() for name, value in part.items()}
    uids = row_values(data, "uid", tokens.num_slots)
    part["uids"] = None if uids is None else [str(uid) for uid in uids]
    dp_size = batch.totals.dp_size
    part["totals"] = dict(batch.totals.counts) | ({} if dp_size is None else {"dp_size": dp_size})
    return part


def _prompt_lengths(batch: MicroBatch) -> Tensor:
    prompts = get_value(batch.data, "prompts")
    if isinstance(prompts, Tensor) and prompts.is_nested:
        return prompts.offsets().diff()  # type: ignore[attr-defined]
    attention_mask = get_value(batch.data, "attention_mask")
    if isinstance(prompts, Tensor) and isinstance(attention_mask, Tensor):
        return attention_mask[:, : prompts.shape[1]].sum(1)
    return torch.ones(batch.tokens.num_slots, dtype=torch.int64)


def _concatenate(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Parts of a mini-batch as the arguments of one :class:`MiniBatch`."""
    if not parts:
        raise MissingFieldError("no micro-batch was recorded")
    merged: dict[str, Any] = {"totals": parts[0]["totals"], "token_fields": {}}
    merged["group_size"] = parts[0].get("group_size", 1)
    merged["uids"] = None if parts[0]["uids"] is None else [uid for part in parts for uid in part["uids"]]
    for name in parts[0]:
        if not isinstance(parts[0][name], Tensor):
            continue
        values = torch.cat([part[name] for part in parts])
        if name in _FIELDS and name != "loss_mask":
            merged["token_fields"][name] = values
        else:
            merged[name] = values
    return merged


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # A log shows the first of a chain.
    finally:
        temporary.unlink(missing_ok=True)


def load_recording(path: str | Path) -> MiniBatch:
    """Reads a recorded mini-batch.

    Args:
        path: The folder of a mini-batch, whose ranks are put together, or one file.

    Raises:
        ConfigError: The file holds the share of one rank among others.
        MissingFieldError: The folder holds no ``rank-0.pt``, or lacks a rank in between.
    """
    path = Path(path)
    if re.fullmatch(r"rank-\d+\.pt", path.name) and len(list(path.parent.glob("rank-*.pt"))) > 1:
        raise ConfigError(f"{path} is one rank's share of a mini-batch; expected its folder, {path.parent}")
    if not path.is_dir():
        return load_mini_batch(str(path))
    by_rank = {int(m[1]): file for file in path.iterdir() if (m := re.fullmatch(r"rank-(\d+)\.pt", file.name))}
    if sorted(by_rank) != list(range(len(by_rank))) or not by_rank:
        raise MissingFieldError(f"{path} holds the ranks {sorted(by_rank)}; expected rank-0.pt and so on, none missing")
    batches = [load_mini_batch(str(by_rank[rank])) for rank in range(len(by_rank))]
    parts = [_as_part(batch) for batch in batches]
    merged = _concatenate(parts)
    starts = [0, *accumulate(batch.num_sequences for batch in batches)]
    merged["cut"] = [
        [[row + start for row in rows] for rank in batch.cut or () for rows in rank]
        for batch, start in zip(batches, starts, strict=False)
    ]
    return MiniBatch(**merged)


def _as_part(batch: MiniBatch) -> dict[str, Any]:
    plain = batch.to_dict()
    return {k: v for k, v in plain.items() if v is not None or k == "uids"} | plain["token_fields"]
