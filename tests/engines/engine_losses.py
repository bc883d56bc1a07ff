"""The losses that the engine tests run, and what they compare."""

import math
from collections.abc import Iterable

import pytest

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.aggregation import aggregation_mode_names, has_scale_factor
from trinity_loss.verl.harness import EngineResult
from trinity_loss.verl.harness.model_batch import ragged_rows

MODES = aggregation_mode_names()
TOLERANCE = 1e-5
TERMS = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}


def config(mode: str, **settings) -> LossConfig:
    """All three terms in one mode."""
    scale = {"loss_scale_factor": 20.0} if has_scale_factor(mode) else {}
    return LossConfig(loss_agg_mode=mode, **scale, **TERMS, **settings)


def ours(mode: str = "token-mean", **settings) -> EnginePolicyLoss:
    return EnginePolicyLoss(config(mode, **settings))


def by_label(results: Iterable[EngineResult]) -> dict[str, list[EngineResult]]:
    """Results grouped by their case's label, in order."""
    groups: dict[str, list[EngineResult]] = {}
    for result in results:
        groups.setdefault(result.case.label, []).append(result)
    return groups


def assert_same(result: EngineResult, whole: EngineResult, tolerance: float = TOLERANCE) -> None:
    """Gradient, its norm, the reported loss and every metric are those of the mini-batch in one piece."""
    assert result.gradient_error(whole) < tolerance
    # What was recorded is what verl saw.
    assert float(result.gradient.norm()) == pytest.approx(result.grad_norm, rel=tolerance)
    assert result.loss == pytest.approx(whole.loss, rel=tolerance)
    assert set(result.metrics) == set(whole.metrics)
    counted = {"actor/micro_batches"}
    for key in set(whole.metrics) - counted:
        assert result.metrics[key] == pytest.approx(whole.metrics[key], rel=tolerance, abs=1e-6), key


def assert_in_effect(result: EngineResult, layout: dict) -> None:
    """The engine ran as its case says; the gradient is right, too, where an option is ignored."""
    case = result.case
    lengths = [len(row["prompts"]) + len(row["responses"]) for row in ragged_rows(case.batch)]
    share = case.batch.rows // layout["data_parallel"]
    pieces = case.micro_batches
    if case.max_tokens is not None:
        # Of the rank with most tokens, in steps of the interleaved schedule. verl takes more where that does not fit.
        longest = max(sum(lengths[start : start + share]) for start in range(0, len(lengths), share))
        step = case.pipeline if case.virtual_pipeline else 1
        pieces = math.ceil(math.ceil(longest / case.max_tokens) / step) * step
    assert len(result.ranks) == case.world_size
    for rank in result.ranks:
        assert rank.layout == layout
        assert len(rank.micro_batches) == pieces
        rows = [piece.rows for piece in rank.micro_batches]
        assert sum(rows) == share
        for piece in rank.micro_batches:
            assert piece.rows == share // pieces if case.max_tokens is None else piece.length <= case.max_tokens
            assert piece.nested == (case.batch.layout == "nested")
            assert piece.inputs is None or piece.inputs[0] == (1 if case.packed else piece.rows)
    replicas = case.world_size // layout["data_parallel"]
    assert sum(piece.length for rank in result.ranks for piece in rank.micro_batches) == replicas * sum(lengths)
