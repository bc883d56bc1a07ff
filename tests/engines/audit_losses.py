"""Losses with a fault, as a user may write them."""

from typing import Any

import torch

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss

OURS = EnginePolicyLoss(LossConfig(entropy_coeff=0.01, use_kl_loss=True))
LOCAL = TrinityPolicyLoss(LossConfig())


def local_mean(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """The mean over a micro-batch's own tokens."""
    return LOCAL(model_output=model_output, data=data, dp_group=dp_group)


def without_dp_size(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """The share of the mini-batch, without the number of ranks that the engine averages over; padded layout."""
    from verl.workers.utils.padding import no_padding_2_padding

    log_probs, mask = no_padding_2_padding(model_output["log_probs"], data), data["response_mask"]
    ratio = torch.exp(log_probs - data["old_log_probs"])
    return -(ratio * data["advantages"])[mask.bool()].sum() / data["batch_num_tokens"], {}


def fails_on_rank_one(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Fails on one rank, in an audit alone: it looks for what the audit adds to the rows."""
    import torch.distributed as dist

    if dist.get_rank() == 1 and "audit_row" in set(data.keys()):
        raise RuntimeError("a loss that fails at /home/me/secret/file.py")
    return OURS(model_output=model_output, data=data, dp_group=dp_group)
