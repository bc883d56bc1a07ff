"""Shadow mode reports our loss and how its gradient compares, and changes nothing that trains."""

from functools import partial

import pytest
import torch
from batches import cut, make_sequences, run
from oracle import evaluate
from verl.workers.config import ActorConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.metric_set import finish_metrics
from trinity_loss.verl.shadow import ShadowLoss

PARTS = cut(make_sequences(12, seed=5), 4, 2, "uneven")


def bound(loss_mode: str, mode: str):
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=VerlPolicyLossConfig(loss_mode=loss_mode),
    )
    return partial(ppo_loss, config=actor)


def shadowed(loss_mode: str, mode: str, layout: str = "nested"):
    ours = EnginePolicyLoss(LossConfig(loss_mode=loss_mode, loss_agg_mode=mode))
    verls = bound(loss_mode, mode)
    got = run(ShadowLoss(verls, ours), PARTS, layout, with_entropy=False)
    plain = run(verls, PARTS, layout, with_entropy=False)
    alone = run(ours, PARTS, layout, with_entropy=False)
    finish_metrics(got.metrics)
    return got, plain, alone


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_nothing_would_change_where_verl_is_right(layout):
    got, plain, _ = shadowed("vanilla", "token-mean", layout)
    assert got.loss == plain.loss
    assert torch.equal(got.log_prob_grad, plain.log_prob_grad)
    assert {key: got.metrics[key] for key in plain.metrics} == plain.metrics
    assert got.metrics["shadow/grad_norm_ratio"] == pytest.approx(1, abs=1e-10)
    assert got.metrics["shadow/grad_cosine"] == pytest.approx(1, abs=1e-10)
    assert got.metrics["shadow/loss"] == pytest.approx(plain.loss, rel=1e-10)


def test_what_would_change_where_verl_depends_on_the_cut():
    got, plain, alone = shadowed("geo_mean", "seq-mean-token-mean")
    assert torch.equal(got.log_prob_grad, plain.log_prob_grad)
    ratio = alone.log_prob_grad.norm() / plain.log_prob_grad.norm()
    cosine = (alone.log_prob_grad * plain.log_prob_grad).sum() / alone.log_prob_grad.norm() / plain.log_prob_grad.norm()
    assert ratio < 0.9
    assert got.metrics["shadow/grad_norm_ratio"] == pytest.approx(ratio.item(), rel=1e-10)
    assert got.metrics["shadow/grad_cosine"] == pytest.approx(cosine.item(), rel=1e-10)
    right = evaluate(PARTS.samples, loss_mode="gmpo", loss_agg_mode="seq-mean-token-mean")
    # verl adds 1e-10 to the importance weights before it takes their logarithm, and so do we.
    assert got.metrics["shadow/actor/pg_loss"] == pytest.approx(right.metrics["actor/pg_loss"], rel=1e-9)


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_an_entropy_with_a_graph_keeps_one(layout):
    """A loss that trains the entropy refuses one without, and reports nothing then."""
    config = LossConfig(entropy_coeff=0.1)
    got = run(ShadowLoss(EnginePolicyLoss(config), EnginePolicyLoss(config)), PARTS, layout)
    finish_metrics(got.metrics)
    assert got.metrics["shadow/grad_norm_ratio"] == pytest.approx(1, abs=1e-10)
