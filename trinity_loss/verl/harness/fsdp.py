"""verl's training worker with the FSDP2 engine, on CPU and gloo.

Run as ``python -m trinity_loss.verl.harness.fsdp FOLDER`` by `launch`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from trinity_loss.verl.harness.engine_case import EngineCase
from trinity_loss.verl.harness.launch import main
from trinity_loss.verl.harness.rank import NamedGradients, recording_worker, run_job

#: A gradient norm beyond all of them: clipping would hide a factor.
NO_CLIP = 1e9
PRECISION = {"float32": "fp32", "bfloat16": "bf16"}

#: verl 0.9.0 reduces after every micro-batch, and has no field for it.
_NO_SYNC = "use_no_sync_for_gradient_accumulation"


def worker_config(case: EngineCase, model: str) -> Any:
    """verl's configuration of the worker: one type everywhere, plain gradient descent, no compilation."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    known = FSDPEngineConfig.__dataclass_fields__
    options: dict[str, Any] = {_NO_SYNC: case.no_sync} if _NO_SYNC in known else {}
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=case.packed,
            # Ulysses is built into flash attention alone.
            override_config={"attn_implementation": "sdpa" if case.sequence_parallel == 1 else "flash_attention_2"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            fsdp_size=case.fsdp_size,
            **options,
            use_torch_compile=False,
            ulysses_sequence_parallel_size=case.sequence_parallel,
            mixed_precision={"param_dtype": PRECISION[case.dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=case.learning_rate, weight_decay=0.0, clip_grad=NO_CLIP, total_training_steps=case.steps
        ),
        checkpoint_config=CheckpointConfig(),
    )


def read_gradients(engine: Any) -> NamedGradients:
    """The whole gradient of every parameter, gathered from the shards; every rank must call this."""
    import torch.distributed as dist

    gradients = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        raise RuntimeError(f"no gradient reached {missing}")
    # Copied: what is whole on this rank already is a view, and clipping would change it.
    whole = {name: gradient.full_tensor().double() for name, gradient in gradients.items()}
    # They are the same on every rank: one copy is enough.
    return whole if dist.get_rank() == 0 else {}


def read_weights(engine: Any) -> NamedGradients:
    """The whole of every parameter; every rank must call this."""
    return {name: parameter.detach().full_tensor().double() for name, parameter in engine.module.named_parameters()}


def read_layout(engine: Any) -> dict[str, Any]:
    """The mesh that the parameters live on, and how many ranks share one copy of them."""
    parameters = list(engine.module.parameters())
    (mesh,) = {parameter.device_mesh for parameter in parameters}
    held = sum(parameter.to_local().numel() for parameter in parameters)
    return {
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "fsdp_size": sum(parameter.numel() for parameter in parameters) / held,
        "sequence_parallel": 1 if engine.ulysses_device_mesh is None else engine.ulysses_device_mesh["sp"].size(),
        "data_parallel": engine.get_data_parallel_size(),
    }


def worker_class(case: EngineCase) -> type:
    """The case's training worker, recording."""
    engine = "trinity_loss.verl.cpu.fsdp_engine" if case.device == "cpu" else "verl.workers.engine"
    return recording_worker(case, engine, read_gradients, read_layout, read_weights)


def build(case: EngineCase, model: str) -> Any:
    """Make the worker in this process; its ``reset`` initialises the engine."""
    return worker_class(case)(worker_config(case, model))


if __name__ == "__main__":
    main(partial(run_job, build=build))
