"""Trajectories of several rows: a value that a hand can check, in every cut, layout and spelling; what is refused."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss, aggregate_loss
from trinity_loss.errors import FieldShapeError, MissingFieldError, TotalsError
from trinity_loss.invariance import assert_invariant, make_mini_batch
from trinity_loss.totals import _warn_of_rows
from trinity_loss.verl.counting import Counting

#: A session of one row with a loss of 1, and one of three rows with 3 each, a token a row.
LOSSES = torch.tensor([1.0, 3, 3, 3], dtype=torch.float64)
MODES = {"trajectory-mean": {}, "trajectory-mean-token-sum-norm": {"loss_scale_factor": 2.0}}
RIGHT = {"trajectory-mean": 2.0, "trajectory-mean-token-sum-norm": (1 + 9) / 2 / 2}
SPELLINGS = {
    "uid and session_id": {"uid": ["a"] * 4, "session_id": [0, 1, 1, 1]},
    "sessions of two prompts": {"uid": ["a", "b", "b", "b"], "session_id": torch.zeros(4, dtype=torch.int64)},
    "trajectory_ids": {"trajectory_ids": torch.tensor([7, 2, 2, 2])},
}


def rows(spelling: str, which: slice = slice(None)) -> dict:
    data = {"response_mask": torch.ones(4, 1), "old_log_probs": torch.full((4, 1), -1.0).double()}
    data |= {"advantages": -LOSSES[:, None], **SPELLINGS[spelling]}
    return {name: value[which] for name, value in data.items()}


def output(which: slice = slice(None)) -> dict:
    return {"log_probs": torch.full((4, 1), -1.0).double()[which].requires_grad_()}


def as_tensordict(data: dict) -> TensorDict:
    size = len(data["response_mask"])
    plain = {k: v if isinstance(v, torch.Tensor) else NonTensorStack(*map(NonTensorData, v)) for k, v in data.items()}
    return TensorDict(plain, batch_size=[size])


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_session_weighs_once(mode, spelling):
    loss, _ = TrinityPolicyLoss(LossConfig(loss_agg_mode=mode, **MODES[mode]))(
        model_output=output(), data=rows(spelling)
    )
    assert loss.item() == pytest.approx(RIGHT[mode], rel=1e-12)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_session_that_is_cut_weighs_once(mode, spelling):
    """Every row a micro-batch of its own, with what the worker counted."""
    config = LossConfig(loss_agg_mode=mode, **MODES[mode])
    data = as_tensordict(rows(spelling))
    Counting().attach(data, config, None)
    assert data["trajectory_num_tokens"].tolist() == [1, 3, 3, 3]
    total = 0.0
    for i in range(4):
        piece = data[i : i + 1]
        piece.set_non_tensor("dp_size", 1)
        part, _ = EnginePolicyLoss(config)(model_output=output(slice(i, i + 1)), data=piece)
        total += part.item()
    assert total == pytest.approx(RIGHT[mode], rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_one_long_row(mode):
    """A session's tokens in one row or in three: each token pulls alike."""
    config = LossConfig(loss_agg_mode=mode, **MODES[mode])
    split = output()
    TrinityPolicyLoss(config)(model_output=split, data=rows("uid and session_id"))[0].backward()
    whole = torch.full((2, 3), -1.0).double().requires_grad_()
    data = {
        "response_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
        "old_log_probs": whole.detach(),
        "advantages": -torch.tensor([[1.0, 0, 0], [3, 3, 3]]).double(),
        "uid": ["a", "a"],
        "session_id": [0, 1],
    }
    TrinityPolicyLoss(config)(model_output={"log_probs": whole}, data=data)[0].backward()
    assert torch.allclose(split["log_probs"].grad.reshape(-1), whole.grad.reshape(-1)[[0, 3, 4, 5]], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_no_cut_changes_anything(mode):
    """Sessions of one and three rows over micro-batches and ranks, in every layout."""
    batch = make_mini_batch(37)
    assert sorted(set(batch.sequence_fields["session_id"].tolist())) == [0, 1]
    config = LossConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, **MODES[mode])
    report = assert_invariant(EnginePolicyLoss(config), batch, micro_batches=(1, 2, 4), dp_sizes=(1, 2))
    assert not report.skipped


def test_the_modes_alone():
    losses, mask = LOSSES[:, None], torch.ones(4, 1)
    ids = torch.tensor([0, 5, 5, 5])
    assert aggregate_loss(losses, mask, "trajectory-mean", trajectory_ids=ids).value().item() == 2
    assert aggregate_loss(losses, mask, "trajectory-mean").value().item() == 2.5
    packed = {"segment_ids": torch.tensor([[1, 2, 3, 4]]), "trajectory_ids": ids[None]}
    assert aggregate_loss(losses.T, mask.T, "trajectory-mean", **packed).value().item() == 2
    assert aggregate_loss(losses.T, mask.T, "trajectory-mean", segment_ids=packed["segment_ids"]).value().item() == 2.5


def test_without_a_session_a_row_is_one_and_a_warning_says_so_once():
    _warn_of_rows.cache_clear()
    loss = TrinityPolicyLoss(LossConfig(loss_agg_mode="trajectory-mean"))
    data = {k: v for k, v in rows("uid and session_id").items() if k != "session_id"}
    with pytest.warns(UserWarning, match="no trajectory_ids and no session_id: every row is a trajectory") as warned:
        losses = [loss(model_output=output(), data=data)[0].item() for _ in range(2)]
    assert losses == [2.5, 2.5]
    assert len(warned) == 1


@pytest.mark.parametrize("count_empty", [True, False])
def test_an_empty_trajectory(count_empty):
    config = LossConfig(loss_agg_mode="trajectory-mean", count_empty_sequences=count_empty)
    data = rows("trajectory_ids") | {"response_mask": torch.tensor([[0], [1], [1], [1]])}
    loss, _ = TrinityPolicyLoss(config)(model_output=output(), data=data)
    assert loss.item() == (1.5 if count_empty else 3.0)


def test_what_is_refused():
    loss = TrinityPolicyLoss(LossConfig(loss_agg_mode="trajectory-mean"))
    without = {k: v for k, v in rows("uid and session_id").items() if k != "uid"}
    with pytest.raises(MissingFieldError, match=r"'session_id', but no 'uid'"):
        loss(model_output=output(), data=without)
    losses, mask, segments = LOSSES[None], torch.ones(1, 4), torch.tensor([[1, 1, 2, 2]])
    with pytest.raises(FieldShapeError, match="trajectory_ids differs within a segment"):
        aggregate_loss(
            losses, mask, "trajectory-mean", segment_ids=segments, trajectory_ids=torch.tensor([[1, 2, 3, 3]])
        )
    data = {name: value.T for name, value in rows("trajectory_ids").items() if value.dim() == 2}
    data |= {"segment_ids": segments, "trajectory_ids": torch.tensor([[1, 2, 3, 3]])}
    with pytest.raises(FieldShapeError, match="trajectory_ids differs within a segment"):
        loss(model_output={"log_probs": output()["log_probs"].T}, data=data)
    with pytest.raises(FieldShapeError, match=r"trajectory_ids has shape \[3\]; expected one id per row, 4"):
        aggregate_loss(LOSSES[:, None], torch.ones(4, 1), "trajectory-mean", trajectory_ids=torch.arange(3))
    with pytest.raises(TotalsError, match="batch_num_trajectories and trajectory_num_tokens"):
        EnginePolicyLoss(loss.config)(model_output=output(), data=rows("trajectory_ids") | {"batch_num_tokens": 4})
