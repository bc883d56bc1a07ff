"""The same mini-batch with one thing changed in some sequences, and all counts as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from trinity_loss.invariance.minibatch import MiniBatch


def tokens_of(batch: MiniBatch, rows: Sequence[int]) -> torch.Tensor:
    """int64: where the tokens of these sequences stand."""
    return torch.cat([torch.arange(batch.starts[i], batch.starts[i + 1]) for i in rows])


@lru_cache(maxsize=64)
def with_field_moved(batch: MiniBatch, name: str, by: float, rows: tuple[int, ...]) -> MiniBatch:
    """One field (``log_probs``, ``entropy`` or a token field) moved in these sequences, log-probs still negative."""
    old = getattr(batch, name) if name in ("log_probs", "entropy") else batch.token_fields[name]
    here = tokens_of(batch, rows)
    moved = old.clone()
    moved[here] += by
    if "log_prob" in name:
        moved.clamp_(max=-0.01)
    elif name == "entropy" or bool((old >= 0).all()):
        moved.clamp_(min=0.01)
    if name == "log_probs":
        return replace(batch, log_probs=moved)
    return replace(batch, entropy=moved) if name == "entropy" else batch.with_fields(**{name: moved})


@lru_cache(maxsize=8)
def with_policy_that_agrees(batch: MiniBatch, name: str, rows: tuple[int, ...]) -> MiniBatch:
    """The log-probs of one other policy are the current ones in these sequences."""
    here, agreeing = tokens_of(batch, rows), batch.token_fields[name].clone()
    agreeing[here] = batch.log_probs.detach()[here].to(agreeing.dtype)
    return batch.with_fields(**{name: agreeing})


@lru_cache(maxsize=8)
def with_other_lengths(batch: MiniBatch, pairs: tuple[tuple[int, int], ...]) -> MiniBatch:
    """Neighbours in the mini-batch share their tokens evenly: other lengths, as many tokens as before in each pair,
    and none as long as the longer one was."""
    lengths = batch.response_lengths.clone()
    for one, other in pairs:
        both = int(lengths[one] + lengths[other])
        lengths[one], lengths[other] = both // 2, both - both // 2
    return replace(batch, prompt_lengths=batch.prompt_lengths.clone(), response_lengths=lengths)


@lru_cache(maxsize=8)
def with_fewer_valid(batch: MiniBatch, rows: tuple[int, ...]) -> MiniBatch:
    """One more masked token in each of these sequences that has several."""
    mask = batch.response_mask.clone()
    for i in rows:
        here = [k for k in range(batch.starts[i], batch.starts[i + 1]) if mask[k]]
        if len(here) > 1:
            mask[here[-1]] = 0
    return replace(batch, response_mask=mask, loss_mask=None, totals=batch.all_totals)


@lru_cache(maxsize=8)
def with_prompts_of_one(batch: MiniBatch) -> MiniBatch:
    """Every sequence has a prompt of its own."""
    return replace(batch, uids=[f"alone-{i}" for i in range(batch.num_sequences)])
