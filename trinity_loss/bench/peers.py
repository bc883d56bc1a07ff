"""The losses that are measured: clipped policy gradient, KL term and entropy term, the same of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

#: verl's comes first: the others are compared with it.
LOSS_NAMES = ("verl", "ours", "trinity")
ENTROPY_COEFF, KL_COEF, SCALE_FACTOR = 0.01, 0.001, 1000.0

LossFn = Callable[..., tuple[Any, dict[str, Any]]]


class Unsupported(Exception):
    """The loss does not have the mode, or means something else by it."""


def make_losses(names: Iterable[str]) -> dict[str, Callable[[str], LossFn]]:
    """Makers of the losses by name, given an aggregation mode; those not installed are left out."""
    makers = {"verl": _verl, "ours": _ours, "trinity": _trinity}
    if importlib.util.find_spec("trinity") is None:
        del makers["trinity"]
    return {name: makers[name] for name in LOSS_NAMES if name in names and name in makers}


def _options(mode: str) -> dict[str, Any]:
    scale = {"loss_scale_factor": SCALE_FACTOR} if mode == "seq-mean-token-sum-norm" else {}
    terms = {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "entropy_coeff": ENTROPY_COEFF}
    return {"loss_agg_mode": mode, **terms, **scale}


def _verl(mode: str) -> LossFn:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **_options(mode))
    return partial(ppo_loss, config=config)


def _ours(mode: str) -> LossFn:
    from trinity_loss.loss import EnginePolicyLoss
    from trinity_loss.loss_config import LossConfig

    return EnginePolicyLoss(LossConfig(**_options(mode)))


def _trinity(mode: str) -> LossFn:
    if mode == "seq-mean-token-sum-norm":
        raise Unsupported(mode)
    from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
    from trinity.common.config import AlgorithmConfig
    from trinity.trainer.verl.losses import TrinityPolicyLoss

    config = AlgorithmConfig(
        policy_loss_fn="ppo",
        policy_loss_fn_args={**POLICY_LOSS_FN.get("ppo").default_args(), "loss_agg_mode": mode},
        kl_loss_fn="low_var_kl",
        kl_loss_fn_args={**KL_FN.get("low_var_kl").default_args(), "kl_coef": KL_COEF},
        entropy_loss_fn="default",
        entropy_loss_fn_args={**ENTROPY_LOSS_FN.get("default").default_args(), "entropy_coef": ENTROPY_COEFF},
        loss_agg_mode=mode,
    )
    return TrinityPolicyLoss(config)
