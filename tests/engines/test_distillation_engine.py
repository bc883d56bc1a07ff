"""Distillation through verl's FSDP2 engine, whose logits processor computes the divergence over the teacher's top k."""

from functools import partial

import pytest
from verl.trainer.distillation.losses import distillation_ppo_loss

from trinity_loss.losses_by_name import bind_loss
from trinity_loss.verl.harness import BatchSpec, EngineCase, run_cases

LOSS = "distillation.distillation_loss"
KINDS = {
    "estimator": (1, [f"{LOSS}.loss_mode=k3"]),
    "top k": (5, [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=5"]),
    "top k alone": (5, [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=5", f"{LOSS}.use_task_rewards=False"]),
}


def cases_of(kind: str) -> list[EngineCase]:
    teacher, overrides = KINDS[kind]
    everything = ["distillation.enabled=True", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", *overrides]
    ours, verls = (bind_loss(f"{whose}:vanilla", *everything).loss_fn for whose in ("ours", "verl"))
    assert isinstance(verls, partial)
    assert verls.func is distillation_ppo_loss
    padded, nested = (BatchSpec(layout=layout, teacher=teacher) for layout in ("padded", "nested"))
    return [
        EngineCase(verls, "verl", batch=padded),
        EngineCase(verls, "verl cut", batch=padded, micro_batches=2),
        EngineCase(ours, "whole", batch=padded, trinity_worker=True),
        EngineCase(ours, "cut", batch=padded, micro_batches=4, trinity_worker=True),
        EngineCase(ours, "jagged", batch=nested, micro_batches=2, trinity_worker=True),
        EngineCase(ours, "ranks", batch=padded, micro_batches=2, world_size=2, trinity_worker=True),
    ]


@pytest.fixture(scope="module")
def results():
    cases = [(kind, case) for kind in KINDS for case in cases_of(kind)]
    # Those that share an engine next to each other.
    cases.sort(key=lambda entry: (entry[1].world_size, entry[1].trinity_worker))
    found = run_cases("fsdp", [case for _, case in cases])
    return {(kind, case.label): result for (kind, case), result in zip(cases, found, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_the_whole_and_verls_own(results, kind):
    whole, verl = results[kind, "whole"], results[kind, "verl"]
    assert whole.gradient.norm() > 1e-3
    assert whole.gradient_error(verl) < 1e-5
    assert whole.loss == pytest.approx(verl.loss, rel=1e-5)
    of_teacher = [name for name in verl.metrics if name.startswith("distillation/")]
    assert len(of_teacher) == (4 if kind == "estimator" else 11)
    for name in of_teacher:
        assert whole.metrics[name] == pytest.approx(verl.metrics[name], rel=1e-5, abs=1e-6), name
    for label in ("cut", "jagged", "ranks"):
        got = results[kind, label]
        assert got.gradient_error(whole) < 1e-5, label
        for name in of_teacher:
            assert got.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5, abs=1e-6), (label, name)


def test_verls_metrics_hang_on_the_cut(results):
    """Its gradients do not; its means are averaged over micro-batches without weights."""
    for kind, name in (("estimator", "distillation/abs_loss"), ("top k", "distillation/teacher_mass")):
        whole, cut = results[kind, "verl"], results[kind, "verl cut"]
        assert cut.gradient_error(whole) < 1e-5
        assert abs(cut.metrics[name] / whole.metrics[name] - 1) > 1e-3
