"""What one rank does: build the worker that the cases ask for, give it its rows, keep the gradient."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from trinity_loss.verl.harness.engine_case import EngineCase, EngineError, EngineResult, SeenMicroBatch, SeenRank, load
from trinity_loss.verl.harness.launch import fork_ranks
from trinity_loss.verl.harness.model_batch import make_batch

if TYPE_CHECKING:
    from tensordict import TensorDict

NamedGradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What a run reads.

    Attributes:
        cases: Cases that share an engine stand next to each other.
        model: Folder for the model, not yet there.
        timeout: Seconds that a collective may take.
    """

    cases: tuple[EngineCase, ...]
    model: str
    timeout: float


@dataclass(frozen=True)
class Record:
    """What verl's own output does not carry: the gradient before clipping, and what the engine did for it."""

    gradients: NamedGradients
    seen: SeenRank


def recording_worker(
    case: EngineCase,
    engine: str,
    read_gradients: Callable[[Any], NamedGradients],
    read_layout: Callable[[Any], dict[str, Any]],
    read_weights: Callable[[Any], NamedGradients],
) -> type:
    """The case's training worker, which also keeps a `Record` of each step; all else stays as it is.

    Args:
        case: Says which worker.
        engine: The module to import where the worker runs, which may be a Ray worker, so that verl knows the
            engine there.
        read_gradients: From the engine, between backward and the optimizer's step, to the named gradients.
        read_layout: From the engine to what it is built of.
        read_weights: From the engine to the named weights, under the names of the gradients.
    """
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.engine_workers import TrainingWorker

    base: Any = TrainingWorker
    if case.trinity_worker:
        from trinity_loss.verl.worker import make_training_worker

        base = make_training_worker(base)

    to_all = Dispatch.ONE_TO_ALL  # type: ignore[attr-defined]

    class Recording(base):
        def __init__(self, config: Any) -> None:
            importlib.import_module(engine)
            # In a Ray worker of the CPU; elsewhere the group is there already. verl's own call names the CPU twice.
            initialize_global_process_group_ray(backend="cpu:gloo")
            super().__init__(config)

        @register(dispatch_mode=to_all)
        def reset(self) -> None:
            super().reset()
            self.seen: list[SeenMicroBatch] = []
            step, prepare = self.engine.optimizer_step, self.engine.prepare_model_inputs
            # In a virtual pipeline, a micro-batch passes each of the rank's chunks.
            model = self.engine.module[0] if isinstance(self.engine.module, list) else self.engine.module

            def recorded_step() -> Any:
                gradients = {name: value.cpu() for name, value in read_gradients(self.engine).items()}
                self.record = Record(gradients, SeenRank(read_layout(self.engine), tuple(self.seen)))
                self.seen = []
                return step()

            def kept_micro_batch(*args: Any, **kwargs: Any) -> Any:
                (self.micro_batch,) = (*args, *kwargs.values())
                # Read before the forward: inside it, FSDP has whole parameters with unreduced gradients instead.
                self.reduced = any(parameter.grad is not None for parameter in model.parameters())
                return prepare(*args, **kwargs)

            def see(_: Any, args: Any, kwargs: Any) -> None:
                data, mask, inputs = self.micro_batch, self.micro_batch["loss_mask"], kwargs["input_ids"]
                self.seen.append(
                    SeenMicroBatch(
                        rows=len(data),
                        length=data["input_ids"].values().numel(),
                        tokens=int((mask.values() if mask.is_nested else mask).sum()),
                        nested=data["advantages"].is_nested,
                        inputs=None if inputs.is_nested else tuple(inputs.shape),
                        reduced_before=self.reduced,
                    )
                )

            model.register_forward_pre_hook(see, with_kwargs=True)
            self.engine.optimizer_step, self.engine.prepare_model_inputs = recorded_step, kept_micro_batch

        @register(dispatch_mode=to_all)
        def take_record(self) -> Record:
            return self.record

        def take_weights(self) -> torch.Tensor:
            return _flat({name: value.cpu() for name, value in read_weights(self.engine).items()})

    return Recording


def _flat(named: NamedGradients) -> torch.Tensor:
    """[parameters] float64, ordered by name."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(named[name].flatten().double() for name in sorted(named))])


def cut(case: EngineCase, data_parallel: int, step: int = 0) -> TensorDict:
    """The case's mini-batch, with the engine told how to cut each rank's share.

    Args:
        case: The case.
        data_parallel: Ranks that the rows are split over.
        step: Which mini-batch.

    Raises:
        ValueError: If the rows do not divide evenly.
    """
    from verl.utils import tensordict_utils as tu

    pieces = data_parallel if case.max_tokens is not None else data_parallel * case.micro_batches
    if case.batch.rows % pieces:
        raise ValueError(f"{case.batch.rows} rows do not divide into {pieces} equal pieces")
    data = make_batch(replace(case.batch, seed=case.batch.seed + step))
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=case.max_tokens is not None,
        max_token_len_per_gpu=case.max_tokens,
        micro_batch_size_per_gpu=case.batch.rows // pieces,
    )
    return data


def result_of(
    case: EngineCase, records: list[Record], metrics: dict[str, Any], seconds: float, moved: torch.Tensor | None = None
) -> EngineResult:
    """Join what the ranks kept and let verl reduce the metrics.

    Args:
        case: The case.
        records: One per rank; a parameter may be in several, with the same gradient.
        metrics: As ``train_mini_batch`` returns them, a list per key.
        seconds: Wall time of the step.
        moved: How far the weights came.
    """
    from verl.utils.metric import reduce_metrics

    gradients = {name: gradient for record in records for name, gradient in record.gradients.items()}
    reduced = {key: float(value) for key, value in reduce_metrics(dict(metrics)).items()}
    return EngineResult(
        case=case,
        gradient=_flat(gradients),
        parameters=tuple((name, gradients[name].numel()) for name in sorted(gradients)),
        loss=reduced.pop("loss"),
        grad_norm=reduced.pop("grad_norm"),
        metrics={key: value for key, value in reduced.items() if not key.startswith("perf/") and key != "mfu"},
        ranks=tuple(record.seen for record in records),
        seconds=seconds,
        moved=moved,
    )


def run_rank(
    cases: Sequence[EngineCase], model: str, store: str, timeout: float, build: Callable[[EngineCase, str], Any]
) -> list[EngineResult]:
    """Run cases that share one engine, as one rank of a gloo group, on CUDA with NCCL beside it.

    Args:
        cases: The cases.
        model: Folder of the model.
        store: A file, not yet there, through which the ranks meet.
        timeout: Seconds that a collective may take.
        build: From a case and the model's folder to a recording worker.

    Returns:
        On every rank, a list of results, one per case.
    """
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu

    torch.set_num_threads(1)
    on_cuda = cases[0].device == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    worker = build(cases[0], model)
    worker.reset()
    size, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
    results = []
    for case in cases:
        data = tu.chunk_tensordict(cut(case, size), size)[rank]
        worker.set_loss_fn(load(case.loss))
        before = worker.take_weights() if case.learning_rate else None
        start = time.perf_counter()
        output = worker.train_mini_batch(data)
        seconds = time.perf_counter() - start
        # Only the last pipeline stage has metrics.
        mine = (worker.take_record(), None if output is None else tu.get(output, "metrics"))
        for step in range(1, case.steps):
            worker.train_mini_batch(tu.chunk_tensordict(cut(case, size, step), size)[rank])
        moved = None if before is None else worker.take_weights() - before
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        metrics = next(part[1] for part in parts if part[1] is not None)
        results.append(result_of(case, [part[0] for part in parts], metrics, seconds, moved))
    return results


def run_job(job: Job, build: Callable[[EngineCase, str], Any]) -> list[EngineResult]:
    """Run all cases of a job in this process's forks, new ones for each engine.

    Args:
        job: The job.
        build: As for `run_rank`.
    """
    from trinity_loss.verl.harness.model import save_tiny_model

    # Before the forks, which then have it.
    importlib.import_module("verl.workers.engine_workers")
    importlib.import_module("verl.workers.engine")
    # As many layers as the longest pipeline has chunks, and the same for all cases, so that they compare.
    chunks = max(case.pipeline * (case.virtual_pipeline or 1) for case in job.cases)
    save_tiny_model(job.model, layers=max(2, chunks))
    results: list[EngineResult] = []
    for number, (_, group) in enumerate(groupby(job.cases, key=lambda case: case.engine_options)):
        cases = list(group)
        run = partial(run_rank, cases, job.model, f"{job.model}.store{number}", job.timeout, build)
        try:
            results += fork_ranks(run, cases[0].world_size, "spawn" if cases[0].device == "cuda" else "fork")
        except EngineError as error:
            raise EngineError(str(error), results) from None
    return results
