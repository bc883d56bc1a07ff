"""Everything that knows verl: selection by Hydra, the training worker, and verl on a CPU for demonstration.

Select the loss in a verl configuration with::

    actor_rollout_ref.actor.policy_loss._target_=trinity_loss.verl.PolicyLossConfig
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_loss.verl.policy_loss_config import PolicyLossConfig

__all__ = ["PolicyLossConfig"]


def __getattr__(name: str) -> Any:
    # verl loads `trinity_loss.verl.plugin` while it is being imported itself, when its configuration
    # classes do not exist yet.
    if name == "PolicyLossConfig":
        from trinity_loss.verl.compat import check_version

        check_version()  # An old verl lacks names that the next line asks it for.
        from trinity_loss.verl.policy_loss_config import PolicyLossConfig

        return PolicyLossConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
