"""Registers the CPU's training worker and rollout with verl when imported; for demonstration and tests.

Meant for ``actor_rollout_ref.model.external_lib``.
"""

from verl.utils.device import get_device_name

if get_device_name() != "cpu":
    raise RuntimeError(
        f"trinity_loss.verl.cpu.register is for the platform cpu, but this process runs on {get_device_name()!r}; "
        "set VERL_PLATFORM=cpu in the environment, and keep the entry point trinity_loss in "
        "VERL_USE_EXTERNAL_PLUGINS if that is set"
    )

from trinity_loss.verl.cpu import checkpoint_engine  # noqa: F401  (registers itself)
from trinity_loss.verl.cpu.rollout import register_rollout
from trinity_loss.verl.cpu.training_worker import register_workers

register_workers()
register_rollout()
