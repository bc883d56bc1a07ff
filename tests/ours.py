"""The package as the tests call it, beside the oracle."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from batches import Cut, Ranks, Run, assert_equals_oracle, run, sequence
from forms import FIELDS, NO_TOTALS, Form
from oracle import AGGREGATIONS, COUNTS, GROUPS, MODES, OF_VERL, Result, Sample, denominator, evaluate

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.metric_set import finish_metrics

SCALED = tuple(name for name, mode in AGGREGATIONS.items() if mode.scaled)
#: Modes whose denominator counts groups of sequences.
OF_GROUPS = tuple(name for name, mode in AGGREGATIONS.items() if mode.total in GROUPS)
#: Modes whose denominator only our training worker counts.
OF_THE_WORKER = tuple(name for name, mode in AGGREGATIONS.items() if mode.total in set(COUNTS) - set(OF_VERL))
_ONE, _EMPTY = sequence(2, uid="one"), sequence(2, mask=[0, 0], uid="empty")
#: Modes that a sequence without a token leaves as they were.
BLIND_TO_EMPTY = tuple(mode for mode in MODES if denominator([_ONE], mode) == denominator([_ONE, _EMPTY], mode))
#: Settings that leave something in a count or out.
COUNTED = tuple(field.name for field in fields(LossConfig) if field.name.startswith("count_"))

_expected: dict[tuple[int, str], tuple[Sequence[Sample], Result]] = {}


def in_mode(mode: str, scale: float = 4.0, **settings: Any) -> dict[str, Any]:
    """Settings of that mode, with a divisor where it takes one."""
    assert mode in MODES
    return {"loss_agg_mode": mode, **({"loss_scale_factor": scale} if mode in SCALED else {}), **settings}


def oracle_value(samples: Sequence[Sample], settings: dict[str, Any]) -> Result:
    """The oracle's result; each is computed once."""
    key = (id(samples), json.dumps(settings, sort_keys=True))
    if key not in _expected:
        _expected[key] = (samples, evaluate(samples, **settings))
    return _expected[key][1]


def make_config(settings: dict[str, Any]) -> LossConfig:
    """The configuration; whether there are rollout weights is the oracle's alone."""
    return LossConfig(**{k: v for k, v in settings.items() if k != "use_weights"})


def sent_by_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """For a ``Form``: what our training worker counts for that mode beside verl's own counts."""
    mode, count_empty = settings["loss_agg_mode"], settings.get("count_empty_sequences", True)
    counts = mode in OF_THE_WORKER or not count_empty
    return {"groups": mode in OF_GROUPS, "count_empty_groups": count_empty, "counts": counts}


def run_ours(settings: dict[str, Any], parts: Cut, layout: str | Form, **options: Any) -> Run:
    """The cut through the package's loss, between what its training worker does before and after.

    Before, it counts what the mode needs beside the engine's counts; after, it finishes the metrics.
    """
    got = run(EnginePolicyLoss(make_config(settings)), parts, layout, **sent_by_worker(settings) | options)
    finish_metrics(got.metrics)
    return got


def _unread(settings: dict[str, Any]) -> tuple[str, ...]:
    """Fields that a loss with these settings does not read."""
    config = make_config(settings)
    read = {*config.policy_loss.fields}
    read |= {"rollout_is_weights"} if settings.get("use_weights", True) else set()
    read |= {"ref_log_prob"} if config.use_kl_loss else set()
    read |= {"old_log_probs", "rollout_log_probs"} if config.rollout_metrics else set()
    return tuple(name for name in FIELDS if name not in read)


def play(
    settings: dict[str, Any], samples: Sequence[Sample], ranks: Ranks, form: Form, *, with_entropy: bool = True
) -> Run:
    """Every micro-batch of the cut, with what the loss reads and no more, through ``EnginePolicyLoss``."""
    options: dict[str, Any] = {"leave_out": _unread(settings)}
    if not all(settings.get(name, True) for name in COUNTED):
        options["counts"] = True
    if not settings.get("count_rejected_tokens", True):
        # Tokens that were rejected before the loss, which the mask no longer has.
        options["totals"] = (("batch_num_tokens", sum(s.tokens for s in samples) + 5),)
    return run_ours(settings, Cut(tuple(samples), ranks), form, with_entropy=with_entropy, **options)


def play_alone(settings: dict[str, Any], samples: Sequence[Sample], form: Form, *, with_entropy: bool = True) -> Run:
    """The whole mini-batch in one piece through ``TrinityPolicyLoss``, without totals."""
    options = {"leave_out": _unread(settings), "totals": NO_TOTALS}
    whole = Cut(tuple(samples), ((tuple(range(len(samples))),),))
    got = run(TrinityPolicyLoss(make_config(settings)), whole, form, with_entropy=with_entropy, **options)
    finish_metrics(got.metrics)
    return got


def check(
    settings: dict[str, Any],
    parts: Cut,
    layout: str,
    tolerance: float = 1e-10,
    expected: Sequence[Sample] | None = None,
    **options: Any,
) -> Run:
    """Run the cut and compare everything with the oracle, which sees ``expected`` or the cut's sequences."""
    got = run_ours(settings, parts, layout, **options)
    reference = oracle_value(parts.samples if expected is None else expected, settings)
    keys = [k for k in reference.metrics if options.get("with_entropy", True) or k != "actor/entropy_loss"]
    # verl's own test of those of the rollout correction is in the field cases.
    unknown = {k for k in got.metrics if not k.startswith("rollout_corr/")} - set(keys)
    assert not unknown, f"the oracle does not return {sorted(unknown)}"
    assert_equals_oracle(got, reference, parts.samples, tolerance, keys)
    return got


def value(settings: dict[str, Any], parts: Cut, layout: str, **options: Any) -> float:
    """The loss of sequences made with ``token_losses``, after asking that everything says the same.

    There the loss is linear in the ratios, which are 1, so the gradient sums to the loss; and the metric,
    which is reported unscaled and reduced by verl, is the loss.
    """
    got = run_ours(settings, parts, layout, **options)
    bound = 1e-12 * max(1.0, abs(got.loss))
    assert abs(got.log_prob_grad.sum().item() - got.loss) <= bound
    assert abs(got.metrics["actor/pg_loss"] - got.loss) <= bound
    return got.loss
