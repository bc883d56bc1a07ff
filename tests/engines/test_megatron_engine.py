"""Our loss through verl's Megatron engine: layouts, per-token loss, data and tensor parallelism, pipelines.

One run gives all results: starting an engine is what takes time.
"""

from collections.abc import Iterator

import pytest
from engine_losses import MODES, assert_in_effect, assert_same, by_label, ours
from faulty_losses import WithoutMicroBatchFactor

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

NESTED = BatchSpec(layout="nested")
ENGINES = {
    "packed": {"batch": NESTED},
    "padded": {"packed": False},
    "per-token loss": {"per_token_loss": True},
    "two ranks": {"world_size": 2, "batch": NESTED},
    "two ranks, per-token loss": {"world_size": 2, "per_token_loss": True},
    "two ranks, per-token loss, jagged": {"world_size": 2, "per_token_loss": True, "batch": NESTED},
    "pipeline": {"world_size": 2, "pipeline": 2, "batch": NESTED},
    "virtual pipeline": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "tensor parallel": {"world_size": 2, "tensor": 2, "batch": NESTED},
    "tensor parallel, per-token loss": {"world_size": 2, "tensor": 2, "per_token_loss": True},
    "distributed optimizer": {"world_size": 2, "distributed_optimizer": True, "batch": NESTED},
    "distributed optimizer, per-token loss": {"world_size": 2, "distributed_optimizer": True, "per_token_loss": True},
}
# Whole, two, four pieces; and by length.
CUTS = ({"micro_batches": 1}, {"micro_batches": 2}, {"micro_batches": 4}, {"max_tokens": 40})


def _cuts(engine: str) -> tuple[dict, ...]:
    # The interleaved schedule needs as many micro-batches as stages.
    return CUTS[1:] if engine == "virtual pipeline" else CUTS


def _cases() -> Iterator[EngineCase]:
    """Every mode on every engine in every cut."""
    for engine, options in ENGINES.items():
        options = {"trinity_worker": True, **options}
        for cut in _cuts(engine):
            for mode in MODES:
                yield EngineCase(ours(mode), f"{engine} {mode}", **options, **cut)
            yield EngineCase(TrinityPolicyLoss(LossConfig()), f"{engine} local mean", **options, **cut)
        if engine == "packed":
            for cut in CUTS[:3]:
                yield EngineCase(WithoutMicroBatchFactor(ours()), "no factor", **options, **cut)


@pytest.fixture(scope="module")
def results():
    """Results by label."""
    return by_label(run_cases("megatron", list(_cases()), timeout=1100))


def layout(case: EngineCase) -> dict:
    """What the engine's record has to say of its groups, model and optimizer."""
    same = ("tensor", "pipeline", "virtual_pipeline", "per_token_loss", "distributed_optimizer", "sequence_parallel")
    return {
        **{name: getattr(case, name) for name in (*same, "split_norms")},
        "data_parallel": case.world_size // case.tensor // case.pipeline,
        "chunks": case.virtual_pipeline or 1,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_cut_is_the_whole_on_one_rank(results, engine, mode):
    whole = results[f"packed {mode}"][0]
    cuts = results[f"{engine} {mode}"]
    assert len(cuts) == len(_cuts(engine))
    for cut in cuts:
        assert_in_effect(cut, layout(cut.case))
        assert_same(cut, whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_local_mean_is_far_off(results, engine):
    one, *more = results[f"{engine} local mean"]
    assert all(cut.gradient_error(one) > 0.1 for cut in more)


def test_a_lost_factor_is_seen(results):
    """If the engine did not multiply by the number of micro-batches, every comparison above would fail."""
    one, two, four = results["no factor"]
    assert two.gradient_error(one) == pytest.approx(1 / 2, rel=1e-4)
    assert four.gradient_error(one) == pytest.approx(3 / 4, rel=1e-4)
    for cut in (two, four):
        with pytest.raises(AssertionError):
            assert_same(cut, one)
