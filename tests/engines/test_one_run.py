"""Our loss once through verl's FSDP2 and Megatron engines: what every change sees. The other files run every way.

verl's whole trainer has its one run in ``test_train_cpu.py``.
"""

import pytest
from engine_losses import assert_same, by_label, ours

from trinity_loss import LossConfig, TrinityPolicyLoss
from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

NESTED = BatchSpec(layout="nested")
MODES = ("token-mean", "seq-mean-token-mean", "prompt-mean")


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def results(request):
    """One rank in one piece, and two ranks with two micro-batches each, in verl's two layouts."""
    losses = {mode: ours(mode) for mode in MODES} | {"local mean": TrinityPolicyLoss(LossConfig())}
    cases = [EngineCase(loss, label, NESTED, trinity_worker=True) for label, loss in losses.items()]
    cases += [
        EngineCase(loss, label, batch, world_size=2, micro_batches=2, trinity_worker=True)
        for label, loss in losses.items()
        for batch in (NESTED, BatchSpec())
    ]
    return by_label(run_cases(request.param, cases))


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_is_the_whole(results, mode):
    whole, *cuts = results[mode]
    for cut in cuts:
        assert len(cut.ranks) == cut.micro_batches == 2
        assert_same(cut, whole)


def test_a_local_mean_is_far_off(results):
    whole, *cuts = results["local mean"]
    assert all(cut.gradient_error(whole) > 0.1 for cut in cuts)
