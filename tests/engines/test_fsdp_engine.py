"""Our loss through verl's training worker and FSDP2 engine, in plain processes and in Ray workers.

Three runs give all results: starting an engine is what takes time.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine_losses import MODES, TOLERANCE, assert_in_effect, assert_same, by_label, ours
from faulty_losses import FailsOnRank, NanOnRank

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.verl.harness import BatchSpec, EngineCase, EngineError, EngineResult, run_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BROKEN = "this loss is broken on rank 1"
SECONDS = 60  # From the call that fails to the error, of the 1100 that a collective waits; mostly below 10.
NESTED = BatchSpec(layout="nested")
# The second rank's half has no token in the mask.
ONE_SIDED = BatchSpec(empty_rows=(2, 4, 5, 6, 7))
BUDGETS = (30, 64, 500)
PIECES = (1, 2, 4)
FEW_MODES = ("token-mean", "prompt-mean")


def _engines() -> Iterator[EngineCase]:
    """Cases in the order of their engines: first one rank, then two, then four."""
    for mode in MODES:
        for pieces in PIECES:
            yield EngineCase(ours(mode), f"one rank {mode}", NESTED, micro_batches=pieces, trinity_worker=True)
        yield EngineCase(ours(mode), f"whole one-sided {mode}", ONE_SIDED, trinity_worker=True)
    two = {"world_size": 2, "trinity_worker": True}
    for mode in MODES:
        for tokens in BUDGETS:
            yield EngineCase(ours(mode), f"two ranks {mode}", NESTED, max_tokens=tokens, **two)
        for pieces in PIECES:
            yield EngineCase(ours(mode), f"two ranks {mode}", micro_batches=pieces, **two)
            yield EngineCase(ours(mode), f"one-sided {mode}", ONE_SIDED, micro_batches=pieces, **two)
    for pieces in PIECES:
        yield EngineCase(TrinityPolicyLoss(LossConfig()), "local mean", micro_batches=pieces, **two)
    for mode in FEW_MODES:
        yield EngineCase(ours(mode), f"synchronised {mode}", micro_batches=4, no_sync=False, **two)
    for mode in FEW_MODES:
        yield EngineCase(ours(mode), f"not packed {mode}", micro_batches=2, packed=False, **two)
    yield EngineCase(ours(), "verl's worker", micro_batches=2, world_size=2)
    for mode in MODES:
        for pieces in PIECES[:2]:
            four = {"world_size": 4, "fsdp_size": 2, "trinity_worker": True}
            yield EngineCase(ours(mode), f"hybrid {mode}", micro_batches=pieces, **four)
    yield EngineCase(FailsOnRank(ours(), 1, BROKEN), "broken", **two)


@dataclass(frozen=True)
class Broken:
    """A run whose last case fails: results by label, the error, and the seconds from the call that failed to it."""

    results: dict[str, list[EngineResult]]
    error: str
    seconds: float


def run_broken(cases: list[EngineCase], ray: bool = False) -> Broken:
    with pytest.raises(EngineError) as caught:
        run_cases("fsdp", cases, ray=ray, timeout=1100)
    ended, error = time.time(), str(caught.value)
    called = re.search(r"called at ([0-9.]+)", error)
    assert called, error
    return Broken(by_label(caught.value.finished), error, ended - float(called[1]))


@pytest.fixture(scope="module")
def engines():
    return run_broken(list(_engines()))


@pytest.fixture(scope="module")
def nan_on_a_rank():
    return run_broken([EngineCase(NanOnRank(ours(), 1), "nan", world_size=2, trinity_worker=True)])


@pytest.fixture(scope="module")
def ray_workers():
    """The same in two Ray workers, through verl's worker group."""
    two = {"world_size": 2, "trinity_worker": True, "batch": NESTED}
    cases = [EngineCase(ours(mode), mode, max_tokens=tokens, **two) for mode in FEW_MODES for tokens in BUDGETS]
    return run_broken([*cases, EngineCase(FailsOnRank(ours(), 1, BROKEN), "broken", **two)], ray=True)


def check(cut: EngineResult) -> None:
    """The mesh, the cut, and when gradients were reduced are those of the case."""
    case = cut.case
    size = case.world_size if case.fsdp_size == -1 else case.fsdp_size
    mesh = {"fsdp": size} if size == case.world_size else {"ddp": case.world_size // size, "fsdp": size}
    layout = {"mesh": mesh, "fsdp_size": size, "sequence_parallel": 1, "data_parallel": case.world_size}
    assert_in_effect(cut, layout)
    for rank in cut.ranks:
        first, *later = (piece.reduced_before for piece in rank.micro_batches)
        assert not first
        assert set(later) <= {not case.no_sync}


@pytest.mark.parametrize("mode", MODES)
def test_every_cut_is_the_whole_on_one_rank(engines, mode):
    results = engines.results
    one, two = results[f"one rank {mode}"], results[f"two ranks {mode}"]
    assert [cut.micro_batches for cut in one] == [1, 2, 4]
    assert [cut.micro_batches for cut in two] == [3, 2, 1, 1, 2, 4]
    for cut in one + two:
        check(cut)
        assert_same(cut, one[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_a_token(engines, mode):
    (whole,) = engines.results[f"whole one-sided {mode}"]
    cuts = engines.results[f"one-sided {mode}"]
    assert [cut.micro_batches for cut in cuts] == [1, 2, 4]
    for cut in cuts:
        check(cut)
        tokens = [sum(piece.tokens for piece in rank.micro_batches) for rank in cut.ranks]
        assert tokens == [sum(piece.tokens for piece in whole.ranks[0].micro_batches), 0]
        assert_same(cut, whole)


@pytest.mark.parametrize("mode", MODES)
def test_hybrid_sharding(engines, mode):
    cuts = engines.results[f"hybrid {mode}"]
    assert [cut.micro_batches for cut in cuts] == [1, 2]
    for cut in cuts:
        check(cut)
        assert cut.ranks[0].layout["mesh"] == {"ddp": 2, "fsdp": 2}
        assert_same(cut, engines.results[f"one rank {mode}"][0])


@pytest.mark.parametrize("mode", FEW_MODES)
@pytest.mark.parametrize("engine", ["synchronised", "not packed"])
def test_every_way_to_run_the_engine(engines, engine, mode):
    (cut,) = engines.results[f"{engine} {mode}"]
    check(cut)
    assert_same(cut, engines.results[f"one rank {mode}"][0])


def test_verls_own_worker(engines):
    (cut,) = engines.results["verl's worker"]
    whole = engines.results["one rank token-mean"][0]
    check(cut)
    assert cut.gradient_error(whole) < TOLERANCE  # It reduces metrics in its own way.
    assert cut.loss == pytest.approx(whole.loss, rel=TOLERANCE)


def test_synchronisation_is_put_off_or_not(engines):
    """`check` compares with the case; here is what it saw, in four micro-batches each."""
    (synchronised,) = engines.results["synchronised token-mean"]
    put_off = engines.results["two ranks token-mean"][-1]
    for cut, later in ((synchronised, True), (put_off, False)):
        for rank in cut.ranks:
            assert [piece.reduced_before for piece in rank.micro_batches] == [False, later, later, later]


def test_ranks_have_different_token_counts(engines):
    for cut in engines.results["two ranks token-mean"]:
        first, second = (sum(piece.tokens for piece in rank.micro_batches) for rank in cut.ranks)
        assert first > 1.5 * second > 0


def test_a_local_mean_is_far_off(engines):
    one, *more = engines.results["local mean"]
    assert all(cut.gradient_error(one) > 0.1 for cut in more)


@pytest.mark.parametrize("mode", FEW_MODES)
def test_ray_workers(engines, ray_workers, mode):
    cuts = ray_workers.results[mode]
    assert [cut.micro_batches for cut in cuts] == [3, 2, 1]
    for cut in cuts:
        check(cut)
        assert_same(cut, engines.results[f"one rank {mode}"][0])


@pytest.mark.parametrize("run", ["engines", "ray_workers"])
def test_an_error_on_one_rank_ends_the_step(run, request):
    broken = request.getfixturevalue(run)
    assert BROKEN in broken.error
    assert broken.seconds < SECONDS


def test_a_nan_on_one_rank_ends_the_step(nan_on_a_rank):
    assert "NonFiniteError" in nan_on_a_rank.error
    assert "advantages" in nan_on_a_rank.error
    assert nan_on_a_rank.seconds < SECONDS
