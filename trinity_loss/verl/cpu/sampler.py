"""A sampler for verl's v1 trainers that makes runs repeatable, for demonstration and tests.

The v1 trainer names prompts with random identifiers and takes answers as they come in. This one puts a batch in an
order of its content, so that two runs that drew the same answers cut them into the same pieces. It may also look
more often than every two seconds whether the answers are there (``sampler_kwargs.poll_interval``, in seconds).

An asynchronous trainer draws what is finished when it looks: there the order makes a batch readable, not repeatable.
"""

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class _InContentOrder(ReplayBuffer):
    """verl's replay buffer with its batches in an order of their content."""

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        options = dict(sampler_kwargs)
        poll_interval = float(options.pop("poll_interval", 2.0))
        if options:
            raise ValueError(f"unknown trainer.v1.sampler.sampler_kwargs {sorted(options)}; known: poll_interval")
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=poll_interval, **kwargs)

    def _materialize_batch(self, partition_id: str, *args: Any) -> Any:
        batch = super()._materialize_batch(partition_id, *args)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"])
        prompts, responses = ([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses"))
        groups = [key.split("_")[0] for key in batch.keys]
        answers: dict[str, list[list[int]]] = {}
        for group, response in sorted(zip(groups, responses, strict=True)):
            answers.setdefault(group, []).append(response)
        # Two groups of one prompt are told apart by their answers; rows that still tie are equal.
        batch.reorder(
            sorted(range(len(groups)), key=lambda i: (prompts[i], answers[groups[i]], groups[i], responses[i]))
        )
        return batch


class _AsyncInContentOrder(_InContentOrder, ReplayBufferAsync):
    """The same for the asynchronous trainers, which leave out answers of too old a version."""


def content_order_replay_buffer(*, trainer_mode: str, **kwargs: Any) -> ReplayBuffer:
    """Make the replay buffer for a trainer mode, as verl does, which calls this instead of a class."""
    kind = _InContentOrder if trainer_mode == "sync" else _AsyncInContentOrder
    return kind(trainer_mode=trainer_mode, **kwargs)
