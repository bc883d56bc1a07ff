"""Which passes an audit makes over a mini-batch: how each cuts it, and why one cannot be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

_SINGLE_ROWS = 16  # One row at a time only up to so many rows per rank.


@dataclass(frozen=True)
class Pass:
    """One computation of the gradient.

    Attributes:
        name: ``as configured``, one of :data:`trinity_loss.verl.policy_options.AUDIT_CUTS`, or an experiment.
        dynamic: Whether ``size`` is a budget of tokens (``use_dynamic_bsz``) instead of rows.
        size: Of a micro-batch.
        reverse: Whether the rows come in reverse order.
        fresh: Whether random numbers go on instead of starting where those of the first pass did.
        growth: How much larger its micro-batches are than as configured, at most.
    """

    name: str
    dynamic: bool
    size: int
    reverse: bool = False
    fresh: bool = False
    growth: float = 1.0

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


def shape_of(data: TensorDict, worker: Any) -> tuple[int, int, int]:
    """Of this rank's rows: how many (or groups of them, where no cut may part these), tokens of the longest, of all.

    Raises:
        NotImplementedError: Rows do not stay on their rank.
    """
    config = worker.engine_config
    if getattr(config, "dynamic_context_parallel", False):
        raise NotImplementedError("with dynamic_context_parallel the rows of a rank are others in every cut")
    # Ranks that share a sequence have a budget together.
    shared = getattr(config, "ulysses_sequence_parallel_size", 1) * getattr(config, "context_parallel_size", 1)
    lengths = data["input_ids"].offsets().diff()
    return len(data) // rows_together(data), -(-int(lengths.max()) // shared), -(-int(lengths.sum()) // shared)


def plan(
    data: TensorDict, worker: Any, names: Sequence[str], shapes: Sequence[tuple[int, int, int]]
) -> tuple[Pass, list[Pass], list[tuple[str, str]]]:
    """The mini-batch as configured, the other passes, and those that cannot be made, each with the reason.

    Args:
        data: This rank's rows.
        worker: The training worker.
        names: Of :data:`trinity_loss.verl.policy_options.AUDIT_CUTS`.
        shapes: :func:`shape_of` each rank.
    """
    config = worker.engine_config
    fewest, rows = min(shape[0] for shape in shapes), max(shape[0] for shape in shapes)
    longest, tokens = max(shape[1] for shape in shapes), max(shape[2] for shape in shapes)
    dynamic = tu.get(data, "use_dynamic_bsz", default=config.use_dynamic_bsz)
    key = "max_token_len_per_gpu" if dynamic else "micro_batch_size_per_gpu"
    size = tu.get(data, key, default=getattr(config, key))
    whole = tokens if dynamic else rows
    used = min(size, whole)
    divisors = [number for number in range(1, fewest + 1) if not any(shape[0] % number for shape in shapes)]
    smaller = max(used // 2, longest) if dynamic else max((d for d in divisors if d <= used // 2), default=used)
    larger = 2 * size if dynamic else min((d for d in divisors if d >= 2 * used), default=max(divisors))
    passes = {
        "repeat": Pass("repeat", dynamic, size, fresh=True),
        "half": Pass("half", dynamic, smaller),
        "twice": Pass("twice", dynamic, larger, growth=min(larger, whole) / used),
        "reverse": Pass("reverse", dynamic, size, reverse=True),
        "single": Pass("single", False, 1),
    }
    impossible = {
        "half": smaller >= used and "no smaller micro-batch holds the longest row",
        "twice": (used == whole or larger <= used) and "it is one micro-batch already",
        "reverse": rows == 1 and "there is one row",
        "single": (rows > _SINGLE_ROWS and f"{rows} rows per rank are more than {_SINGLE_ROWS}")
        or (not dynamic and used == 1 and "every micro-batch is one row already"),
    }
    left_out = [(name, str(why)) for name in names if (why := impossible.get(name))]
    return Pass("as configured", dynamic, size), [passes[n] for n in names if not impossible.get(n)], left_out
