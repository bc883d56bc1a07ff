"""A way for weights from training ranks to rollout servers of their own, on one machine; for demonstration and tests.

verl's asynchronous trainers with separate rollouts send weights over NCCL or the like. This one leaves them in a file.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

NAME = "file"
"""What ``actor_rollout_ref.rollout.checkpoint_engine.backend`` has to be."""

_POLL_SECONDS = 0.02

Weights = Generator[tuple[str, torch.Tensor], None, None]


@CheckpointEngineRegistry.register(NAME)
class FileCheckpointEngine(CheckpointEngine):
    """Writes the weights of one step in a folder that lasts from `prepare` to `finalize`, and reads them there.

    Args:
        bucket_size: Not used: a file takes all weights at once.
        is_master: Whether this is the training rank that writes; the others only take part in gathering.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.folder: Path | None = None

    def prepare(self) -> str | None:  # type: ignore[override]
        """Make the folder, on the writing rank."""
        return tempfile.mkdtemp(prefix="trinity_loss_weights_") if self.is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every rank the folder that the writing rank has made."""
        (folder,) = filter(None, metadata)
        return {"folder": [folder] * actor_wg_world_size}, {"folder": [folder] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:  # type: ignore[override]
        """Take the folder."""
        self.folder = Path(folder)

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Write all weights; every training rank goes through them, since gathering one is collective."""
        state = {name: weight.detach().clone() for name, weight in weights}
        if self.is_master:
            assert self.folder is not None
            torch.save(state, self.folder / "part")
            os.replace(self.folder / "part", self.folder / "weights")

    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the weights and yield them."""
        assert self.folder is not None
        while not (self.folder / "weights").exists():
            await asyncio.sleep(_POLL_SECONDS)
        for item in torch.load(self.folder / "weights", weights_only=True).items():
            yield item

    def finalize(self) -> None:
        """Remove the folder, which everybody has read by now."""
        if self.is_master and self.folder is not None:
            shutil.rmtree(self.folder)
        self.folder = None
