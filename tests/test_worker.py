"""The training worker without an engine: which loss trains, and what is said where it is not ours."""

import logging
from functools import partial
from itertools import cycle
from types import MethodType

import cloudpickle
import pytest
from batches import sequence, token_losses
from oracle import evaluate
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss
from workers import POLICY_LOSS, Outer, TrainingWorker, by_keyword, composed, started, train

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.invariance.recorded import load_recording, recorded_config
from trinity_loss.verl.metric_reduction import reduce_over_ranks

RECORD = f"+{POLICY_LOSS}.record_steps"
SAMPLES = token_losses([1, 1, 1], [5], same_prompt=True)


@pytest.fixture(autouse=True)
def verls_worker(monkeypatch):
    """A training worker without an engine in verl's place."""
    monkeypatch.setattr(engine_workers.ActorRolloutRefWorker, "actor_worker_cls", TrainingWorker)


def warned(caplog):
    """What the package said above the level of information."""
    found = [record for record in caplog.records if record.name.startswith("trinity_loss")]
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def mine(model_output, data, dp_group=None, config=None):
    """A loss of somebody else's."""
    return model_output["log_probs"].values().sum(), {}


class Carrying:
    """A callable with a configuration, and without the attributes of a ``partial``."""

    def __init__(self, config):
        self.config = config

    def __call__(self, **given):
        return EnginePolicyLoss(self.config)(**given)


@pytest.mark.parametrize(
    "bind",
    [
        by_keyword,
        lambda actor: partial(ppo_loss, actor),
        lambda actor: partial(partial(ppo_loss), actor),
        lambda actor: partial(partial(ppo_loss, dp_group=None), config=actor),
        lambda actor: MethodType(ppo_loss, actor),
    ],
)
def test_ppo_loss_is_exchanged_however_it_is_bound(bind, caplog):
    _, worker = started(bind=bind)
    assert type(worker.loss_fn) is EnginePolicyLoss
    assert train(worker, SAMPLES)["loss"] == 2
    assert warned(caplog) == []


@pytest.mark.parametrize(
    ("bind", "named"),
    [
        (lambda actor: partial(mine, config=actor), "test_worker.mine"),
        (lambda actor: partial(mine, actor), "test_worker.mine"),
        (lambda actor: partial(Carrying(actor)), "test_worker.Carrying"),
        (Carrying, "test_worker.Carrying"),
    ],
)
def test_another_loss_bound_to_our_configuration_trains_and_is_named(bind, named, caplog):
    _, worker = started(bind=bind)
    (said,) = warned(caplog)
    assert said.startswith(
        f"trinity_loss: actor.policy_loss selects this loss, but it does not train: a trainer set {named} as the loss"
    )
    assert not isinstance(worker.loss_fn, EnginePolicyLoss)


@pytest.mark.parametrize("later", [mine, Carrying(None), lambda **given: mine(**given), partial(mine, dp_group=None)])
def test_a_loss_that_is_set_after_ours_trains_and_is_named(later, caplog):
    outer, worker = started()
    outer.set_loss_fn(later)
    assert worker.loss_fn is later
    (said,) = warned(caplog)
    assert "it does not train: a trainer set test_worker." in said


@pytest.mark.parametrize("what", ["record", "audit"])
def test_a_folder_without_steps_is_named(what, caplog, tmp_path):
    started(f"+{POLICY_LOSS}.{what}_dir={tmp_path}")
    assert warned(caplog) == [
        f"trinity_loss: policy_loss.{what}_dir is set, but {what}_steps is not: nothing is {what}ed"
    ]


def test_what_carries_a_configuration_of_ours_is_ours(caplog):
    """It is counted for: prompt-mean over a prompt of two rows is 8 / 4."""
    outer, worker = started()
    loss = Carrying(LossConfig(loss_agg_mode="prompt-mean"))
    outer.set_loss_fn(loss)
    assert worker.loss_fn is loss
    assert train(worker, SAMPLES)["loss"] == 2
    assert warned(caplog) == []


def as_sent(loss):
    """A loss as an RPC of verl brings it to a worker."""
    return cloudpickle.loads(cloudpickle.dumps(loss))


def sessions(*rows_of):
    """Rows of two tokens, so many for each session, each row with a loss of its own."""
    named = [(f"prompt-{i // 2}", i % 2) for i, rows in enumerate(rows_of) for _ in range(rows)]
    return tuple(
        sequence(2, uid=uid, advantages=[-float(k), -0.5 * k - i], session=session)
        for i, (k, (uid, session)) in enumerate(zip(cycle((1, 3, 2)), named, strict=False))
    )


#: Sessions of one step each, by how many rows they have: always more rows than ``global_batch_size``.
STEPS = ((2, 3, 1), (1, 1, 4, 2), (5,))


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("mode", ["trajectory-mean", "seq-mean-token-sum", "token-mean"])
@pytest.mark.parametrize("carry", [EnginePolicyLoss, Carrying])
def test_a_loss_set_later_over_more_rows_than_the_denominator(carry, mode, pieces, monkeypatch, recwarn):
    """As rllm's backend trains: a loss object sent after the configuration, rows per session that vary by step."""
    monkeypatch.setattr("trinity_loss.loss._warned", set())
    outer, worker = started()
    config = LossConfig(loss_agg_mode=mode)
    outer.set_loss_fn(as_sent(carry(config)))
    assert worker.loss_fn.config == config
    worker.pieces = pieces
    for rows_of in STEPS:
        samples = sessions(*rows_of)
        right = evaluate(samples, loss_agg_mode=mode, use_weights=False).loss
        # The sum over sequences is divided by what the trainer says, whatever is there.
        right *= len(samples) / 4 if mode == "seq-mean-token-sum" else 1
        metrics = train(worker, samples, totals=(("global_batch_size", 4),))
        assert metrics["loss"] == pytest.approx(right, rel=1e-12)
        assert metrics["actor/pg_loss"] == pytest.approx(right, rel=1e-12)
    said = [str(w.message) for w in recwarn if "global_batch_size is 4" in str(w.message)]
    assert said == [
        "global_batch_size is 4, but the mini-batch has 6: the loss is a sum over more than it divides by "
        "(look at who sets it)"
    ]


def test_a_loss_of_verls_configuration_is_none_of_our_business(caplog):
    target = "verl.workers.config.PolicyLossConfig"
    started()
    verls = started(f"{POLICY_LOSS}._target_={target}")[1]
    verls.set_loss_fn(mine)
    assert verls.loss_fn is mine
    assert warned(caplog) == []


def test_a_worker_class_that_goes_around_says_so(caplog, monkeypatch):
    monkeypatch.setattr(Outer, "actor_worker_cls", type("Around", (TrainingWorker,), {}), raising=False)
    outer = Outer(composed())
    worker = outer.init_model(by_keyword)
    assert type(worker).__name__ == "Around"
    (said,) = warned(caplog)
    assert said.endswith("it does not train: Outer trains with test_worker.Around, which goes around it")
    verls = Outer(composed(f"{POLICY_LOSS}._target_=verl.workers.config.PolicyLossConfig"))
    caplog.clear()
    verls.init_model(by_keyword)
    assert warned(caplog) == []


def steps(outer, worker, *weights):
    """Trains once after each sending of weights; None sends none."""
    for step in weights:
        if step is not None:
            outer.update_weights(global_steps=step)
        train(worker, SAMPLES)
    return worker.steps.step, worker.steps.mini_batch


def test_the_step_is_the_one_that_verl_logs():
    outer, worker = started()
    assert steps(outer, worker, 0) == (1, 1)
    assert steps(outer, worker, 1) == (2, 1)
    outer.update_weights(7, "auto")
    outer.update_weights()  # Before a validation, of no step.
    assert steps(outer, worker, None, None, None) == (8, 3)


def test_without_weights_every_batch_is_a_step_from_the_checkpoint_on():
    outer, worker = started()
    assert steps(outer, worker, None, None) == (2, 1)
    worker.load_checkpoint("/a/global_step_1/b/global_step_41/actor")
    assert steps(outer, worker, None) == (42, 1)
    worker.load_checkpoint("/a/checkpoint")
    assert steps(outer, worker, None) == (43, 1)


def recorded(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("rank-*.pt"))


def recording(tmp_path, chosen="[1,3]", *overrides):
    return started(f"{RECORD}={chosen}", f"+{POLICY_LOSS}.record_dir={tmp_path}", *overrides)


def test_a_recording_never_ends_a_training(tmp_path, monkeypatch):
    monkeypatch.setattr("trinity_loss.recorder.Recorder.add", lambda *_: 1 / 0)
    _, worker = recording(tmp_path)
    with pytest.warns(UserWarning, match=r"recording .*step-1.*, and training goes on without it: ZeroDivisionError"):
        assert train(worker, SAMPLES)["loss"] == 2
    monkeypatch.undo()
    assert recorded(tmp_path) == []


def test_a_recording_says_what_trained(tmp_path):
    _, worker = recording(tmp_path, "[1]", f"+{POLICY_LOSS}.loss_agg_mode=prompt-mean")
    train(worker, SAMPLES)
    assert recorded_config(tmp_path / "step-1" / "mini-batch-1") == worker.loss_fn.config
    assert load_recording(tmp_path / "step-1" / "mini-batch-1").num_sequences == 2


def test_counting_and_metrics_of_shadow_mode_never_end_a_training(monkeypatch):
    """verl's loss trains; what of ours fails anywhere is left out everywhere."""
    _, worker = started(f"+{POLICY_LOSS}.shadow=True", f"+{POLICY_LOSS}.loss_agg_mode=prompt-mean")
    monkeypatch.setattr("trinity_loss.verl.counting.Counting.attach", lambda *_: 1 / 0)
    monkeypatch.setattr(EnginePolicyLoss, "__call__", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="shadow mode failed, and training goes on") as said:
        metrics = train(worker, SAMPLES)
    assert any("counting for shadow mode failed" in str(warning.message) for warning in said)
    assert metrics["loss"] == 2
    assert not any("shadow" in name for name in metrics)


def test_shadow_metrics_that_a_rank_lacks_are_left_out():
    def of_rank(pieces):
        return {"actor/pg_loss": SUM(2.0), "shadow/loss": SUM(*pieces)}

    ranks = [of_rank([1.0, 2.0]), of_rank([1.0])]
    metrics = {key: [rank[key] for rank in ranks] for key in ranks[0]}
    for metric in metrics["actor/pg_loss"]:
        metric.append(3.0)
    reduce_over_ranks(metrics)
    assert metrics == {"actor/pg_loss": 5.0, "actor/micro_batches": 2}


def SUM(*values):
    metric = Metric(AggregationType.SUM)
    for value in values:
        metric.append(value)
    return metric
