"""What an audit of a configuration would do, and what it would cost."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_loss.errors import ConfigError
from trinity_loss.verl.policy_options import PolicyLossOptions

_SWITCH = "+actor_rollout_ref.actor.policy_loss.audit_steps=[1,100] +actor_rollout_ref.actor.policy_loss.audit_dir=DIR"


def forecast(config: DictConfig) -> str:
    """One sentence on the audit of a composed verl configuration, whether it has one or not."""
    actor: Any = config.actor_rollout_ref.actor
    asked: Any = OmegaConf.to_container(actor.policy_loss, resolve=True)
    given = {key: value for key, value in asked.items() if key.startswith("audit")}
    known = [name for name in PolicyLossOptions.__dataclass_fields__ if name.startswith("audit_")]
    if unknown := [name for name in given if name not in known]:
        return f"none: policy_loss has no {', '.join(unknown)}; an audit is configured by {', '.join(known)}"
    try:
        options = PolicyLossOptions(**given)
    except ConfigError as error:
        return f"none: {error}"
    cuts, steps = options.audit_cuts, options.audit_steps
    size = (
        f"{actor.ppo_max_token_len_per_gpu} tokens"
        if actor.use_dynamic_bsz
        else f"{actor.ppo_micro_batch_size_per_gpu} rows"
    )
    when = f"audits steps {steps}" if steps else f"none; {_SWITCH} audits these steps"
    last = config.trainer.get("total_training_steps")
    if beyond := [step for step in steps if last and step > last]:
        when += f", of which {beyond} will not come (trainer.total_training_steps is {last})"
    times = 1 + len(cuts)
    return (
        f"{when}: the gradient of the first mini-batch, {times} times (as configured, with {size}; {', '.join(cuts)}), "
        f"so about {times} updates without the optimizer's step, fewer where a cut cannot be made; in host memory "
        f"{_memory(config, actor)}, and on the device no more than 'twice' needs, left out where that does not fit"
    )


def _memory(config: DictConfig, actor: Any) -> str:
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if actor.strategy == "megatron":
        megatron = actor.megatron
        parts = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        if megatron.get("use_distributed_optimizer", True):
            parts = ranks
    else:
        fsdp_size = actor.fsdp_config.get("fsdp_size", -1)
        parts = ranks if fsdp_size in (-1, None) else fsdp_size
    return f"4 bytes a parameter, which {parts} ranks share" if parts > 1 else "4 bytes a parameter"
