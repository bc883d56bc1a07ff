"""Distillation from a teacher, token by token: what verl's ``distillation_ppo_loss`` adds to a policy loss.

Names, formulas and clamps are those of verl 0.9.1 (``verl/trainer/distillation/losses.py``). An estimator compares the
log-probs of the sampled token. ``forward_kl_topk`` sums over the teacher's most likely tokens; an engine computes it
where the logits are, and it arrives in the model output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError
from trinity_loss.kl import KL_TYPES, kl_penalty
from trinity_loss.registry import PolicyInputs, TokenLoss, get_policy_loss
from trinity_loss.rules import (
    BOOLEAN,
    COUNT,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    Rule,
    check,
    naming_unknown_fields,
    one_of,
    optional,
)
from trinity_loss.tokens import ResponseTokens, above, at_most

#: The loss over the teacher's most likely tokens, and what of the model output it reads.
TOP_K, TOP_K_OUTPUTS = "forward_kl_topk", ("distillation_losses", "student_mass", "teacher_mass")
#: What some engines add to that.
_OVERLAP = ("overlap_count", "overlap_token_advantage")
#: Every part of the model output that stands beside the log-probs.
OUTPUTS = (*TOP_K_OUTPUTS, *_OVERLAP)
#: The teacher's log-prob of each token; its places are those of the model output, not of the response.
TEACHER = "teacher_logprobs"
#: Which tokens these are of, where there are several at a place.
TEACHER_IDS = "teacher_ids"
#: The weight of negative advantages in the policy gradient's dual clip, which verl does not let one choose.
_CLIP_RATIO_C = 3.0
_ESTIMATORS = tuple(name for name in KL_TYPES if not name.endswith("+"))

_RULES: dict[str, Rule] = {
    "loss_mode": one_of(*_ESTIMATORS, TOP_K),
    "topk": optional(COUNT),
    "use_task_rewards": BOOLEAN,
    "distillation_loss_coef": NUMBER,
    "loss_max_clamp": optional(POSITIVE),
    "use_policy_gradient": BOOLEAN,
    "clip_ratio": NOT_NEGATIVE,
    "clip_ratio_low": optional(NOT_NEGATIVE),
    "clip_ratio_high": optional(NOT_NEGATIVE),
}


@naming_unknown_fields
@dataclass(frozen=True)
class DistillationLossConfig:
    """What is added of a teacher; verl's fields of ``distillation.distillation_loss`` that a loss reads.

    Attributes:
        loss_mode: An estimator of the KL divergence from the teacher (``k1``, ``k2``, ``k3``, ``abs``, …), or
            ``forward_kl_topk``.
        topk: How many of the teacher's most likely tokens ``forward_kl_topk`` looks at.
        use_task_rewards: Whether the policy loss trains too.
        distillation_loss_coef: Weight of the distillation beside the policy loss; alone it weighs 1.
        loss_max_clamp: Bound of a token's loss; None: none.
        use_policy_gradient: Whether the negative loss of a token is its advantage in a clipped policy gradient, not
            differentiated itself: https://thinkingmachines.ai/blog/on-policy-distillation/.
        clip_ratio: Clip range of that policy gradient below and above 1.
        clip_ratio_low: Clip range below 1; None: ``clip_ratio``.
        clip_ratio_high: Clip range above 1; None: ``clip_ratio``.

    Raises:
        ConfigError: A value is unknown or out of range; ``k1`` without ``use_policy_gradient``.
    """

    loss_mode: str = "k3"
    topk: int | None = 32
    use_task_rewards: bool = True
    distillation_loss_coef: float = 1.0
    loss_max_clamp: float | None = None
    use_policy_gradient: bool = False
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            check(f"distillation_loss.{f.name}", getattr(self, f.name), _RULES[f.name])
        if self.loss_mode in ("k1", "kl") and not self.use_policy_gradient:
            raise ConfigError(
                f"distillation_loss.loss_mode is {self.loss_mode!r}, whose gradient does not depend on the teacher: "
                "use_policy_gradient=True makes it an advantage, or choose another estimator"
            )
        if self.use_topk and not self.topk:
            raise ConfigError(
                f"distillation_loss.topk is {self.topk!r}, but loss_mode {TOP_K!r} needs a number above 0"
            )

    @property
    def use_topk(self) -> bool:
        """Whether it looks at the teacher's most likely tokens."""
        return self.loss_mode == TOP_K

    @property
    def teacher_fields(self) -> tuple[str, ...]:
        """Fields of a mini-batch in which a teacher says what the loss, or the engine for it, reads."""
        return (TEACHER, TEACHER_IDS) if self.use_topk else (TEACHER,)

    @property
    def needs_policy_loss(self) -> bool:
        """Whether anything of the policy loss is computed, its metrics at least, as in verl."""
        return self.use_task_rewards or self.use_policy_gradient

    @property
    def coefficient(self) -> float:
        """Its weight in the loss."""
        return self.distillation_loss_coef if self.use_task_rewards else 1.0

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip range below and above 1."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return (self.clip_ratio if low is None else low, self.clip_ratio if high is None else high)

    @property
    def source(self) -> str:
        """The part of the model output that it is differentiated by."""
        return "distillation_losses" if self.use_topk and not self.use_policy_gradient else "log_probs"


def distillation_loss(
    config: DistillationLossConfig, tokens: ResponseTokens, values: Mapping[str, Tensor]
) -> TokenLoss:
    """The distillation of each token, with its derivative by ``config.source`` and its metrics.

    Args:
        config: What is computed.
        tokens: The response tokens.
        values: [N] by name: ``log_probs`` and ``teacher_logprobs``, or what the engine made of the logits; for the
            policy gradient ``log_probs``, ``old_log_probs`` and, where there are any, ``rollout_is_weights``.

    Returns:
        Losses and metrics, without the mean over some of the tokens that :func:`overlap` gives.
    """
    found = _divergence(config, values)
    losses, derivative = found.values, found.derivative
    assert derivative is not None
    bound = config.loss_max_clamp
    if bound is not None:
        derivative = derivative * at_most(losses.abs(), bound)
        losses = losses.clamp(-bound, bound)
    if not config.use_policy_gradient:
        return replace(found, values=losses, derivative=derivative)
    low, high = config.clip_range
    fields_read = {"old_log_probs": values["old_log_probs"], "advantages": -losses}
    inputs = PolicyInputs(tokens, values["log_probs"], fields_read)
    gradient = get_policy_loss("ppo")(inputs, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=_CLIP_RATIO_C)
    assert gradient.derivative is not None
    weights = values.get("rollout_is_weights", torch.ones_like(losses))
    return TokenLoss(
        gradient.values * weights,
        gradient.derivative * weights,
        means={**found.means, **_renamed(gradient.means)},
        maxima={**found.maxima, **_renamed(gradient.maxima)},
        minima={**found.minima, **_renamed(gradient.minima)},
    )


def _renamed(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("actor/", "distillation/"): values for name, values in metrics.items()}


def _divergence(config: DistillationLossConfig, values: Mapping[str, Tensor]) -> TokenLoss:
    """The divergence from the teacher at each token, its derivative by what it was made of, and its metrics."""
    means: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    minima: dict[str, Tensor] = {}
    if config.use_topk:
        raw, student, teacher = (values[name] for name in TOP_K_OUTPUTS)
        # Of the most likely tokens alone, neither policy's probabilities add up to 1: the sum may be negative.
        losses, derivative = raw.clamp(min=0), 1 - above(-raw, 0)
        for name, mass in (("student_mass", student), ("teacher_mass", teacher)):
            means[f"distillation/{name}"] = mass
            maxima[f"distillation/{name}_max"] = minima[f"distillation/{name}_min"] = mass
        if "overlap_count" in values:
            assert config.topk is not None
            means["distillation/overlap_ratio"] = values["overlap_count"] / config.topk
    else:
        losses, derivative = kl_penalty(values["log_probs"], values[TEACHER], config.loss_mode)
        means["distillation/abs_loss"] = losses.abs()
    maxima["distillation/loss_max"] = minima["distillation/loss_min"] = losses
    return TokenLoss(losses, derivative, means=means, maxima=maxima, minima=minima)


def overlap(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The advantage of the tokens that student and teacher both find likely [N], and 1.0 where there is one [N].

    None where the engine does not compute it.
    """
    if any(name not in values for name in _OVERLAP):
        return None
    count, advantage = (values[name] for name in _OVERLAP)
    return advantage, above(count, 0).to(torch.float64)
