"""Reads a verl configuration as a training run would: Hydra composition, then verl's own dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_loss.errors import ConfigError

TARGET = "trinity_loss.verl.PolicyLossConfig"


def compose(
    config_dir: str | None = None, config_name: str = "ppo_trainer", overrides: Sequence[str] = ()
) -> DictConfig:
    """Composes a configuration.

    Args:
        config_dir: Folder of the configuration; None: verl's own. verl's is on the search path in any case.
        config_name: Its name, without ``.yaml``.
        overrides: Hydra overrides, as on verl's command line.

    Raises:
        ConfigError: It cannot be composed.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf.errors import OmegaConfBaseException

    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError("verl is not installed (pip install trinity-loss[verl])")
    verls = Path(spec.origin).parent / "trainer" / "config"
    folder = verls if config_dir is None else Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is no folder")
    if folder != verls:
        file = folder / f"{config_name}.yaml"
        # What it says of its search path itself, which an override replaces.
        own = OmegaConf.select(OmegaConf.load(file), "hydra.searchpath") if file.is_file() else None
        overrides = [*overrides, f"hydra.searchpath={[*(own or ()), f'file://{verls}']}"]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            config = hydra.compose(config_name, overrides=list(overrides))
            OmegaConf.resolve(config.actor_rollout_ref.actor)
            return config
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{config_name} cannot be composed: {_first_line(error)}") from error


def actor_config(config: DictConfig, policy_loss: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The actor configuration as a worker instantiates it.

    Args:
        config: What :func:`compose` returned; it is not changed.
        policy_loss: Changes to its ``policy_loss``.
        **changes: Changes to itself.

    Raises:
        ConfigError: verl or our configuration refuses a value.
    """
    actor: Any = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True))
    with open_dict(actor):
        actor.update(changes)
        actor.policy_loss.update(policy_loss or {})
        # Without one, verl refuses the configuration; no loss looks at it.
        if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size is None:
            actor.ppo_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu or 1
    return _instantiate(actor)


def distillation_config(config: DictConfig) -> Any:
    """verl's ``distillation`` as far as a loss reads it, None where it is off; no teacher has to be there.

    Raises:
        ConfigError: verl refuses a value.
    """
    from verl.workers.config import DistillationConfig

    if not OmegaConf.select(config, "distillation.enabled"):
        return None
    own: Any = OmegaConf.to_container(config.distillation.distillation_loss)
    return DistillationConfig(distillation_loss=_instantiate(OmegaConf.create(own)))


def _instantiate(config: Any) -> Any:
    """What verl's workers make of a part of the configuration; what it refuses is a :class:`ConfigError`."""
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    try:
        return omega_conf_to_dataclass(config)
    # verl's configurations refuse by assertions and by NotImplementedError, too.
    except (InstantiationException, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(_first_line(error.__cause__ or error)) from error


def token_budgets(actor: Any) -> tuple[int, ...]:
    """Token budget of a micro-batch, where the configuration cuts by one."""
    return (actor.ppo_max_token_len_per_gpu,) if actor.use_dynamic_bsz else ()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2]) or type(error).__name__
