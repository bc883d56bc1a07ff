"""What the generated examples found, each by itself and as small as it is.

They come from ``test_generated`` and from the table of bad inputs; each says what went wrong before.
"""

import math

import pytest
import torch
from batches import cut, sequence
from forms import Form, jagged
from ours import check, in_mode, play, play_alone

from trinity_loss import LossConfig, TrinityPolicyLoss, aggregate_loss
from trinity_loss.errors import ConfigError, FieldShapeError, NonFiniteError

NARROWED = (torch.tensor([[9.0, -1, 9, -2], [9, -3, -4, 9]], dtype=torch.float64), [1, 0], [2, 3])


def narrowed(buffer, starts, lengths):
    leaf = buffer.clone().requires_grad_()
    return leaf, torch.nested.narrow(leaf, 1, torch.tensor(starts), torch.tensor(lengths), layout=torch.jagged)


@pytest.mark.parametrize("both", [False, True])
def test_narrowed_log_probs_have_a_gradient(both):
    """The loss of a narrowed jagged tensor had no graph: it was made contiguous where nothing was recorded.

    Torch has no gradient of that copy either, so the loss reads the values where they lie.
    """
    leaf, log_probs = narrowed(*NARROWED)
    entropy_leaf, entropy = narrowed(*NARROWED)
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    data = {
        "response_mask": jagged(torch.ones(3), [1, 2], "contiguous"),
        "prompts": jagged(torch.ones(2), [1, 1], "contiguous"),
        "advantages": jagged(values, [1, 2], "narrowed"),
    }
    if not both:
        entropy = jagged(torch.zeros(5, dtype=torch.float64, requires_grad=True), [2, 3], "contiguous")
    config = LossConfig(loss_mode="gpg", loss_agg_mode="token-sum", entropy_coeff=0.5)
    loss, _ = TrinityPolicyLoss(config)(model_output={"log_probs": log_probs, "entropy": entropy}, data=data)
    loss.backward()
    assert leaf.grad.tolist() == [[0, -1, 0, 0], [-2, -3, 0, 0]]
    if both:
        assert entropy_leaf.grad.tolist() == [[0, -0.5, 0, 0], [-0.5, -0.5, 0, 0]]


def test_narrowed_token_losses_have_a_gradient():
    """``aggregate_loss`` of a narrowed tensor raised in backward: torch has no gradient of a contiguous copy."""
    leaf, losses = narrowed(*NARROWED)
    mask = jagged(torch.tensor([1, 0, 1, 1, 1]), [2, 3], "narrowed")
    ratio = aggregate_loss(losses, mask, "token-mean")
    assert ratio.value().item() == (-1 + 9 - 3 - 4) / 4
    ratio.value().backward()
    assert leaf.grad.tolist() == [[0, 0.25, 0, 0], [0.25, 0.25, 0.25, 0]]


@pytest.mark.parametrize("layout", ["nested", "padded", "packed"])
def test_where_policy_and_reference_agree_abs_kl_pulls_nowhere(layout):
    """The first step of every run. The oracle took 1 for the slope of |x| at 0, where torch and verl have 0."""
    settings = in_mode("token-mean", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="abs")
    got = check(settings, cut((sequence(2), sequence(1))), layout)
    assert not got.log_prob_grad.any()


def test_a_response_of_no_token_is_nowhere_in_a_packed_row():
    """Only the totals know that it exists: shares are right, and a local mean counts one sequence less."""
    samples = (sequence(2, advantages=-1.0), sequence(0))
    settings = in_mode("seq-mean-token-mean")
    form = Form(layout="packed")
    assert play(settings, samples, (((0, 1),),), form).loss == pytest.approx(0.5)
    assert play_alone(settings, samples, form).loss == pytest.approx(1.0)
    assert play_alone(settings, samples, Form(layout="dense")).loss == pytest.approx(0.5)


def test_a_deviation_of_equal_weights_is_near_zero():
    """From moments it is the root of a difference that cancels: 0 to eight digits, not to sixteen."""
    samples = tuple(sequence(n, old_log_probs=-1.3, rollout_log_probs=-1.4) for n in (1, 2, 3))
    settings = in_mode("token-mean", rollout_metrics="token")
    for ranks in ((((0, 1, 2),),), (((0,), (1,), (2,)),)):
        std = play(settings, samples, ranks, Form()).metrics["rollout_corr/rollout_is_std"]
        assert math.isfinite(std)
        assert abs(std) < 1e-7


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"loss_mode": "ppo"}, {"advantages": 3e38}),
        ({"loss_mode": "dro", "loss_args": {"dro_beta": 1.0}}, {"log_probs": -1e20}),
        ({"loss_mode": "rec", "loss_args": {"weight": "advantage"}}, {"advantages": 100.0}),
        ({"loss_mode": "gmpo"}, {"old_log_probs": -100.0, "advantages": -1.0}),
    ],
)
def test_a_loss_that_overflows_is_named(settings, values):
    """Finite fields can make an infinite loss in float32; it must not pass for a number."""
    fields = {"log_probs": -1.0, "old_log_probs": -1.0, "advantages": 1.0} | values
    row = {name: torch.full((1, 2), value) for name, value in fields.items()}
    log_probs = row.pop("log_probs").requires_grad_()
    data = row | {"response_mask": torch.ones(1, 2)}
    with pytest.raises(NonFiniteError, match=r"actor/pg_loss of this micro-batch is -?(inf|nan).*overflow"):
        TrinityPolicyLoss(LossConfig(**settings))(model_output={"log_probs": log_probs}, data=data)


def test_a_gradient_that_fp16_does_not_hold_is_infinite():
    """As with torch's own: a gradient scaler looks for infinity and skips the step. Loss and metrics are float32."""
    samples = (sequence(1, log_probs=-1.0, old_log_probs=-1.0, advantages=40.0), sequence(2))
    settings = in_mode("token-mean", loss_mode="rec", loss_args={"clip_mode": "none", "weight": "advantage"})
    settings["loss_args"]["temp"] = 3.7
    form = Form(layout="nested", dtype=torch.float16, field_dtype=torch.float32)
    run = play_alone(settings, samples, form)
    assert math.isfinite(run.loss)
    assert run.log_prob_grad.min() == -math.inf
    assert not run.log_prob_grad.isnan().any()
    assert all(math.isfinite(x) for x in run.metrics.values())
    exact = play_alone(settings, samples, Form(layout="nested", dtype=torch.float32, field_dtype=torch.float32))
    assert exact.log_prob_grad.min().item() == pytest.approx(-40 * math.exp(40 / 3.7) / 3)


DENSE = {"loss_mat": torch.ones(2, 3), "loss_mask": torch.ones(2, 3), "loss_agg_mode": "prompt-mean"}
STRIDED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.strided)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss_mat": [[1.0]]}, "loss_mat is a list; expected a tensor"),
        ({"loss_mat": None}, "loss_mat is a NoneType; expected a tensor"),
        ({"loss_mask": None}, "loss_mask is a NoneType; expected a tensor"),
        ({"loss_mat": STRIDED}, "loss_mat is a nested tensor of layout torch.strided; expected torch.jagged"),
        ({"loss_mat": torch.ones(2, 3) + 0j}, "loss_mat has dtype torch.complex64; expected real numbers"),
        ({"segment_ids": [[1, 1, 2], [1, 1, 0]]}, "segment_ids is a list; expected a tensor"),
        ({"prompt_ids": ["a", "b"]}, "prompt_ids is a list; expected a tensor"),
        ({"prompt_ids": torch.ones(2).numpy()}, "prompt_ids is a ndarray; expected a tensor"),
    ],
)
def test_what_is_aggregated_are_tensors(changed, words):
    """They were an AttributeError that named nothing, and complex numbers had a mean."""
    with pytest.raises(FieldShapeError) as error:
        aggregate_loss(**{**DENSE, "prompt_ids": torch.tensor([0, 1]), **changed})
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss_agg_mode": None}, "loss_agg_mode is None; expected a name"),
        ({"count_empty_sequences": "no"}, "count_empty_sequences is 'no'; expected true or false"),
        ({"count_empty_sequences": None}, "count_empty_sequences is None; expected true or false"),
    ],
)
def test_options_of_aggregation_are_checked(changed, words):
    """``"no"`` counted as yes, None as no, and no name at all was a TypeError."""
    with pytest.raises(ConfigError) as error:
        aggregate_loss(**{**DENSE, "prompt_ids": torch.tensor([0, 1]), **changed})
    assert str(error.value) == words
