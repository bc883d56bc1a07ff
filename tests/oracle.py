"""The loss, gradient and metrics of a whole mini-batch, written from their definitions, one token at a time.

Nothing here is fast and nothing is batched: every value is a float64 scalar, every sum a Python loop over
the tokens whose mask is set, and autograd differentiates the loops. There is no padding, no micro-batch and
no rank, so there is nothing that a cut could change. The package is never imported.

The formulas are those of verl 0.9.1 (``trainer/ppo/core_algos.py``, ``trainer/ppo/rollout_corr_helper.py``)
and, for the losses it adds, of Trinity-RFT 0.6.0 (``algorithm/policy_loss_fn``), without the 1e-8 that both
add to the denominators of their means. With a boolean mask torch rounds that away: an integer sum plus 1e-8
is float32.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VERL_GUARD = 1e-8
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
    "constant",
    "trajectory-mean",
    "trajectory-mean-token-sum-norm",
)


@dataclass(frozen=True)
class Sample:
    """One sequence. Every field but the first and the last has one entry per response token."""

    prompt_length: int
    mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    old_log_probs: tuple[float, ...]
    ref_log_prob: tuple[float, ...]
    advantages: tuple[float, ...]
    entropy: tuple[float, ...]
    rollout_is_weights: tuple[float, ...]
    rollout_log_probs: tuple[float, ...]
    uid: str
    session: int = 0

    @property
    def trajectory(self) -> tuple[str, int]:
        """The session of the prompt that it is a row of."""
        return self.uid, self.session

    @property
    def length(self) -> int:
        return len(self.mask)

    @property
    def tokens(self) -> int:
        return sum(self.mask)

    def valid(self, values: Sequence[Any]) -> list[Any]:
        """Those of ``values`` whose mask is set."""
        return [value for value, keep in zip(values, self.mask, strict=True) if keep]


@dataclass(frozen=True)
class Result:
    """What the mini-batch is worth. Gradients have an entry per response token, 0 where the mask is 0."""

    loss: float
    log_prob_grad: list[list[float]]
    entropy_grad: list[list[float]]
    metrics: dict[str, float]


def clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """``x`` inside the bounds, a constant outside: its gradient there is 0."""
    if low is not None and x < low:
        return torch.full_like(x, low)
    if high is not None and x > high:
        return torch.full_like(x, high)
    return x


def scalar(x: float) -> Tensor:
    return torch.tensor(float(x), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------
# KL estimators


def kl_estimate(log_prob: Tensor, ref: float, kind: str) -> Tensor:
    """The estimate of KL(policy || reference) at one token; a trailing ``+`` takes the gradient of k2."""
    if kind.endswith("+"):
        base = kind[:-1]
        if base in ("mse", "k2"):
            return kl_estimate(log_prob, ref, base)
        through = 0.5 * (log_prob - ref) ** 2
        return kl_estimate(log_prob, ref, base).detach() + through - through.detach()
    difference = log_prob - ref
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        # Where the policies agree the gradient is 0, as autograd has it: the first step of a run.
        return difference * float(difference > 0) - difference * float(difference < 0)
    if kind in ("mse", "k2"):
        return 0.5 * difference**2
    if kind in ("low_var_kl", "k3"):
        gap = clamp(-difference, -20.0, 20.0)
        return clamp(torch.exp(gap) - gap - 1, -10.0, 10.0)
    raise ValueError(kind)


# ----------------------------------------------------------------------------------------------------
# Aggregation


def group_keys(samples: Sequence[Sample], mode: str) -> list[Hashable]:
    """What tells the group that a mode averages over: the prompt, or the trajectory."""
    return [s.trajectory if mode.startswith("trajectory") else s.uid for s in samples]


def aggregate(
    values: list[list[Tensor]],
    groups_of: Sequence[Hashable],
    mode: str,
    *,
    loss_scale_factor: float | None = None,
    count_empty_sequences: bool = True,
    before: list[int] | None = None,
) -> tuple[Tensor, float]:
    """Numerator and denominator of ``mode``; ``values[i]`` holds the valid tokens of sequence i.

    ``groups_of[i]`` tells its prompt group, or its trajectory in a mode of those.

    ``count_empty_sequences`` counts, or leaves out, sequences and prompt groups without a token. ``before`` is how
    many tokens each sequence had before the loss rejected some: a mean over the tokens of the mini-batch, or of a
    prompt group, divides by those.
    """
    before = [len(v) for v in values] if before is None else before
    nothing = scalar(0.0)
    counted = [v for v in values if v or count_empty_sequences]
    if mode == "token-mean":
        return sum((x for v in values for x in v), nothing), float(sum(before))
    if mode == "token-sum":
        return sum((x for v in values for x in v), nothing), 1.0
    if mode == "constant":
        assert loss_scale_factor is not None
        return sum((x for v in values for x in v), nothing) / loss_scale_factor, 1.0
    if mode == "seq-mean-token-sum":
        return sum((sum(v, nothing) for v in counted), nothing), float(len(counted))
    if mode == "seq-mean-token-sum-norm":
        assert loss_scale_factor is not None
        return sum((sum(v, nothing) / loss_scale_factor for v in counted), nothing), float(len(counted))
    if mode == "seq-mean-token-mean":
        return sum((sum(v, nothing) / len(v) for v in counted if v), nothing), float(len(counted))
    if mode in ("prompt-mean", "trajectory-mean", "trajectory-mean-token-sum-norm"):
        groups: dict[Hashable, list[Tensor]] = defaultdict(list)
        sizes: dict[Hashable, int] = defaultdict(int)
        for key, v, size in zip(groups_of, values, before, strict=True):
            groups[key].extend(v)
            sizes[key] += size
        kept = [key for key in groups if sizes[key] or count_empty_sequences]
        if mode == "trajectory-mean-token-sum-norm":
            sizes = dict.fromkeys(sizes, loss_scale_factor)
        return sum((sum(groups[key], nothing) / sizes[key] for key in kept if sizes[key]), nothing), float(len(kept))
    raise ValueError(mode)


def ratio(numerator: Tensor, denominator: float) -> Tensor:
    return numerator / denominator if denominator else numerator * 0.0


def mean(values: list[float], guard: float = 0.0) -> float:
    return sum(values) / (len(values) + guard) if values else 0.0


# ----------------------------------------------------------------------------------------------------
# Policy losses. Each takes the valid tokens of one sequence and returns a loss per token, and what it reports
# per token. The caller multiplies by the rollout weights, unless the loss has done so itself.

TokenMetrics = dict[str, list[float]]
PolicyLoss = Callable[..., tuple[list[Tensor], TokenMetrics]]

CLIPFRAC, CLIPFRAC_LOWER, PPO_KL = "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"


def _surrogate(advantage: float, r: Tensor, a: Any) -> tuple[Tensor, bool]:
    free = -advantage * r
    bounded = -advantage * clamp(r, 1 - a.low, 1 + a.high)
    return (bounded, True) if bounded > free else (free, False)


def ppo(log_probs, old, advantages, weights, a):
    losses, clipped, lower, kl = [], [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        loss, hit = _surrogate(adv, torch.exp(log_ratio), a)
        hit_lower = False
        if adv < 0:
            bound = scalar(-adv * a.clip_ratio_c)
            if loss > bound:
                loss, hit_lower = bound, True
        losses.append(loss)
        clipped.append(float(hit))
        lower.append(float(hit_lower))
        kl.append(-log_ratio.item())
    return losses, {CLIPFRAC: clipped, CLIPFRAC_LOWER: lower, PPO_KL: kl}


def gspo(log_probs, old, advantages, weights, a):
    if not log_probs:
        return [], {CLIPFRAC: [], CLIPFRAC_LOWER: [], PPO_KL: []}
    differences = [lp.item() - o for lp, o in zip(log_probs, old, strict=True)]
    sequence_log_ratio = sum(differences) / len(differences)
    losses, clipped = [], []
    for lp, adv in zip(log_probs, advantages, strict=True):
        r = torch.exp(clamp(sequence_log_ratio + lp - lp.detach(), high=10.0))
        loss, hit = _surrogate(adv, r, a)
        losses.append(loss)
        clipped.append(float(hit))
    zeros = [0.0] * len(losses)
    return losses, {CLIPFRAC: clipped, CLIPFRAC_LOWER: zeros, PPO_KL: [-d for d in differences]}


def cispo(log_probs, old, advantages, weights, a):
    losses, clipped, kl = [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        r = math.exp(log_ratio.item())
        inside = min(max(r, 1 - a.low), 1 + a.high)
        losses.append(-inside * adv * lp)
        clipped.append(float(inside != r))
        kl.append(-log_ratio.item())
    return losses, {CLIPFRAC: clipped, CLIPFRAC_LOWER: [0.0] * len(losses), PPO_KL: kl}


def sapo(log_probs, old, advantages, weights, a):
    losses, kl = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        tau = a.tau_pos if adv > 0 else a.tau_neg
        gate = torch.sigmoid(tau * (torch.exp(log_ratio) - 1)) * 4 / tau
        losses.append(-gate * adv)
        kl.append(-log_ratio.item())
    zeros = [0.0] * len(losses)
    return losses, {CLIPFRAC: zeros, CLIPFRAC_LOWER: zeros, PPO_KL: kl}


def gmpo(log_probs, old, advantages, weights, a):
    """Minus the mean advantage times the geometric mean of the clipped ratios, the same at each valid token.

    The clip is a bound on the log-ratio, above for a positive advantage and below for a negative one; an
    advantage of 0 leaves its token out of the sum. Rollout weights enter as their geometric mean, to each of
    which verl adds 1e-10 (``weight_floor``).
    """
    n = len(log_probs)
    if n == 0:
        return [], {CLIPFRAC: [], CLIPFRAC_LOWER: [], PPO_KL: []}
    total, clipped, lower, kl = scalar(0.0), [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = lp - o
        if adv > 0:
            total = total + clamp(log_ratio, high=a.high)
        elif adv < 0:
            total = total + clamp(log_ratio, low=-a.low)
        outside = log_ratio < -a.low or log_ratio > a.high
        clipped.append(float(outside and adv > 0))
        lower.append(float(outside and adv < 0))
        kl.append(-log_ratio.item())
    value = -(sum(advantages) / n) * torch.exp(total / n)
    if weights is not None:
        value = value * math.exp(sum(math.log(w + a.weight_floor) for w in weights) / n)
    return [value] * n, {CLIPFRAC: clipped, CLIPFRAC_LOWER: lower, PPO_KL: kl}


def gpg(log_probs, old, advantages, weights, a):
    return [-lp * adv for lp, adv in zip(log_probs, advantages, strict=True)], {}


def drifting_gpg(log_probs, old, advantages, weights, a):
    """gpg that reports how far the policy is from the one that answered: the bypass mode's reinforce."""
    losses, _ = gpg(log_probs, old, advantages, weights, a)
    return losses, {PPO_KL: [o - lp.item() for lp, o in zip(log_probs, old, strict=True)]}


def _dppo(log_probs, old, advantages, a, keep):
    losses, clipped, lower, kl = [], [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        r = math.exp(log_ratio.item())
        kept = float(keep(lp.item(), o, adv))
        losses.append(-adv * min(r, a.clip_ratio_c) * kept * lp)
        clipped.append(1.0 - kept)
        lower.append(float(r > a.clip_ratio_c) * kept)
        kl.append(-log_ratio.item())
    return losses, {CLIPFRAC: clipped, CLIPFRAC_LOWER: lower, PPO_KL: kl}


def dppo_tv(log_probs, old, advantages, weights, a):
    def keep(lp: float, o: float, adv: float) -> bool:
        moved = math.exp(lp) - math.exp(o)
        return moved <= a.high if adv > 0 else moved >= -a.low

    losses, metrics = _dppo(log_probs, old, advantages, a, keep)
    tau = getattr(a, "kl_tau", 0.0)
    return [loss + tau * (lp - o) ** 2 for loss, lp, o in zip(losses, log_probs, old, strict=True)], metrics


def dppo_kl(log_probs, old, advantages, weights, a):
    def keep(lp: float, o: float, adv: float) -> bool:
        p, q = math.exp(lp), math.exp(o)
        divergence = q * (o - lp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        if adv > 0:
            return divergence <= a.high or p <= q
        return divergence <= a.low or p >= q

    return _dppo(log_probs, old, advantages, a, keep)


def dro(log_probs, old, advantages, weights, a):
    losses = [
        -(lp * adv - 0.5 * a.dro_beta * (lp - o) ** 2) for lp, o, adv in zip(log_probs, old, advantages, strict=True)
    ]
    return losses, {PPO_KL: [o - lp.item() for lp, o in zip(log_probs, old, strict=True)]}


def importance_sampling(log_probs, old, advantages, weights, a):
    losses = [
        -adv * torch.exp(clamp(lp - o, -20.0, 20.0)) for lp, o, adv in zip(log_probs, old, advantages, strict=True)
    ]
    return losses, {}


def topr(log_probs, old, advantages, weights, a):
    losses = []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        alpha = math.exp(min(lp.item() - o, 0.0)) if adv <= a.advantage_threshold else 1.0
        losses.append(-alpha * adv * lp)
    return losses, {}


def opmd(log_probs, old, advantages, weights, a):
    return [-adv * lp / (1 + a.tau) for lp, adv in zip(log_probs, advantages, strict=True)], {}


def sppo(log_probs, old, advantages, weights, a):
    losses, clipped = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        inside = 1 / (1 + a.epsilon) <= math.exp(lp.item() - o) <= 1 + a.epsilon
        losses.append(-adv * (lp - o) * float(inside))
        clipped.append(1.0 - float(inside))
    return losses, {CLIPFRAC: clipped}


def rec(log_probs, old, advantages, weights, a):
    if not log_probs:
        return [], {CLIPFRAC: []}
    log_ratios = [lp.item() - o for lp, o in zip(log_probs, old, strict=True)]
    of_sequence = math.exp(sum(log_ratios) / len(log_ratios))
    losses, clipped = [], []
    for lp, o, adv, log_ratio in zip(log_probs, old, advantages, log_ratios, strict=True):
        r = math.exp(log_ratio)
        low, high = 1 - a.epsilon_low, 1 + a.epsilon_high
        if a.clip_mode == "two-side":
            inside = low <= r <= high
        elif a.clip_mode == "one-side":
            inside = (adv >= 0 and r <= high) or (adv <= 0 and r >= low)
        elif a.clip_mode == "gspo-one-side":
            inside = (adv >= 0 and of_sequence <= high) or (adv <= 0 and of_sequence >= low)
        elif a.clip_mode == "ring":
            inside = (
                low <= r <= high
                or (adv >= 0 and r <= 1 - a.epsilon_low_prime)
                or (adv <= 0 and r >= 1 + a.epsilon_high_prime)
            )
        else:
            inside = True
        scale = {
            "none": 1.0,
            "importance_sampling": r,
            "gspo_importance_sampling": of_sequence,
            "advantage": math.exp(adv / a.temp),
        }[a.weight]
        loss = -adv * scale * lp * float(inside)
        if a.regularizer == "forward-kl":
            loss = loss - a.regularizer_coef * lp
        elif a.regularizer == "k2":
            loss = loss + a.regularizer_coef * (lp - o) ** 2
        losses.append(loss)
        clipped.append(1.0 - float(inside))
    return losses, {CLIPFRAC: clipped}


def sft(log_probs, old, advantages, weights, a):
    return [-lp for lp in log_probs], {}


def sft_is(log_probs, old, advantages, weights, a):
    return [-lp * math.exp(lp.item()) for lp in log_probs], {}


def sft_phi(log_probs, old, advantages, weights, a):
    p = [math.exp(lp.item()) for lp in log_probs]
    return [-clamp(lp, high=math.log(a.cutoff_prob)) * q * (1 - q) for lp, q in zip(log_probs, p, strict=True)], {}


def vespo(log_probs, old, advantages, weights, a):
    """w is the product of a sequence's ratios and rollout weights; its reshaped value weighs the log-probs."""
    low = math.log(1e-8)
    log_w = sum(min(max(lp.item() - o, -20.0), 20.0) for lp, o in zip(log_probs, old, strict=True))
    if weights is not None:
        log_w += sum(min(max(math.log(w), low), 20.0) for w in weights)
    log_w = min(max(log_w, low), 20.0)
    losses, phis, kl = [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        k, lam = (a.k_pos, a.lambda_pos) if adv >= 0 else (a.k_neg, a.lambda_neg)
        phi = math.exp(lam) * math.exp(log_w) ** k * math.exp(-lam * math.exp(log_w))
        losses.append(-phi * adv * lp)
        phis.append(phi)
        kl.append(-min(max(lp.item() - o, -20.0), 20.0))
    return losses, {"actor/vespo_weight": phis, PPO_KL: kl}


def ipo(log_probs, old, advantages, weights, a):
    losses, masked = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        kept = float(abs(math.exp(lp.item()) - math.exp(o)) <= a.threshold)
        losses.append(-kept * adv * torch.exp(clamp(lp - o, -20.0, 20.0)) + a.kl_tau * (lp - o) ** 2)
        masked.append(1 - kept)
    return losses, {CLIPFRAC: masked}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "vanilla": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "geo_mean": gmpo,
    "gpg": gpg,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "importance_sampling": importance_sampling,
    "topr": topr,
    "opmd": opmd,
    "sppo": sppo,
    "rec": rec,
    "sft": sft,
    "sft_is": sft_is,
    "sft_phi": sft_phi,
    "luspo": gspo,
    "vespo": vespo,
    "ipo": ipo,
}
#: Losses of the whole mini-batch, which ``test_selecting_losses.py`` defines.
OF_THE_MINI_BATCH = {"clip_cov", "kl_cov", "m2po"}
WEIGHT_INSIDE = {"gmpo", "geo_mean", "vespo"}
#: Losses whose aggregation mode is part of them.
OWN_MODE = {"luspo": "seq-mean-token-sum"}


def keeps(log_ratios: list[float], rule: str, threshold: str) -> list[bool]:
    """Which tokens of one sequence a rejection rule of verl lets pass; log-ratios of its valid tokens.

    The statistic is an estimate of the KL divergence (k1, k2, k3) of each token, or the sum, mean or maximum of
    a sequence's. k1 is signed and must lie between the logs of two ratios, the others below a bound.
    """
    level, kind = rule.rsplit("_", 1)
    limited = [min(max(x, -20.0), 20.0) for x in log_ratios]
    estimate = {"k1": lambda x: -x, "k2": lambda x: 0.5 * x * x, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    statistic = [estimate(x) for x in limited]
    if level != "token" and statistic:
        pooled = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}[level](statistic)
        statistic = [pooled] * len(statistic)
    bounds = [float(part) for part in threshold.split("_")]
    if kind == "k1":
        low, high = math.log(bounds[0] if len(bounds) == 2 else 1 / bounds[0]), math.log(bounds[-1])
    else:
        low, high = -math.inf, bounds[-1]
    return [low <= x <= high for x in statistic]


def rejected(samples: list[Sample], a: Any) -> list[Sample]:
    """The sequences with the mask that is left after every rejection rule, each applied to the first mask."""
    if a.rollout_rs is None:
        return samples
    rules = a.rollout_rs.split(",")
    thresholds = a.rollout_rs_threshold.split(",")
    thresholds *= len(rules) // len(thresholds)
    out = []
    for s in samples:
        gaps = [x - o for x, o in zip(s.valid(s.log_probs), s.valid(s.old_log_probs), strict=True)]
        passed = [keeps(gaps, rule, bound) for rule, bound in zip(rules, thresholds, strict=True)]
        verdict = iter([all(each) for each in zip(*passed, strict=True)])
        out.append(replace(s, mask=tuple(int(m and next(verdict)) for m in s.mask)))
    return out


def bypass_weights(samples: list[Sample], a: Any) -> list[list[float]] | None:
    """A rollout weight for each token, masked or not, from the policy and the rollout's log-probs."""
    if a.rollout_is is None:
        return None
    bounds = [float(part) for part in str(a.rollout_is_threshold).split("_")]
    out = []
    for s in samples:
        gaps = [x - o if m else 0.0 for x, o, m in zip(s.log_probs, s.old_log_probs, s.mask, strict=True)]
        if a.rollout_is == "sequence":
            gaps = [sum(gaps)] * len(gaps)
        raw = [math.exp(min(max(x, -20.0), 20.0)) for x in gaps]
        if len(bounds) == 1:
            out.append([min(w, bounds[0]) for w in raw])
        else:
            out.append([w if bounds[0] <= w <= bounds[1] else 0.0 for w in raw])
    return out


def dpo_pairs(samples: list[Sample], log_probs: list[list[Tensor]], a: Any) -> list[Tensor]:
    """A loss per pair: row 2k is preferred to row 2k + 1."""
    losses = []
    for k in range(0, len(samples), 2):
        gain = [
            sum(samples[i].valid(log_probs[i]), scalar(0.0)) - sum(samples[i].valid(samples[i].ref_log_prob))
            for i in (k, k + 1)
        ]
        logit = a.beta * (gain[0] - gain[1])
        losses.append(
            -torch.nn.functional.logsigmoid(logit) * (1 - a.label_smoothing)
            - torch.nn.functional.logsigmoid(-logit) * a.label_smoothing
        )
    return losses


# ----------------------------------------------------------------------------------------------------
# The whole


def evaluate(
    samples: Sequence[Sample],
    *,
    loss_mode: str = "ppo",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_args: dict[str, Any] | None = None,
    entropy_coeff: float = 0.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: str = "low_var_kl",
    count_empty_sequences: bool = True,
    count_rejected_tokens: bool = True,
    use_weights: bool = True,
    weight_floor: float = 0.0,
    kl_unbiased: bool = False,
    off_policy_mask: float | None = None,
    nll_on_positives: float = 0.0,
    row_weights: str | None = None,
) -> Result:
    """Everything about ``samples`` as one mini-batch: pg - entropy_coeff x entropy + kl_loss_coef x KL.

    ``row_weights`` is the field of a sequence that multiplies its token losses in every term.
    """
    samples = list(samples)
    leaves = [[scalar(x).requires_grad_() for x in s.log_probs] for s in samples]
    entropies = [[scalar(x).requires_grad_() for x in s.entropy] for s in samples]
    args = SimpleNamespace(
        low=clip_ratio if clip_ratio_low is None else clip_ratio_low,
        high=clip_ratio if clip_ratio_high is None else clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        weight_floor=weight_floor,
        **(loss_args or {}),
    )
    groups_of = group_keys(samples, loss_agg_mode)

    def weighed(s: Sample, losses: list[Tensor]) -> list[Tensor]:
        if row_weights is None:
            return losses
        return [x * w for x, w in zip(losses, s.valid(getattr(s, row_weights)), strict=True)]

    def total(values: list[list[Tensor]], before: list[int] | None = None, mode: str = loss_agg_mode) -> Tensor:
        numerator, denominator = aggregate(
            values,
            groups_of,
            mode,
            loss_scale_factor=loss_scale_factor,
            count_empty_sequences=count_empty_sequences,
            before=before,
        )
        return ratio(numerator, denominator)

    metrics: dict[str, float] = {}
    if loss_mode == "dpo":
        pairs = dpo_pairs(samples, leaves, args)
        pg = sum(pairs, scalar(0.0)) / len(pairs)
    else:
        token_losses, reported = [], defaultdict(list)
        weights_of = [s.rollout_is_weights for s in samples] if use_weights else None
        effective, policy_loss, before = samples, POLICY_LOSSES.get(loss_mode), None
        if loss_mode == "bypass_mode":
            reinforce = args.loss_type == "reinforce"
            weights_of = bypass_weights(samples, args) if reinforce else None
            effective, policy_loss = rejected(samples, args), drifting_gpg if reinforce else ppo
            before = [s.tokens for s in samples] if count_rejected_tokens else None
        assert policy_loss is not None, loss_mode
        for i, (s, leaf) in enumerate(zip(effective, leaves, strict=True)):
            weights = None if weights_of is None else s.valid(weights_of[i])
            losses, per_token = policy_loss(
                s.valid(leaf), s.valid(s.old_log_probs), s.valid(s.advantages), weights, args
            )
            if weights is not None and loss_mode not in WEIGHT_INSIDE:
                losses = [loss * w for loss, w in zip(losses, weights, strict=True)]
            if off_policy_mask is not None:
                drift = mean([o - lp.item() for lp, o in zip(s.valid(leaf), s.valid(s.old_log_probs), strict=True)])
                stays = [float(not (adv < 0 and drift > off_policy_mask)) for adv in s.valid(s.advantages)]
                losses = [loss * stay for loss, stay in zip(losses, stays, strict=True)]
                reported["actor/off_policy_frac"].extend(1 - stay for stay in stays)
            token_losses.append(weighed(s, losses))
            for key, values in per_token.items():
                reported[key].extend(values)
        pg = total(token_losses, before, OWN_MODE.get(loss_mode, loss_agg_mode))
        metrics = {key: mean(values) for key, values in reported.items()}
    metrics["actor/pg_loss"] = pg.item()

    entropy = total([weighed(s, s.valid(e)) for s, e in zip(samples, entropies, strict=True)])
    metrics["actor/entropy_loss"] = entropy.item()
    loss = pg - entropy_coeff * entropy
    if use_kl_loss:
        estimates = []
        for s, leaf in zip(samples, leaves, strict=True):
            valid = zip(s.valid(leaf), s.valid(s.ref_log_prob), s.valid(s.old_log_probs), strict=True)
            tokens = [
                kl_estimate(lp, r, kl_loss_type) * (torch.exp(clamp(lp - o, -20.0, 20.0)) if kl_unbiased else 1.0)
                for lp, r, o in valid
            ]
            estimates.append(weighed(s, tokens))
        kl = total(estimates)
        metrics["kl_loss"] = kl.item()
        metrics["kl_coef"] = kl_loss_coef
        loss = loss + kl_loss_coef * kl
    if nll_on_positives:
        positive = [
            weighed(
                s, [-lp if adv > 0 else lp * 0.0 for lp, adv in zip(s.valid(leaf), s.valid(s.advantages), strict=True)]
            )
            for s, leaf in zip(samples, leaves, strict=True)
        ]
        count = sum(adv > 0 for s in samples for adv in s.valid(s.advantages))
        nll = ratio(sum((x for row in positive for x in row), scalar(0.0)), float(count))
        metrics["actor/nll_on_positives"] = nll.item()
        loss = loss + nll_on_positives * nll
    if loss.requires_grad:
        loss.backward()

    def gradients(tensors: list[list[Tensor]]) -> list[list[float]]:
        return [[0.0 if t.grad is None else t.grad.item() for t in row] for row in tensors]

    return Result(loss.item(), gradients(leaves), gradients(entropies), metrics)


# ----------------------------------------------------------------------------------------------------
# Importance-sampling metrics


def importance_metrics(
    old: list[list[float]],
    rollout: list[list[float]],
    *,
    level: str = "token",
    upper: float = 2.0,
    lower: float = 0.5,
    guard: float = 0.0,
    trajectories: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """verl's rollout-correction metrics over the valid tokens of each sequence; empty ones are not there.

    ``level`` says what a weight is: the ratio of a token, of a whole sequence (the product of its tokens'),
    or the geometric mean of a sequence's. The last two give every token of a sequence the same weight, and
    what is a mean over weights stays a mean over tokens, as in verl. Weights are truncated at ``upper``;
    ``lower`` only counts. ``guard`` is what verl adds to denominators. With ``trajectories``, one per sequence, each
    of them weighs once in a mean over sequences, and a sequence in it as its tokens.
    """
    kept = [(o, r) for o, r in zip(old, rollout, strict=True) if o]
    shares = [1.0] * len(kept)
    if trajectories is not None:
        named = [(name, len(o)) for name, o in zip(trajectories, old, strict=True) if o]
        shares = [size / sum(other for its, other in named if its == name) for name, size in named]

    def over_sequences(values: list[float]) -> float:
        return sum(v * share for v, share in zip(values, shares, strict=True)) / sum(shares)

    if not kept:
        return {}
    token_log_ratios = [[x - y for x, y in zip(o, r, strict=True)] for o, r in kept]

    if level == "token":
        log_ratios = token_log_ratios
    else:
        divisor = [1 if level == "sequence" else len(row) + guard for row in token_log_ratios]
        log_ratios = [[sum(row) / d] * len(row) for row, d in zip(token_log_ratios, divisor, strict=True)]
    raw = [[math.exp(min(max(x, -20.0), 20.0)) for x in row] for row in log_ratios]
    applied = [[min(w, upper) for w in row] for row in raw]
    flat_raw, flat = [w for row in raw for w in row], [w for row in applied for w in row]
    out = {"rollout_is_mean": mean(flat, guard)}
    if level == "token":
        out["rollout_is_max"], out["rollout_is_min"] = max(flat), min(flat)
        out["rollout_is_ratio_fraction_high"] = mean([float(w > upper) for w in flat_raw], guard)
        out["rollout_is_ratio_fraction_low"] = mean([float(w < lower) for w in flat_raw], guard)
    else:
        of_sequence = [row[0] for row in log_ratios]
        out["rollout_is_max"] = math.exp(min(max(of_sequence), 20.0))
        out["rollout_is_min"] = math.exp(min(of_sequence))
        out["rollout_is_ratio_fraction_high"] = over_sequences([float(x > math.log(upper)) for x in of_sequence])
        out["rollout_is_ratio_fraction_low"] = over_sequences([float(x < math.log(lower)) for x in of_sequence])
    centre, square = mean(flat, guard), mean([w * w for w in flat], guard)
    out["rollout_is_std"] = math.sqrt(max(square - centre * centre, 0.0)) if len(flat) > 1 else 0.0
    out["rollout_is_eff_sample_size"] = 1 / mean([(w / (centre + guard)) ** 2 for w in flat], guard)

    per_sequence = [mean(row, guard) for row in applied]
    raw_per_sequence = [mean(row, guard) for row in raw]
    middle, count = over_sequences(per_sequence), round(sum(shares))
    spread = sum((w - middle) ** 2 * share for w, share in zip(per_sequence, shares, strict=True))
    out["rollout_is_seq_mean"] = middle
    out["rollout_is_seq_std"] = math.sqrt(spread / (count - 1)) if count > 1 else 0.0
    out["rollout_is_seq_max"], out["rollout_is_seq_min"] = max(per_sequence), min(per_sequence)
    out["rollout_is_seq_max_deviation"] = max(abs(w - 1) for w in per_sequence)
    out["rollout_is_seq_fraction_high"] = over_sequences([float(w > upper) for w in raw_per_sequence])
    out["rollout_is_seq_fraction_low"] = over_sequences([float(w < lower) for w in raw_per_sequence])

    trained = [mean(o, guard) for o, _ in kept]
    sampled = [mean(r, guard) for _, r in kept]
    gaps = [s - t for s, t in zip(sampled, trained, strict=True)]
    flat_log_ratios = [x for row in token_log_ratios for x in row]
    out["training_ppl"] = over_sequences([math.exp(-x) for x in trained])
    out["training_log_ppl"] = over_sequences([-x for x in trained])
    out["rollout_ppl"] = over_sequences([math.exp(-x) for x in sampled])
    out["rollout_log_ppl"] = over_sequences([-x for x in sampled])
    out["kl"] = mean([-x for x in flat_log_ratios], guard)
    out["k3_kl"] = mean([math.exp(x) - x - 1 for x in flat_log_ratios], guard)
    out["log_ppl_diff"] = over_sequences(gaps)
    out["log_ppl_abs_diff"] = over_sequences([abs(g) for g in gaps])
    out["log_ppl_diff_max"], out["log_ppl_diff_min"] = max(gaps), min(gaps)
    out["ppl_ratio"] = over_sequences([math.exp(g) for g in gaps])
    out["chi2_token"] = mean([math.exp(min(max(x, -20.0), 20.0)) ** 2 for x in flat_log_ratios], guard) - 1
    sums = [min(max(sum(row), -20.0), 20.0) for row in token_log_ratios]
    out["chi2_seq"] = over_sequences([math.exp(2 * x) for x in sums]) - 1
    return out
