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


#: What is counted over the sequences of a mini-batch, by the field that brings it to the loss.
COUNTS: dict[str, Callable[[Sequence[Sample]], int]] = {
    "batch_num_tokens": lambda samples: sum(s.tokens for s in samples),
    "global_batch_size": len,
    "batch_num_valid_tokens": lambda samples: sum(s.tokens for s in samples),
    "batch_num_positive_tokens": lambda samples: sum(a > 0 for s in samples for a in s.valid(s.advantages)),
    "batch_num_nonempty_sequences": lambda samples: sum(s.tokens > 0 for s in samples),
    "batch_num_real_sequences": lambda samples: sum(not s.uid.startswith("pad") for s in samples),
}
#: Those that verl sends by itself; our training worker adds the others.
OF_VERL = ("batch_num_tokens", "global_batch_size")


@dataclass(frozen=True)
class Groups:
    """Sequences that belong together, each group of which counts as one.

    Attributes:
        key: What the sequences of a group have in common.
        per_row: The field with the tokens of each row's group.
        ids: The field that tells the groups of a packed micro-batch.
    """

    key: Callable[[Sample], Hashable]
    per_row: str
    ids: str


#: Counts of groups, by the field that brings the number of them.
GROUPS = {
    "batch_num_prompts": Groups(lambda s: s.uid, "prompt_num_tokens", "prompt_ids"),
    "batch_num_trajectories": Groups(lambda s: s.trajectory, "trajectory_num_tokens", "trajectory_ids"),
}


@dataclass(frozen=True)
class Mode:
    """A sum over sequences, or over the groups that it counts, divided by a count of the mini-batch.

    Attributes:
        total: What it is divided by, one of :data:`COUNTS` or :data:`GROUPS`; None: nothing.
        summand: What a sequence or group with a token adds, given the losses of its tokens, how many tokens it had
            before the loss itself rejected some, and ``loss_scale_factor``.
        scaled: Whether it has that factor.
    """

    total: str | None
    summand: Callable[[list[Tensor], int, float], Tensor]
    scaled: bool = False


AGGREGATIONS = {
    "token-mean": Mode("batch_num_tokens", lambda losses, size, scale: plus(losses)),
    "token-sum": Mode(None, lambda losses, size, scale: plus(losses)),
    "seq-mean-token-sum": Mode("global_batch_size", lambda losses, size, scale: plus(losses)),
    "seq-mean-token-mean": Mode("global_batch_size", lambda losses, size, scale: plus(losses) / len(losses)),
    "seq-mean-token-sum-norm": Mode("global_batch_size", lambda losses, size, scale: plus(losses) / scale, scaled=True),
    "prompt-mean": Mode("batch_num_prompts", lambda losses, size, scale: plus(losses) / size),
    "constant": Mode(None, lambda losses, size, scale: plus(losses) / scale, scaled=True),
    "trajectory-mean": Mode("batch_num_trajectories", lambda losses, size, scale: plus(losses) / size),
    "trajectory-mean-token-sum-norm": Mode(
        "batch_num_trajectories", lambda losses, size, scale: plus(losses) / scale, scaled=True
    ),
}
MODES = tuple(AGGREGATIONS)


def plus(losses: list[Tensor]) -> Tensor:
    """Their sum, one after the other."""
    return sum(losses, scalar(0.0))


def denominator(samples: Sequence[Sample], mode: str, *, count_empty_sequences: bool = True) -> float:
    """What ``mode`` divides by: counted over all sequences, as they were before the loss itself rejected some tokens.

    ``count_empty_sequences`` counts, or leaves out, sequences and groups without a token.
    """
    total = AGGREGATIONS[mode].total
    if total is None:
        return 1.0
    if total == "global_batch_size" and not count_empty_sequences:
        total = "batch_num_nonempty_sequences"
    if total in GROUPS:
        return float(len({GROUPS[total].key(s) for s in samples if s.tokens or count_empty_sequences}))
    return float(COUNTS[total](samples))


def aggregate(
    samples: Sequence[Sample],
    values: list[list[Tensor]],
    mode: str,
    *,
    loss_scale_factor: float = math.nan,
    count_empty_sequences: bool = True,
) -> tuple[Tensor, float]:
    """Numerator and denominator of ``mode``; ``values[i]`` holds the tokens of sequence i that the loss has left."""
    of = AGGREGATIONS[mode]
    losses: dict[Hashable, list[Tensor]] = defaultdict(list)
    sizes: dict[Hashable, int] = defaultdict(int)
    for i, (s, left) in enumerate(zip(samples, values, strict=True)):
        key = GROUPS[of.total].key(s) if of.total in GROUPS else i
        losses[key].extend(left)
        sizes[key] += s.tokens
    numerator = scalar(0.0)
    for key, left in losses.items():
        if left:
            numerator = numerator + of.summand(left, sizes[key], loss_scale_factor)
    return numerator, denominator(samples, mode, count_empty_sequences=count_empty_sequences)


def ratio(numerator: Tensor, denominator: float) -> Tensor:
    return numerator / denominator if denominator else numerator * 0.0


def mean(values: list[float], guard: float = 0.0) -> float:
    return sum(values) / (len(values) + guard) if values else 0.0


# ----------------------------------------------------------------------------------------------------
# Policy losses. Each takes the valid tokens of one sequence and returns a loss per token, and what it reports
# per token. The caller multiplies by the rollout weights, unless the loss has done so itself.

TokenMetrics = dict[str, list[float]]


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss, and what the tests give it.

    Attributes:
        name: Its own name, which is not an alias.
        fn: The loss of one sequence.
        arguments: Values of each of its ``loss_args``: the default (None where one must be given), that of most tests,
            and others that generated configurations have too.
        weighs_itself: Whether it applies the rollout weights.
        agg_mode: The aggregation mode that is part of it.
    """

    name: str
    fn: Callable[..., tuple[list[Tensor], TokenMetrics]]
    arguments: dict[str, tuple[Any, ...]]
    weighs_itself: bool = False
    agg_mode: str | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.arguments.items() if values[0] is not None}

    @property
    def tried(self) -> dict[str, Any]:
        return {name: values[1] for name, values in self.arguments.items()}


#: By name, aliases included.
POLICY_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(
    *names: str, weighs_itself: bool = False, agg_mode: str | None = None, **arguments: tuple[Any, ...]
) -> Callable[[Any], Any]:
    """Declares a loss for all tests, see :class:`PolicyLoss`."""

    def declare(fn: Any) -> Any:
        POLICY_LOSSES.update(dict.fromkeys(names, PolicyLoss(names[0], fn, arguments, weighs_itself, agg_mode)))
        return fn

    return declare


CLIPFRAC, CLIPFRAC_LOWER, PPO_KL = "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"


def usual_metrics(ratios: list[float], kl: list[float], clipped: Any = (), lower: Any = ()) -> TokenMetrics:
    """What most losses report: clipped fractions, drift, and the ratio's mean and extremes."""
    zeros = [0.0] * len(ratios)
    metrics = {CLIPFRAC: list(clipped) or zeros, CLIPFRAC_LOWER: list(lower) or zeros, PPO_KL: kl}
    return metrics | {f"actor/ratio_{of}": ratios for of in ("mean", "max", "min")}


def reduced(key: str, values: list[float]) -> float:
    """A metric over the tokens of the mini-batch: its name says whether it is the largest, the smallest or the mean."""
    if "max" in key or "min" in key:
        return (max if "max" in key else min)(values, default=0.0)
    return mean(values)


def ratio_of(log_ratio: float) -> float:
    """The probability ratio, limited as verl does."""
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def _surrogate(advantage: float, r: Tensor, a: Any) -> tuple[Tensor, bool]:
    free = -advantage * r
    bounded = -advantage * clamp(r, 1 - a.low, 1 + a.high)
    return (bounded, True) if bounded > free else (free, False)


@policy_loss("ppo", "vanilla")
def ppo(log_probs, old, advantages, weights, a):
    losses, clipped, lower, kl, ratios = [], [], [], [], []
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
        ratios.append(math.exp(log_ratio.item()))
    return losses, usual_metrics(ratios, kl, clipped, lower)


@policy_loss("luspo", agg_mode="seq-mean-token-sum")
@policy_loss("gspo")
def gspo(log_probs, old, advantages, weights, a):
    if not log_probs:
        return [], usual_metrics([], [])
    differences = [lp.item() - o for lp, o in zip(log_probs, old, strict=True)]
    sequence_log_ratio = sum(differences) / len(differences)
    losses, clipped = [], []
    for lp, adv in zip(log_probs, advantages, strict=True):
        r = torch.exp(clamp(sequence_log_ratio + lp - lp.detach(), high=10.0))
        loss, hit = _surrogate(adv, r, a)
        losses.append(loss)
        clipped.append(float(hit))
    ratios = [math.exp(min(sequence_log_ratio, 10.0))] * len(losses)
    return losses, usual_metrics(ratios, [-d for d in differences], clipped)


@policy_loss("cispo")
def cispo(log_probs, old, advantages, weights, a):
    losses, clipped, kl, ratios = [], [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        r = math.exp(log_ratio.item())
        inside = min(max(r, 1 - a.low), 1 + a.high)
        losses.append(-inside * adv * lp)
        clipped.append(float(inside != r))
        kl.append(-log_ratio.item())
        ratios.append(r)
    return losses, usual_metrics(ratios, kl, clipped)


@policy_loss("sapo", tau_pos=(1.0, 1.3, 0.7), tau_neg=(1.05, 1.7, 2.3))
def sapo(log_probs, old, advantages, weights, a):
    losses, kl, ratios = [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        tau = a.tau_pos if adv > 0 else a.tau_neg
        gate = torch.sigmoid(tau * (torch.exp(log_ratio) - 1)) * 4 / tau
        losses.append(-gate * adv)
        kl.append(-log_ratio.item())
        ratios.append(math.exp(log_ratio.item()))
    return losses, usual_metrics(ratios, kl)


@policy_loss("gmpo", "geo_mean", weighs_itself=True)
def gmpo(log_probs, old, advantages, weights, a):
    """Minus the mean advantage times the geometric mean of the clipped ratios, the same at each valid token.

    The clip is a bound on the log-ratio, above for a positive advantage and below for a negative one; an
    advantage of 0 leaves its token out of the sum. Rollout weights enter as their geometric mean, to each of
    which verl adds 1e-10.
    """
    n = len(log_probs)
    if n == 0:
        return [], usual_metrics([], [])
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
        value = value * math.exp(sum(math.log(w + 1e-10) for w in weights) / n)
    return [value] * n, usual_metrics([ratio_of(-x) for x in kl], kl, clipped, lower)


@policy_loss("gpg")
def gpg(log_probs, old, advantages, weights, a):
    return [-lp * adv for lp, adv in zip(log_probs, advantages, strict=True)], {}


def drifting_gpg(log_probs, old, advantages, weights, a):
    """gpg that reports how far the policy is from the one that answered: the bypass mode's reinforce."""
    losses, _ = gpg(log_probs, old, advantages, weights, a)
    return losses, {PPO_KL: [o - lp.item() for lp, o in zip(log_probs, old, strict=True)]}


def _dppo(log_probs, old, advantages, a, keep):
    losses, clipped, lower, kl, ratios = [], [], [], [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        log_ratio = clamp(lp - o, -20.0, 20.0)
        r = math.exp(log_ratio.item())
        kept = float(keep(lp.item(), o, adv))
        losses.append(-adv * min(r, a.clip_ratio_c) * kept * lp)
        clipped.append(1.0 - kept)
        lower.append(float(r > a.clip_ratio_c) * kept)
        kl.append(-log_ratio.item())
        ratios.append(r)
    return losses, usual_metrics(ratios, kl, clipped, lower)


@policy_loss("dppo_tv", kl_tau=(0.0, 0.2, 0.0))
def dppo_tv(log_probs, old, advantages, weights, a):
    def keep(lp: float, o: float, adv: float) -> bool:
        moved = math.exp(lp) - math.exp(o)
        return moved <= a.high if adv > 0 else moved >= -a.low

    losses, metrics = _dppo(log_probs, old, advantages, a, keep)
    return [loss + a.kl_tau * (lp - o) ** 2 for loss, lp, o in zip(losses, log_probs, old, strict=True)], metrics


@policy_loss("dppo_kl")
def dppo_kl(log_probs, old, advantages, weights, a):
    def keep(lp: float, o: float, adv: float) -> bool:
        p, q = math.exp(lp), math.exp(o)
        divergence = q * (o - lp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        if adv > 0:
            return divergence <= a.high or p <= q
        return divergence <= a.low or p >= q

    return _dppo(log_probs, old, advantages, a, keep)


@policy_loss("dro", dro_beta=(None, 0.3, 0.01))
def dro(log_probs, old, advantages, weights, a):
    losses = [
        -(lp * adv - 0.5 * a.dro_beta * (lp - o) ** 2) for lp, o, adv in zip(log_probs, old, advantages, strict=True)
    ]
    return losses, {PPO_KL: [o - lp.item() for lp, o in zip(log_probs, old, strict=True)]}


def limited_metrics(log_probs, old, clipped=()):
    """The usual metrics of a loss that looks at the limited ratio of each token."""
    limited = [min(max(lp.item() - o, -20.0), 20.0) for lp, o in zip(log_probs, old, strict=True)]
    return usual_metrics([math.exp(x) for x in limited], [-x for x in limited], clipped)


@policy_loss("importance_sampling")
def importance_sampling(log_probs, old, advantages, weights, a):
    losses = [
        -adv * torch.exp(clamp(lp - o, -20.0, 20.0)) for lp, o, adv in zip(log_probs, old, advantages, strict=True)
    ]
    return losses, limited_metrics(log_probs, old)


@policy_loss("topr", advantage_threshold=(0.0, 0.2, 0.0, 0.21))
def topr(log_probs, old, advantages, weights, a):
    losses, alphas = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        alpha = math.exp(min(lp.item() - o, 0.0)) if adv <= a.advantage_threshold else 1.0
        losses.append(-alpha * adv * lp)
        alphas.append(alpha)
    return losses, {"actor/topr_alpha": alphas} | limited_metrics(log_probs, old)


@policy_loss("opmd", tau=(1.0, 0.6, 0.0))
def opmd(log_probs, old, advantages, weights, a):
    return [-adv * lp / (1 + a.tau) for lp, adv in zip(log_probs, advantages, strict=True)], {}


@policy_loss("sppo", epsilon=(0.3, 0.37, 0.1))
def sppo(log_probs, old, advantages, weights, a):
    losses, clipped = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        inside = 1 / (1 + a.epsilon) <= math.exp(lp.item() - o) <= 1 + a.epsilon
        losses.append(-adv * (lp - o) * float(inside))
        clipped.append(1.0 - float(inside))
    return losses, limited_metrics(log_probs, old, clipped)


@policy_loss(
    "rec",
    epsilon_low=(0.2, 0.3, 0.1),
    epsilon_high=(0.2, 0.4, 0.15),
    epsilon_low_prime=(0.6, 0.45),
    epsilon_high_prime=(2.0, 0.55, 2.1),
    clip_mode=("none", "two-side", "one-side", "gspo-one-side", "ring", "none"),
    weight=("none", "importance_sampling", "gspo_importance_sampling", "advantage", "none"),
    regularizer=("none", "k2", "forward-kl", "none"),
    regularizer_coef=(0.0, 0.13, 0.0),
    temp=(1.0, 3.7, 1000.0),
)
def rec(log_probs, old, advantages, weights, a):
    if not log_probs:
        return [], usual_metrics([], [])
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
    ratios = [math.exp(min(x, 20.0)) for x in log_ratios]
    return losses, usual_metrics(ratios, [-x for x in log_ratios], clipped)


@policy_loss("sft")
def sft(log_probs, old, advantages, weights, a):
    return [-lp for lp in log_probs], {}


@policy_loss("sft_is")
def sft_is(log_probs, old, advantages, weights, a):
    return [-lp * math.exp(lp.item()) for lp in log_probs], {}


@policy_loss("sft_phi", cutoff_prob=(1.0, 0.3, 0.9))
def sft_phi(log_probs, old, advantages, weights, a):
    p = [math.exp(lp.item()) for lp in log_probs]
    return [-clamp(lp, high=math.log(a.cutoff_prob)) * q * (1 - q) for lp, q in zip(log_probs, p, strict=True)], {}


@policy_loss(
    "vespo",
    weighs_itself=True,
    k_pos=(2.0, 1.5, 0.0),
    lambda_pos=(3.0, 2.0),
    k_neg=(3.0, 2.5),
    lambda_neg=(2.0, 1.2),
)
def vespo(log_probs, old, advantages, weights, a):
    """w is the product of a sequence's ratios and rollout weights; its reshaped value weighs the log-probs."""
    low = math.log(1e-8)
    log_w = sum(min(max(lp.item() - o, -20.0), 20.0) for lp, o in zip(log_probs, old, strict=True))
    if weights is not None:
        log_w += sum(min(max(math.log(w), low), 20.0) for w in weights)
    log_w = min(max(log_w, low), 20.0)
    losses, phis = [], []
    for lp, adv in zip(log_probs, advantages, strict=True):
        k, lam = (a.k_pos, a.lambda_pos) if adv >= 0 else (a.k_neg, a.lambda_neg)
        phi = math.exp(lam) * math.exp(log_w) ** k * math.exp(-lam * math.exp(log_w))
        losses.append(-phi * adv * lp)
        phis.append(phi)
    return losses, {"actor/vespo_weight": phis} | limited_metrics(log_probs, old)


@policy_loss("ipo", threshold=(0.2, 0.15), kl_tau=(0.001, 0.1, 0.0))
def ipo(log_probs, old, advantages, weights, a):
    losses, masked = [], []
    for lp, o, adv in zip(log_probs, old, advantages, strict=True):
        kept = float(abs(math.exp(lp.item()) - math.exp(o)) <= a.threshold)
        losses.append(-kept * adv * torch.exp(clamp(lp - o, -20.0, 20.0)) + a.kl_tau * (lp - o) ** 2)
        masked.append(1 - kept)
    return losses, limited_metrics(log_probs, old, masked)


#: Losses of the whole mini-batch, which ``test_selecting_losses.py`` defines.
OF_THE_MINI_BATCH = {"clip_cov", "kl_cov", "m2po"}


#: Statistics by which verl rejects tokens and sequences.
REJECTION_RULES = tuple(
    f"{of}_{k}"
    for of in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in ("k1", "k2", "k3")
    if (of, k) != ("seq_max", "k1")
)


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
    use_weights: bool = True,
    kl_unbiased: bool = False,
    off_policy_mask: float | None = None,
    nll_on_positives: float = 0.0,
    row_weights: str | None = None,
    counted: Sequence[Sample] | None = None,
) -> Result:
    """Everything about ``samples`` as one mini-batch: pg - entropy_coeff x entropy + kl_loss_coef x KL.

    ``row_weights`` is the field of a sequence that multiplies its token losses in every term. ``counted`` is what was
    counted over the mini-batch, where that was more than what is left: the same sequences before tokens were rejected.
    """
    samples = list(samples)
    counted = samples if counted is None else counted
    declared = POLICY_LOSSES.get(loss_mode)
    leaves = [[scalar(x).requires_grad_() for x in s.log_probs] for s in samples]
    entropies = [[scalar(x).requires_grad_() for x in s.entropy] for s in samples]
    args = SimpleNamespace(
        low=clip_ratio if clip_ratio_low is None else clip_ratio_low,
        high=clip_ratio if clip_ratio_high is None else clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        **({} if declared is None else declared.defaults) | (loss_args or {}),
    )

    def weighed(s: Sample, losses: list[Tensor]) -> list[Tensor]:
        if row_weights is None:
            return losses
        return [x * w for x, w in zip(losses, s.valid(getattr(s, row_weights)), strict=True)]

    def total(values: list[list[Tensor]], mode: str = loss_agg_mode) -> Tensor:
        scale = math.nan if loss_scale_factor is None else loss_scale_factor
        return ratio(
            *aggregate(counted, values, mode, loss_scale_factor=scale, count_empty_sequences=count_empty_sequences)
        )

    metrics: dict[str, float] = {}
    if loss_mode == "dpo":
        pairs = dpo_pairs(samples, leaves, args)
        pg = sum(pairs, scalar(0.0)) / len(pairs)
    else:
        token_losses, reported = [], defaultdict(list)
        weights_of = [s.rollout_is_weights for s in samples] if use_weights else None
        effective, fn = samples, None if declared is None else declared.fn
        if loss_mode == "bypass_mode":
            reinforce = args.loss_type == "reinforce"
            weights_of = bypass_weights(samples, args) if reinforce else None
            effective, fn = rejected(samples, args), drifting_gpg if reinforce else ppo
        assert fn is not None, loss_mode
        for i, (s, leaf) in enumerate(zip(effective, leaves, strict=True)):
            weights = None if weights_of is None else s.valid(weights_of[i])
            losses, per_token = fn(s.valid(leaf), s.valid(s.old_log_probs), s.valid(s.advantages), weights, args)
            if weights is not None and not (declared and declared.weighs_itself):
                losses = [loss * w for loss, w in zip(losses, weights, strict=True)]
            if off_policy_mask is not None:
                drift = mean([o - lp.item() for lp, o in zip(s.valid(leaf), s.valid(s.old_log_probs), strict=True)])
                stays = [float(not (adv < 0 and drift > off_policy_mask)) for adv in s.valid(s.advantages)]
                losses = [loss * stay for loss, stay in zip(losses, stays, strict=True)]
                reported["actor/off_policy_frac"].extend(1 - stay for stay in stays)
            token_losses.append(weighed(s, losses))
            for key, values in per_token.items():
                reported[key].extend(values)
        pg = total(token_losses, (declared and declared.agg_mode) or loss_agg_mode)
        metrics = {key: reduced(key, values) for key, values in reported.items()}
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
