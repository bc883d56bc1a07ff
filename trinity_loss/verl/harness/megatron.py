"""verl's training worker with the Megatron engine, on CPU and gloo.

Run as ``python -m trinity_loss.verl.harness.megatron FOLDER`` by `launch`. Context and sequence parallelism,
Transformer Engine and NCCL have no CPU counterpart.
"""

from __future__ import annotations

from typing import Any

from trinity_loss.verl.harness.cases import EngineCase
from trinity_loss.verl.harness.launch import main
from trinity_loss.verl.harness.rank import Job, NamedGradients, recording_worker, run_job

# Fused kernels and initialisation on the device are CUDA's.
TRANSFORMER = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}


def worker_config(case: EngineCase, model: str) -> Any:
    """verl's configuration of the worker: float32 everywhere and a learning rate of zero."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual_pipeline,
        sequence_parallel=False,
        use_remove_padding=case.packed,
        use_distributed_optimizer=False,
        override_transformer_config={**TRANSFORMER, "calculate_per_token_loss": case.per_token_loss},
    )
    # The configuration admits half precision only; the engine itself takes any.
    object.__setattr__(engine, "dtype", "float32")
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=model, use_remove_padding=case.packed),
        engine_config=engine,
        optimizer_config=McoreOptimizerConfig(
            lr=0.0, weight_decay=0.0, total_training_steps=1, lr_warmup_steps=0, lr_decay_style="constant"
        ),
        checkpoint_config=CheckpointConfig(),
    )


def read_gradients(engine: Any) -> NamedGradients:
    """The gradients of this rank's parameters, already reduced, under their names in the whole model."""
    from verl.utils.megatron_utils import unwrap_model

    gradients = {}
    for chunk in engine.module:
        names = engine.bridge._weight_name_mapping_mcore_local_to_global(chunk)
        for name, parameter in unwrap_model(chunk).named_parameters():
            gradients[names[name]] = parameter.main_grad.double()
    return gradients


def build(case: EngineCase, model: str) -> Any:
    """Make the worker in this process; its ``reset`` initialises the engine."""
    return recording_worker(case, "verl.workers.engine.megatron", read_gradients)(worker_config(case, model))


def run(job: Job) -> Any:
    """Run the job with CUDA redirected to the CPU."""
    from trinity_loss.verl.harness import megatron_shim

    megatron_shim.apply()
    return run_job(job, build)


if __name__ == "__main__":
    main(run)
