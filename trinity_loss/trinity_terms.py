"""The terms of Trinity-RFT's loss, each multiplied by its share of the mini-batch, and so are its metrics.

Trinity-RFT says nowhere what a number that a loss function returns is an average over. A trial says it: the function is
called on a micro-batch made up for it and on two pieces of that, and only one kind of share makes the pieces add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trinity.algorithm.policy_loss_fn.chord_policy_loss import MIXCHORDPolicyLossFn, mu_schedule_function
from trinity.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn
from verl.utils.metric import Metric

from trinity_loss.errors import BatchError, ConfigError, TotalsError
from trinity_loss.jagged import is_jagged
from trinity_loss.row_values import MicroBatchData, get_value
from trinity_loss.totals import read_totals

#: What the training worker counts over the mini-batch for losses that mix usual rows and an expert's.
EXPERT_COUNTS = ("batch_num_expert_tokens", "batch_num_expert_rows")


class Shares(NamedTuple):
    """What a value of a micro-batch is multiplied by so that verl's engine adds it up to that of the mini-batch.

    Attributes:
        tokens: For an average over tokens: the share of the mini-batch's tokens × ``dp_size``. None: nobody counted.
        rows: For one over rows, likewise.
        sum: For a sum over a constant: ``dp_size``; None where the engine gave no totals at all.
    """

    tokens: float | None = None
    rows: float | None = None
    sum: float | None = None

    @classmethod
    def of(cls, counts: Tensor, tokens: int | None, rows: int | None, dp_size: int | None) -> Shares:
        """The shares of rows with these token counts [rows] in totals of ``tokens`` and ``rows``."""

        def share(local: int, whole: int | None) -> float | None:
            return None if whole is None else local * (dp_size or 1) / max(whole, 1)

        known = (tokens, rows, dp_size) != (None, None, None)
        return cls(share(int(counts.sum()), tokens), share(len(counts), rows), float(dp_size or 1) if known else None)


def read_shares(data: MicroBatchData, mixed: bool) -> dict[str, Shares]:
    """The shares of ``all`` rows of a micro-batch and, if ``mixed``, of the ``usual`` and the ``expert`` ones.

    Raises:
        TotalsError: The expert rows were not counted, but others were.
    """
    totals, mask = read_totals(data), get_value(data, "response_mask")
    counts = (torch.nested.to_padded_tensor(mask, 0) if is_jagged(mask) else mask).count_nonzero(-1)
    wholes = totals.get("batch_num_tokens"), totals.get("global_batch_size")
    found = {"all": Shares.of(counts, *wholes, totals.dp_size)}
    if not mixed:
        return found
    expert, theirs = get_value(data, "expert_mask").bool(), [get_value(data, name) for name in EXPERT_COUNTS]
    for name, value in zip(EXPERT_COUNTS, theirs, strict=True):
        if value is None and wholes != (None, None):
            raise TotalsError(f"{name} is missing; the training worker of trinity_loss.trinity_rft counts it")
    usual = [None if a is None or b is None else a - b for a, b in zip(wholes, theirs, strict=True)]
    found["expert"] = Shares.of(counts[expert], theirs[0], theirs[1], totals.dp_size)
    return found | {"usual": Shares.of(counts[~expert], usual[0], usual[1], totals.dp_size)}


def find_averages(name: str, call: Callable[..., Any], fields: Iterable[str], kinds: Iterable[str]) -> dict[str, str]:
    """What a loss function's values are averages over, by trial.

    Args:
        name: Whose they are, for errors.
        call: Returns a loss and metrics.
        fields: The fields [rows, T] that it takes by name; ``expert_mask`` and ``step`` are [rows].
        kinds: The attributes of :class:`Shares` that may make them add up, the first that does is taken.

    Returns:
        A kind for each metric, or ``max`` or ``min``; for the loss, under the empty name, a kind.

    Raises:
        ConfigError: The function fails, or nothing adds up.
    """
    draw, lengths = torch.Generator().manual_seed(0), torch.tensor([2, 7, 1, 5, 3, 6])
    inputs: dict[str, Tensor] = {}
    for field in fields:
        noise = torch.randn(len(lengths), 8, generator=draw, dtype=torch.float64)
        inputs[field] = noise - 3 if "prob" in field else noise
        if field in ("response_mask", "action_mask"):
            inputs[field] = torch.arange(8) < lengths[:, None]
        elif field in ("expert_mask", "step"):
            inputs[field] = torch.zeros(len(lengths), dtype=torch.bool if field == "expert_mask" else torch.int32)
    pieces = slice(0, 2), slice(2, 6)
    shares = [Shares.of(lengths[piece], int(lengths.sum()), len(lengths), 1) for piece in pieces]
    try:
        results = [call(**{k: v[rows] for k, v in inputs.items()}) for rows in (slice(0, 6), *pieces)]
        whole, *parts = ({"": float(loss), **{k: float(v) for k, v in metrics.items()}} for loss, metrics in results)
    except Exception as error:
        raise ConfigError(f"{name} failed on a made-up micro-batch: {type(error).__name__}: {error}") from error
    found = {}
    for key, value in whole.items():
        values = [part.get(key, math.nan) for part in parts]
        sums = {kind: sum(getattr(s, kind) * v for s, v in zip(shares, values, strict=True)) for kind in kinds}
        fits = [kind for kind, total in sums.items() if math.isclose(total, value, rel_tol=1e-6, abs_tol=1e-9)]
        if key:
            fits += [extreme.__name__ for extreme in (max, min) if extreme(values) == value]
        if not fits:
            raise ConfigError(
                f"{key or 'the loss'} of {name} is {value} on a made-up micro-batch, {values[0]} and {values[1]} on "
                f"its pieces; expected an average over {' or '.join(kinds)}, which an engine can add up"
            )
        found[key] = fits[0]
    return found


class ScaledTerm:
    """A loss function of Trinity-RFT's, its loss and metrics multiplied by their shares of the mini-batch.

    Args:
        part: Trinity-RFT's object.
        fields: The fields that it takes, beside ``logprob``.
        call: What is called of it or in its place; by default itself.
        rows: The rows that it takes: ``all``, ``usual`` or ``expert``.
        kinds: What it may be an average over.
    """

    def __init__(
        self,
        part: Any,
        fields: Iterable[str],
        call: Callable[..., Any] | None = None,
        rows: str = "all",
        kinds: Iterable[str] = Shares._fields,
    ) -> None:
        self.part, self.select_keys, self.call, self.rows = part, list(fields), call or part, rows
        self.averages = find_averages(type(part).__name__, self.call, ["logprob", *self.select_keys], kinds)
        self.shares = Shares()

    def __call__(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        if self.rows != "all":
            rows = inputs["expert_mask"] if self.rows == "expert" else ~inputs["expert_mask"]
            inputs = {key: value[rows] if isinstance(value, Tensor) else value for key, value in inputs.items()}
            if not rows.any():  # A mean over nothing is NaN in some modes; it counts for nothing, with a graph.
                nothing = inputs["entropy" if "entropy" in inputs else "logprob"].sum()
                return nothing, {key: self._share(key, 0.0) for key in self.averages if key}
        loss, metrics = self.call(**inputs)
        weight = getattr(self.shares, self.averages[""])
        return loss if weight is None else loss * weight, {k: self._share(k, v) for k, v in metrics.items()}

    calculate_kl_loss = __call__

    def _share(self, key: str, value: float) -> Any:
        kind = self.averages.get(key)
        if kind is None:  # It was not there when the function was tried: what it is an average over is not known.
            return value
        if kind in ("max", "min"):
            return Metric(kind, value)
        weight = getattr(self.shares, kind)
        return value if weight is None else Metric("sum", value * weight)

    def __repr__(self) -> str:
        return f"{type(self.part).__name__} over {'' if self.rows == 'all' else f'{self.rows} '}{self.averages['']}"


def summed(loss: Tensor, shares: Shares) -> Any:
    """A loss that has its share already as a metric; without totals the number that Trinity-RFT logs."""
    return loss.detach().item() if shares.sum is None else Metric("sum", loss)


class Mixture:
    """``mix`` and ``mix_chord``: (1 − µ) × the mean over the usual rows + µ × the mean over the expert rows.

    Each is the mean over the mini-batch's own count. Trinity-RFT's weights come from the configured batch sizes and say
    the same where rows come in these numbers.
    """

    def __init__(self, part: MIXPolicyLossFn | MIXCHORDPolicyLossFn) -> None:
        self.part, self.select_keys = part, part.select_keys
        self.usual = ScaledTerm(part.grpo_loss_fn, part.grpo_loss_fn.select_keys, rows="usual")
        self.expert = ScaledTerm(part.sft_loss_fn, part.sft_loss_fn.select_keys, rows="expert")

    def __call__(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        part, metrics = self.part, {}
        if isinstance(part, MIXCHORDPolicyLossFn):
            mu = metrics["mu"] = mu_schedule_function(
                int(inputs["step"].max()), part.mu_warmup_steps, part.mu_decay_steps, part.mu_peak, part.mu_valley
            )
        else:
            mu = part.mu
        (usual, usual_metrics), (expert, expert_metrics) = self.usual(**inputs), self.expert(**inputs)
        loss = (1 - mu) * usual + mu * expert
        metrics |= {f"usual/{key}": value for key, value in usual_metrics.items()}
        metrics |= {f"expert/{key}": value for key, value in expert_metrics.items()}
        return loss, metrics | {"loss": summed(loss, self.usual.shares)}


def mean_over_pairs(part: Callable[..., Any], **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    """DPO as the mean over pairs of rows; Trinity-RFT's takes all rows that it is given for one pair.

    Raises:
        BatchError: The number of rows is odd.
    """
    rows = inputs["logprob"].shape[0]
    if rows % 2:
        raise BatchError(f"a micro-batch of DPO has {rows} rows; expected pairs, chosen and rejected in turn")
    pairs = [
        part(**{k: v[i : i + 2] if isinstance(v, Tensor) else v for k, v in inputs.items()}) for i in range(0, rows, 2)
    ]
    metrics = {key: sum(found[key] for _, found in pairs) / len(pairs) for key in pairs[0][1]}
    return torch.stack([loss for loss, _ in pairs]).mean(), metrics
