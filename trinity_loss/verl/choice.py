"""Which loss a worker trains with: a trainer hands over verl's ``ppo_loss`` bound to our options, or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from trinity_loss.errors import ConfigError
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.verl.distilling import DistillingPolicyLoss
from trinity_loss.verl.policy_options import PolicyLossOptions, loss_config
from trinity_loss.verl.shadow import ShadowLoss


def unbound(loss_fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that a callable binds arguments to, with these: of a ``partial``, a bound method, or neither."""
    if isinstance(loss_fn, partial):
        return loss_fn.func, loss_fn.args, loss_fn.keywords
    if isinstance(loss_fn, MethodType):
        return loss_fn.__func__, (loss_fn.__self__,), {}
    return loss_fn, (), {}


class _Engine:
    """Stands for what an engine hands to a loss: verl's loss, spied upon, leaves its configurations here."""

    def __init__(self) -> None:
        self.config: Any = None
        self.distillation: Any = None
        self.loss, self.metrics = object(), {"actor/pg_loss": object()}

    def reach(self, config: Any, data: Any, distillation: Any = None) -> tuple[Any, dict[str, Any]]:
        self.config, self.distillation = (config, distillation) if data is self else (None, None)
        return self.loss, self.metrics


def _spy(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return model_output.reach(config, data)


def _distilling_spy(
    config: Any,
    distillation_config: Any,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    student_logits: Any = None,
    data_format: Any = None,
) -> Any:
    return model_output.reach(config, data, distillation_config)


def bound_configurations(loss_fn: Any) -> tuple[Any, Any]:
    """The configurations of actor and distillation that a callable binds verl's losses to, however it does so.

    The second is None for ``ppo_loss``, both for another loss.

    A partial shows what it binds, a lambda, a closure or a method does not. So it is called once, with verl's functions
    replaced: one that passes everything on, and gives back what it got, is one of these.
    """
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.utils.losses import ppo_loss

    engine = _Engine()
    spies = {ppo_loss: _spy.__code__, distillation_ppo_loss: _distilling_spy.__code__}
    verls = {function: function.__code__ for function in spies}
    # By their code: whoever imported a function holds the object itself.
    for function, code in spies.items():
        function.__code__ = code
    try:
        result = loss_fn(model_output=engine, data=engine, dp_group=engine)
    except Exception:
        return None, None
    finally:
        for function, code in verls.items():
            function.__code__ = code
    same = isinstance(result, tuple) and len(result) == 2 and result[0] is engine.loss and result[1] is engine.metrics
    return (engine.config, engine.distillation) if same and len(engine.metrics) == 1 else (None, None)


def selecting_actor(loss_fn: Any) -> Any:
    """The actor configuration with our options that a callable is bound to or carries, None if there is none."""
    function, values, named = unbound(loss_fn)
    carried = (getattr(candidate, "config", None) for candidate in (function, *values))
    for candidate in (*bound_configurations(loss_fn), *values, *named.values(), *carried):
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
        ConfigError: The configurations do not make a valid loss.
    """
    actor, distillation = bound_configurations(loss_fn)
    if not isinstance(getattr(actor, "policy_loss", None), PolicyLossOptions):
        return None
    ours: EnginePolicyLoss
    if distillation is None:
        ours = EnginePolicyLoss(loss_config(actor, correction))
    else:
        ours = DistillingPolicyLoss(loss_config(actor, correction, distillation), loss_fn)
    if not actor.policy_loss.shadow:
        return ours
    _check_verls(actor.policy_loss.loss_mode)
    return ShadowLoss(loss_fn, ours)


def _check_verls(loss_mode: str) -> None:
    """Raises :class:`ConfigError` for a loss that verl cannot train with, beside which ours would be reported."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if loss_mode not in POLICY_LOSS_REGISTRY:
        raise ConfigError(
            f"policy_loss.shadow is True, but verl, which trains then, has no loss_mode {loss_mode!r}; expected one of "
            f"{', '.join(POLICY_LOSS_REGISTRY)}"
        )


def config_of(loss_fn: Any) -> LossConfig | None:
    """The configuration of the loss of ours that a callable is, carries or stands beside, None where there is none."""
    function, values, _ = unbound(loss_fn.ours if isinstance(loss_fn, ShadowLoss) else loss_fn)
    configs = (getattr(candidate, "config", None) for candidate in (function, *values))
    return next((config for config in configs if isinstance(config, LossConfig)), None)


def name_of(something: Callable[..., Any]) -> str:
    """Where a function, a class, or the class of a callable is defined."""
    function = unbound(something)[0]
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
