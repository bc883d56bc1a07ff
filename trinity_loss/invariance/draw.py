"""Draws mini-batches for a check: one in which every wrong denominator shows, and some that are special."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from trinity_loss.distillation import TEACHER, DistillationLossConfig
from trinity_loss.errors import ConfigError
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
        # Sessions of one and of three rows; an expert's rows of all lengths.
        sequence_fields={
            "session_id": torch.arange(sequences) % 4 // 3,
            "expert_mask": torch.rand(sequences, generator=draw) < 0.3,
        },
        uids=[f"prompt-{i // 4}" for i in range(sequences)],
    )


def with_teacher(batch: MiniBatch, distillation: DistillationLossConfig | None, seed: int = 0) -> MiniBatch:
    """A mini-batch with what a distillation (None: nothing) reads of a teacher, drawn; what is there already stays."""
    if distillation is None:
        return batch
    draw = torch.Generator().manual_seed(seed)
    log_probs, size = batch.log_probs, batch.num_tokens

    def uniform(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(size, generator=draw, dtype=torch.float64)).to(log_probs.dtype)

    teacher = (log_probs.detach() + uniform(-0.8, 0.8)).clamp(max=-0.01)
    drawn = {TEACHER: teacher}
    if distillation.use_topk:
        shared = torch.randint(0, (distillation.topk or 1) + 1, (size,), generator=draw)
        drawn = {
            "distillation_losses": uniform(-0.1, 1.5),
            "student_mass": uniform(0.3, 0.9),
            "teacher_mass": uniform(0.7, 1.0),
            "overlap_count": shared,
            "overlap_token_advantage": uniform(-0.5, 0.5) * (shared > 0),
        }
    return batch.with_fields(**drawn | dict(batch.token_fields))


def with_extra_fields(batch: MiniBatch, fields: Mapping[str, str]) -> MiniBatch:
    """A mini-batch with fields of a user's own.

    Args:
        batch: Without them.
        fields: By name: ``token`` or ``sequence`` for a number drawn per response token or per sequence, or a
            number, which is the same in every micro-batch.

    Raises:
        ConfigError: A value is none of these, or there is a field of that name.
    """
    draw = torch.Generator().manual_seed(0)
    tokens, rows, constants = dict(batch.token_fields), dict(batch.sequence_fields), dict(batch.constants)
    taken = {*tokens, *rows, *constants, *batch.all_totals, "response_mask", "uid", "prompts", "responses"}
    for name, value in fields.items():
        if name in taken:
            raise ConfigError(f"--field is {name}={value}; the mini-batch has that field")
        if value in ("token", "sequence"):
            fields_of, size = (tokens, batch.num_tokens) if value == "token" else (rows, batch.num_sequences)
            fields_of[name] = torch.rand(size, generator=draw, dtype=torch.float64).to(batch.log_probs.dtype)
            continue
        try:
            constants[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ConfigError(f"--field is {name}={value}; expected {name}=token, =sequence or =NUMBER") from None
    return replace(batch, token_fields=tokens, sequence_fields=rows, constants=constants)


def special_mini_batches(batch: MiniBatch, seed: int = 0) -> Iterator[tuple[str, MiniBatch]]:
    """Mini-batches like this one in which faults show that it hides, each with what is special about it."""
    advantages = batch.token_fields.get("advantages")
    lengths, old = batch.response_lengths, batch.token_fields.get("old_log_probs")
    if advantages is not None:
        uids = list(batch.uids or map(str, range(batch.num_sequences)))
        names = sorted(set(uids))
        group = torch.tensor([names.index(uid) for uid in uids])
        draw = torch.Generator().manual_seed(seed)
        reward = torch.randn(batch.num_sequences, generator=draw, dtype=torch.float64)
        sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, group, reward)
        centred = reward - (sums / group.bincount(minlength=len(names)))[group]
        # Two of three prompts have answers that are all alike, so that whole micro-batches have nothing to gain.
        for what, per_sequence, on_policy in (
            ("advantages centred by group, on-policy", centred, True),
            ("no advantage in most groups", torch.where(group % 3 == 0, centred, 0.0), False),
            ("no advantage anywhere", torch.zeros_like(centred), False),
        ):
            changed = {"advantages": torch.repeat_interleave(per_sequence, lengths).to(advantages)}
            if on_policy and old is not None:
                changed["old_log_probs"] = batch.log_probs.detach().clone()
            yield what, batch.with_fields(**changed)
    yield "values of all sizes", _of_all_sizes(batch)
    if batch.group_size == 1 and batch.num_sequences >= 8:
        yield "responses of length 0 and 1", _shortened(batch)
        yield "responses of 12,000 tokens", _repeated(batch, 12_000)


def _of_all_sizes(batch: MiniBatch) -> MiniBatch:
    """Advantages, entropies and how far policies are apart grow from a hundredth to twice: what a threshold or a
    bound is compared with lies on either side of it."""
    sizes = 2 * 200 ** -torch.linspace(1, 0, batch.num_sequences, dtype=batch.log_probs.dtype)
    size, now = torch.repeat_interleave(sizes, batch.response_lengths), batch.log_probs.detach()
    fields = {
        name: now + size * (values - now) if "log_prob" in name else size * values
        for name, values in batch.token_fields.items()
        if name == "advantages" or "log_prob" in name
    }
    other = batch.with_fields(**{n: v.clamp(max=-0.001) if "log_prob" in n else v for n, v in fields.items()})
    return other if batch.entropy is None else replace(other, entropy=size * batch.entropy)


def _shortened(batch: MiniBatch) -> MiniBatch:
    """Every fourth response of length 1, another one of length 0, none alone in an even cut."""
    lengths = batch.response_lengths.tolist()
    kept = [1 if i % 4 == 0 else 0 if i == 5 else n for i, n in enumerate(lengths)]
    index = torch.cat([torch.arange(a, a + n) for a, n in zip(batch.starts, kept, strict=False)])
    return batch.picked(torch.tensor(kept), index, list(range(batch.num_sequences)), totals={})


def _repeated(batch: MiniBatch, length: int) -> MiniBatch:
    """The six longest sequences, each repeated up to so many tokens: counts that few bits cannot hold."""
    longest = sorted(range(batch.num_sequences), key=lambda i: -batch.valid_counts[i])[:6]
    pieces = [
        batch.starts[i] + torch.arange(length + 61 * k) % int(batch.response_lengths[i]) for k, i in enumerate(longest)
    ]
    return batch.picked(torch.tensor([len(p) for p in pieces]), torch.cat(pieces), longest, totals={})
