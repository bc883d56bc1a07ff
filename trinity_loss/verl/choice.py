"""Which loss a worker trains with: a trainer hands over verl's ``ppo_loss`` bound to our options, or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

from trinity_loss.errors import ConfigError
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.verl.policy_options import PolicyLossOptions, loss_config
from trinity_loss.verl.shadow import ShadowLoss


def unbound(loss_fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that a callable binds arguments to, with these: of a ``partial``, a bound method, or neither."""
    if isinstance(loss_fn, partial):
        return loss_fn.func, loss_fn.args, loss_fn.keywords
    if isinstance(loss_fn, MethodType):
        return loss_fn.__func__, (loss_fn.__self__,), {}
    return loss_fn, (), {}


def selecting_actor(loss_fn: Any) -> Any:
    """The actor configuration with our options that a callable is bound to or carries, None if there is none."""
    function, values, named = unbound(loss_fn)
    for candidate in (*values, *named.values(), getattr(function, "config", None)):
        if isinstance(getattr(candidate, "policy_loss", None), PolicyLossOptions):
            return candidate
    return None


def engine_loss(loss_fn: Any, correction: Mapping[str, Any] | None = None) -> EnginePolicyLoss | ShadowLoss | None:
    """Our loss for the loss that verl bound to an actor configuration; None if it is not to be exchanged.

    In shadow mode it is verl's loss with ours beside it.

    Args:
        loss_fn: What verl passes to ``set_loss_fn``.
        correction: ``algorithm.rollout_correction`` of the run, if it is known.

    Raises:
        ConfigError: A distillation loss is bound to our configuration.
    """
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.utils.losses import ppo_loss

    function, values, named = unbound(loss_fn)
    if function is distillation_ppo_loss and (said := selecting_actor(loss_fn)) is not None:
        raise ConfigError(
            f"actor.policy_loss is {name_of(type(said.policy_loss))}, but verl computes {name_of(function)}, which "
            "goes around it: switch the distillation off, or take the _target_ of policy_loss away"
        )
    if function is not ppo_loss:
        return None
    actor: Any = signature(ppo_loss).bind_partial(*values, **named).arguments.get("config")
    if not isinstance(getattr(actor, "policy_loss", None), PolicyLossOptions):
        return None
    ours = EnginePolicyLoss(loss_config(actor, correction))
    return ShadowLoss(loss_fn, ours) if actor.policy_loss.shadow else ours


def config_of(loss_fn: Any) -> LossConfig | None:
    """The configuration of the loss of ours that a callable is, carries or stands beside, None where there is none."""
    loss = loss_fn.ours if isinstance(loss_fn, ShadowLoss) else unbound(loss_fn)[0]
    config = getattr(loss, "config", None)
    return config if isinstance(config, LossConfig) else None


def name_of(something: Callable[..., Any]) -> str:
    """Where a function, a class, or the class of a callable is defined."""
    function = unbound(something)[0]
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
