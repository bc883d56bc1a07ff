"""A sampler for verl's v1 trainer that makes runs repeatable, for demonstration and tests.

The v1 trainer names prompts with random identifiers and takes answers as they come in. This one puts a batch in an
order of its content, so that two runs that drew the same answers cut them into the same pieces. It may also look
more often than every two seconds whether the answers are there (``sampler_kwargs.poll_interval``, in seconds).
"""

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class ContentOrderReplayBuffer(ReplayBuffer):
    """verl's synchronous replay buffer with its batches in an order of their content."""

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        options = dict(sampler_kwargs)
        poll_interval = float(options.pop("poll_interval", 2.0))
        if options:
            raise ValueError(f"unknown trainer.v1.sampler.sampler_kwargs {sorted(options)}; known: poll_interval")
        if kwargs["trainer_mode"] != "sync":
            raise ValueError(f"this sampler is for trainer_mode=sync, not {kwargs['trainer_mode']!r}")
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
