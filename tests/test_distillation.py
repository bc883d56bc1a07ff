"""Distillation from a teacher: both of verl's losses against their definition, under cuts, and against verl."""

import math
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import build, cut, make_sequences, poisoned, reduce_like_verl, sequence
from forms import LAYOUTS, NO_TOTALS, Form, make_leaves
from oracle import MODES, aggregate, clamp, evaluate, kl_estimate, ppo, ratio, reduced, scalar
from ours import in_mode, sent_by_worker
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.workers.config import DistillationConfig
from verl.workers.config import DistillationLossConfig as VerlLossConfig

from trinity_loss import DistillationLossConfig, EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.errors import ConfigError, FieldShapeError, MissingFieldError, MissingGraphError
from trinity_loss.kl import KL_TYPES
from trinity_loss.metric_set import finish_metrics
from trinity_loss.verl.composed import actor_config, compose
from trinity_loss.verl.distilling import DistillingPolicyLoss

SAMPLES = make_sequences(11, seed=4)
K = 4
DISTILLATIONS = {
    "k3": {"loss_mode": "k3"},
    "k2 clamped": {"loss_mode": "k2", "loss_max_clamp": 0.2},
    "abs alone": {"loss_mode": "abs", "use_task_rewards": False},
    "k1 as advantage": {
        "loss_mode": "k1",
        "use_policy_gradient": True,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.15,
    },
    "k3 as advantage alone": {
        "loss_mode": "k3",
        "use_policy_gradient": True,
        "use_task_rewards": False,
        "clip_ratio": 0.1,
    },
    "top k": {"loss_mode": "forward_kl_topk", "topk": K, "distillation_loss_coef": 0.7},
    "top k clamped alone": {
        "loss_mode": "forward_kl_topk",
        "topk": K,
        "use_task_rewards": False,
        "loss_max_clamp": 0.3,
    },
    "top k as advantage": {"loss_mode": "forward_kl_topk", "topk": K, "use_policy_gradient": True},
}
every_distillation = pytest.mark.parametrize("name", DISTILLATIONS)


def outputs_of(lp, old, ref, advantage):
    """What an engine might have made of a token's logits, as numbers that the oracle has too."""
    return {
        "distillation_losses": old - ref,
        "student_mass": math.exp(lp),
        "teacher_mass": math.exp(ref),
        "overlap_count": int(abs(10 * advantage)) % (K + 1) if math.isfinite(advantage) else 0,
        "overlap_token_advantage": advantage,
    }


def flat(samples, of, filler=77.0):
    """A value for each place of prompt + response; the response's stand one to the left."""
    return torch.tensor(
        [x for s in samples for x in (*[filler] * (s.prompt_length - 1), *of(s), filler)], dtype=torch.float64
    )


def run(config, parts, layout, *, dtype=torch.float64, loss_type=EnginePolicyLoss, log_probs_there=True, **options):
    """The cut through our loss: loss, gradients by log-probs and by the divergence over the top k, metrics."""
    teacher, samples = config.distillation, parts.samples
    form = Form(layout, dtype=dtype, **options)
    log_probs, _ = make_leaves(samples, dtype)
    named = {}
    for name in outputs_of(0.0, 0.0, 0.0, 0.0):
        named[name] = flat(
            samples,
            lambda s, name=name: [
                outputs_of(*x)[name]
                for x in zip(s.log_probs, s.old_log_probs, s.ref_log_prob, s.advantages, strict=True)
            ],
        )
    named = {name: values.nan_to_num(0.0, 0.0, 0.0).to(dtype) for name, values in named.items()}
    named["overlap_count"] = named["overlap_count"].to(torch.int64)
    divergence = named["distillation_losses"].requires_grad_()
    of_teacher = flat(samples, lambda s: s.ref_log_prob).to(dtype)
    losses, emitted = [], []
    for rank in build(parts, form):
        losses.append([])
        emitted.append([])
        for micro in rank:
            output, data = {}, micro.data.copy()
            if teacher.use_topk:
                output = {name: micro.lay_out(values) for name, values in named.items()}
            else:
                laid = micro.lay_out(of_teacher)
                data["teacher_logprobs"] = (
                    laid
                    if layout == "packed"
                    else torch.nested.nested_tensor_from_jagged(laid.values()[:, None], laid.offsets())
                )
            if log_probs_there:
                output["log_probs"] = micro.lay_out(log_probs)
            loss, metrics = loss_type(config)(model_output=output, data=data, dp_group=None)
            assert loss.requires_grad
            losses[-1].append(loss)
            emitted[-1].append(metrics)
    total = sum(sum(rank) for rank in losses) / len(losses)
    gradients = torch.autograd.grad(total, [log_probs, divergence], allow_unused=True, materialize_grads=True)
    metrics = emitted[0][0] if loss_type is TrinityPolicyLoss else reduce_like_verl(emitted)
    if loss_type is EnginePolicyLoss:
        finish_metrics(metrics)
    return total.item(), *gradients, metrics


def oracle(samples, settings):
    """The whole mini-batch, token by token."""
    settings = dict(settings)
    d = DistillationLossConfig(**settings.pop("distillation"))
    mode = settings["loss_agg_mode"]
    policy = evaluate(samples, use_weights=True, **settings)
    leaves = [[scalar(x).requires_grad_() for x in s.log_probs] for s in samples]
    made = [
        [outputs_of(*x) for x in zip(s.log_probs, s.old_log_probs, s.ref_log_prob, s.advantages, strict=True)]
        for s in samples
    ]
    tops = [[scalar(m["distillation_losses"]).requires_grad_() for m in row] for row in made]
    metrics, values, raw, reported = {}, [], [], {}
    for s, leaf, top, row in zip(samples, leaves, tops, made, strict=True):
        if d.use_topk:
            losses = [clamp(x, low=0.0) for x in s.valid(top)]
            for key in ("student_mass", "teacher_mass"):
                reported.setdefault(f"distillation/{key}", []).extend(m[key] for m in s.valid(row))
            reported.setdefault("distillation/overlap_ratio", []).extend(m["overlap_count"] / K for m in s.valid(row))
            both = [m["overlap_token_advantage"] for m in s.valid(row) if m["overlap_count"] > 0]
            reported.setdefault("distillation/overlap_token_advantage", []).extend(both)
        else:
            losses = [
                kl_estimate(x, r, d.loss_mode) for x, r in zip(s.valid(leaf), s.valid(s.ref_log_prob), strict=True)
            ]
            reported.setdefault("distillation/abs_loss", []).extend(abs(x.item()) for x in losses)
        raw += [x.item() for x in losses]
        if d.loss_max_clamp is not None:
            losses = [clamp(x, -d.loss_max_clamp, d.loss_max_clamp) for x in losses]
        if d.use_policy_gradient:
            low, high = d.clip_range
            a = SimpleNamespace(low=low, high=high, clip_ratio_c=3.0)
            gains = [-x.item() for x in losses]
            losses, per_token = ppo(s.valid(leaf), s.valid(s.old_log_probs), gains, None, a)
            losses = [x * w for x, w in zip(losses, s.valid(s.rollout_is_weights), strict=True)]
            for key, found in per_token.items():
                reported.setdefault(key.replace("actor/", "distillation/"), []).extend(found)
        values.append(losses)
    options = {k: settings[k] for k in ("loss_scale_factor", "count_empty_sequences") if k in settings}
    term = ratio(*aggregate(samples, values, mode, **options))
    metrics = {key: reduced(key, found) for key, found in reported.items()}
    metrics |= {"distillation/loss": term.item(), "distillation/loss_min": min(raw), "distillation/loss_max": max(raw)}
    for key in ("student_mass", "teacher_mass") if d.use_topk else ():
        found = reported[f"distillation/{key}"]
        metrics |= {f"distillation/{key}_min": min(found), f"distillation/{key}_max": max(found)}
    loss = term * d.coefficient
    if loss.requires_grad:
        loss.backward()
    lp_grad = [[0.0 if x.grad is None else x.grad.item() for x in row] for row in leaves]
    top_grad = [[0.0 if x.grad is None else x.grad.item() for x in row] for row in tops]
    total = loss.item()
    if d.use_task_rewards:
        total += policy.loss
        lp_grad = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(lp_grad, policy.log_prob_grad, strict=True)
        ]
    if d.needs_policy_loss:
        metrics["actor/pg_loss"] = policy.metrics["actor/pg_loss"]
        metrics["actor/ppo_kl"] = policy.metrics["actor/ppo_kl"]
    of = [flat(samples, lambda s, g=g: g[[id(x) for x in samples].index(id(s))], 0.0) for g in (lp_grad, top_grad)]
    return total, *of, metrics


def agree(got, expected, tolerance=1e-10):
    assert got[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    for mine, theirs in zip(got[1:3], expected[1:3], strict=True):
        assert (mine.double() - theirs).abs().max().item() <= tolerance * max(1.0, theirs.abs().max().item())
    for key, value in expected[3].items():
        assert got[3][key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("mode", MODES)
@every_distillation
def test_on_cuts(name, mode):
    """Micro-batches, ranks, layouts; one micro-batch has no token at all."""
    settings = in_mode(mode, 3.5, distillation=DISTILLATIONS[name])
    if DISTILLATIONS[name].get("use_task_rewards", True):
        settings |= {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"}
    expected = oracle(SAMPLES, settings)
    for i, (micro, ranks, how) in enumerate(((1, 1, "even"), (4, 1, "uneven"), (2, 2, "dynamic"))):
        layout = LAYOUTS[(i + MODES.index(mode)) % 3]
        parts = cut(SAMPLES, micro, ranks, how)
        got = run(LossConfig(**settings), parts, layout, **sent_by_worker(settings) | {"counts": True})
        agree(got, expected)
        assert got[1].abs().max() + got[2].abs().max() > 1e-3


def test_every_option_is_in_a_test():
    assert {f.name for f in fields(DistillationLossConfig)} == set().union(*DISTILLATIONS.values())


@pytest.mark.parametrize("kind", [kind for kind in KL_TYPES if not kind.endswith("+")])
def test_every_estimator(kind):
    settings = in_mode("token-mean", distillation={"loss_mode": kind, "use_policy_gradient": kind in ("kl", "k1")})
    got = run(LossConfig(**settings), cut(SAMPLES, 3), "nested", counts=True)
    agree(got, oracle(SAMPLES, settings))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_distillation
def test_float32_and_one_batch_alone(name, layout):
    settings = in_mode("seq-mean-token-mean", distillation=DISTILLATIONS[name])
    expected = oracle(SAMPLES, settings)
    agree(run(LossConfig(**settings), cut(SAMPLES, 2), layout, dtype=torch.float32, counts=True), expected, 1e-5)
    agree(run(LossConfig(**settings), cut(SAMPLES), layout, loss_type=TrinityPolicyLoss, totals=NO_TOTALS), expected)


@every_distillation
def test_padding_alone_is_no_error(name):
    """verl asks such a micro-batch for its smallest loss, and fails."""
    nothing = tuple(sequence(3, mask=(0, 0, 0)) for _ in range(2))
    settings = in_mode("token-mean", distillation=DISTILLATIONS[name])
    for samples in (nothing, (*SAMPLES[:4], *nothing)):
        got = run(LossConfig(**settings), cut(samples, len(samples) // 2), "nested", counts=True)
        assert all(math.isfinite(value) for value in got[3].values())
    agree(got, oracle(samples, settings))


@pytest.mark.parametrize("name", ["abs alone", "top k clamped alone"])
def test_an_engine_that_returns_no_log_probs(name):
    """Where the distillation over the top k alone trains, verl's engines do not compute them."""
    settings = in_mode("seq-mean-token-sum", distillation=DISTILLATIONS[name])
    if DISTILLATIONS[name]["loss_mode"] == "forward_kl_topk":
        got = run(LossConfig(**settings), cut(SAMPLES, 3), "nested", log_probs_there=False, counts=True)
        agree(got, oracle(SAMPLES, settings))
    else:
        with pytest.raises(MissingFieldError, match="no 'log_probs'"):
            run(LossConfig(**settings), cut(SAMPLES, 3), "nested", log_probs_there=False)


def verls_config(settings):
    """verl's two configurations of the same loss."""
    mode, loss = settings["loss_agg_mode"], settings["distillation"]
    made = actor_config(compose(overrides=[f"actor_rollout_ref.actor.loss_agg_mode={mode}"]))
    defaults = {"use_policy_gradient": False, "loss_max_clamp": None, "log_prob_min_clamp": None}
    # verl's bounds do not follow its clip_ratio.
    bounds = dict(zip(("clip_ratio_low", "clip_ratio_high"), DistillationLossConfig(**loss).clip_range, strict=True))
    return made, DistillationConfig(distillation_loss=VerlLossConfig(**defaults | loss | bounds))


@pytest.mark.parametrize("layout", ["nested", "padded"])
@every_distillation
def test_verls_own_value_on_one_micro_batch(name, layout):
    settings = in_mode("token-mean", distillation=DISTILLATIONS[name])
    parts = cut(SAMPLES)
    # verl does not pad jagged weights of its policy gradient, and fails.
    options = {"leave_out": ("rollout_is_weights",) if layout == "nested" else ()}
    ours = run(LossConfig(**settings), parts, layout, counts=True, **options)
    made, distillation = verls_config(settings)

    def verls(_):
        return partial(distillation_ppo_loss, made, distillation)

    theirs = run(LossConfig(**settings), parts, layout, loss_type=verls, **options)
    # verl divides by the count plus 1e-8 in some metrics, in float32.
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for mine, verl in zip(ours[1:3], theirs[1:3], strict=True):
        torch.testing.assert_close(mine, verl, rtol=1e-6, atol=1e-9)
    for key in (key for key in theirs[3] if key.startswith("distillation/")):
        assert ours[3][key] == pytest.approx(theirs[3][key], rel=1e-5, abs=1e-7), key
    shared = {key for key in ours[3] if key.startswith("distillation/")} - set(theirs[3])
    assert all("/ratio_" in key for key in shared)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss_mode": "k4"}, "distillation_loss.loss_mode is 'k4'; expected one of"),
        ({"loss_mode": "k1"}, "does not depend on the teacher"),
        ({"loss_mode": "kl"}, "does not depend on the teacher"),
        ({"loss_mode": "forward_kl_topk", "topk": None}, "topk is None"),
        ({"loss_max_clamp": 0}, "loss_max_clamp is 0; expected null or a finite number above 0"),
        ({"distillation_loss_coef": "1"}, "distillation_loss_coef is '1'"),
        (
            {"loss_mode": "k3", "coef": 1.0},
            "DistillationLossConfig has no field 'coef'; its fields are loss_mode, topk",
        ),
        ({3: "k3"}, "DistillationLossConfig has no field '3'"),
    ],
)
def test_what_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        LossConfig(distillation=fields)


@pytest.mark.parametrize("option", [{"entropy_coeff": 0.1}, {"use_kl_loss": True}, {"off_policy_mask": 0.1}])
def test_what_would_not_train(option):
    with pytest.raises(ConfigError, match=r"use_task_rewards is False, so the distillation alone trains"):
        LossConfig(distillation={"use_task_rewards": False}, **option)


def test_a_teacher_that_is_not_there():
    """Each error names the field, and what would supply it."""
    (micro,), *_ = build(cut(SAMPLES[:3]), Form("nested"))
    log_probs, _ = make_leaves(SAMPLES[:3])
    output = {"log_probs": micro.lay_out(log_probs)}
    with pytest.raises(MissingFieldError, match=r"no 'teacher_logprobs'.*distillation.enabled=True"):
        EnginePolicyLoss(LossConfig(distillation={}))(model_output=output, data=micro.data)
    top = EnginePolicyLoss(LossConfig(distillation=DISTILLATIONS["top k"]))
    with pytest.raises(MissingFieldError, match=r"no 'distillation_losses'.*distillation_use_topk"):
        top(model_output=output, data=micro.data)
    loss = DistillingPolicyLoss(LossConfig(distillation=DISTILLATIONS["top k"]), of_logits=None)
    with pytest.raises(MissingFieldError, match=r"no 'teacher_logprobs'.*ask the teacher"):
        loss(student_logits=torch.zeros(1, 9, 5), data=micro.data)
    data = micro.data.copy()
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(
        output["log_probs"].values().detach()[:, None].expand(-1, K), output["log_probs"].offsets()
    )
    with pytest.raises(FieldShapeError, match=rf"teacher_logprobs has \[\d+, {K}\] values; expected \[\d+\]"):
        EnginePolicyLoss(LossConfig(distillation={}))(model_output=output, data=data)


def test_a_divergence_without_a_graph():
    (micro,), *_ = build(cut(SAMPLES[:3]), Form("nested"))
    log_probs, _ = make_leaves(SAMPLES[:3])
    constant = micro.lay_out(log_probs.detach())
    output = dict.fromkeys(("distillation_losses", "student_mass", "teacher_mass"), constant)
    output["log_probs"] = micro.lay_out(log_probs)
    loss = EnginePolicyLoss(LossConfig(distillation=DISTILLATIONS["top k"]))
    with pytest.raises(MissingGraphError, match="the teacher would teach nothing"):
        loss(model_output=output, data=micro.data)


def test_masked_places_may_hold_anything():
    settings = in_mode("token-mean", distillation={"loss_mode": "k3"})
    got = run(LossConfig(**settings), cut(poisoned(SAMPLES), 3), "nested", counts=True)
    agree(got, oracle(SAMPLES, settings))
