"""The losses that the engine tests run, and what they compare."""

from collections.abc import Iterable

import pytest

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.aggregation import aggregation_mode_names, has_scale_factor
from trinity_loss.verl.harness import EngineResult

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
