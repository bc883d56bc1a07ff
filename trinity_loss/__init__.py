"""A verl engine loss whose loss, gradient and metrics are those of the whole mini-batch, however it was cut."""

from trinity_loss.aggregation import aggregate_loss
from trinity_loss.distillation import DistillationLossConfig
from trinity_loss.loss import EnginePolicyLoss, TrinityPolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.tokens import ResponseTokens

__version__ = "0.1.0"

__all__ = [
    "DistillationLossConfig",
    "EnginePolicyLoss",
    "LossConfig",
    "ResponseTokens",
    "TrinityPolicyLoss",
    "aggregate_loss",
]
