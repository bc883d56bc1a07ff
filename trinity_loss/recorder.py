"""Records the mini-batches of a run, one file per rank, as plain data: tensors, numbers and text.

A recording is a folder with ``rank-0.pt``, ``rank-1.pt``, …, each rank's part with the cut that the engine made and
with :class:`Provenance`, and ``config.json``, the :class:`trinity_loss.LossConfig` that trained.
:mod:`trinity_loss.invariance.recorded` reads it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_loss.distillation import OUTPUTS, TEACHER
from trinity_loss.errors import BatchError, MissingFieldError
from trinity_loss.loss_config import LossConfig
from trinity_loss.micro_batch import MicroBatch, read_micro_batch
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.totals import EXPERT_MASK, GroupCount, Rows, count_names, find_count, prompt_keys

#: Fields of a micro-batch that are recorded as tokens, where they are there.
_TOKEN_FIELDS = ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")


@dataclass(frozen=True)
class Provenance:
    """Where a rank's part of a mini-batch comes from; every part of one mini-batch says the same but for ``rank``.

    Attributes:
        run: Name of the run; one that goes on from a checkpoint is another.
        training_step: As verl logs it.
        mini_batch: Counted from 1 within the training step.
        rank: Data-parallel rank.
        ranks: How many of them there are.
    """

    run: str
    training_step: int
    mini_batch: int
    rank: int
    ranks: int

    @property
    def folder(self) -> Path:
        """The folder of the mini-batch, within that of the recordings."""
        return Path(f"step-{self.training_step}", f"mini-batch-{self.mini_batch}")


class Recorder:
    """Collects one rank's micro-batches of a mini-batch.

    Args:
        max_bytes: A part larger than this is not kept.
        row_weights: A field that is kept beside those that every loss has, as a weight for each token; None: none.
        fields: Names of the fields that a policy loss reads, which may be others, too.
        expert_rows: Whether to keep which rows are an expert's, and the step that their weight may depend on.

    Attributes:
        parts: What was kept, a dictionary per micro-batch.
    """

    def __init__(
        self, max_bytes: int, row_weights: str | None = None, fields: Sequence[str] = (), expert_rows: bool = False
    ) -> None:
        self._max_bytes, self._row_weights, self._expert_rows = max_bytes, row_weights, expert_rows
        self._fields = tuple(dict.fromkeys((*_TOKEN_FIELDS, *fields)))
        self._bytes = 0
        self.parts: list[dict[str, Any]] = []

    def add(self, model_output: Mapping[str, Any], data: MicroBatchData) -> None:
        """Copies what the loss of this micro-batch looks at to host memory."""
        batch = _read(model_output, data)
        if batch.tokens.offsets is None:
            raise BatchError("a packed micro-batch cannot be recorded: its rows are not sequences")
        part = _flat_part(batch, self._fields)
        if self._row_weights is not None:
            weights = batch.weighted_by(self._row_weights).row_weights
            part["token_fields"] |= _on_host({self._row_weights: weights})
        if self._expert_rows:
            part["sequence_fields"] |= _on_host({EXPERT_MASK: batch.with_expert_rows().expert})
            step = get_value(batch.data, "step")
            part["constants"] = {} if step is None else {"step": int(torch.as_tensor(step).max())}
        tensors = [*part.values(), *part["token_fields"].values()]
        self._bytes += sum(v.numel() * v.element_size() for v in tensors if isinstance(v, Tensor))
        # Past the limit nothing is held back in memory either; `write` says so.
        self.parts = [] if self._bytes > self._max_bytes else [*self.parts, part]

    def write(self, folder: Path, provenance: Provenance, config: LossConfig) -> None:
        """Writes this rank's part; a file is there whole or not at all, and none is written over.

        Args:
            folder: Of the mini-batch; made where missing.
            provenance: Where the part comes from.
            config: What trained.

        Raises:
            OSError: The file, which is named, is there already or cannot be written, as on a full disk.
        """
        rank = provenance.rank
        if self._bytes > self._max_bytes:
            warnings.warn(
                f"not recorded in {folder}: rank {rank} holds {self._bytes / 2**20:.0f} MiB, above "
                f"record_max_megabytes, {self._max_bytes / 2**20:.0f}",
                stacklevel=2,
            )
            return
        folder.mkdir(parents=True, exist_ok=True)
        sizes = [part["response_lengths"].numel() for part in self.parts]
        ends = list(accumulate(sizes))
        text = json.dumps(asdict(config), indent=2, default=str)
        plain = concatenate(self.parts) | {
            "cut": [[list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]],
            "group_size": config.group_size,
            "provenance": asdict(provenance) | {"config": text},
        }
        # In memory first: torch's error for a full disk says neither that it is full nor which file it was.
        content = io.BytesIO()
        torch.save(plain, content)
        _write_whole(folder / f"rank-{rank}.pt", content.getvalue())
        if rank == 0:
            _write_whole(folder / "config.json", text.encode())


def _read(model_output: Mapping[str, Any], data: MicroBatchData) -> MicroBatch:
    """The micro-batch with all that a loss may read of the model output, and of a teacher one number a token."""
    outputs = [name for name in ("log_probs", *OUTPUTS) if model_output.get(name, None) is not None]
    has_teacher = get_value(data, TEACHER) is not None and not set(OUTPUTS) & set(outputs)
    return read_micro_batch(model_output, data, outputs=outputs or ["log_probs"], beside=[TEACHER] * has_teacher)


def _flat_part(batch: MicroBatch, names: Sequence[str]) -> dict[str, Any]:
    tokens, data = batch.tokens, batch.data
    assert tokens.offsets is not None
    part: dict[str, Any] = {"prompt_lengths": _prompt_lengths(batch), "response_lengths": tokens.lengths}
    # Padding of a dense field is no token of the sequence, but it does not count either.
    part["response_mask"] = tokens.mask.to(torch.int64)
    sources = {name: source.gather() for name, source in batch.sources.items()}
    # Where distillation alone trains, an engine does not return log-probs, and no loss reads them.
    part["log_probs"] = sources.pop("log_probs", torch.zeros(tokens.size))
    if "entropy" in sources:
        part["entropy"] = sources.pop("entropy")
    if batch.has("loss_mask"):
        part["loss_mask"] = batch.raw("loss_mask")
    part["token_fields"] = {name: batch.raw(name) for name in names if batch.has(name)} | sources
    part["uids"] = _prompt_names(Rows(tokens, data))
    # Whatever told the groups of rows, their sizes over the mini-batch are what a loss looks at.
    groups = [count for count in map(find_count, count_names()) if isinstance(count, GroupCount)]
    sizes = {count.per_row: get_value(data, count.per_row) for count in groups}
    part["sequence_fields"] = {name: value for name, value in sizes.items() if isinstance(value, Tensor)}
    part["sequence_fields"] |= _group_ids(Rows(tokens, data), groups)
    dp_size = batch.totals.dp_size
    part["totals"] = dict(batch.totals.counts) | ({} if dp_size is None else {"dp_size": dp_size})
    return _on_host(part)


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all tensors on the host, also of those in a mapping within."""

    def copy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _on_host(value)
        return value.detach().to("cpu").clone() if isinstance(value, Tensor) else value

    return {name: copy(value) for name, value in values.items()}


def _group_ids(rows: Rows, groups: Sequence[GroupCount]) -> dict[str, Tensor]:
    """Fields int64 [rows] that tell groups beside ``uid``, such as ``session_id``; what is no number, as a digest."""
    told = {name: rows.values(name) for count in groups for name in count.told_by}
    return {
        name: torch.tensor([value if _is_int64(value) else _digest(value) for value in values])
        for name, values in told.items()
        if values is not None
    }


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])


def _prompt_names(rows: Rows) -> list[str] | None:
    """A name of each row's prompt: its ``uid``, else a digest of its tokens; None where there is neither."""
    try:
        keys = prompt_keys(rows)
    except MissingFieldError:
        return None
    return [hashlib.sha256(repr(key).encode()).hexdigest() if isinstance(key, tuple) else str(key) for key in keys]


def _prompt_lengths(batch: MicroBatch) -> Tensor:
    prompts = get_value(batch.data, "prompts")
    if isinstance(prompts, Tensor) and prompts.is_nested:
        return prompts.offsets().diff()  # type: ignore[attr-defined]
    attention_mask = get_value(batch.data, "attention_mask")
    if isinstance(prompts, Tensor) and isinstance(attention_mask, Tensor):
        return attention_mask[:, : prompts.shape[1]].sum(1)
    return torch.ones(batch.tokens.num_slots, dtype=torch.int64)


def concatenate(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parts of a mini-batch, one after the other, as one; what is no tensor and no list is that of the first."""
    if not parts:
        raise MissingFieldError("no micro-batch was recorded")
    merged = dict(parts[0])
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, Tensor):
            merged[name] = torch.cat(values)
        elif isinstance(first, list):
            merged[name] = [entry for value in values for entry in value]
        elif name in ("token_fields", "sequence_fields"):
            merged[name] = concatenate(values)
    return merged


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # A log shows the first of a chain.
    finally:
        temporary.unlink(missing_ok=True)
