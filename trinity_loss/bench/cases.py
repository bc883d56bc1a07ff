"""Micro-batches of given size, as verl's v1 trainer hands them to a loss."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from itertools import product as combinations

import torch
from tensordict import TensorDict
from torch import Tensor

from trinity_loss.invariance.layouts import build
from trinity_loss.invariance.minibatch import MiniBatch

#: Spread of the logarithm of response lengths.
SPREAD = 0.9
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 256


@dataclass(frozen=True)
class Case:
    """Size of a micro-batch and how its loss is aggregated.

    Attributes:
        sequences: Sequences.
        longest: Tokens of the longest response.
        fill: Response tokens over sequences × longest.
        mode: Aggregation mode.
        masked_rows: Further sequences of 16 response tokens each, none of which counts.
        goal: How many times faster than verl's loss it is meant to be, None where nothing is said.
    """

    sequences: int
    longest: int
    fill: float
    mode: str = "token-mean"
    masked_rows: int = 0
    goal: float | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        masked = f" + {self.masked_rows} masked" if self.masked_rows else ""
        return f"{self.sequences}×{self.longest} fill {self.fill:g}{masked}"

    def lengths(self, seed: int) -> Tensor:
        """Response lengths int64 [sequences]: log-normal, the longest ``longest``, the total that ``fill`` says."""
        generator = torch.Generator().manual_seed(seed)
        shape = torch.empty(self.sequences).log_normal_(0, SPREAD, generator=generator).double()
        total = round(self.fill * self.sequences * self.longest)

        def scaled(factor: float) -> Tensor:
            lengths = (shape * factor).clamp(1, self.longest).long()
            lengths[0] = self.longest
            return lengths

        low, high = 0.0, self.longest / float(shape.min())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if int(scaled(middle).sum()) > total else (middle, high)
        return scaled(high)


BASE = Case(32, 8192, 0.2)

GOALS = (
    Case(32, 8192, 0.21, goal=8),
    Case(64, 16384, 0.21, goal=13),
    Case(128, 512, 1.0, goal=6),
    Case(8, 512, 0.5, goal=2),
)

#: One thing varies at a time.
SWEEP = (
    BASE,
    *(replace(BASE, sequences=n) for n in (8, 128)),
    *(replace(BASE, longest=n) for n in (512, 2048, 32768)),
    *(replace(BASE, fill=x) for x in (0.4, 0.7, 1.0)),
    *(replace(BASE, mode=m) for m in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")),
)

#: Ten times the tokens; the same tokens under twice the longest response, with masked rows, in 1 and 512 sequences.
SCALING = (
    Case(16, 2048, 0.5),
    Case(160, 2048, 0.5),
    Case(512, 4096, 0.5),
    Case(32, 8192, 0.4),
    Case(32, 16384, 0.2),
    Case(32, 16384, 0.2, masked_rows=32),
    Case(1, 65536, 1.0),
    Case(512, 128, 1.0),
)


def product(
    sequences: tuple[int, ...], longest: tuple[int, ...], fill: tuple[float, ...], modes: tuple[str, ...]
) -> tuple[Case, ...]:
    """All combinations; what is empty is that of :data:`BASE`."""
    given = zip((sequences, longest, fill, modes), astuple(BASE), strict=False)
    return tuple(Case(*values) for values in combinations(*(some or (base,) for some, base in given)))


@dataclass(frozen=True, eq=False)
class MeasuredBatch:
    """A micro-batch, which is its mini-batch, and the flat values that the model output is made of.

    Attributes:
        data: Fields, jagged over the responses, and the totals.
        log_probs: Leaf [M] over prompts and responses.
        entropy: Leaf [M].
        offsets: int64 [S + 1], where each sequence starts in the leaves.
        num_tokens: Response tokens that count.
    """

    data: TensorDict
    log_probs: Tensor
    entropy: Tensor
    offsets: Tensor
    num_tokens: int

    def model_output(self) -> dict[str, Tensor]:
        """New jagged tensors over the leaves, as the engine makes them, without earlier gradients."""
        self.log_probs.grad = self.entropy.grad = None
        leaves = {"log_probs": self.log_probs, "entropy": self.entropy}
        return {n: torch.nested.nested_tensor_from_jagged(x, offsets=self.offsets) for n, x in leaves.items()}


def make_micro_batch(case: Case, *, device: str = "cpu", seed: int = 0) -> MeasuredBatch:
    """Draws the micro-batch of a case."""
    generator = torch.Generator().manual_seed(seed)
    valid = case.lengths(seed)
    lengths = torch.cat([valid, torch.full((case.masked_rows,), 16)])
    prompts = torch.randint(SHORTEST_PROMPT, LONGEST_PROMPT, lengths.shape, generator=generator)
    num_tokens = int(valid.sum())

    def noise(scale: float) -> Tensor:
        return torch.randn(int(lengths.sum()), generator=generator) * scale

    old = noise(0.3)
    batch = MiniBatch(
        prompt_lengths=prompts,
        response_lengths=lengths,
        response_mask=torch.repeat_interleave(torch.arange(len(lengths)) < len(valid), lengths).long(),
        # Near the old log-probs, so that some ratios are clipped and most are not.
        log_probs=old + noise(0.3),
        entropy=noise(1.0).abs(),
        token_fields={"old_log_probs": old, "advantages": noise(1.0), "ref_log_prob": old + noise(0.2)},
    )
    built = build(batch, range(len(lengths)), "nested")
    totals = {"batch_num_tokens": num_tokens, "dp_size": 1, "global_batch_size": len(lengths)}
    # Leaves of their own: how they came out of the drawn values is no part of a backward pass.
    output = {name: x.to(device) for name, x in built.model_output(batch.log_probs, batch.entropy).items()}
    log_probs, entropy = (x.values().detach().requires_grad_() for x in output.values())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (prompts + lengths).cumsum(0)]).to(device)
    return MeasuredBatch(built.with_totals(totals).to(device), log_probs, entropy, offsets, num_tokens)
