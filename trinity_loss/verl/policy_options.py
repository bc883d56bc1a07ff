"""What ``actor.policy_loss`` may say, and what it makes of verl's actor configuration: a :class:`LossConfig`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from inspect import Parameter
from typing import Any, Optional, cast

import torch
from verl.trainer.config import RolloutCorrectionConfig
from verl.workers.config import ActorConfig, DistillationConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

from trinity_loss.aggregation import check_aggregation_mode
from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.errors import ConfigError
from trinity_loss.loss_config import RULES, LossConfig
from trinity_loss.registry import get_policy_loss
from trinity_loss.rollout_correction import parse_rejections, parse_weight_threshold
from trinity_loss.rules import BOOLEAN, NUMBER, POSITIVE, TEXT, Rule, check, list_of, number, one_of, optional

logger = logging.getLogger(__name__)

#: What an audit may compute the gradient of a mini-batch with, beside the mini-batch as configured.
AUDIT_CUTS = ("repeat", "half", "twice", "reverse", "single")
_STEPS = list_of(number("a training step, 1 or more", lambda value: value >= 1 and value == int(value)))


def _is_folder(value: Any) -> bool:
    """Whether a value names a folder that :class:`pathlib.Path` can make: no text of blanks, no address."""
    return isinstance(value, str | os.PathLike) and bool(str(value).strip()) and "://" not in str(value)


_FOLDER = optional(Rule(_is_folder, "a folder of this machine"))


#: What each field that :class:`LossConfig` does not have must be.
_RULES: dict[str, Rule] = {
    "loss_agg_mode": optional(TEXT),
    **dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"), NUMBER),
    "dro_beta": optional(NUMBER),
    "shadow": BOOLEAN,
    "record_steps": _STEPS,
    "record_dir": _FOLDER,
    "record_max_megabytes": POSITIVE,
    "audit_steps": _STEPS,
    "audit_dir": _FOLDER,
    "audit_cuts": list_of(one_of(*AUDIT_CUTS)),
}
_MODES = ("loss_agg_mode", "entropy_agg_mode", "kl_agg_mode")

#: Fields of verl's configurations that one loss_mode alone reads, by the name of its argument.
_ACTOR_ARGUMENTS = ("tau_pos", "tau_neg")
_POLICY_LOSS_ARGUMENTS = ("dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
#: Options that the loss of the bypass mode reads; where a mapping does not name one, verl's loss takes these.
CORRECTION: dict[str, Any] = {
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
_BYPASS = "bypass_mode"
_ACTOR = "actor_rollout_ref.actor"
_HERE, _THERE = f"{_ACTOR}.policy_loss", "algorithm.rollout_correction"


@dataclass
class PolicyLossOptions(VerlPolicyLossConfig):
    """verl's policy-loss configuration with our fields, every one checked when it is made.

    What verl's ``ActorConfig`` already says (modes, clip ranges, entropy, KL) is read from there; the fields here
    add what verl has no field for. The meaning of those that are not listed is that of
    :class:`trinity_loss.LossConfig`. On a command line Hydra wants a ``+`` before what verl's own configuration does
    not have, as in ``+actor_rollout_ref.actor.policy_loss.loss_args.NAME=…``.

    Attributes:
        loss_agg_mode: Aggregation mode; None: the actor's, which admits verl's own modes only.
        shadow: Train with verl's loss and log ours beside it (``shadow/…``).
        record_steps: Training steps, as verl logs them, whose mini-batches are saved.
        record_dir: Where they are saved, one folder per mini-batch.
        record_max_megabytes: A rank's part of a mini-batch above this size is not saved, and a warning says so.
        audit_steps: Training steps, as verl logs them, whose first mini-batch is audited before it is trained on.
        audit_dir: Where the reports go.
        audit_cuts: What the gradient is computed with beside the mini-batch as configured, of :data:`AUDIT_CUTS`.

    Raises:
        ConfigError: A loss or mode is not known, or a value has another type or range.
    """

    loss_agg_mode: Optional[str] = None  # noqa: UP045  (OmegaConf reads the annotation)
    entropy_agg_mode: Optional[str] = None  # noqa: UP045
    kl_agg_mode: Optional[str] = None  # noqa: UP045
    kl_unbiased: bool = False
    off_policy_mask: Optional[float] = None  # noqa: UP045
    nll_on_positives: float = 0.0
    row_weights: Optional[str] = None  # noqa: UP045
    loss_args: dict[str, Any] = field(default_factory=dict)
    top_entropy_quantile: float = 1.0
    selection_pass: str = "forward"
    selection_seed: int = 0
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
    audit_steps: list[int] = field(default_factory=list)
    audit_dir: Optional[str] = None  # noqa: UP045
    audit_cuts: list[str] = field(default_factory=lambda: list(AUDIT_CUTS))

    def __post_init__(self) -> None:
        for f in fields(self):
            rule = _RULES.get(f.name) or RULES.get(f.name)
            if rule is not None:
                check(f"policy_loss.{f.name}", getattr(self, f.name), rule)
        get_policy_loss(self.loss_mode)
        for name in _MODES:
            check_aggregation_mode(f"policy_loss.{name}", getattr(self, name))
        for what in ("record", "audit"):
            steps = getattr(self, f"{what}_steps")
            if steps and not getattr(self, f"{what}_dir"):
                raise ConfigError(f"policy_loss.{what}_steps is {list(steps)}, but {what}_dir is not set")
        if self.audit_steps and not self.audit_cuts:
            cuts = ", ".join(AUDIT_CUTS)
            raise ConfigError(f"policy_loss.audit_cuts is [], but audit_steps is not; expected some of {cuts}")
        # Hydra hands over a plain mapping where no _target_ makes it more; verl's fields are frozen.
        object.__setattr__(self, "rollout_correction", _as_correction(self.rollout_correction))

    def get(self, key: str, default: Any = None) -> Any:
        """An option by its name, as verl asks for it; where its own loss asks for its mode, ours does not train."""
        if key == "loss_mode" and not self.shadow and not _bypass_said:
            say_bypassed("verl's ppo_loss does, in a training worker that goes around it")
        return super().get(key, default)


#: What the log has of another loss that trains.
_bypass_said: list[str] = []


def say_bypassed(what: str) -> None:
    """Names what trains in the place of our loss, in the log of the driver, once for all ranks."""
    _bypass_said.append(what)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning("trinity_loss: actor.policy_loss selects this loss, but it does not train: %s", what)


def _as_correction(given: Any) -> RolloutCorrectionConfig:
    """``policy_loss.rollout_correction`` in the form that verl's own losses read, too."""
    if given is None:
        return RolloutCorrectionConfig()
    name = "policy_loss.rollout_correction"
    if not isinstance(given, RolloutCorrectionConfig):
        check(name, given, Rule(lambda value: isinstance(value, Mapping), "a mapping"))
        _check_correction(name, given)
        given = RolloutCorrectionConfig(**CORRECTION | dict(given))
    _check_correction(name, {f.name: getattr(given, f.name) for f in fields(given)})
    return given


def _check_correction(name: str, given: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for an option that rollout correction does not have, or a value that is none."""
    known = [f.name for f in fields(RolloutCorrectionConfig)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigError(f"{name} has {', '.join(map(str, unknown))}; expected some of {', '.join(known[1:])}")
    for option, expected in {_BYPASS: BOOLEAN, **get_policy_loss(_BYPASS).rules}.items():
        if given.get(option) is not None:
            check(f"{name}.{option}", given[option], expected)
    rule, threshold = given.get("rollout_rs"), given.get("rollout_rs_threshold")
    if threshold is None and name != _THERE:
        return  # It is not whole, and whoever reads it says so.
    try:
        parse_rejections(rule, threshold)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def loss_config(
    actor: ActorConfig, correction: Mapping[str, Any] | None = None, distillation: DistillationConfig | None = None
) -> LossConfig:
    """What an actor configuration with our :class:`PolicyLossOptions` says of the loss.

    Args:
        actor: verl's actor configuration as a worker instantiates it.
        correction: ``algorithm.rollout_correction`` of the run, if it is known.
        distillation: verl's ``distillation`` of the run, where it is on.

    Raises:
        ConfigError: Its values do not make a valid :class:`trinity_loss.LossConfig`.
    """
    policy_loss = cast(PolicyLossOptions, actor.policy_loss)
    loss_mode, options = _with_bypass(policy_loss, correction)
    arguments = dict(policy_loss.loss_args)
    verls: dict[str, tuple[str, Any]] = dict.fromkeys(_ACTOR_ARGUMENTS, (_ACTOR, actor))
    verls |= dict.fromkeys(_POLICY_LOSS_ARGUMENTS, (_HERE, policy_loss)) | dict.fromkeys(CORRECTION, options)
    for name, default in get_policy_loss(loss_mode).arguments.items():
        if name in verls:
            place, owner = verls[name]
            value = getattr(owner, name)
            if name in arguments:
                _check_said_once(f"{place}.{name}", value, owner, arguments[name])
            # verl's null means that nothing is given, except where null is a choice.
            elif value is not None or default is not Parameter.empty:
                arguments[name] = value
    said = {f.name: getattr(actor, f.name) for f in fields(LossConfig) if hasattr(actor, f.name)}
    ours = {f.name: getattr(policy_loss, f.name) for f in fields(LossConfig) if hasattr(policy_loss, f.name)}
    said |= {name: value for name, value in ours.items() if value is not None or name not in said}
    if distillation is not None:
        said["distillation"] = distillation_of(distillation)
    config = LossConfig(**said | {"loss_mode": loss_mode, "loss_args": arguments})
    if config.group_size > 1 and actor.shuffle:
        raise ConfigError(
            f"{_ACTOR}.shuffle is True, which takes pairs of loss_mode {loss_mode!r} apart; expected False"
        )
    if config.selection_pass == "old_log_probs" and actor.ppo_epochs > 1:
        raise ConfigError(
            f"{_HERE}.selection_pass is 'old_log_probs', but {_ACTOR}.ppo_epochs is {actor.ppo_epochs}: from the "
            "second on, the policy has moved since these log-probs; expected 'forward', or one epoch of one mini-batch"
        )
    return config


def _check_said_once(place: str, value: Any, owner: Any, given: Any) -> None:
    """Raises :class:`ConfigError` where verl's own option and ``loss_args`` both say something, and not the same."""
    name = place.rpartition(".")[2]
    unsaid = (CORRECTION.get(name), *(f.default for f in fields(owner) if f.name == name))
    if not any(_same(value, other) for other in (given, *unsaid)):
        raise ConfigError(f"{place} is {value!r}, but {_HERE}.loss_args.{name} is {given!r}; leave one of them out")


def _same(one: Any, other: Any) -> bool:
    """Whether two values of an option are the same; verl takes numbers as text, too."""
    # Python's numbers may have a _ within, which the two bounds of a threshold have.
    if (isinstance(one, str) or isinstance(other, str)) and "_" not in f"{one}{other}":
        try:
            return float(one) == float(other)
        except (TypeError, ValueError):
            pass
    return bool(one == other)


def unread_corrections(loss_mode: str, own: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    """What options of rollout correction ask for that nothing does, a sentence each.

    Args:
        loss_mode: The policy loss.
        own: ``policy_loss.rollout_correction``, empty where nothing is said there.
        said: ``algorithm.rollout_correction``.
    """
    for place, options in ((_THERE, said), (f"{_HERE}.rollout_correction", own)):
        threshold = options.get("rollout_is_threshold")
        if options.get("rollout_is") and threshold is not None:
            upper, lower = parse_weight_threshold(threshold)
            if lower is None and upper < 1:
                yield (
                    f"{place}.rollout_is_threshold is {threshold}, so that a weight of 1 is truncated, too; two bounds "
                    "need quotes that reach Hydra, which takes 0.5_5 for the number 0.55"
                )
    if said.get(_BYPASS):
        return
    if loss_mode == _BYPASS or own.get(_BYPASS):
        place = "loss_mode is bypass_mode" if loss_mode == _BYPASS else "rollout_correction.bypass_mode is True"
        yield (
            f"{_HERE}.{place}, but {_THERE}.bypass_mode is False, which the trainer reads: it computes "
            f"old_log_probs, and the loss takes them for those of the rollout; {_THERE}.bypass_mode=True"
        )
    if loss_mode != _BYPASS:
        for name in ("rollout_is", "rollout_rs"):
            if own.get(name) and own[name] != said.get(name):
                yield (
                    f"{_HERE}.rollout_correction.{name} is {own[name]}, which only loss_mode=bypass_mode reads; "
                    f"{_THERE}.{name}={own[name]} has the trainer do it"
                )


def distillation_of(distillation: DistillationConfig) -> DistillationLossConfig:
    """What verl's configuration of distillation says of the loss.

    Raises:
        ConfigError: Its values do not make a valid one.
    """
    own = distillation.distillation_loss
    return DistillationLossConfig(**{f.name: getattr(own, f.name) for f in fields(DistillationLossConfig)})


def _with_bypass(
    policy_loss: PolicyLossOptions, correction: Mapping[str, Any] | None
) -> tuple[str, tuple[str, RolloutCorrectionConfig]]:
    """The loss, and its options of rollout correction with their place.

    verl's trainer, where ``algorithm.rollout_correction.bypass_mode`` is on, takes the rollout's log-probs for the old
    ones and writes the options and the loss ``bypass_mode`` into its own copy of ``policy_loss``, after the workers
    were made from it.
    """
    mode, own = policy_loss.loss_mode, policy_loss.rollout_correction
    here = f"{_HERE}.rollout_correction"
    if correction is None:
        correction = {f.name: getattr(own, f.name) for f in fields(own)}
    _check_correction(_THERE, correction)
    if not correction.get(_BYPASS):
        return mode, (here, own)
    theirs = RolloutCorrectionConfig(**CORRECTION | {k: v for k, v in correction.items() if k in CORRECTION})
    if own != RolloutCorrectionConfig():
        for name in CORRECTION:
            mine, value = getattr(own, name), getattr(theirs, name)
            if not _same(mine, value):
                raise ConfigError(
                    f"{_THERE}.{name} is {value!r}, but {here}.{name} is {mine!r}; +{here}=${{{_THERE}}} makes them one"
                )
    if mode in ("vanilla", "ppo", _BYPASS):
        return _BYPASS, (_THERE, theirs)
    for name in ("rollout_rs", "rollout_is", "loss_type"):
        nothing, value = CORRECTION[name], getattr(theirs, name)
        if value != nothing:
            raise ConfigError(
                f"{_THERE}.bypass_mode is on and {name} is {value!r}, which verl's loss bypass_mode reads, but "
                f"{_HERE}.loss_mode is {mode!r}; {_HERE}.loss_mode=bypass_mode makes it reach the loss, "
                f"{_THERE}.{name}={'null' if nothing is None else nothing} leaves it out"
            )
    return mode, (here, own)
