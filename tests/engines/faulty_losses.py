"""Losses that go wrong in known ways, to see that a check would notice."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WithoutMicroBatchFactor:
    """What comes of a loss if the Megatron engine did not multiply it by the number of micro-batches.

    Attributes:
        loss: The loss.
    """

    loss: Callable[..., Any]

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        value, metrics = self.loss(model_output=model_output, data=data, dp_group=dp_group)
        return value / data["num_micro_batch"], metrics


@dataclass(frozen=True)
class FailsOnRank:
    """A loss that raises on one rank, while the others wait for it in a collective; a note says when.

    Attributes:
        loss: The loss of all other ranks.
        rank: The rank.
        text: The message of the RuntimeError.
    """

    loss: Callable[..., Any]
    rank: int
    text: str

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            error = RuntimeError(self.text)
            error.add_note(f"called at {time.time()}")
            raise error
        return self.loss(model_output=model_output, data=data, dp_group=dp_group)


@dataclass(frozen=True)
class NanOnRank:
    """A loss that is given, on one rank, a NaN among the advantages at a token that counts; a note says when.

    Attributes:
        loss: The loss.
        rank: The rank.
    """

    loss: Callable[..., Any]
    rank: int

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        import torch.distributed as dist

        called = time.time()
        if dist.get_rank() == self.rank:  # Of the padded layout.
            data["advantages"][tuple(data["response_mask"].nonzero()[0])] = float("nan")
        try:
            return self.loss(model_output=model_output, data=data, dp_group=dp_group)
        except Exception as error:
            error.add_note(f"called at {called}")
            raise
