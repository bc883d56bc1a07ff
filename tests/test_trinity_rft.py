"""Trinity-RFT's own loss, stock and scaled, under verl's contract."""

import base64
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from batches import cut, given_cut, make_sequences, run
from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
from trinity.common.config import AlgorithmConfig
from trinity.trainer.verl import losses, workers
from verl.single_controller.base.decorator import MAGIC_ATTR

from trinity_loss.errors import BatchError, ConfigError, TotalsError
from trinity_loss.trinity_rft import ScaledActorRolloutRefWorker, ScaledTrinityPolicyLoss, install

STOCK = losses.TrinityPolicyLoss
PLUGIN = Path(__file__).parent.parent / "recipes" / "trinity_plugins" / "engine_scaling.py"
WITH_MODE = ("ppo", "opmd", "sft", "gspo", "topr", "cispo", "sft_is", "sft_phi", "sppo", "sapo", "importance_sampling")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SAMPLES = make_sequences(8, seed=11, max_length=9)
CUTS = [cut(SAMPLES, 2), cut(SAMPLES, 4, 1, "uneven"), cut(SAMPLES, 8), cut(SAMPLES, 2, 2), cut(SAMPLES, 2, 4)]


def algorithm(name: str, mode: str, policy_mode: str | None = None, **arguments) -> AlgorithmConfig:
    given = dict(POLICY_LOSS_FN.get(name).default_args()) | arguments
    if "loss_agg_mode" in given:
        given["loss_agg_mode"] = policy_mode or mode
    return AlgorithmConfig(
        policy_loss_fn=name,
        policy_loss_fn_args=given,
        kl_loss_fn="k2",
        kl_loss_fn_args={**KL_FN.get("k2").default_args(), "kl_coef": 0.1},
        entropy_loss_fn="default",
        entropy_loss_fn_args={**ENTROPY_LOSS_FN.get("default").default_args(), "entropy_coef": 0.05},
        loss_agg_mode=mode,
    )


def gradient(loss_fn, parts, layout="padded", **options):
    got = run(loss_fn, parts, layout, width=12 if layout == "padded" else None, **options)
    return torch.cat([got.log_prob_grad, got.entropy_grad])


def deviation(loss_fn, parts, whole, **options):
    return ((gradient(loss_fn, parts, **options) - whole).norm() / whole.norm()).item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_MODE)
def test_exact_under_any_cut(name, mode):
    config = algorithm(name, mode)
    whole = gradient(STOCK(config), cut(SAMPLES))
    scaled = ScaledTrinityPolicyLoss(config)
    assert deviation(scaled, cut(SAMPLES), whole) < 1e-10
    for parts in CUTS:
        assert deviation(scaled, parts, whole) < 1e-10


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_stock_loss_grows_with_the_micro_batches(mode):
    """What the scaling repairs: the norm for 1, 2, 4, 8 micro-batches."""
    loss = STOCK(algorithm("ppo", mode))
    norms = [gradient(loss, cut(SAMPLES, n)).norm().item() for n in (1, 2, 4, 8)]
    factors = [norm / norms[0] for norm in norms]
    if mode == "token-mean":
        assert factors[1] > 1.5
        assert factors[3] > 6
    else:
        assert factors == pytest.approx([1, 2, 4, 8], rel=1e-6)
    scaled = ScaledTrinityPolicyLoss.of(loss)
    assert [gradient(scaled, cut(SAMPLES, n)).norm().item() / norms[0] for n in (1, 2, 4, 8)] == pytest.approx([1] * 4)


def test_a_policy_loss_with_a_mode_of_its_own_is_weighted_by_it():
    config = algorithm("ppo", "token-mean", policy_mode="seq-mean-token-mean")
    whole = gradient(STOCK(config), cut(SAMPLES))
    for parts in CUTS:
        assert deviation(ScaledTrinityPolicyLoss(config), parts, whole) < 1e-10


@pytest.mark.parametrize("clip_mode", ["none", "one-side", "two-side", "ring", "gspo-one-side"])
@pytest.mark.parametrize("mode", MODES[:2])
def test_rec_is_weighted_by_what_it_averages_over(mode, clip_mode):
    config = algorithm("rec", mode, clip_mode=clip_mode)
    whole = gradient(STOCK(config), cut(SAMPLES))
    for parts in CUTS:
        assert deviation(ScaledTrinityPolicyLoss(config), parts, whole) < 1e-10


def test_dpo_is_the_mean_over_pairs():
    config = algorithm("dpo", "seq-mean-token-mean")
    scaled = ScaledTrinityPolicyLoss(config)
    whole = gradient(scaled, cut(SAMPLES))
    pairs = [gradient(STOCK(config), given_cut(SAMPLES[i : i + 2], [[0, 1]])) for i in range(0, 8, 2)]
    assert deviation(scaled, given_cut(SAMPLES, [[0, 1], [2, 3, 4, 5], [6, 7]]), whole) < 1e-10
    assert deviation(scaled, given_cut(SAMPLES, [[0, 1], [2, 3]], [[4, 5], [6, 7]]), whole) < 1e-10
    halves = [torch.cat([pair[: len(pair) // 2] for pair in pairs]), torch.cat([p[len(p) // 2 :] for p in pairs])]
    assert ((torch.cat(halves) / 4 - whole).norm() / whole.norm()).item() < 1e-10
    with pytest.raises(BatchError, match="3 rows"):
        gradient(scaled, given_cut(SAMPLES, [[0, 1, 2], [3, 4, 5, 6, 7]]))


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_mixed_losses_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match="a count of its own that no engine counts"):
        ScaledTrinityPolicyLoss(algorithm(name, "token-mean"))


def test_without_totals_the_loss_is_the_stock_one():
    config = algorithm("ppo", "token-mean")
    nothing = {"totals": (("batch_num_tokens", None), ("global_batch_size", None), ("dp_size", None))}
    expected = gradient(STOCK(config), cut(SAMPLES, 2), **nothing)
    assert torch.equal(gradient(ScaledTrinityPolicyLoss(config), cut(SAMPLES, 2), **nothing), expected)


def test_a_missing_count_with_several_ranks_is_an_error():
    with pytest.raises(TotalsError, match="batch_num_tokens is missing"):
        gradient(
            ScaledTrinityPolicyLoss(algorithm("ppo", "token-mean")),
            cut(SAMPLES, 1, 2),
            totals=(("batch_num_tokens", None),),
        )


def test_the_width_as_norm_is_refused_where_it_depends_on_the_cut():
    with pytest.raises(BatchError, match="max_response_len"):
        gradient(ScaledTrinityPolicyLoss(algorithm("ppo", "seq-mean-token-sum-norm")), cut(SAMPLES, 2), "nested")


def test_metrics_keep_the_unscaled_value():
    config = algorithm("ppo", "token-mean")
    micro = run(ScaledTrinityPolicyLoss(config), cut(SAMPLES, 2), "padded", width=12).emitted[0][0]
    stock = run(STOCK(config), cut(SAMPLES, 2), "padded", width=12).emitted[0][0]
    assert micro == pytest.approx(stock, rel=1e-12)


@pytest.fixture
def stock(monkeypatch):
    """Trinity-RFT as it is, also afterwards."""
    monkeypatch.setattr(losses, "TrinityPolicyLoss", STOCK)
    monkeypatch.setattr(workers, "TrinityActorRolloutRefWorker", workers.TrinityActorRolloutRefWorker)


@pytest.mark.usefixtures("stock")
def test_one_call_installs_it():
    config = algorithm("ppo", "token-mean")
    assert type(losses.build_trinity_loss(config)) is STOCK
    install()
    install()
    loss = losses.build_trinity_loss(config)
    assert type(loss) is ScaledTrinityPolicyLoss
    whole = gradient(STOCK(config), cut(SAMPLES))
    assert deviation(pickle.loads(pickle.dumps(loss)), cut(SAMPLES, 4), whole) < 1e-10


WORKER_PROCESS = """
import base64, pickle, sys
worker_class, config = pickle.loads(base64.b64decode(sys.stdin.read()))
worker = object.__new__(worker_class)
worker.actor = type("Actor", (), {"set_loss_fn": lambda self, loss_fn: print(type(loss_fn).__name__)})()
worker.set_trinity_config(config, "vllm", "namespace")
"""


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("installed", [False, True])
def test_the_workers_that_load_no_plugin_build_it_too(installed):
    """A worker process knows only what Ray sends: the class, by its name, and the configuration."""
    if installed:
        runpy.run_path(str(PLUGIN))
    sent = base64.b64encode(cloudpickle.dumps((workers.TrinityActorRolloutRefWorker, algorithm("ppo", "token-mean"))))
    said = subprocess.run([sys.executable, "-c", WORKER_PROCESS], input=sent, capture_output=True, check=True)
    assert said.stdout.split()[-1].decode() == ("ScaledTrinityPolicyLoss" if installed else "TrinityPolicyLoss")


def test_the_method_of_the_worker_is_dispatched_as_trinity_dispatches_it():
    ours, theirs = (
        getattr(kind.set_trinity_config, MAGIC_ATTR)
        for kind in (ScaledActorRolloutRefWorker, ScaledActorRolloutRefWorker.__bases__[0])
    )
    assert ours == theirs
