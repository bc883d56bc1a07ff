"""What to run through an engine, and what comes back. Imports neither torch's distributed part nor verl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from trinity_loss.import_path import find_at

EngineName = Literal["fsdp", "megatron"]
Loss = Callable[..., Any] | str


class EngineError(RuntimeError):
    """An engine run failed or ran out of time.

    Args:
        text: What happened, with the traceback of the rank that failed first.
        finished: Results from before: of the engines that had finished, with Ray workers of every case.
    """

    def __init__(self, text: str, finished: Sequence[EngineResult] = ()) -> None:
        super().__init__(text)
        self.finished = list(finished)


@dataclass(frozen=True)
class BatchSpec:
    """One mini-batch, the same on every rank until the engine splits it.

    Attributes:
        rows: Sequences of the mini-batch, over all ranks.
        layout: ``"padded"`` as verl's v0 trainer sends it, ``"nested"`` as its v1 trainer does.
        entropy: Whether the engine is asked for the entropy of each token.
        empty_rows: Rows whose mask holds no token at all.
        rows_per_prompt: Consecutive rows that share a ``uid``.
        seed: Of lengths, tokens and advantages.
        teacher: Tokens of which a teacher tells the log-prob at each place: 0 is no teacher, 1 the token that stands
            there, more are its most likely ones.
        taught_alone: Whether the engine makes no log-probs, since nothing but the teacher's most likely tokens counts.
        expert_rows: Rows that are marked as an expert's; none: nothing marks any.
    """

    rows: int = 8
    layout: Literal["padded", "nested"] = "padded"
    entropy: bool = True
    empty_rows: tuple[int, ...] = (2,)
    rows_per_prompt: int = 3
    seed: int = 0
    teacher: int = 0
    taught_alone: bool = False
    expert_rows: tuple[int, ...] = (0, 1, 3)


@dataclass(frozen=True)
class EngineCase:
    """One mini-batch through one engine, cut in one way.

    Attributes:
        loss: A picklable callable of verl's engine contract, or ``"package.module:name"`` of one.
        label: Free text, kept in the result.
        batch: The mini-batch.
        world_size: Number of ranks.
        micro_batches: How many equal pieces each rank cuts its rows into, unless ``max_tokens`` is given.
        max_tokens: Tokens per micro-batch; verl then cuts by length (``use_dynamic_bsz``).
        packed: Rows packed without padding (``use_remove_padding``; thd in Megatron), or padded (bshd).
        trinity_worker: Train with our training worker, as selected in Hydra, instead of verl's own.
        fsdp_size: FSDP only: ranks that share one copy of the weights; -1 is all of them.
        no_sync: FSDP only: ``use_no_sync_for_gradient_accumulation``.
        per_token_loss: Megatron only: ``calculate_per_token_loss``.
        pipeline: Megatron only: pipeline stages.
        virtual_pipeline: Megatron only: model chunks per stage.
        tensor: Megatron only: tensor-parallel ranks.
        distributed_optimizer: Megatron only: each data-parallel rank reduces and updates a share of the gradient.
        sequence_parallel: Ranks that share a sequence: Ulysses in FSDP, context parallelism in Megatron; CUDA only.
        split_norms: Megatron only: what it calls sequence parallelism, which needs Transformer Engine.
        dtype: What the model computes in.
        steps: Mini-batches, and optimizer steps, one after the other; the gradient is that of the first.
        learning_rate: Of plain gradient descent, since Adam divides a factor away; 0 keeps the weights, so that all
            cases of an engine start from the same ones. Any other needs an engine of its own.
        device: ``"cpu"`` with gloo, or ``"cuda"`` with NCCL and a GPU per rank; the same for all cases of a run.
    """

    loss: Loss
    label: str = ""
    batch: BatchSpec = field(default_factory=BatchSpec)
    world_size: int = 1
    micro_batches: int = 1
    max_tokens: int | None = None
    packed: bool = True
    trinity_worker: bool = False
    fsdp_size: int = -1
    no_sync: bool = True
    per_token_loss: bool = False
    pipeline: int = 1
    virtual_pipeline: int | None = None
    tensor: int = 1
    distributed_optimizer: bool = False
    sequence_parallel: int = 1
    split_norms: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 1
    learning_rate: float = 0.0
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def engine_options(self) -> tuple[Any, ...]:
        """What needs an engine of its own; cases that agree here share one."""
        free = ("batch", "micro_batches", "max_tokens", "steps")
        mine = [value for name, value in vars(self).items() if name not in (*free, "loss", "label", "device")]
        return (*mine, tuple(getattr(self, name) for name in free) if self.learning_rate else None)


@dataclass(frozen=True)
class SeenMicroBatch:
    """One micro-batch as one rank's model got it.

    Attributes:
        rows: Sequences.
        length: Tokens of all rows together, prompts included, without padding.
        tokens: Those of them that the loss mask holds.
        nested: Whether its advantages are jagged, as of the v1 trainer.
        inputs: Shape of the model's ``input_ids``: [1, length] where rows are packed, else [rows, longest], or a
            little more for alignment; None on later pipeline stages, which do not read them.
        reduced_before: Whether a gradient had been reduced before its forward; FSDP only.
    """

    rows: int
    length: int
    tokens: int
    nested: bool
    inputs: tuple[int, ...] | None
    reduced_before: bool


@dataclass(frozen=True)
class SeenRank:
    """What one rank did, read from its engine: an option that verl ignored would not show in the gradient.

    Attributes:
        layout: What the engine is built of, by the names of `EngineCase` where it has one.
        micro_batches: In the order of their forwards; in a virtual pipeline those of the rank's first chunk.
    """

    layout: dict[str, Any]
    micro_batches: tuple[SeenMicroBatch, ...]


@dataclass(frozen=True)
class EngineResult:
    """What the engine made of one case.

    Attributes:
        case: The case.
        gradient: [parameters] float64, the gradient the optimizer gets, before clipping; parameters are
            ordered by their global name, so that different layouts of one engine compare.
        parameters: Name and number of elements of each parameter, in the gradient's order.
        loss: The ``loss`` that verl reports.
        grad_norm: The gradient norm that verl reports.
        metrics: All other training metrics, reduced by verl.
        ranks: What each rank really ran.
        moved: [parameters] float64, how far the weights came in all steps; None without a learning rate.
        seconds: Wall time of the step.
    """

    case: EngineCase
    gradient: torch.Tensor
    parameters: tuple[tuple[str, int], ...]
    loss: float
    grad_norm: float
    metrics: dict[str, float]
    ranks: tuple[SeenRank, ...]
    seconds: float
    moved: torch.Tensor | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each rank really ran."""
        return len(self.ranks[0].micro_batches)

    def by_group(self, vector: torch.Tensor, group_of: Callable[[str], str]) -> dict[str, torch.Tensor]:
        """The parts of a vector [parameters] by kind of parameter, each [elements]."""
        parts = zip(self.parameters, vector.split([size for _, size in self.parameters]), strict=True)
        groups: dict[str, list[torch.Tensor]] = {}
        for (name, _), part in parts:
            groups.setdefault(group_of(name), []).append(part)
        return {group: torch.cat(pieces) for group, pieces in groups.items()}

    def gradient_error(self, other: EngineResult) -> float:
        """Relative difference of the two gradients, |self - other| / |other|."""
        return float((self.gradient - other.gradient).norm() / other.gradient.norm())


def load(loss: Loss) -> Callable[..., Any]:
    """The loss itself, where it was named by its place.

    Raises:
        ConfigError: There is none.
    """
    return find_at("loss", loss) if isinstance(loss, str) else loss
