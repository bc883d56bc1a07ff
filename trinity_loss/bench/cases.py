"""Micro-batches of given size, as verl's v1 trainer hands them to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product as combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

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
    lists = (
        sequences or (BASE.sequences,),
        longest or (BASE.longest,),
        fill or (BASE.fill,),
        modes or (BASE.mode,),
    )
    return tuple(Case(*values) for values in combinations(*lists))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch and the flat values that the model output is made of.

    Attributes:
        data: Fields, jagged over the responses, and the totals of the mini-batch, which is this micro-batch.
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
        jagged = torch.nested.nested_tensor_from_jagged
        return {
            "log_probs": jagged(self.log_probs, offsets=self.offsets),
            "entropy": jagged(self.entropy, offsets=self.offsets),
        }


def make_micro_batch(case: Case, *, device: str = "cpu", seed: int = 0) -> MicroBatch:
    """Draws the micro-batch of a case."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    valid = case.lengths(seed)
    lengths = torch.cat([valid, torch.full((case.masked_rows,), 16)])
    prompts = torch.randint(SHORTEST_PROMPT, LONGEST_PROMPT, lengths.shape, generator=generator)
    rows = len(lengths)

    def jagged(tensors: list[Tensor]) -> Tensor:
        # Like this, and not from offsets, since it notes the longest: else verl pads to the sum of all.
        return torch.nested.as_nested_tensor([t.to(device) for t in tensors], layout=torch.jagged)

    def noise(scale: float) -> list[Tensor]:
        return [torch.randn(int(n), generator=generator) * scale for n in lengths]

    old = noise(0.3)
    fields: dict[str, Any] = {
        "prompts": jagged([torch.zeros(int(n), dtype=torch.int64) for n in prompts]),
        "responses": jagged([torch.zeros(int(n), dtype=torch.int64) for n in lengths]),
        "response_mask": jagged([torch.full((int(n),), int(i < len(valid))) for i, n in enumerate(lengths)]),
        "old_log_probs": jagged(old),
        "advantages": jagged(noise(1.0)),
        "ref_log_prob": jagged([o + torch.randn(len(o), generator=generator) * 0.2 for o in old]),
    }
    data = TensorDict(fields, batch_size=[rows])
    num_tokens = int(valid.sum())
    tu.assign_non_tensor(data, batch_num_tokens=num_tokens, dp_size=1, global_batch_size=rows)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (prompts + lengths).cumsum(0)])
    # Near the old log-probs, which stand one place to the left, so that some ratios are clipped and most are not.
    pieces = []
    for prompt, values in zip(prompts.tolist(), old, strict=True):
        current = values + torch.randn(len(values), generator=generator) * 0.3
        pieces.append(torch.cat([torch.zeros(prompt - 1), current, torch.zeros(1)]))
    size = int(offsets[-1])
    return MicroBatch(
        data=data,
        log_probs=torch.cat(pieces).to(device).requires_grad_(),
        entropy=torch.rand(size, generator=generator).to(device).requires_grad_(),
        offsets=offsets.to(device),
        num_tokens=num_tokens,
    )
