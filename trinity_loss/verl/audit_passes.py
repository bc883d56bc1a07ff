"""Which passes an audit makes over a mini-batch: how each cuts it, and why one cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device

_SINGLE_ROWS = 16  # One row at a time only up to so many rows per rank.
#: From an item of this rank to those of all ranks.
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Pass:
    """One computation of the gradient.

    Attributes:
        name: ``as configured``, one of :data:`trinity_loss.verl.policy_options.AUDIT_CUTS`, or an experiment.
        dynamic: Whether ``size`` is a budget of tokens (``use_dynamic_bsz``) instead of rows.
        size: Of a micro-batch.
        reverse: Whether the rows come in reverse order.
        fresh: Whether random numbers go on instead of starting where those of the first pass did.
    """

    name: str
    dynamic: bool
    size: int
    reverse: bool = False
    fresh: bool = False

    def cut(self, data: TensorDict, worker: Any) -> TensorDict:
        """A copy of the rows, numbered, with the settings of the pass and those that verl's worker would attach."""
        groups = list(torch.arange(len(data)).split(rows_together(data)))
        rows = torch.cat(groups[::-1] if self.reverse else groups)
        copy = tu.index_select_tensor_dict(data, rows)
        tu.maybe_fix_3d_position_ids(copy)
        copy["audit_row"] = rows
        verls = {
            "use_remove_padding": worker.model_config.get("use_remove_padding", False),
            "use_fused_kernels": worker.engine_config.use_fused_kernels,
        }
        key = "max_token_len_per_gpu" if self.dynamic else "micro_batch_size_per_gpu"
        own: dict[str, Any] = {"use_dynamic_bsz": self.dynamic, key: self.size}
        tu.assign_non_tensor(copy, **{k: v for k, v in verls.items() if k not in set(data.keys())} | own)
        return copy


def rows_together(data: TensorDict) -> int:
    """How many consecutive rows no cut may part."""
    return int(tu.get(data, "force_group_size", default=1))


def plan(
    data: TensorDict, worker: Any, names: Sequence[str], gather: Gather
) -> tuple[Pass, list[Pass], list[tuple[str, str]]]:
    """The mini-batch as configured, the other passes, and those that cannot be made, each with the reason.

    Args:
        data: This rank's rows.
        worker: The training worker.
        names: Of :data:`trinity_loss.verl.policy_options.AUDIT_CUTS`.
        gather: Called as often on every rank.
    """
    config = worker.engine_config
    # Ranks that share a sequence have a budget together.
    shared = getattr(config, "ulysses_sequence_parallel_size", 1) * getattr(config, "context_parallel_size", 1)
    lengths = data["input_ids"].offsets().diff()
    mine = (len(data) // rows_together(data), int(lengths.max()), int(lengths.sum()))
    rows, longest, tokens = (max(column) for column in zip(*gather(mine), strict=True))
    longest, tokens = -(-longest // shared), -(-tokens // shared)
    dynamic = tu.get(data, "use_dynamic_bsz", default=config.use_dynamic_bsz)
    key = "max_token_len_per_gpu" if dynamic else "micro_batch_size_per_gpu"
    size = tu.get(data, key, default=getattr(config, key))
    whole = tokens if dynamic else rows
    used = min(size, whole)
    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    smaller = max(used // 2, longest) if dynamic else max((d for d in divisors if d <= used // 2), default=used)
    larger = 2 * size if dynamic else min((d for d in divisors if d >= 2 * used), default=rows)
    passes = {
        "repeat": Pass("repeat", dynamic, size, fresh=True),
        "half": Pass("half", dynamic, smaller),
        "twice": Pass("twice", dynamic, larger),
        "reverse": Pass("reverse", dynamic, size, reverse=True),
        "single": Pass("single", False, 1),
    }
    impossible = {
        "half": smaller >= used and "no smaller micro-batch holds the longest row",
        "twice": (used == whole and "it is one micro-batch already")
        or (any(gather(_has_no_room())) and "some rank has no room for it on its device"),
        "reverse": rows == 1 and "there is one row",
        "single": (rows > _SINGLE_ROWS and f"{rows} rows per rank are more than {_SINGLE_ROWS}")
        or (not dynamic and used == 1 and "every micro-batch is one row already"),
    }
    left_out = [(name, str(why)) for name in names if (why := impossible.get(name))]
    return Pass("as configured", dynamic, size), [passes[n] for n in names if not impossible.get(n)], left_out


def _has_no_room() -> bool:
    """Whether the most that a pass of this run took of the device's memory, taken twice, does not fit."""
    device = get_torch_device()
    free, total = device.mem_get_info()
    held, highest = device.memory_allocated(), device.max_memory_allocated()
    return held + 2 * (highest - held) > 0.9 * min(total, free + device.memory_reserved())
