"""Losses that choose among the tokens of the whole mini-batch: value and gradient by definition, and under cuts."""

import math

import numpy as np
import pytest
import torch
from batches import make_sequences, sequence
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.errors import BatchError, ConfigError, MissingFieldError
from trinity_loss.invariance import MiniBatch, assert_invariant
from trinity_loss.verl.selecting import attach_selection
from trinity_loss.verl.steps import Steps

CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}
SAMPLES = make_sequences(14, seed=3, max_length=9)
LENGTHS = torch.tensor([len(s.mask) for s in SAMPLES])
MASK = torch.cat([torch.tensor(s.mask) for s in SAMPLES])


def flat(name: str) -> torch.Tensor:
    return torch.tensor([x for s in SAMPLES for x in getattr(s, name)], dtype=torch.float64)


FIELDS = {name: flat(name) for name in ("log_probs", "old_log_probs", "advantages", "entropy")}


def mini_batch() -> MiniBatch:
    return MiniBatch(
        prompt_lengths=torch.tensor([s.prompt_length for s in SAMPLES]),
        response_lengths=LENGTHS,
        response_mask=MASK,
        log_probs=FIELDS["log_probs"],
        entropy=FIELDS["entropy"],
        token_fields={name: FIELDS[name] for name in ("old_log_probs", "advantages")},
        uids=[s.uid for s in SAMPLES],
    )


def padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS.tolist())), batch_first=True)


def compute(config: LossConfig, **more):
    """Loss, gradient [N] by the log-probs, and metrics of all sequences at once."""
    leaf = FIELDS["log_probs"].clone().requires_grad_()
    data = {name: padded(FIELDS[name]) for name in ("old_log_probs", "advantages")}
    output = {"log_probs": padded(leaf), "entropy": padded(FIELDS["entropy"].clone().requires_grad_())}
    loss, metrics = TrinityPolicyLoss(config)(model_output=output, data=data | {"response_mask": padded(MASK)} | more)
    loss.backward()
    return loss.item(), leaf.grad, metrics


def covariances() -> torch.Tensor:
    counted = MASK.bool()
    advantages, log_probs = FIELDS["advantages"], FIELDS["log_probs"]
    return (advantages - advantages[counted].mean()) * (log_probs - log_probs[counted].mean())


def expected(token_loss):
    """Mean over tokens of a definition of the loss of each, and its gradient."""
    leaf = FIELDS["log_probs"].clone().requires_grad_()
    total = (token_loss(leaf) * MASK).sum() / MASK.sum()
    total.backward()
    return total.item(), leaf.grad


def assert_same(got, wanted):
    assert got[0] == pytest.approx(wanted[0], rel=1e-10)
    assert torch.allclose(got[1], wanted[1], rtol=1e-10, atol=1e-14)


def highest(values: torch.Tensor, count: int) -> torch.Tensor:
    places = [i for i in range(len(values)) if MASK[i]]
    places.sort(key=lambda i: -float(values[i]))
    chosen = torch.zeros(len(values), dtype=torch.float64)
    chosen[places[:count]] = 1
    return chosen


@pytest.mark.parametrize("ratio", [1e-4, 0.1, 0.5, 1.0])
def test_kl_cov_is_its_definition(ratio):
    config = LossConfig(loss_mode="kl_cov", loss_args={"kl_cov_ratio": ratio, "ppo_kl_coef": 0.7})
    chosen = highest(covariances(), max(1, int(int(MASK.sum()) * ratio)))

    def token_loss(log_prob):
        log_ratio = log_prob - FIELDS["old_log_probs"]
        return -FIELDS["advantages"] * log_ratio.exp() + 0.7 * chosen * log_ratio.abs()

    got = compute(config)
    assert_same(got, expected(token_loss))
    log_ratio = (FIELDS["log_probs"] - FIELDS["old_log_probs"])[MASK.bool()]
    assert got[2]["actor/ppo_kl"] == pytest.approx(log_ratio.abs().mean().item(), rel=1e-10)


def verls(loss_mode: str, policy_loss: dict) -> tuple[float, torch.Tensor, dict]:
    leaf = FIELDS["log_probs"].clone().requires_grad_()
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        **CLIP,
        policy_loss=VerlPolicyLossConfig(loss_mode=loss_mode, **policy_loss),
    )
    inputs = {"old_log_prob": "old_log_probs", "advantages": "advantages"}
    loss, metrics = get_policy_loss_fn(loss_mode)(
        log_prob=padded(leaf),
        response_mask=padded(MASK),
        config=actor,
        **{name: padded(FIELDS[field]) for name, field in inputs.items()},
    )
    loss.backward()
    return loss.item(), leaf.grad, metrics


@pytest.mark.parametrize("ratio", [1e-4, 0.1, 0.5])
def test_kl_cov_is_verls_on_one_micro_batch(ratio):
    options = {"kl_cov_ratio": ratio, "ppo_kl_coef": 0.7}
    got, wanted = compute(LossConfig(loss_mode="kl_cov", loss_args=options)), verls("kl_cov", options)
    # verl's means divide by the tokens and 1e-8.
    assert got[0] == pytest.approx(wanted[0], rel=1e-7)
    assert torch.allclose(got[1], wanted[1], rtol=1e-7)
    assert got[2]["actor/ppo_kl"] == pytest.approx(wanted[2]["actor/ppo_kl"], rel=1e-7)


def test_clip_cov_is_verls_on_one_micro_batch_but_for_the_draw():
    """A ratio of 1 takes all candidates, so nothing is drawn."""
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.01, "clip_cov_ub": 0.8}
    got = compute(LossConfig(loss_mode="clip_cov", loss_args=options, **CLIP))
    wanted = verls("clip_cov", options)
    assert 0 < wanted[2]["actor/pg_clipfrac"] < 1
    assert got[0] == pytest.approx(wanted[0], rel=1e-7)
    assert torch.allclose(got[1], wanted[1], rtol=1e-7)
    for key, value in wanted[2].items():
        assert got[2][key] == pytest.approx(value, rel=1e-7)


def test_clip_cov_draws_as_many_as_verl_and_by_seed():
    options = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}
    fractions, losses = set(), set()
    for seed in range(5):
        loss, _, metrics = compute(LossConfig(loss_mode="clip_cov", loss_args=options, selection_seed=seed, **CLIP))
        fractions.add(round(metrics["actor/pg_clipfrac"] * int(MASK.sum())))
        losses.add(loss)
    assert fractions == {int(0.1 * int(MASK.sum()))}
    assert len(losses) == 1, "outside of the training worker there is no step, and one draw"


@pytest.mark.parametrize("threshold", [1e-6, 0.04, 0.3, 1e3])
def test_m2po_is_its_definition(threshold):
    squares = (FIELDS["log_probs"] - FIELDS["old_log_probs"]).square()
    places = sorted((i for i in range(len(MASK)) if MASK[i]), key=lambda i: float(squares[i]))
    count = max([n for n in range(1, len(places) + 1) if squares[places[:n]].mean() < threshold], default=1)
    stays = torch.zeros(len(MASK), dtype=torch.float64)
    stays[places[:count]] = 1

    def token_loss(log_prob):
        ratio, cost = (log_prob - FIELDS["old_log_probs"]).exp(), -FIELDS["advantages"]
        larger = torch.maximum(cost * ratio, cost * ratio.clamp(0.85, 1.25))
        return stays * torch.where(cost > 0, torch.minimum(larger, 3 * cost), larger)

    got = compute(LossConfig(loss_mode="m2po", loss_args={"m2_threshold": threshold}, **CLIP))
    assert_same(got, expected(token_loss))
    assert got[2]["actor/m2_dropped_frac"] == pytest.approx(1 - count / int(MASK.sum()), abs=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_share_of_highest_entropy(share):
    counted = FIELDS["entropy"][MASK.bool()]
    stays = (FIELDS["entropy"] >= torch.quantile(counted, 1 - share)) * 1.0

    def token_loss(log_prob):
        return -FIELDS["advantages"] * log_prob * stays

    assert_same(compute(LossConfig(loss_mode="gpg", top_entropy_quantile=share)), expected(token_loss))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_mean_1(level):
    """verl's own weights, divided by their mean over tokens, or over sequences."""
    arguments = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_batch_normalize": True}
    log_ratio = (FIELDS["log_probs"] - FIELDS["old_log_probs"]) * MASK
    parts, masks = log_ratio.split(LENGTHS.tolist()), MASK.split(LENGTHS.tolist())
    if level == "sequence":
        of_sequence = torch.stack([part.sum() for part in parts]).exp().clamp(max=2.0)
        weights = of_sequence.repeat_interleave(LENGTHS)
        mean = of_sequence[torch.tensor([bool(mask.any()) for mask in masks])].mean()
    else:
        weights = log_ratio.exp().clamp(max=2.0)
        mean = weights[MASK.bool()].mean()

    def token_loss(log_prob):
        return -FIELDS["advantages"] * log_prob * weights / mean

    got = compute(LossConfig(loss_mode="bypass_mode", loss_args=arguments))
    assert_same(got, expected(token_loss))
    assert got[2]["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean.item(), rel=1e-10)


CONFIGS = {
    "kl_cov": LossConfig(loss_mode="kl_cov", loss_args={"kl_cov_ratio": 0.2}),
    "clip_cov": LossConfig(
        loss_mode="clip_cov", loss_args={"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}, **CLIP
    ),
    "m2po": LossConfig(loss_mode="m2po", loss_args={"m2_threshold": 0.2}),
    "entropy": LossConfig(loss_mode="gspo", top_entropy_quantile=0.3),
    "normalized": LossConfig(
        loss_mode="bypass_mode", loss_args={"loss_type": "reinforce", "rollout_is_batch_normalize": True}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", ["token-mean", "prompt-mean"])
def test_no_cut_changes_anything(name, mode):
    config = LossConfig(**{**CONFIGS[name].__dict__, "loss_agg_mode": mode})
    assert_invariant(
        EnginePolicyLoss(config),
        mini_batch(),
        micro_batches=(1, 2, 4),
        dp_sizes=(1, 2),
        layouts=("nested", "padded", "packed"),
    )


def as_trainers_send_it() -> TensorDict:
    """The mini-batch as verl's v1 trainer sends it, with distinct token ids."""
    starts = [0, *np.cumsum(LENGTHS).tolist()]

    def jagged(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    rows = range(len(SAMPLES))
    prompts = [torch.full((SAMPLES[i].prompt_length,), 100 + i) for i in rows]
    responses = [torch.arange(starts[i], starts[i + 1]) for i in rows]
    fields = {name: jagged(list(FIELDS[name].split(LENGTHS.tolist()))) for name in ("old_log_probs", "advantages")}
    ids = {"prompts": jagged(prompts), "responses": jagged(responses)}
    ids["input_ids"] = jagged([torch.cat(pair) for pair in zip(prompts, responses, strict=True)])
    mask = jagged(list(MASK.split(LENGTHS.tolist())))
    return TensorDict({**fields, **ids, "response_mask": mask}, batch_size=[len(SAMPLES)])


def infer(data: TensorDict) -> TensorDict:
    """What the model says: the log-prob of a response token stands one place to the left."""
    parts = {name: FIELDS[name].split(LENGTHS.tolist()) for name in ("log_probs", "entropy")}
    output = {
        name: torch.nested.as_nested_tensor(
            [
                torch.cat([torch.zeros(s.prompt_length - 1).double(), part, torch.zeros(1).double()])
                for s, part in zip(SAMPLES, of, strict=True)
            ],
            layout=torch.jagged,
        )
        for name, of in parts.items()
    }
    return TensorDict(output, batch_size=[len(SAMPLES)])


def at_step(step: int, mini_batch: int = 1) -> Steps:
    steps = Steps()
    steps.step, steps.mini_batch = step, mini_batch
    return steps


@pytest.mark.parametrize("name", CONFIGS)
def test_the_worker_attaches_what_one_batch_would_choose(name):
    data, loss = as_trainers_send_it(), TrinityPolicyLoss(CONFIGS[name])
    attach_selection(data, loss, infer, None, at_step(1))
    (field,) = loss.over_mini_batch
    attached = data[field]
    assert attached.is_nested
    assert torch.equal(attached.offsets(), data["response_mask"].offsets())
    chosen = attached.values()
    assert (chosen[MASK == 0] == 0).all() or name == "normalized"
    if name != "clip_cov":  # whose draw belongs to other rows here
        wanted = compute(CONFIGS[name])
        got = compute(CONFIGS[name], **{field: padded(chosen)})
        assert_same(got, wanted)


def test_the_entropy_that_chose_is_not_needed_again():
    """The forward pass computes it, whether the engine does in training (``calculate_entropy``) or not."""
    config, data = CONFIGS["entropy"], as_trainers_send_it()
    attach_selection(data, TrinityPolicyLoss(config), infer, None, at_step(1))
    leaf = FIELDS["log_probs"].clone().requires_grad_()
    fields = {name: padded(FIELDS[name]) for name in ("old_log_probs", "advantages")}
    fields |= {"response_mask": padded(MASK), "high_entropy_tokens": padded(data["high_entropy_tokens"].values())}
    loss, _ = TrinityPolicyLoss(config)(model_output={"log_probs": padded(leaf)}, data=fields)
    loss.backward()
    assert_same((loss.item(), leaf.grad), compute(config))


def test_a_draw_belongs_to_row_place_step_and_seed():
    config = CONFIGS["clip_cov"]

    def drawn(step: int, order: list[int], seed: int = 0) -> list[float]:
        data = as_trainers_send_it()
        picked = {
            k: torch.nested.as_nested_tensor([v.unbind()[i] for i in order], layout=torch.jagged)
            for k, v in data.items()
        }

        def picked_infer(_):
            output = infer(data)
            return TensorDict(
                {
                    k: torch.nested.as_nested_tensor([v.unbind()[i] for i in order], layout=torch.jagged)
                    for k, v in output.items()
                },
                batch_size=[len(order)],
            )

        picked = TensorDict(picked, batch_size=[len(order)])
        loss = TrinityPolicyLoss(LossConfig(**{**config.__dict__, "selection_seed": seed}))
        attach_selection(picked, loss, picked_infer, None, at_step(step))
        rows = dict(zip(order, picked["selected_tokens"].unbind(), strict=True))
        return [x for i in sorted(rows) for x in rows[i].tolist()]

    order = list(range(len(SAMPLES)))
    first = drawn(1, order)
    assert sum(first) > 0
    assert drawn(1, order[::-1]) == first
    assert drawn(2, order) != first
    assert drawn(1, order, seed=1) != first


def test_old_log_probs_stand_for_the_policy_until_it_moves():
    config = LossConfig(loss_mode="kl_cov", loss_args={"kl_cov_ratio": 0.2}, selection_pass="old_log_probs")
    data = as_trainers_send_it()
    attach_selection(data, TrinityPolicyLoss(config), pytest.fail, None, at_step(3))
    counted = MASK.bool()
    old, advantages = FIELDS["old_log_probs"], FIELDS["advantages"]
    cov = (advantages - advantages[counted].mean()) * (old - old[counted].mean())
    assert torch.equal(data["selected_tokens"].values(), highest(cov, max(1, int(0.2 * int(MASK.sum())))))
    with pytest.raises(BatchError, match=r"mini-batch 2.*selection_pass=forward"):
        attach_selection(as_trainers_send_it(), TrinityPolicyLoss(config), pytest.fail, None, at_step(3, mini_batch=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mini_batch_with_totals_needs_the_field(name):
    with pytest.raises(MissingFieldError, match="made of all tokens of the mini-batch"):
        EnginePolicyLoss(CONFIGS[name])(
            model_output={"log_probs": padded(FIELDS["log_probs"]), "entropy": padded(FIELDS["entropy"])},
            data={name: padded(FIELDS[name]) for name in ("old_log_probs", "advantages")}
            | {"response_mask": padded(MASK), "batch_num_tokens": int(MASK.sum()), "global_batch_size": len(SAMPLES)},
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0; expected a number above 0, at most 1"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile is 1.5"),
        ({"top_entropy_quantile": math.nan}, "top_entropy_quantile is nan"),
        ({"selection_pass": "backward"}, "selection_pass is 'backward'; expected one of forward, old_log_probs"),
        ({"selection_pass": "old_log_probs", "top_entropy_quantile": 0.5}, "which have no entropy"),
        ({"selection_pass": "old_log_probs"}, "loss_mode 'ppo' chooses no tokens by log-probs; expected 'forward'"),
        ({"selection_pass": "old_log_probs", "loss_mode": "bypass_mode"}, "loss_mode 'bypass_mode' chooses no tokens"),
        ({"loss_mode": "kl_cov", "nonfinite": "neutral"}, "nonfinite is 'neutral'"),
        ({"loss_mode": "kl_cov", "loss_args": {"kl_cov_ratio": 0}}, "kl_cov_ratio'. is 0; expected a number above 0"),
        ({"loss_mode": "m2po", "loss_args": {"m2_threshold": -1}}, "m2_threshold'. is -1"),
        ({"loss_mode": "dpo", "top_entropy_quantile": 0.5}, "not one loss per token"),
        (
            {
                "loss_mode": "bypass_mode",
                "loss_args": {"rollout_is_batch_normalize": True},
                "selection_pass": "old_log_probs",
            },
            "those of the rollout",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)


def test_nothing_to_choose_from():
    masked = sequence(3, mask=[0, 0, 0])
    data = {"response_mask": torch.zeros(1, 3), "old_log_probs": torch.zeros(1, 3), "advantages": torch.ones(1, 3)}
    for config in CONFIGS.values():
        leaf = torch.tensor([masked.log_probs]).requires_grad_()
        output = {"log_probs": leaf, "entropy": torch.ones(1, 3, requires_grad=True)}
        loss, metrics = TrinityPolicyLoss(config)(model_output=output, data=data)
        loss.backward()
        assert loss.item() == 0
        assert all(math.isfinite(value) for value in metrics.values())
