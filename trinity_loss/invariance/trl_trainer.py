"""A GRPOTrainer of TRL, or a subclass of it, without model, data and processes: its ``_compute_loss`` alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.pieces import LABEL, Piece

#: What a trainer keeps under another name than its arguments have.
_RENAMED = {"epsilon_low": "epsilon"}


def play(trainer: Any) -> Callable[[Piece], tuple[Any, Any]]:
    """A function of a piece that returns loss and metrics as a trainer of this class would.

    Args:
        trainer: A subclass of ``trl.GRPOTrainer``, or ``functools.partial(subclass, args=GRPOConfig(...))``.

    Raises:
        ConfigError: It is no such class, or TRL cannot be imported.
    """
    bound = isinstance(trainer, partial)
    cls: Any = trainer.func if bound else trainer
    try:
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise ConfigError(f"TRL cannot be imported (docs/contracts.md): {error}") from error
    if not issubclass(cls, GRPOTrainer):
        raise ConfigError(f"{cls.__name__} is no subclass of trl.GRPOTrainer")
    args = (bound and trainer.keywords.get("args")) or GRPOConfig(
        output_dir=gettempdir(), use_cpu=True, bf16=False, report_to=[]
    )
    epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high

    def default(self: Any, name: str) -> Any:
        if name == "args":  # Before there are any: no attribute can be looked up in them.
            raise AttributeError(name)
        return getattr(self.args, _RENAMED.get(name, name))

    def log_probs(self: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.piece.rectangle("log_probs"), self.piece.rectangle("entropy"), None

    played: Any = type(cls.__name__, (cls,), {"__getattr__": default, "_get_per_token_logps_and_entropies": log_probs})

    def loss_fn(piece: Piece) -> tuple[Any, Any]:
        made = played.__new__(played)
        made.args, made.piece, made.epsilon_high = args, piece, epsilon_high
        made.model = SimpleNamespace(training=True)
        collectives = dict.fromkeys(("gather", "gather_for_metrics", "pad_across_processes", "reduce"), _alone)
        ranks = int(piece.totals["dp_size"])
        made.accelerator = SimpleNamespace(num_processes=ranks, sync_gradients=False, **collectives)
        made.current_gradient_accumulation_steps = int(piece.totals["pieces_per_rank"])
        made._entropy_bonus_enabled = args.entropy_coef != 0.0 or args.use_adaptive_entropy
        made._entropy_window_stats, made._last_world_entropy = None, float("inf")
        made.aux_loss_enabled, made._metrics = False, {"train": defaultdict(list)}
        # One step is generated at a time.
        args.steps_per_generation = made.current_gradient_accumulation_steps
        return made._compute_loss(made.model, _inputs(piece)), {}

    return loss_fn


def _alone(values: Tensor, *_: Any, **__: Any) -> Tensor:
    """What Accelerate's collectives return to a process without others."""
    return values


def _inputs(piece: Piece) -> dict[str, Any]:
    rows = len(piece.lengths)
    prompt = torch.arange(max(piece.prompts)).expand(rows, -1)
    first = [row[:1] if len(row) else torch.zeros(1, dtype=row.dtype) for row in piece.rows("advantages")]
    return {
        "prompt_ids": torch.full(prompt.shape, LABEL),
        "prompt_mask": (prompt >= prompt.shape[1] - torch.tensor(piece.prompts)[:, None]).long(),
        "completion_ids": torch.full((rows, piece.width), LABEL),
        "completion_mask": piece.real,
        "tool_mask": piece.rectangle("response_mask"),
        "advantages": torch.cat(first),
        "old_per_token_logps": piece.rectangle("old_log_probs"),
        "ref_per_token_logps": piece.rectangle("ref_log_prob"),
        "sampling_per_token_logps": piece.rectangle("rollout_log_probs"),
        "importance_sampling_ratio": piece.rectangle("rollout_is_weights"),
        "num_items_in_batch": torch.tensor(piece.totals["batch_num_tokens"]),
    }
