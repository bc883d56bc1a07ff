"""The package as the tests call it, beside the oracle."""

import json
from collections.abc import Sequence
from typing import Any

from batches import Cut, Run, assert_equals_oracle, run
from oracle import MODES, Result, Sample, evaluate

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.metric_set import finish_metrics

SCALED = ("seq-mean-token-sum-norm", "constant")
#: Modes whose denominator counts sequences.
PER_SEQUENCE = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
#: Modes that a sequence without a token leaves as they were.
BLIND_TO_EMPTY = ("token-mean", "token-sum", "constant")

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


def run_ours(settings: dict[str, Any], parts: Cut, layout: str, **options: Any) -> Run:
    """The cut through the package's loss, between what its training worker does before and after.

    Before, it counts what the mode needs beside the engine's counts; after, it finishes the metrics.
    """
    own = {k: v for k, v in settings.items() if k not in ("use_weights", "weight_floor")}
    options.setdefault("prompts", own["loss_agg_mode"] == "prompt-mean")
    options.setdefault("counts", not own.get("count_empty_sequences", True))
    options.setdefault("count_empty_prompts", own.get("count_empty_sequences", True))
    got = run(EnginePolicyLoss(LossConfig(**own)), parts, layout, **options)
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
