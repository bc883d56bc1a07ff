"""verl's training worker with the Megatron engine, on CPU and gloo.

Run as ``python -m trinity_loss.verl.harness.megatron FOLDER`` by `launch`. Context and sequence parallelism,
Transformer Engine and NCCL have no CPU counterpart; a case on CUDA has them.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from trinity_loss.verl.cpu.megatron_shim import register_bridge
from trinity_loss.verl.harness.engine_case import EngineCase
from trinity_loss.verl.harness.fsdp import NO_CLIP
from trinity_loss.verl.harness.launch import main
from trinity_loss.verl.harness.rank import NamedGradients, recording_worker, run_job

# Of Megatron's local layers: fused kernels and initialisation on the device are CUDA's.
TRANSFORMER = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}


def local_layers(case: EngineCase) -> bool:
    """Whether Megatron's local layers take the place of Transformer Engine's."""
    return case.device == "cpu" or importlib.util.find_spec("transformer_engine") is None


def worker_config(case: EngineCase, model: str) -> Any:
    """verl's configuration of the worker: one type everywhere, plain gradient descent."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig

    from trinity_loss.verl.cpu.megatron_config import CpuMcoreEngineConfig

    transformer = {
        **(TRANSFORMER if local_layers(case) else {}),
        # mbridge would take it from the tensor-parallel size.
        "sequence_parallel": case.split_norms,
        "calculate_per_token_loss": case.per_token_loss,
    }
    engine = CpuMcoreEngineConfig(
        vanilla_mbridge=True,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual_pipeline,
        sequence_parallel=case.split_norms,
        use_remove_padding=case.packed,
        use_distributed_optimizer=case.distributed_optimizer,
        context_parallel_size=case.sequence_parallel,
        override_transformer_config=transformer,
        dtype=case.dtype,
    )
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=model, use_remove_padding=case.packed),
        engine_config=engine,
        optimizer_config=McoreOptimizerConfig(
            # Megatron's distributed optimizer knows Adam alone; with a rate of 0 either keeps the weights.
            optimizer="sgd" if case.learning_rate else "adam",
            lr=case.learning_rate,
            weight_decay=0.0,
            clip_grad=NO_CLIP,
            total_training_steps=case.steps,
            lr_warmup_steps=0,
            lr_decay_style="constant",
            override_optimizer_config={"sgd_momentum": 0.0},
        ),
        checkpoint_config=CheckpointConfig(),
    )


def read_gradients(engine: Any) -> NamedGradients:
    """The whole gradient of every parameter under its Hugging Face name; every rank must call this.

    mbridge puts together what tensor-parallel ranks and pipeline stages hold when it exports weights: it is given
    the gradients in their place.
    """
    import torch.distributed as dist

    for chunk in engine.module:
        if chunk.ddp_config.use_distributed_optimizer:
            _gather_shards(chunk)
    modules = [module for chunk in engine.module for module in chunk.modules()]
    weights = [dict(module._parameters) for module in modules]
    try:
        for module in modules:
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = _gradient_of(weight)
        whole = {name: gradient.double() for name, gradient in engine.bridge.export_weights(engine.module)}
    finally:
        for module, parameters in zip(modules, weights, strict=True):
            module._parameters.update(parameters)
    # They are the same on every rank: one copy is enough.
    return whole if dist.get_rank() == 0 else {}


def read_weights(engine: Any) -> NamedGradients:
    """The whole of every parameter under its Hugging Face name; every rank must call this."""
    return {name: weight.detach().double() for name, weight in engine.bridge.export_weights(engine.module)}


def read_layout(engine: Any) -> dict[str, Any]:
    """What Megatron's groups, model and optimizer are, not what they were asked to be."""
    from megatron.core import parallel_state as mpu
    from megatron.core.optimizer import DistributedOptimizer
    from megatron.core.utils import get_model_config

    model = get_model_config(engine.module[0])  # Where the schedule and DDP look.
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    distributed = {isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers}
    distributed |= {chunk.ddp_config.use_distributed_optimizer for chunk in engine.module}
    return {
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": mpu.get_virtual_pipeline_model_parallel_world_size(),
        "sequence_parallel": mpu.get_context_parallel_world_size(),
        "data_parallel": mpu.get_data_parallel_world_size(),
        "chunks": len(engine.module),
        "per_token_loss": model.calculate_per_token_loss,
        "split_norms": model.sequence_parallel,
        "distributed_optimizer": distributed.pop() if len(distributed) == 1 else None,
    }


def _gradient_of(weight: Any) -> Any:
    """The gradient as a parameter that says of itself, as the weight does, how it is split over ranks."""
    gradient = type(weight)(weight.main_grad, requires_grad=False)
    gradient.__dict__.update(weight.__dict__)
    return gradient


def _gather_shards(chunk: Any) -> None:
    """Fill the gradient buffers: of each bucket, a data-parallel rank has reduced its own share only."""
    import torch.distributed as dist

    for buffer in chunk.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(dist.get_world_size(group)))
            dist.all_gather(shards, shards[dist.get_rank(group)].clone(), group=group)


def build(case: EngineCase, model: str) -> Any:
    """Make the worker in this process, where CUDA means the CPU from then on if the case asks for that device."""
    if case.device == "cpu":
        engine = "trinity_loss.verl.cpu.megatron_engine"
    else:
        engine = "verl.workers.engine.megatron"
        if local_layers(case):
            register_bridge()
    return recording_worker(case, engine, read_gradients, read_layout, read_weights)(worker_config(case, model))


if __name__ == "__main__":
    main(partial(run_job, build=build))
