"""Which of a run's checkpoints are whole, for verl's FSDP and Megatron engines; torch is not imported for it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("global_step_"))


def last_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end and has not been removed since."""
    return max(filter(is_complete, checkpoints.glob("global_step_*")), key=step_of, default=None)


def is_complete(checkpoint: Path) -> bool:
    """Return whether verl's trainer has written ``data.pt``, its last file, and what the engine wrote is whole."""
    actor = checkpoint / "actor"
    written = (checkpoint / "data.pt").exists() and not cut_short(checkpoint)
    return written and (_fsdp_has_all(actor) or _megatron_has_all(actor))


def cut_short(folder: Path) -> list[Path]:
    """Return the files below a folder whose writing did not come to its end."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix in _WHOLE and not _WHOLE[file.suffix](file)]


def _is_whole_safetensors(file: Path) -> bool:
    """Return whether a file is as long as its header says: 8 bytes for the header's length, the header, the tensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            entries = json.loads(stream.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)


def _is_whole_archive(file: Path) -> bool:
    """Return whether a file ends as torch's zip archives do; a shard of Megatron's is several in a row."""
    with file.open("rb") as stream:
        stream.seek(-min(22, file.stat().st_size), os.SEEK_END)
        return stream.read(4) == b"PK\5\6"


_WHOLE: dict[str, Callable[[Path], bool]] = {
    ".pt": _is_whole_archive,
    ".distcp": _is_whole_archive,
    ".safetensors": _is_whole_safetensors,
}


def _fsdp_has_all(actor: Path) -> bool:
    """Return whether each kind of file is there once for every rank."""
    found: dict[tuple[str, int], int] = {}
    for file in actor.glob("*_world_size_*_rank_*.pt"):
        kind, ranks, _ = re.split("_world_size_|_rank_", file.stem)
        found[kind, int(ranks)] = found.get((kind, int(ranks)), 0) + 1
    return bool(found) and all(number == ranks for (_, ranks), number in found.items())


def _megatron_has_all(actor: Path) -> bool:
    """Return whether verl's list of contents, its last file, is there, the weights, and all shards of the optimizer."""
    shards = actor / "optimizer" / "dist_ckpt"
    index = shards / ".metadata"  # A pickle in which the names of the shards stand as they are.
    if not ((actor / "ckpt_contents.json").exists() and index.exists() and (shards / "common.pt").exists()):
        return False
    named = {name.decode() for name in re.findall(rb"__\d+_\d+\.distcp", index.read_bytes())}
    there = {file.name for file in shards.glob("*.distcp")}
    return bool(named) and named <= there and any(actor.glob("model/huggingface/*.safetensors"))
