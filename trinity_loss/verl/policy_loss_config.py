"""The Hydra configuration that selects the loss."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_loss.rules import naming_unknown_fields
from trinity_loss.verl.compat import warn_if_untested
from trinity_loss.verl.policy_options import PolicyLossOptions, loss_config
from trinity_loss.verl.worker import install

__all__ = ["PolicyLossConfig", "loss_config"]

warn_if_untested()


@naming_unknown_fields
@dataclass
class PolicyLossConfig(PolicyLossOptions):
    """verl's policy-loss configuration, read by trinity_loss; see :class:`PolicyLossOptions` for its fields.

    Instantiating it, which verl does in every worker, puts our training worker in place.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install()
