"""The Hydra configuration that selects the loss, and what verl's actor configuration says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Optional, cast

from verl.workers.config import ActorConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

from trinity_loss.aggregation import find_aggregation_mode
from trinity_loss.errors import ConfigError
from trinity_loss.loss_config import LossConfig
from trinity_loss.registry import get_policy_loss
from trinity_loss.verl.compat import warn_if_untested
from trinity_loss.verl.worker import install

warn_if_untested()

#: Fields of verl's configurations that one loss_mode alone reads, by the name of its argument.
_ACTOR_ARGUMENTS = ("tau_pos", "tau_neg")
_POLICY_LOSS_ARGUMENTS = ("dro_beta",)
_CORRECTION_ARGUMENTS = (
    "loss_type",
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


@dataclass
class PolicyLossConfig(VerlPolicyLossConfig):
    """verl's policy-loss configuration, read by trinity_loss.

    Instantiating it, which verl does in every worker, puts our training worker in place. What verl's
    ``ActorConfig`` already says (modes, clip ranges, entropy, KL) is read from there; the fields here add
    what verl has no field for. Their meaning is that of :class:`trinity_loss.LossConfig`.

    Attributes:
        loss_agg_mode: Aggregation mode; None: the actor's, which admits verl's own modes only.
        entropy_agg_mode: Mode of the entropy term; None: that of the loss.
        kl_agg_mode: Mode of the KL term; None: that of the loss.
        loss_args: Arguments that only this ``loss_mode`` takes.
        count_empty_sequences: Whether fully masked sequences count in a mean over sequences.
        count_padding_rows: Whether verl's synthetic rows count in it.
        count_rejected_tokens: Whether a mean over tokens divides by the tokens before rejection.
        nonfinite: ``error`` or ``neutral``, at a NaN or an infinity that counts.
        rollout_metrics: Level of the importance-sampling metrics; None: none.
        rollout_metrics_upper: Their upper threshold.
        rollout_metrics_lower: Their lower threshold.
        shadow: Train with verl's loss and log ours beside it (``shadow/…``).
        record_steps: Training steps, counted from 1 at the start of the worker, whose mini-batches are saved.
        record_dir: Where they are saved, one folder per mini-batch.
        record_max_megabytes: A rank's part of a mini-batch above this size is not saved, and a warning says so.

    Raises:
        ConfigError: A loss or mode is not known.
    """

    loss_agg_mode: Optional[str] = None  # noqa: UP045  (OmegaConf reads the annotation)
    entropy_agg_mode: Optional[str] = None  # noqa: UP045
    kl_agg_mode: Optional[str] = None  # noqa: UP045
    loss_args: dict[str, Any] = field(default_factory=dict)
    count_empty_sequences: bool = True
    count_padding_rows: bool = True
    count_rejected_tokens: bool = True
    nonfinite: str = "error"
    rollout_metrics: Optional[str] = None  # noqa: UP045
    rollout_metrics_upper: float = 2.0
    rollout_metrics_lower: float = 0.5
    shadow: bool = False
    record_steps: list[int] = field(default_factory=list)
    record_dir: Optional[str] = None  # noqa: UP045
    record_max_megabytes: float = 512.0

    def __post_init__(self) -> None:
        get_policy_loss(self.loss_mode)
        for name in ("loss_agg_mode", "entropy_agg_mode", "kl_agg_mode"):
            mode = getattr(self, name)
            if mode is not None:
                try:
                    find_aggregation_mode(mode)
                except ConfigError as error:
                    raise ConfigError(f"policy_loss.{name}: {error}") from error
        if self.record_steps and not self.record_dir:
            raise ConfigError(f"policy_loss.record_steps is {list(self.record_steps)}, but record_dir is not set")
        install()


def loss_config(actor: ActorConfig) -> LossConfig:
    """What an actor configuration with our :class:`PolicyLossConfig` says of the loss.

    Args:
        actor: verl's actor configuration as a worker instantiates it.

    Raises:
        ConfigError: Its values do not make a valid :class:`trinity_loss.LossConfig`.
    """
    policy_loss = cast(PolicyLossConfig, actor.policy_loss)
    arguments = dict(policy_loss.loss_args)
    verls = {name: getattr(actor, name) for name in _ACTOR_ARGUMENTS}
    verls |= {name: getattr(policy_loss, name) for name in _POLICY_LOSS_ARGUMENTS}
    verls |= {name: getattr(policy_loss.rollout_correction, name) for name in _CORRECTION_ARGUMENTS}
    for name, default in get_policy_loss(policy_loss.loss_mode).arguments.items():
        # verl's null means that nothing is given, except where null is a choice.
        if name in verls and name not in arguments and (verls[name] is not None or default is not Parameter.empty):
            arguments[name] = verls[name]
    return LossConfig(
        loss_mode=policy_loss.loss_mode,
        loss_agg_mode=policy_loss.loss_agg_mode or actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
        clip_ratio=actor.clip_ratio,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_args=arguments,
        entropy_coeff=actor.entropy_coeff,
        entropy_agg_mode=policy_loss.entropy_agg_mode,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        kl_agg_mode=policy_loss.kl_agg_mode,
        count_empty_sequences=policy_loss.count_empty_sequences,
        count_padding_rows=policy_loss.count_padding_rows,
        count_rejected_tokens=policy_loss.count_rejected_tokens,
        nonfinite=policy_loss.nonfinite,
        rollout_metrics=policy_loss.rollout_metrics,
        rollout_metrics_upper=policy_loss.rollout_metrics_upper,
        rollout_metrics_lower=policy_loss.rollout_metrics_lower,
    )
