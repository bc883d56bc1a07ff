"""Our loss through verl's training worker and FSDP2 engine, in plain processes and in Ray workers.

Two runs give all results: starting an engine is what takes time.
"""

from collections.abc import Iterator
from functools import cache

import pytest
from engine_losses import MODES, TOLERANCE, assert_same, by_label, ours

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.verl.harness import BatchSpec, EngineCase, EngineError, run_cases
from trinity_loss.verl.harness.losses import FailsOnRank

BROKEN = "this loss is broken on rank 1"
NESTED = BatchSpec(layout="nested")
# The second rank's half has no token in the mask.
ONE_SIDED = BatchSpec(empty_rows=(2, 4, 5, 6, 7))
BUDGETS = (30, 64, 500)
# The other modes run with the smallest budget only.
EVERY_BUDGET = ("token-mean", "prompt-mean")


def _engines() -> Iterator[EngineCase]:
    """Cases in the order of their engines: first one rank, then two."""
    for mode in MODES:
        yield EngineCase(ours(mode), f"whole {mode}", NESTED, trinity_worker=True)
    yield EngineCase(ours(), "whole padded", trinity_worker=True)
    yield EngineCase(ours(), "whole one-sided", ONE_SIDED, trinity_worker=True)
    two = {"world_size": 2, "trinity_worker": True}
    for mode in MODES:
        for tokens in BUDGETS:
            if tokens == BUDGETS[0] or mode in EVERY_BUDGET:
                yield EngineCase(ours(mode), f"cut {mode}", NESTED, max_tokens=tokens, **two)
    for pieces in (1, 2, 4):
        yield EngineCase(ours(), "cut padded", micro_batches=pieces, **two)
        yield EngineCase(ours(), "cut one-sided", ONE_SIDED, micro_batches=pieces, **two)
        yield EngineCase(TrinityPolicyLoss(LossConfig()), "local mean", micro_batches=pieces, **two)
    yield EngineCase(ours(), "synchronised", micro_batches=4, no_sync=False, **two)
    yield EngineCase(ours(), "hybrid", micro_batches=2, fsdp_size=1, **two)
    yield EngineCase(ours(), "not packed", micro_batches=2, packed=False, **two)
    yield EngineCase(ours(), "verl's worker", micro_batches=2, world_size=2)
    yield EngineCase(FailsOnRank(ours(), 1, BROKEN), "broken", **two)


@cache
def engines():
    """Results by label, and the error of the last case."""
    with pytest.raises(EngineError) as caught:
        run_cases("fsdp", list(_engines()), timeout=500)
    return by_label(caught.value.finished), str(caught.value)


@cache
def ray_workers():
    """The same in two Ray workers, through verl's worker group."""
    two = {"world_size": 2, "trinity_worker": True, "batch": NESTED}
    cases = [EngineCase(ours(mode), mode, max_tokens=tokens, **two) for mode in EVERY_BUDGET for tokens in BUDGETS]
    cases.append(EngineCase(FailsOnRank(ours(), 1, BROKEN), "broken", **two))
    with pytest.raises(EngineError) as caught:
        run_cases("fsdp", cases, ray=True, timeout=500)
    return by_label(caught.value.finished), str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_and_every_budget_are_the_whole(mode):
    results, _ = engines()
    (whole,) = results[f"whole {mode}"]
    cuts = results[f"cut {mode}"]
    if mode in EVERY_BUDGET:
        assert len({cut.micro_batches for cut in cuts}) == len(BUDGETS)
    for cut in cuts:
        assert_same(cut, whole)


@pytest.mark.parametrize("batch", ["padded", "one-sided"])
def test_a_rank_with_other_or_no_tokens(batch):
    results, _ = engines()
    (whole,) = results[f"whole {batch}"]
    for cut in results[f"cut {batch}"]:
        assert_same(cut, whole)


@pytest.mark.parametrize("engine", ["synchronised", "hybrid", "not packed", "verl's worker"])
def test_every_way_to_run_the_engine(engine):
    results, _ = engines()
    (cut,) = results[engine]
    assert cut.gradient_error(results["whole padded"][0]) < TOLERANCE
    assert cut.loss == pytest.approx(results["whole padded"][0].loss, rel=TOLERANCE)


def test_a_local_mean_is_far_off():
    results, _ = engines()
    one, *more = results["local mean"]
    assert all(cut.gradient_error(one) > 0.1 for cut in more)


@pytest.mark.parametrize("mode", EVERY_BUDGET)
def test_ray_workers(mode):
    results, _ = ray_workers()
    whole = engines()[0][f"whole {mode}"][0]
    for cut in results[mode]:
        assert_same(cut, whole)


@pytest.mark.parametrize("run", [engines, ray_workers])
def test_an_error_on_one_rank_ends_the_step(run):
    _, error = run()
    assert BROKEN in error
