"""Losses by the names that ``trinity-loss verify --loss`` takes, bound to a verl configuration."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from trinity_loss.aggregation import aggregation_mode_names, has_scale_factor
from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.errors import ConfigError
from trinity_loss.import_path import find_at
from trinity_loss.invariance.contracts import CONTRACTS, Contract, Played, contract_of
from trinity_loss.invariance.engine import BoundLoss, LossFn
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.mixtures import can_be_split
from trinity_loss.registry import get_policy_loss, policy_loss_names

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trinity_loss.invariance.minibatch import MiniBatch

#: What ``:all`` puts where a loss cannot do without a number.
_DRO_BETA, _SCALE_FACTOR = 0.1, 100
_VERL_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_TRINITY_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_ONE_POSITIONAL = ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD])

#: Makes a loss; making one takes a while, since verl checks the whole configuration.
Maker = Callable[[], BoundLoss]


def candidates(spec: str, config: DictConfig, contract: str = "verl", weight_fn: str | None = None) -> Iterator[Maker]:
    """The losses that a name stands for, each to be made when it is wanted.

    Args:
        spec: ``ours``, ``verl``, ``trinity`` (the loss that the configuration names) or ``scaled_trinity`` (the same
            with :mod:`trinity_loss.trinity_rft`), each with ``:NAME`` for another one and ``:all`` for every loss in
            every aggregation mode; or ``package.module:name``: a callable of the engine's contract, one that takes
            verl's ``config`` too, a policy loss of verl's signature, or one per token of ours
            (:mod:`trinity_loss.registry`).
        config: A composed verl configuration.
        contract: Whose engine calls a loss of a module, one of
            :data:`trinity_loss.invariance.contracts.CONTRACTS`.
        weight_fn: Place of AReaL's ``loss_weight_fn``; None: that of its actor, which counts valid tokens.

    Raises:
        ConfigError: There is no such loss, contract or weight function; when one is made, that the configuration
            does not make one.
    """
    family, _, name = spec.partition(":")
    chosen = contract_of(contract)
    if weight_fn is not None and contract != "areal":
        raise ConfigError(f"--weight-fn is AReaL's; --contract is {contract}")
    if contract != "verl" and not (contract == "trinity" and family.endswith("trinity")):
        if family in _FAMILIES:
            raise ConfigError(f"--loss {spec} is not written for --contract {contract}; give package.module:name")
        yield partial(_of_contract, spec, chosen, weight_fn)
        return
    if family in _FAMILIES and name == "all":
        _, names, modes = _FAMILIES[family]
        for loss_mode, mode in product(names(), modes()):
            yield from _of_every_mode(family, loss_mode, mode, config)
    elif family in _FAMILIES:
        yield partial(_FAMILIES[family][0], name or None, config, {})
    elif name:
        yield partial(_from_module, spec, config)
    else:
        families = ", ".join(f"{known}:NAME" for known in _FAMILIES)
        raise ConfigError(f"--loss is {spec!r}; expected one of {families} or package.module:name")


def bind_loss(
    spec: str,
    *overrides: str,
    config_dir: str | None = None,
    config_name: str = "ppo_trainer",
    contract: str = "verl",
    weight_fn: str | None = None,
    fields: Mapping[str, str] | None = None,
    group_size: int | None = None,
) -> BoundLoss:
    """A loss as ``trinity-loss verify --loss`` binds it, for :func:`trinity_loss.invariance.assert_invariant`.

    Args:
        spec: As :func:`candidates` takes it, one loss.
        *overrides: Hydra overrides, ``key=value``.
        config_dir: Folder of a verl configuration; None: verl's own.
        config_name: Its name.
        contract: As :func:`candidates` takes it.
        weight_fn: Likewise.
        fields: Fields of your own, by name: ``token``, ``sequence`` or a number, as ``--field`` takes them.
        group_size: So many consecutive sequences stay together in every cut; None: as the loss needs it.

    Raises:
        ConfigError: There is no such loss, or several, or the configuration does not make it.

    Example:
        >>> bind_loss("verl:gspo", "actor_rollout_ref.actor.clip_ratio=0.1").name
        'verl:gspo token-mean'
    """
    from trinity_loss.verl.composed import compose

    makers = [*candidates(spec, compose(config_dir, config_name, overrides), contract, weight_fn)]
    if len(makers) != 1:
        raise ConfigError(f"{spec} names {len(makers)} losses; expected one")
    bound = makers[0]()
    return replace(bound, fields=fields or {}, group_size=group_size or bound.group_size)


def _of_every_mode(family: str, loss_mode: str, mode: str, config: DictConfig) -> Iterator[Maker]:
    if family == "ours" and get_policy_loss(loss_mode).mixture is not None and not can_be_split(mode):
        return
    scales: list[float | None] = [None]
    if family in ("ours", "verl") and has_scale_factor(mode):
        # verl alone does without a divisor, and then takes the padded width.
        scales = [None] if family == "verl" else []
        scales.append(config.actor_rollout_ref.actor.loss_scale_factor or _SCALE_FACTOR)
    for scale in scales:
        yield partial(_FAMILIES[family][0], loss_mode, config, {"loss_agg_mode": mode, "loss_scale_factor": scale})


def _policy_loss(config: DictConfig, loss_mode: str | None) -> dict[str, Any]:
    chosen = loss_mode or config.actor_rollout_ref.actor.policy_loss.loss_mode
    changes = {"loss_mode": chosen}
    if chosen == "dro" and config.actor_rollout_ref.actor.policy_loss.dro_beta is None:
        changes["dro_beta"] = _DRO_BETA
    return changes


def _title(family: str, loss_mode: str, mode: str, scale: Any) -> str:
    divisor = f"/{scale}" if has_scale_factor(mode) else ""
    return f"{family}:{loss_mode} {mode}{divisor}"


def _distilling(name: str, distillation: DistillationLossConfig | None) -> str:
    if distillation is None:
        return name
    how = " as advantage" if distillation.use_policy_gradient else ""
    return f"{name if distillation.use_task_rewards else name.partition(':')[0]} + {distillation.loss_mode}{how}"


def _ours(loss_mode: str | None, config: DictConfig, changes: dict[str, Any]) -> BoundLoss:
    from omegaconf import OmegaConf
    from verl.trainer.distillation.losses import distillation_ppo_loss

    from trinity_loss.verl.composed import TARGET, actor_config, distillation_config, token_budgets
    from trinity_loss.verl.distilling import DistillingPolicyLoss
    from trinity_loss.verl.policy_loss_config import loss_config

    changes = dict(changes)
    mode = changes.pop("loss_agg_mode", None)
    policy_loss: dict[str, Any] = {"_target_": TARGET, **_policy_loss(config, loss_mode)}
    if mode is not None:
        policy_loss["loss_agg_mode"] = mode
    actor = actor_config(config, policy_loss, **changes)
    teacher = distillation_config(config)
    made = loss_config(actor, OmegaConf.select(config, "algorithm.rollout_correction"), teacher)
    loss_fn = EnginePolicyLoss(made)
    if teacher is not None:
        bound = partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
        loss_fn = DistillingPolicyLoss(made, bound)
    name = _distilling(_title("ours", made.loss_mode, made.loss_agg_mode, made.loss_scale_factor), made.distillation)
    group_size = made.aggregation_modes["pg"].group_size
    return BoundLoss(name, loss_fn, token_budgets(actor), group_size, distillation=made.distillation)


def _verls(loss_mode: str | None, config: DictConfig, changes: dict[str, Any]) -> BoundLoss:
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.utils.losses import ppo_loss

    from trinity_loss.verl.composed import actor_config, distillation_config, token_budgets
    from trinity_loss.verl.policy_options import distillation_of

    policy_loss = {"_target_": "verl.workers.config.PolicyLossConfig", **_policy_loss(config, loss_mode)}
    names = _verl_names()
    if policy_loss["loss_mode"] not in names:
        raise ConfigError(f"verl has no loss {policy_loss['loss_mode']!r}; expected one of {', '.join(names)}")
    actor = actor_config(_without_ours(config), policy_loss, **changes)
    name = _title("verl", policy_loss["loss_mode"], actor.loss_agg_mode, actor.loss_scale_factor)
    teacher = distillation_config(config)
    if teacher is not None:
        ours = distillation_of(teacher)
        bound = partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
        return BoundLoss(_distilling(name, ours), bound, token_budgets(actor), distillation=ours)
    return BoundLoss(name, partial(ppo_loss, config=actor), token_budgets(actor))


def _without_ours(config: DictConfig) -> DictConfig:
    """The configuration without our fields of ``policy_loss``, which verl's dataclass does not have."""
    from omegaconf import OmegaConf
    from verl.workers.config import PolicyLossConfig

    known = {*PolicyLossConfig.__dataclass_fields__, "_target_"}
    actor: Any = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
    actor["policy_loss"] = {name: value for name, value in actor["policy_loss"].items() if name in known}
    return OmegaConf.create({"actor_rollout_ref": {"actor": actor}})


class WithRowFields:
    """A Trinity-RFT loss with the fields that its trainer adds per row: who is an expert, the step."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn

    @staticmethod
    def _is_expert(prompt_lengths: torch.Tensor) -> torch.Tensor:
        # By the prompt's length, which a sequence keeps in whatever micro-batch it is.
        return prompt_lengths % 3 == 0

    def mini_batch_totals(self, batch: MiniBatch) -> dict[str, int]:
        """What the training worker of :mod:`trinity_loss.trinity_rft` counts of the expert's rows."""
        expert = self._is_expert(batch.prompt_lengths)
        tokens = (batch.response_mask != 0) & expert.repeat_interleave(batch.response_lengths)
        return {"batch_num_expert_rows": int(expert.sum()), "batch_num_expert_tokens": int(tokens.sum())}

    def __call__(self, *, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        rows = data.batch_size[0]
        prompts = data["prompts"]
        data["expert_mask"] = self._is_expert(prompts.offsets().diff() if prompts.is_nested else prompts.sum(1))
        data["step"] = torch.zeros(rows, dtype=torch.int64)
        return self.loss_fn(model_output=model_output, data=data, dp_group=dp_group)


def _trinitys(loss_mode: str | None, config: DictConfig, changes: dict[str, Any], family: str = "trinity") -> BoundLoss:
    from trinity_loss.verl.composed import actor_config, token_budgets

    try:
        from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
        from trinity.common.config import AlgorithmConfig
        from trinity.trainer.verl.losses import TrinityPolicyLoss
    except ImportError as error:
        raise ConfigError(f"Trinity-RFT cannot be imported (pip install --no-deps trinity-rft): {error}") from error
    name = loss_mode or "ppo"
    names = _trinity_names()
    if name not in names:
        raise ConfigError(f"Trinity-RFT has no loss {name!r}; expected one of {', '.join(names)}")
    verls = {"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": "vanilla"}
    actor = actor_config(_without_ours(config), verls, **changes)
    arguments = dict(POLICY_LOSS_FN.get(name).default_args())
    for argument, value in (("loss_agg_mode", actor.loss_agg_mode), ("clip_range", actor.clip_ratio)):
        if argument in arguments:
            arguments[argument] = value
    kl = actor.kl_loss_type.removesuffix("+") if actor.use_kl_loss else "none"
    kl = {"kl": "k1", "mse": "k2"}.get(kl, kl)
    entropy = "default" if actor.entropy_coeff else "none"
    loss_fn = TrinityPolicyLoss(
        AlgorithmConfig(
            policy_loss_fn=name,
            policy_loss_fn_args=arguments,
            kl_loss_fn=kl,
            kl_loss_fn_args={**KL_FN.get(kl).default_args(), "kl_coef": actor.kl_loss_coef},
            entropy_loss_fn=entropy,
            entropy_loss_fn_args={**ENTROPY_LOSS_FN.get(entropy).default_args(), "entropy_coef": actor.entropy_coeff},
            loss_agg_mode=actor.loss_agg_mode,
        )
    )
    contract, pairs = CONTRACTS["trinity"], 2 if name == "dpo" else 1
    if family == "scaled_trinity":
        from trinity_loss.trinity_rft import ScaledTrinityPolicyLoss

        loss_fn, contract = ScaledTrinityPolicyLoss.of(loss_fn), CONTRACTS["verl"]
    title = f"{family}:{name} {actor.loss_agg_mode}"
    return BoundLoss(title, WithRowFields(loss_fn), token_budgets(actor), pairs, contract=contract)


def _callable_at(spec: str) -> Any:
    found = find_at("--loss", spec)
    if not callable(found):
        raise ConfigError(f"--loss {spec} is a {type(found).__name__}; expected a callable")
    return found


def _from_module(spec: str, config: DictConfig) -> BoundLoss:
    found = _callable_at(spec)
    if inspect.isclass(found):
        raise ConfigError(
            f"--loss {spec} is a class; expected a function or an object: give the module one that is made"
        )
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return BoundLoss(spec, found, fresh=partial(_made_anew, spec))
    # Ours have the tokens as their one positional argument.
    others = [p.kind for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if others in _ONE_POSITIONAL and not {"model_output", "data"} & set(parameters):
        return replace(_ours(spec, config, {}), name=spec)
    if {"log_prob", "response_mask", "loss_agg_mode"} <= set(parameters):
        return replace(_verls(_registered(spec, found), config, {}), name=spec)
    if "config" in parameters and not isinstance(found, partial):
        from trinity_loss.verl.composed import actor_config, token_budgets

        actor = actor_config(config)
        fresh = partial(_made_anew, spec, config=actor)
        return BoundLoss(spec, partial(found, config=actor), token_budgets(actor), fresh=fresh)
    return BoundLoss(spec, found, fresh=partial(_made_anew, spec))


def _made_anew(spec: str, **arguments: Any) -> LossFn:
    """What stands there in a module that is run again, beside the one that is imported; with these arguments bound."""
    module, _, name = spec.partition(":")
    found = importlib.util.find_spec(module)
    if found is None or found.loader is None:
        return find_at("--loss", spec)
    again: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(again)
    made: Any = reduce(getattr, name.split("."), again)
    return partial(made, **arguments) if arguments else made


def _of_contract(spec: str, contract: Contract, weight_fn: str | None) -> BoundLoss:
    found = _callable_at(spec)
    weigh = None if weight_fn is None else find_at("--weight-fn", weight_fn)
    return BoundLoss(
        f"{spec} ({contract.name})",
        Played(contract, found, weigh),
        fresh=partial(_played_anew, spec, contract, weigh),
        contract=contract,
    )


def _played_anew(spec: str, contract: Contract, weigh: Callable[..., Any] | None) -> LossFn:
    return Played(contract, _made_anew(spec), weigh)


def _registered(spec: str, policy_loss: Callable[..., Any]) -> str:
    """The name under which verl knows this policy loss; one it does not know is registered by its path."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    for name, function in POLICY_LOSS_REGISTRY.items():
        if function is policy_loss:
            return name
    register_policy_loss(spec)(policy_loss)
    return spec


def _verl_names() -> tuple[str, ...]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return tuple(POLICY_LOSS_REGISTRY)


def _trinity_names() -> tuple[str, ...]:
    from trinity.algorithm import POLICY_LOSS_FN

    return tuple(POLICY_LOSS_FN._default_mapping)


#: Of each family what makes a loss, the names of its losses, and its aggregation modes.
_FAMILIES: dict[str, tuple[Callable[..., BoundLoss], Callable[[], Iterable[str]], Callable[[], Iterable[str]]]] = {
    "ours": (_ours, policy_loss_names, aggregation_mode_names),
    "verl": (_verls, _verl_names, lambda: _VERL_MODES),
    "trinity": (_trinitys, _trinity_names, lambda: _TRINITY_MODES),
    "scaled_trinity": (partial(_trinitys, family="scaled_trinity"), _trinity_names, lambda: _TRINITY_MODES),
}
