"""The Hydra selection, composed from verl's own configuration and instantiated as a worker does it."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers import engine_workers
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.errors import ConfigError
from trinity_loss.verl import PolicyLossConfig
from trinity_loss.verl.policy_loss_config import loss_config
from trinity_loss.verl.shadow import ShadowLoss
from trinity_loss.verl.worker import TrinityWorkerMixin, engine_loss

TARGET = "actor_rollout_ref.actor.policy_loss._target_=trinity_loss.verl.PolicyLossConfig"
ENGINES = {
    "fsdp": [],
    "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2"],
    "megatron": ["model_engine=megatron"],
}
RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture(autouse=True)
def verls_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with verl's own training worker in verl's place."""
    worker = engine_workers.ActorRolloutRefWorker
    monkeypatch.setattr(worker, "actor_worker_cls", engine_workers.TrainingWorker)
    yield
    GlobalHydra.instance().clear()


def composed(*overrides: str, engine: str = "fsdp") -> DictConfig:
    everything = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *ENGINES[engine], *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=everything)


def actor(*overrides: str, engine: str = "fsdp"):
    return omega_conf_to_dataclass(composed(*overrides, engine=engine).actor_rollout_ref.actor)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_override_selects_the_loss(engine):
    config = actor(TARGET, engine=engine)
    assert type(config.policy_loss) is PolicyLossConfig
    assert isinstance(config.policy_loss, VerlPolicyLossConfig)
    worker = engine_workers.ActorRolloutRefWorker.actor_worker_cls
    assert issubclass(worker, TrinityWorkerMixin)
    assert issubclass(worker, engine_workers.TrainingWorker)
    loss = engine_loss(partial(ppo_loss, config=config))
    assert type(loss) is EnginePolicyLoss
    assert loss.config == LossConfig(loss_mode="vanilla", clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert pickle.loads(pickle.dumps(loss)).config == loss.config


@pytest.mark.parametrize("engine", ENGINES)
def test_the_fragment_composes_with_verls_trainer(engine, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config, pkg://trinity_loss.verl.conf]\n"
        "defaults: [ppo_trainer, trinity_loss, _self_]\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        overrides = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *ENGINES[engine]]
        config = compose("run", overrides=overrides)
    assert config.actor_rollout_ref.actor.policy_loss._target_ == "trinity_loss.verl.PolicyLossConfig"
    assert config.actor_rollout_ref.actor.strategy == engine
    assert type(omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss) is PolicyLossConfig


def test_without_the_override_verl_is_as_it_was():
    config = actor()
    assert type(config.policy_loss) is VerlPolicyLossConfig
    assert engine_workers.ActorRolloutRefWorker.actor_worker_cls is engine_workers.TrainingWorker
    assert engine_loss(partial(ppo_loss, config=config)) is None
    assert engine_loss(lambda **_: None) is None


def test_a_second_instance_installs_nothing_more():
    actor(TARGET)
    worker = engine_workers.ActorRolloutRefWorker.actor_worker_cls
    actor(TARGET)
    assert engine_workers.ActorRolloutRefWorker.actor_worker_cls is worker


def test_what_verl_says_of_the_loss_is_read_from_verl():
    prefix = "actor_rollout_ref.actor."
    config = actor(
        TARGET,
        *(
            prefix + override
            for override in (
                "loss_agg_mode=seq-mean-token-sum-norm",
                "loss_scale_factor=1024",
                "clip_ratio_low=0.1",
                "clip_ratio_high=0.3",
                "clip_ratio_c=5.0",
                "entropy_coeff=0.01",
                "use_kl_loss=True",
                "kl_loss_coef=0.02",
                "kl_loss_type=k2",
                "tau_neg=1.5",
                "policy_loss.loss_mode=sapo",
            )
        ),
    )
    assert loss_config(config) == LossConfig(
        loss_mode="sapo",
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=1024,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        clip_ratio_c=5.0,
        loss_args={"tau_pos": 1.0, "tau_neg": 1.5},
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.02,
        kl_loss_type="k2",
    )


def test_what_verl_has_no_field_for_stands_in_policy_loss():
    here = "+actor_rollout_ref.actor.policy_loss."
    config = actor(
        TARGET,
        here + "loss_agg_mode=prompt-mean",
        here + "kl_agg_mode=token-mean",
        here + "count_padding_rows=False",
        here + "nonfinite=neutral",
        here + "rollout_metrics=sequence",
        here + "nll_on_positives=0.05",
        here + "row_weights=loss_weight",
    )
    read = loss_config(config)
    assert (read.nll_on_positives, read.row_weights) == (0.05, "loss_weight")
    assert (read.loss_agg_mode, read.kl_agg_mode, read.count_padding_rows) == ("prompt-mean", "token-mean", False)
    assert (read.nonfinite, read.rollout_metrics) == ("neutral", "sequence")


def test_bypass_mode_reads_verls_rollout_correction():
    here = "actor_rollout_ref.actor.policy_loss."
    correction = "{_target_: verl.trainer.config.RolloutCorrectionConfig, bypass_mode: true, loss_type: reinforce,"
    correction += " rollout_is: token, rollout_is_threshold: 3.0, rollout_rs: token_k1, rollout_rs_threshold: 0.5_2.0}"
    config = actor(TARGET, here + "loss_mode=bypass_mode", "+" + here + "rollout_correction=" + correction)
    arguments = loss_config(config).loss_args
    assert arguments["loss_type"] == "reinforce"
    assert (arguments["rollout_is"], arguments["rollout_is_threshold"]) == ("token", 3.0)
    assert (arguments["rollout_rs"], arguments["rollout_rs_threshold"]) == ("token_k1", "0.5_2.0")


def test_dro_takes_verls_beta():
    here = "actor_rollout_ref.actor.policy_loss."
    assert loss_config(actor(TARGET, here + "loss_mode=dro", here + "dro_beta=0.5")).loss_args == {"dro_beta": 0.5}
    with pytest.raises(ConfigError, match="dro_beta"):
        loss_config(actor(TARGET, here + "loss_mode=dro"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=ppoo", "ppoo"),
        ("+actor_rollout_ref.actor.policy_loss.top_entropy_quantile=0", "top_entropy_quantile is 0"),
        ("+actor_rollout_ref.actor.policy_loss.loss_agg_mode=prompt_mean", "prompt_mean"),
        ("+actor_rollout_ref.actor.policy_loss.record_steps=[1]", "record_dir"),
        ("+actor_rollout_ref.actor.policy_loss.loss_agg_mod=x", "no field 'loss_agg_mod', but 'loss_agg_mode'"),
    ],
)
def test_a_wrong_selection_fails_when_it_is_made(override, named):
    with pytest.raises(Exception, match=named):
        actor(TARGET, override)


def test_old_log_probs_cannot_choose_where_the_policy_moves():
    """Several epochs are several mini-batches, whatever else is configured."""
    here = "actor_rollout_ref.actor.policy_loss."
    given = (TARGET, f"+{here}selection_pass=old_log_probs", "actor_rollout_ref.actor.ppo_epochs=2")
    with pytest.raises(ConfigError, match="loss_mode 'vanilla' chooses no tokens by log-probs"):
        loss_config(actor(*given))
    with pytest.raises(
        ConfigError, match=r"selection_pass is 'old_log_probs', but .*ppo_epochs is 2.*expected 'forward'"
    ):
        loss_config(actor(*given, here + "loss_mode=kl_cov"))
    loss_config(actor(*given[:2], here + "loss_mode=kl_cov"))


def test_distillation_with_our_target():
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    teacher = DistillationLossConfig(loss_mode="k2", use_policy_gradient=False, loss_max_clamp=3.0)
    bound = partial(
        distillation_ppo_loss, config=actor(TARGET), distillation_config=DistillationConfig(distillation_loss=teacher)
    )
    for loss_fn in (bound, lambda **inputs: bound(**inputs)):
        loss = engine_loss(loss_fn)
        assert isinstance(loss, EnginePolicyLoss)
        assert loss.config.distillation is not None
        assert (loss.config.distillation.loss_mode, loss.config.distillation.loss_max_clamp) == ("k2", 3.0)
    assert engine_loss(partial(distillation_ppo_loss, config=actor(), distillation_config=None)) is None


def test_shadow_mode_keeps_verls_loss():
    bound = partial(ppo_loss, config=actor(TARGET, "+actor_rollout_ref.actor.policy_loss.shadow=True"))
    loss = engine_loss(bound)
    assert isinstance(loss, ShadowLoss)
    assert loss.verl_loss is bound


def test_the_recipe_composes_and_selects_the_loss():
    with initialize_config_dir(str(RECIPES), version_base=None):
        config = compose("cpu_grpo")
    OmegaConf.resolve(config.actor_rollout_ref.actor)
    loss = engine_loss(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))
    assert loss.config.use_kl_loss
    assert loss.config.entropy_coeff > 0
    assert replace(loss.config, loss_mode="ppo").policy_loss is loss.config.policy_loss


def test_a_worker_loads_nothing_of_the_instrument():
    """What instantiating the configuration imports, in a process of its own: no file that judges or measures."""
    code = f"""
import sys
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=["{TARGET}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"])
omega_conf_to_dataclass(config.actor_rollout_ref.actor)
import trinity_loss.trinity_rft
print(*sorted(name for name in sys.modules if name.startswith("trinity_loss.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert {"trinity_loss.recorder", "trinity_loss.verl.worker", "trinity_loss.verl.shadow"} <= set(loaded)
    instrument = {"invariance", "bench", "verify", "doctor", "cli", "engine_check", "losses_by_name", "tables"}
    unneeded = ("trinity_loss.verl.harness", "trinity_loss.verl.cpu", "trinity_loss.verl.composed")
    assert [n for n in loaded if n.split(".")[1] in instrument or n.startswith(unneeded)] == []
