"""What is chosen among the tokens of a mini-batch by verl's engines: the same in every cut, over ranks and stages."""

import pytest
from engine_losses import assert_same, by_label, ours

from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: Chooses a quarter of the tokens by covariance, and half of them by entropy.
COVARIANCE = ours(loss_mode="kl_cov", loss_args={"kl_cov_ratio": 0.25}, top_entropy_quantile=0.5)
MOMENT = ours("seq-mean-token-mean", loss_mode="m2po", loss_args={"m2_threshold": 0.05})
NESTED = BatchSpec(layout="nested")
LAYOUTS = {
    "fsdp": [{}, {"world_size": 2}],
    "megatron": [{}, {"world_size": 2}, {"world_size": 2, "pipeline": 2}, {"world_size": 2, "tensor": 2}],
}


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def results(request):
    cases = []
    for layout in LAYOUTS[request.param]:
        for label, loss in (("covariance", COVARIANCE), ("moment", MOMENT)):
            options = {"label": label, "trinity_worker": True, **layout}
            cases += [EngineCase(loss, batch=NESTED, micro_batches=pieces, **options) for pieces in (1, 2, 4)]
            cases.append(EngineCase(loss, micro_batches=2, **options))
    return by_label(run_cases(request.param, cases))


@pytest.mark.parametrize("label", ["covariance", "moment"])
def test_every_cut_chooses_what_the_whole_does(results, label):
    whole, *cuts = results[label]
    assert len(cuts) >= 7
    for cut in cuts:
        assert_same(cut, whole)


def test_something_was_chosen_and_something_not(results):
    whole = results["moment"][0]
    dropped = next(value for key, value in whole.metrics.items() if key.endswith("m2_dropped_frac"))
    assert 0 < dropped < 1
