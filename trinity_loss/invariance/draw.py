"""Draws a mini-batch for a check."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from trinity_loss.invariance.minibatch import MiniBatch


@lru_cache(maxsize=8)
def make_mini_batch(sequences: int = 36, seed: int = 0, longest: int = 24, masked: int = 2) -> MiniBatch:
    """Draws a mini-batch in which every wrong denominator shows.

    Lengths run from 1 to ``longest``, evenly in their logarithm; masks have holes; ``masked`` sequences have
    no token that counts; four sequences in a row share a prompt; ratios lie on both sides of every clip, and
    advantages and log-probs are spread wide enough for losses that choose tokens by their covariance.

    Args:
        sequences: S, at least 4.
        seed: Of everything.
        longest: Length of the longest response.
        masked: Fully masked sequences, at most a quarter of all.

    Returns:
        float64 throughout, with every field that verl's losses read.
    """
    draw = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=draw, dtype=torch.float64)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    lengths = (longest ** torch.linspace(0, 1, sequences)).round().long()
    lengths = lengths[torch.randperm(sequences, generator=draw)]
    tokens = int(lengths.sum())
    starts = [0, *accumulate(lengths.tolist())]
    mask = torch.ones(tokens, dtype=torch.int64)
    for i, length in enumerate(lengths.tolist()):
        if length > 2:
            mask[starts[i] + 1 + int(uniform(1) * (length - 2))] = 0
    # One in four at most, so that no prompt group is masked throughout.
    for i in range(min(masked, sequences // 4)):
        mask[starts[4 * i + 1] : starts[4 * i + 2]] = 0
    log_probs = -0.05 - 3 * uniform(tokens)

    def other_policy(spread: float) -> Tensor:
        return (log_probs + spread * normal(tokens)).clamp(max=-0.01)

    return MiniBatch(
        prompt_lengths=torch.randint(1, 5, (sequences,), generator=draw),
        response_lengths=lengths,
        response_mask=mask,
        log_probs=log_probs,
        entropy=2 * uniform(tokens),
        token_fields={
            "advantages": 1.5 * torch.repeat_interleave(normal(sequences), lengths) + 0.3 * normal(tokens),
            "old_log_probs": other_policy(0.6),
            "ref_log_prob": other_policy(0.5),
            "rollout_log_probs": other_policy(0.3),
            "rollout_is_weights": 0.5 + uniform(tokens),
        },
        uids=[f"prompt-{i // 4}" for i in range(sequences)],
    )
