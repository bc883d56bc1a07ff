"""Trinity-RFT's own losses, stock and scaled, under verl's contract; the reference is one batch, uncut, no engine."""

import base64
import functools
import multiprocessing
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from batches import cut, given_cut, make_sequences, run
from tensordict import TensorDict
from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss, masked_mean
from trinity.common import config_validator
from trinity.common.config import AlgorithmConfig, Config
from trinity.trainer.verl import losses, workers
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from trinity_loss.errors import BatchError, ConfigError, TotalsError
from trinity_loss.trinity_rft import (
    EngineScalingValidator,
    ScaledActorRolloutRefWorker,
    ScaledTrinityPolicyLoss,
    install,
    prepare_mini_batch,
)

STOCK = losses.TrinityPolicyLoss
PLUGIN = Path(__file__).parent.parent / "recipes" / "trinity_plugins" / "engine_scaling.py"
WITH_MODE = ("ppo", "opmd", "sft", "gspo", "topr", "cispo", "sft_is", "sft_phi", "sppo", "sapo", "importance_sampling")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SAMPLES = make_sequences(8, seed=11, max_length=9)
CUTS = [cut(SAMPLES, 2), cut(SAMPLES, 4, 1, "uneven"), cut(SAMPLES, 8), cut(SAMPLES, 2, 2), cut(SAMPLES, 2, 4)]
EXPERTS = (1, 4, 6)
NO_TOTALS = {"totals": (("batch_num_tokens", None), ("global_batch_size", None), ("dp_size", None))}


def algorithm(name: str, mode: str, policy_mode: str | None = None, kl="k2", entropy="default", **arguments):
    given = dict(POLICY_LOSS_FN.get(name).default_args()) | arguments
    if "loss_agg_mode" in given:
        given["loss_agg_mode"] = policy_mode or mode
    return AlgorithmConfig(
        policy_loss_fn=name,
        policy_loss_fn_args=given,
        kl_loss_fn=kl,
        kl_loss_fn_args={**KL_FN.get(kl).default_args(), "kl_coef": 0.1},
        entropy_loss_fn=entropy,
        entropy_loss_fn_args={**ENTROPY_LOSS_FN.get(entropy).default_args(), "entropy_coef": 0.05},
        loss_agg_mode=mode,
    )


def play(loss_fn, parts, layout="padded", **options):
    return run(loss_fn, parts, layout, width=12 if layout == "padded" else None, **options)


def gradient(got):
    return torch.cat([got.log_prob_grad, got.entropy_grad])


def norm(loss_fn, parts):
    return gradient(play(loss_fn, parts)).norm().item()


def assert_same(got, whole, tolerance=1e-10):
    """Gradient, loss and every metric."""
    assert ((gradient(got) - gradient(whole)).norm() / gradient(whole).norm()).item() < tolerance
    assert got.loss == pytest.approx(whole.loss, rel=1e-7)
    assert set(got.metrics) == set(whole.metrics)
    # Trinity-RFT computes some of its metrics in float32.
    assert got.metrics == pytest.approx(whole.metrics, rel=1e-6, abs=1e-9)


def assert_exact(config, cuts=CUTS, stock=STOCK, with_rows=lambda loss: loss):
    whole = play(with_rows(stock(config)), cut(SAMPLES), **NO_TOTALS)
    scaled = with_rows(ScaledTrinityPolicyLoss(config))
    for parts in (cut(SAMPLES), *cuts):
        assert_same(play(scaled, parts), whole)


def test_every_loss_of_trinity_is_compared():
    assert set(POLICY_LOSS_FN._default_mapping) == {*WITH_MODE, "rec", "dpo", "mix", "mix_chord"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_MODE)
def test_exact_under_any_cut(name, mode):
    assert_exact(algorithm(name, mode))


@pytest.mark.parametrize("kl", ["k1", "k3", "low_var_kl", "abs", "corrected_k3"])
def test_with_every_kl(kl):
    assert_exact(algorithm("ppo", "seq-mean-token-mean", kl=kl))


@pytest.mark.parametrize("mode", MODES[:2])
def test_with_what_masks_whole_sequences(mode):
    assert_exact(algorithm("ppo", mode, enable_sequence_masking=True))


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_stock_loss_grows_with_the_micro_batches(mode):
    """What the scaling repairs: the norm for 1, 2, 4, 8 micro-batches."""
    loss = STOCK(algorithm("ppo", mode))
    norms = [norm(loss, cut(SAMPLES, n)) for n in (1, 2, 4, 8)]
    factors = [norm / norms[0] for norm in norms]
    if mode == "token-mean":
        assert factors[1] > 1.5
        assert factors[3] > 6
    else:
        assert factors == pytest.approx([1, 2, 4, 8], rel=1e-6)
    scaled = ScaledTrinityPolicyLoss.of(loss)
    assert [norm(scaled, cut(SAMPLES, n)) / norms[0] for n in (1, 2, 4, 8)] == pytest.approx([1] * 4)


def test_a_policy_loss_with_a_mode_of_its_own_is_weighted_by_it():
    assert_exact(algorithm("ppo", "token-mean", policy_mode="seq-mean-token-mean"))


@pytest.mark.parametrize("clip_mode", ["none", "one-side", "two-side", "ring", "gspo-one-side"])
@pytest.mark.parametrize("mode", MODES[:2])
def test_rec_is_weighted_by_what_it_averages_over(mode, clip_mode):
    assert_exact(algorithm("rec", mode, clip_mode=clip_mode))


def stock_metric(metric, loss, n):
    return play(loss, cut(SAMPLES, n)).metrics[metric]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("rec", "actor/pg_loss"),
        ("ppo", "actor/ppo_kl"),
        ("ppo", "actor/pg_clipfrac"),
        ("ppo", "actor/kl_loss"),
        ("ppo", "actor/entropy_loss"),
        ("ppo", "final_loss"),
    ],
)
def test_54_a_metric_is_that_of_the_mini_batch(name, metric):
    """In the stock loss it is a mean of means, which is another number for another cut."""
    loss = STOCK(algorithm(name, "token-mean"))
    right = stock_metric(metric, loss, 1)
    assert abs(stock_metric(metric, loss, 8) - right) > 1e-3
    assert stock_metric(metric, ScaledTrinityPolicyLoss.of(loss), 8) == pytest.approx(right, rel=1e-6)


# ----------------------------------------------------------------------------------------------------
# DPO


def test_dpo_is_the_mean_over_pairs():
    config = algorithm("dpo", "seq-mean-token-mean")
    scaled = ScaledTrinityPolicyLoss(config)
    whole = play(scaled, cut(SAMPLES), **NO_TOTALS)
    pairs = [play(STOCK(config), given_cut(SAMPLES[i : i + 2], [[0, 1]])) for i in range(0, 8, 2)]
    expected = [torch.cat([getattr(pair, of) for pair in pairs]) / 4 for of in ("log_prob_grad", "entropy_grad")]
    assert ((torch.cat(expected) - gradient(whole)).norm() / gradient(whole).norm()).item() < 1e-10
    for key, value in whole.metrics.items():
        assert value == pytest.approx(sum(pair.metrics[key] for pair in pairs) / 4, rel=1e-6), key
    for parts in (
        given_cut(SAMPLES, [[0, 1], [2, 3, 4, 5], [6, 7]]),
        given_cut(SAMPLES, [[6, 7], [0, 1, 4, 5], [2, 3]]),
        given_cut(SAMPLES, [[0, 1], [2, 3]], [[4, 5], [6, 7]]),
    ):
        assert_same(play(scaled, parts), whole)
    with pytest.raises(BatchError, match="3 rows"):
        play(scaled, given_cut(SAMPLES, [[0, 1, 2], [3, 4, 5, 6, 7]]))


# ----------------------------------------------------------------------------------------------------
# Usual rows and expert rows


def with_experts(loss_fn, experts=EXPERTS):
    """The same loss on micro-batches that say which rows are an expert's, and what the worker counted of them."""
    marks = {SAMPLES[i].old_log_probs[0] for i in experts}

    def called(model_output, data, dp_group=None):
        rows = data["old_log_probs"].unbind()
        data["expert_mask"] = torch.tensor([float(row[0]) in marks for row in rows])
        data["step"] = torch.full((len(rows),), 3, dtype=torch.int32)
        if tu.get(data, "dp_size") is not None:
            counts = {"rows": len(experts), "tokens": sum(SAMPLES[i].tokens for i in experts)}
            tu.assign_non_tensor(data, **{f"batch_num_expert_{name}": count for name, count in counts.items()})
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    return called


def mixture(name, mode, experts=3, **arguments):
    sizes = {"ppo_mini_batch_size": 8, "train_batch_size_usual": 8 - experts, "train_batch_size_expert": experts}
    return algorithm(name, mode, use_dynamic_bsz=True, **sizes, **arguments)


@pytest.mark.parametrize("entropy", ["mix", "default", "none"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_mixtures_are_exact_with_the_counts_of_the_worker(name, mode, entropy):
    assert_exact(mixture(name, mode, entropy=entropy), with_rows=with_experts)


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_phi_function": False, "mu_warmup_steps": 10, "mu_peak": 0.9, "mu_valley": 0.2},
        {"sft_loss_agg_mode": "seq-mean-token-mean", "grpo_loss_agg_mode": "token-mean"},
    ],
)
def test_the_parts_of_a_mixture_have_modes_and_a_schedule_of_their_own(arguments):
    assert_exact(mixture("mix_chord", "seq-mean-token-sum", **arguments), with_rows=with_experts)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("experts", [(), tuple(range(8))])
def test_a_mixture_of_one_kind_of_rows_has_that_part_alone(mode, experts):
    name = "sft" if experts else "ppo"
    loss = ScaledTrinityPolicyLoss(mixture("mix", mode, experts=1, mu=0.25, kl="none", entropy="none"))
    alone = STOCK(algorithm(name, mode, kl="none", entropy="none"))
    expected = play(alone, cut(SAMPLES), **NO_TOTALS)
    for parts in (cut(SAMPLES), *CUTS):
        got = play(with_experts(loss, experts), parts)
        share = 0.25 if experts else 0.75
        assert got.loss == pytest.approx(share * expected.loss, rel=1e-7)
        assert gradient(got) == pytest.approx(share * gradient(expected), rel=1e-9, abs=1e-15)
        assert all(value == value for value in got.metrics.values())


def test_a_mixture_without_the_counts_of_its_expert_rows_is_an_error():
    loss = ScaledTrinityPolicyLoss(mixture("mix", "token-mean"))

    def uncounted(model_output, data, dp_group=None):
        data["expert_mask"] = torch.zeros(len(data["uid"]), dtype=torch.bool)
        return loss(model_output=model_output, data=data)

    with pytest.raises(TotalsError, match="batch_num_expert_tokens is missing"):
        play(uncounted, cut(SAMPLES, 2))


# ----------------------------------------------------------------------------------------------------
# Losses of a user's own


class Own(PolicyLossFn):
    """A loss as a user writes one: means over rows whatever is configured, an extreme, a constant."""

    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
        losses = aggregate_loss(-advantages * logprob, action_mask, "seq-mean-token-mean")
        ratio = torch.where(action_mask, (logprob - old_logprob).exp(), torch.zeros(()))
        metrics = {
            "own_loss": losses.item(),
            "ratio/max": ratio.max().item(),
            "beta": 0.3,
            "ratio/mean": masked_mean(ratio, action_mask).item(),
            "rows": masked_mean(ratio, action_mask, axis=-1).mean().item(),
        }
        return losses, metrics

    @classmethod
    def default_args(cls):
        return {}


def own_loss(kind):
    scaled = STOCK(algorithm("ppo", "token-mean"))
    scaled.policy_loss_fn = kind(backend="verl")
    return scaled


def test_a_loss_of_a_users_own_is_found_out_by_trial():
    loss = own_loss(Own)
    whole = play(loss, cut(SAMPLES), **NO_TOTALS)
    for parts in CUTS:
        assert_same(play(ScaledTrinityPolicyLoss.of(loss), parts), whole)


def test_a_metric_that_comes_only_now_and_then_is_left_as_it_is():
    class Seldom(Own):
        def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
            loss = masked_mean(-advantages * logprob, action_mask)
            return loss, {"seldom": 7.0} if logprob.shape[1] == 12 else {}

    got = play(ScaledTrinityPolicyLoss.of(own_loss(Seldom)), cut(SAMPLES, 2))
    assert got.emitted[0][0]["actor/seldom"] == 7.0


def test_what_no_weight_makes_exact_is_refused_by_name():
    class Spread(Own):
        def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
            loss = masked_mean(-advantages * logprob, action_mask)
            return loss, {"spread": logprob[action_mask].std().item()}

    class Padded(Own):
        def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
            return (-advantages * logprob).sum() / action_mask.sum().sqrt(), {}

    class Faulty(Own):
        def __call__(self, logprob, action_mask, teacher, **kwargs):
            raise KeyError("teacher_logits")

    with pytest.raises(ConfigError, match=r"spread of Spread is .* expected an average over tokens or rows or sum"):
        ScaledTrinityPolicyLoss.of(own_loss(Spread))
    with pytest.raises(ConfigError, match="the loss of Padded is"):
        ScaledTrinityPolicyLoss.of(own_loss(Padded))
    with pytest.raises(ConfigError, match="Faulty failed on a made-up micro-batch: KeyError: 'teacher_logits'"):
        ScaledTrinityPolicyLoss.of(own_loss(Faulty))


# ----------------------------------------------------------------------------------------------------
# Totals


def test_without_totals_the_loss_is_the_stock_one():
    config = algorithm("ppo", "token-mean")
    expected = play(STOCK(config), cut(SAMPLES, 2), **NO_TOTALS)
    got = play(ScaledTrinityPolicyLoss(config), cut(SAMPLES, 2), **NO_TOTALS)
    assert torch.equal(gradient(got), gradient(expected))
    assert got.emitted == expected.emitted


def test_a_missing_count_with_several_ranks_is_an_error():
    with pytest.raises(TotalsError, match="batch_num_tokens is missing"):
        play(
            ScaledTrinityPolicyLoss(algorithm("ppo", "token-mean")),
            cut(SAMPLES, 1, 2),
            totals=(("batch_num_tokens", None),),
        )


def test_the_width_as_norm_is_refused_where_it_depends_on_the_cut():
    with pytest.raises(BatchError, match="max_response_len"):
        play(ScaledTrinityPolicyLoss(algorithm("ppo", "seq-mean-token-sum-norm")), cut(SAMPLES, 2), "nested")


# ----------------------------------------------------------------------------------------------------
# What the worker does with a mini-batch, on two ranks


def mini_batch(rows):
    """Rows as Trinity-RFT's trainer sends them: (prompt, tokens, whether an expert's)."""
    mask = torch.tensor([[k < tokens for k in range(6)] for _, tokens, _ in rows])
    ids = [torch.ones(2 + tokens, dtype=torch.long) for _, tokens, _ in rows]
    return TensorDict(
        {
            "prompts": torch.tensor([[prompt, prompt] for prompt, _, _ in rows]),
            "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
            "response_mask": mask,
            "expert_mask": torch.tensor([expert for _, _, expert in rows]),
        },
        batch_size=[len(rows)],
    )


def _on_a_rank(rank, file, pipe, config, rows, keep_pairs):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(rows))
    data = mini_batch(rows[rank])
    try:
        prepare_mini_batch(data, ScaledTrinityPolicyLoss(config), torch.distributed.group.WORLD, keep_pairs)
        names = ("batch_num_expert_rows", "batch_num_expert_tokens", "force_group_size")
        pipe.send({name: tu.get(data, name) for name in names if tu.get(data, name) is not None})
    except Exception as error:
        pipe.send(repr(error))


@pytest.fixture
def on_two_ranks(tmp_path, monkeypatch):
    """What two ranks on gloo say of their rows."""
    monkeypatch.setattr("trinity_loss.trinity_rft.get_device_id", lambda: "cpu")
    return functools.partial(_on_two_ranks, tmp_path)


def _on_two_ranks(tmp_path, config, *rows, keep_pairs=True):
    fork = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(2):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_on_a_rank, args=(rank, tmp_path / "store", theirs, config, rows, keep_pairs))
        process.start()
        ends.append(ours)
        processes.append(process)
    said = [end.recv() if end.poll(60) else None for end in ends]
    for process in processes:
        process.join(10)
        process.kill()
    return said


def test_the_worker_counts_the_expert_rows_of_all_ranks(on_two_ranks):
    said = on_two_ranks(mixture("mix", "token-mean"), [(1, 3, True), (1, 5, False)], [(2, 2, True), (2, 6, True)])
    assert said == [{"batch_num_expert_rows": 3, "batch_num_expert_tokens": 11}] * 2


PAIRS = [(1, 6, False), (1, 1, False), (2, 2, False), (2, 5, False), (3, 1, False), (3, 2, False)]


def test_53_pairs_stay_together_however_verl_cuts(on_two_ranks):
    """By length alone verl puts rows of different pairs together."""
    config = algorithm("dpo", "token-mean")
    assert on_two_ranks(config, PAIRS, PAIRS) == [{"force_group_size": 2}] * 2
    for options, apart in (
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 18}, True),
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, True),
    ):
        data = mini_batch(PAIRS)
        tu.assign_non_tensor(data, **options)
        cuts = [micro["prompts"][:, 0].tolist() for micro in prepare_micro_batches(data.copy())[0]]
        assert any(prompts[::2] != prompts[1::2] for prompts in cuts) == apart
        tu.assign_non_tensor(data, force_group_size=2)
        # Megatron's virtual stages ask for a multiple of their number.
        for stages in (None, 2):
            micro_batches, _ = prepare_micro_batches(data.copy(), num_batches_divided_by=stages)
            cuts = [micro["prompts"][:, 0].tolist() for micro in micro_batches]
            assert len(cuts) > 1
            assert all(prompts[::2] == prompts[1::2] for prompts in cuts)


@pytest.mark.parametrize("wrong", [PAIRS[:3], [PAIRS[0], PAIRS[2], PAIRS[1], PAIRS[3]]])
def test_53_where_one_rank_has_no_pairs_every_rank_stops(on_two_ranks, wrong):
    said = on_two_ranks(algorithm("dpo", "token-mean"), PAIRS, wrong)
    assert all("BatchError" in error and "no pairs on 1 ranks" in error for error in said)


def test_a_fixed_number_of_rows_that_is_even_is_left_alone(on_two_ranks):
    config = algorithm("dpo", "token-mean")
    assert on_two_ranks(config, PAIRS, PAIRS, keep_pairs=False) == [{}] * 2


# ----------------------------------------------------------------------------------------------------
# Installation


@pytest.fixture
def stock(monkeypatch):
    """Trinity-RFT as it is, also afterwards."""
    monkeypatch.setattr(losses, "TrinityPolicyLoss", STOCK)
    monkeypatch.setattr(workers, "TrinityActorRolloutRefWorker", workers.TrinityActorRolloutRefWorker)
    monkeypatch.setattr(config_validator, "validators", list(config_validator.validators))


@pytest.mark.usefixtures("stock")
def test_one_call_installs_it():
    config = algorithm("ppo", "token-mean")
    assert type(losses.build_trinity_loss(config)) is STOCK
    install()
    install()
    loss = losses.build_trinity_loss(config)
    assert type(loss) is ScaledTrinityPolicyLoss
    assert [type(v) for v in config_validator.validators].count(EngineScalingValidator) == 1
    whole = play(STOCK(config), cut(SAMPLES), **NO_TOTALS)
    assert_same(play(pickle.loads(pickle.dumps(loss)), cut(SAMPLES, 4)), whole)


WORKER_PROCESS = """
import base64, pickle, sys
worker_class, config = pickle.loads(base64.b64decode(sys.stdin.read()))
worker = object.__new__(worker_class)
worker.actor = type("Actor", (), {"set_loss_fn": lambda self, loss_fn: print(type(loss_fn).__name__)})()
worker.set_trinity_config(config, "vllm", "namespace")
"""


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("installed", [False, True])
def test_the_workers_that_load_no_plugin_build_it_too_and_say_so(installed):
    """A worker process knows only what Ray sends: the class, by its name, and the configuration."""
    if installed:
        runpy.run_path(str(PLUGIN))
    sent = base64.b64encode(cloudpickle.dumps((workers.TrinityActorRolloutRefWorker, algorithm("ppo", "token-mean"))))
    said = subprocess.run([sys.executable, "-c", WORKER_PROCESS], input=sent, capture_output=True, check=True)
    assert said.stdout.split()[-1].decode() == ("ScaledTrinityPolicyLoss" if installed else "TrinityPolicyLoss")
    assert (b"trinity_loss: training with ScaledTrinityPolicyLoss, policy_loss_fn ppo" in said.stdout) == installed


def test_the_methods_of_the_worker_are_dispatched_as_trinity_dispatches_them():
    ours, theirs = (
        getattr(kind.set_trinity_config, MAGIC_ATTR)
        for kind in (ScaledActorRolloutRefWorker, ScaledActorRolloutRefWorker.__bases__[0])
    )
    assert ours == theirs
    ours = object.__new__(ScaledActorRolloutRefWorker).actor_worker_cls
    theirs = ScaledActorRolloutRefWorker.__bases__[0].actor_worker_cls
    assert issubclass(ours, theirs)
    ours, theirs = (getattr(kind.train_batch, MAGIC_ATTR) for kind in (ours, theirs))
    assert (ours["blocking"], ours["execute_mode"]) == (theirs["blocking"], theirs["execute_mode"])


def global_config(config, **changes):
    whole = Config(algorithm=config, mode="train")
    whole.trainer.trainer_strategy = "fsdp2"
    whole.cluster.trainer_gpu_num = 2
    whole.buffer.train_batch_size = 8
    whole.algorithm.algorithm_type = "dpo"
    for path, value in changes.items():
        *owners, name = path.split("__")
        setattr(functools.reduce(getattr, owners, whole), name, value)
    return whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"buffer__train_batch_size": 6}, "buffer.train_batch_size is 6 on 2 data-parallel ranks"),
        ({"buffer__train_batch_size": 6, "trainer__ulysses_sequence_parallel_size": 2}, None),
        ({"trainer__trainer_config": {"actor": {"shuffle": True}}}, "actor.shuffle"),
        ({"trainer__trainer_strategy": "megatron", "buffer__train_batch_size": 6}, "6 on 2 data-parallel ranks"),
        (
            {
                "trainer__trainer_strategy": "megatron",
                "trainer__trainer_config": {"actor": {"megatron": {"dynamic_context_parallel": True}}},
            },
            "dynamic_context_parallel",
        ),
    ],
)
def test_53_what_takes_pairs_apart_is_refused_with_the_configuration(changes, said):
    config = global_config(algorithm("dpo", "token-mean"), **changes)
    if said is None:
        EngineScalingValidator().validate(config)
    else:
        with pytest.raises(ConfigError, match=f"{said}.* takes pairs of DPO apart"):
            EngineScalingValidator().validate(config)


def test_what_cannot_be_exact_is_refused_with_the_configuration():
    config = algorithm("rec", "token-mean", weight="gspo_importance_sampling")
    with pytest.raises(ConfigError, match="RECPolicyLossFn failed"):
        EngineScalingValidator().validate(global_config(config))
    EngineScalingValidator().validate(global_config(config, mode="explore"))


def test_a_trainer_that_goes_around_it_is_named(monkeypatch):
    said = []
    validator = EngineScalingValidator()
    monkeypatch.setattr(validator.logger, "warning", lambda text, *args: said.append(text % args))
    validator.validate(global_config(algorithm("ppo", "token-mean"), trainer__trainer_type="tinker"))
    assert said == ["trinity_loss: trainer.trainer_type is 'tinker', which goes around the scaled loss"]
