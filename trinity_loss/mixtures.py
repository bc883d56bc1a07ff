"""Losses of two kinds of rows, usual ones and an expert's: Trinity-RFT's ``mix`` and ``mix_chord``.

Formulas are those of Trinity-RFT 0.6.0 (``trinity/algorithm/policy_loss_fn``), whose weights come from configured batch
sizes and say the same where rows come in these numbers. Each part is aggregated over its own rows of the mini-batch, so
its denominator is a count of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode, TokenSum, has_scale_factor, make_aggregation_mode
from trinity_loss.errors import ConfigError
from trinity_loss.policy import ppo, sft, sft_phi
from trinity_loss.registry import ExpertPart, PolicyInputs, TokenLoss, register_policy_loss
from trinity_loss.rules import BOOLEAN, COUNT, number
from trinity_loss.tokens import ResponseTokens

_PART = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
#: What a total of all rows is called where it is one of some.
_TOTALS = {
    "batch_num_tokens": "tokens",
    "batch_num_valid_tokens": "valid_tokens",
    "global_batch_size": "rows",
    "batch_num_nonempty_sequences": "nonempty_rows",
    "batch_num_real_sequences": "real_rows",
}


@dataclass(frozen=True)
class OfRows(AggregationMode):
    """A mode of which the usual rows alone, or the expert's, are the mini-batch; it is given no others.

    Attributes:
        mode: The mode.
        rows: ``usual`` or ``expert``.
    """

    mode: AggregationMode = field(default_factory=TokenSum)
    rows: str = "usual"

    @property
    def total(self) -> str | None:
        return None if self.mode.total is None else f"batch_num_{self.rows}_{_TOTALS[self.mode.total]}"

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return self.mode.local_count(tokens)

    def token_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        return self.mode.token_weights(tokens, dtype)


def can_be_split(name: str) -> bool:
    """Whether the mode of that name is one for a loss that counts an expert's rows apart."""
    try:
        split_mode(name, make_aggregation_mode(name, loss_scale_factor=1.0 if has_scale_factor(name) else None))
    except ConfigError:
        return False
    return True


def split_mode(name: str, mode: AggregationMode) -> dict[str, AggregationMode]:
    """The mode of that name as those of the usual rows and of the expert's, by the names of their terms.

    Raises:
        ConfigError: It counts something else than tokens or sequences.
    """
    if not mode.is_linear or mode.total not in (None, *_TOTALS):
        raise ConfigError(
            f"loss_agg_mode is {name!r}, which divides by {mode.total}; a loss_mode that counts an expert's rows apart "
            "divides by tokens, by sequences or by nothing: expected token-mean, token-sum, constant or seq-mean-…"
        )
    return {"pg": OfRows(mode=mode, rows="usual"), "expert": OfRows(mode=mode, rows="expert")}


def scheduled_weight(step: int, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> float:
    """CHORD's µ of a step: up to ``peak`` in a straight line, then down to ``valley`` by half a cosine.

    Example:
        >>> [scheduled_weight(step, 2, 4, 0.8, 0.2) for step in (1, 2, 4, 6, 9)]
        [0.4, 0.8, 0.5, 0.2, 0.2]
    """
    if step < warmup_steps:
        return step / warmup_steps * peak
    if step >= warmup_steps + decay_steps:
        return valley
    fallen = 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps))
    return (peak - valley) * fallen + valley


def _chord_weight(arguments: Mapping[str, Any], step: int) -> float:
    return scheduled_weight(
        step, *(arguments[f"mu_{name}"] for name in ("warmup_steps", "decay_steps", "peak", "valley"))
    )


def _chord_expert(inputs: PolicyInputs, arguments: Mapping[str, Any]) -> TokenLoss:
    return sft_phi(inputs) if arguments["enable_phi_function"] else sft(inputs)


@register_policy_loss(
    "mix",
    analytic=True,
    rules={"mu": _PART},
    mixture=ExpertPart(lambda inputs, _: sft(inputs), lambda arguments, step: float(arguments["mu"])),
)
def mix(
    inputs: PolicyInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float, mu: float = 0.1
) -> TokenLoss:
    """``ppo`` of the usual rows and the negative log-likelihood of the expert's (Trinity-RFT)."""
    return ppo(inputs, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)


@register_policy_loss(
    "mix_chord",
    analytic=True,
    rules={
        "mu_warmup_steps": COUNT,
        "mu_decay_steps": COUNT,
        "mu_peak": _PART,
        "mu_valley": _PART,
        "enable_phi_function": BOOLEAN,
    },
    mixture=ExpertPart(
        _chord_expert,
        _chord_weight,
        needs_step=lambda arguments: arguments["mu_warmup_steps"] + arguments["mu_decay_steps"] > 0,
    ),
)
def mix_chord(
    inputs: PolicyInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
    enable_phi_function: bool = True,
) -> TokenLoss:
    """``mix`` with a scheduled µ and likelihoods weighted by p (1 - p), CHORD: https://arxiv.org/abs/2508.11408."""
    return ppo(inputs, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)
