"""The recipes compose, verl accepts them, and the loss that would train is the one that they promise."""

import socket
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.utils.losses import ppo_loss

from trinity_loss import DistillationLossConfig, EnginePolicyLoss, LossConfig
from trinity_loss.verl import PolicyLossConfig
from trinity_loss.verl.composed import compose
from trinity_loss.verl.worker import engine_loss

RECIPES = Path(__file__).parent.parent / "recipes"
KL = {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
PPO = {"loss_mode": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
LOSSES = {
    "fsdp_grpo": LossConfig(**PPO, **KL),
    "megatron_grpo": LossConfig(**PPO, **KL),
    "dapo": LossConfig(**(PPO | {"clip_ratio_high": 0.28}), clip_ratio_c=10.0),
    "dr_grpo": LossConfig(**PPO, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=1024),
    "gspo": LossConfig(
        loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4
    ),
    "cpu_grpo": LossConfig(**PPO, **KL, entropy_coeff=0.001),
    "cpu_megatron": LossConfig(**PPO, **KL, entropy_coeff=0.001),
    "cpu_distillation": LossConfig(
        **PPO,
        distillation=DistillationLossConfig(
            loss_mode="forward_kl_topk", topk=16, use_task_rewards=False, clip_ratio_low=0.2, clip_ratio_high=0.2
        ),
    ),
    "cpu_prompt_mean": LossConfig(**PPO, **KL, entropy_coeff=0.001, loss_agg_mode="prompt-mean"),
    "cpu_trajectories": LossConfig(
        **PPO, **KL, entropy_coeff=0.001, loss_agg_mode="trajectory-mean", count_padding_rows=False
    ),
}
ON_GPUS = [name for name in LOSSES if not name.startswith("cpu_")]
SCALES = {name: "cpu_megatron" if name == "megatron_grpo" else "cpu" for name in ON_GPUS}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def connect(*_):
        raise AssertionError("a recipe's test went to the network")

    monkeypatch.setattr(socket.socket, "connect", connect)


@cache
def composed(name: str, *overrides: str) -> DictConfig:
    return compose(str(RECIPES), name, overrides)


def trained_by(config: DictConfig) -> EnginePolicyLoss:
    """The loss that verl's worker ends up with."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor.policy_loss) is PolicyLossConfig
    if config.distillation.enabled:
        teacher = omega_conf_to_dataclass(config.distillation)
        return engine_loss(partial(distillation_ppo_loss, config=actor, distillation_config=teacher))
    return engine_loss(partial(ppo_loss, config=actor))


def accept(config: DictConfig) -> None:
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def test_every_recipe_is_here():
    complete = {path.stem for path in RECIPES.glob("*.yaml")} - {"gsm8k", "trinity_rft"}
    assert complete == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_verl_accepts_it_and_trains_with_the_loss_it_promises(name):
    config = composed(name)
    accept(config)
    loss = trained_by(config)
    assert isinstance(loss, EnginePolicyLoss)
    assert loss.config == LOSSES[name]


@pytest.mark.parametrize("name", ON_GPUS)
def test_nothing_is_left_open(name):
    config = composed(name)
    assert config.trainer.experiment_name == name
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.algorithm.adv_estimator == "grpo"
    assert not OmegaConf.missing_keys(config.actor_rollout_ref)
    assert config.actor_rollout_ref.actor.strategy == ("megatron" if name == "megatron_grpo" else "fsdp2")
    # Every rank has a row of every mini-batch, and rows of a prompt stay in one.
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size % config.trainer.n_gpus_per_node == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_reference_model_is_there_where_a_kl_term_is(name):
    assert need_reference_policy(composed(name)) is LOSSES[name].use_kl_loss


def test_what_makes_the_algorithms_beside_the_loss():
    assert composed("dr_grpo").algorithm.norm_adv_by_std_in_grpo is False
    assert composed("fsdp_grpo").algorithm.norm_adv_by_std_in_grpo is True
    dapo = composed("dapo")
    assert dapo.algorithm.filter_groups.enable
    assert get_reward_manager_cls(dapo.reward.reward_manager.name).__name__ == "DAPORewardManager"
    # That manager gives no penalty if these are elsewhere.
    assert dapo.reward.reward_kwargs.max_resp_len == dapo.data.max_response_length
    assert dapo.reward.reward_kwargs.overlong_buffer_cfg.len < dapo.data.max_response_length


@pytest.mark.parametrize("name", SCALES)
def test_scaled_down_it_keeps_its_loss_and_its_engine(name):
    config = composed(name, f"+scale={SCALES[name]}")
    accept(config)
    assert config.actor_rollout_ref.actor.strategy == composed(name).actor_rollout_ref.actor.strategy
    small = trained_by(config).config
    expected = LOSSES[name]
    if expected.loss_scale_factor is not None:
        assert small.loss_scale_factor == config.data.max_response_length == 8
        small = LossConfig(**(vars(small) | {"loss_scale_factor": expected.loss_scale_factor}))
    assert small == expected
    assert config.actor_rollout_ref.model.path.startswith("runs/toy/model")
    assert config.trainer.device == "cpu"


def test_megatrons_layout_and_precision_on_a_cpu():
    """The layout is the recipe's; both models are what the scale says, and verl's class would refuse that."""
    config = composed("megatron_grpo", "+scale=cpu_megatron")
    actor, reference = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    for part in (actor, reference):
        engine = omega_conf_to_dataclass(part.megatron)
        assert (engine.dtype, engine.tensor_model_parallel_size) == ("float32", 2)
        assert engine.vanilla_mbridge
        assert not engine.override_transformer_config["sequence_parallel"]
    actor.megatron.dtype = "float64"
    with pytest.raises(Exception, match="float64 not supported"):
        omega_conf_to_dataclass(actor.megatron)


def test_both_engines_on_a_cpu_get_the_same_task():
    fsdp, megatron = (OmegaConf.to_container(composed(name)) for name in ("cpu_grpo", "cpu_megatron"))
    for part in ("algorithm", "data", "reward"):
        assert fsdp[part] == megatron[part]
    for part in ("model", "rollout"):
        assert fsdp["actor_rollout_ref"][part] == megatron["actor_rollout_ref"][part]


def test_asynchronous_trainers_change_no_loss():
    """One-step-off gives the loss other old log-probs, which verl says by the loss's name."""
    for override in ("trainer.v1.trainer_mode=colocate_async", "+asynchronous=separate"):
        config = composed("cpu_grpo", override)
        accept(config)
        assert trained_by(config).config == LOSSES["cpu_grpo"]
    config = composed("cpu_grpo", "+asynchronous=one_step_off")
    accept(config)
    assert trained_by(config).config.loss_mode == "vanilla"
    actor = config.actor_rollout_ref.actor
    batch = config.data.train_batch_size
    separate = composed("cpu_grpo", "+asynchronous=separate")
    steps = separate.trainer.v1.separate_async.parameter_sync_step
    assert steps * separate.actor_rollout_ref.actor.ppo_mini_batch_size == batch
    assert actor.ppo_mini_batch_size == batch


@pytest.mark.parametrize("name", LOSSES)
def test_the_head_says_how_to_start_it(name):
    head = (RECIPES / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    assert f"python -m verl.trainer.main_ppo --config-dir recipes --config-name {name}" in head


class TestTrinityRft:
    """Trinity-RFT's own format, read by its own classes."""

    @pytest.fixture
    def config(self):
        from trinity.common.config import load_config

        return load_config(str(RECIPES / "trinity_rft.yaml"))

    def test_its_validators_accept_it(self, config, tmp_path):
        from trinity.common import config_validator as validators

        config.checkpoint_root_dir = str(tmp_path)
        # The others ask for a GPU or for a database driver that is not installed for the tests.
        for name in ("Global", "Algorithm", "Model", "RayCluster", "Synchronizer", "Interval", "Explorer", "Trainer"):
            kind = getattr(validators, f"{name}ConfigValidator")
            next(validator for validator in validators.validators if type(validator) is kind).validate(config)
        assert config.mode == "both"
        assert config.cluster.trainer_gpu_num == 2
        assert config.algorithm.policy_loss_fn_args["loss_agg_mode"] == config.algorithm.loss_agg_mode

    def test_its_loss_is_scaled(self, config):
        from trinity.common.config_validator import AlgorithmConfigValidator

        from trinity_loss.trinity_rft import ScaledTrinityPolicyLoss

        AlgorithmConfigValidator().validate(config)
        assert "PPOPolicyLossFn" in repr(ScaledTrinityPolicyLoss(config.algorithm).policy_loss_fn.part)

    def test_the_command_names_what_is_there(self):
        head = (RECIPES / "trinity_rft.yaml").read_text()
        assert "--config recipes/trinity_rft.yaml" in head
        assert "recipes/trinity_plugins" in head
        plugins = {path.stem for path in (RECIPES / "trinity_plugins").glob("*.py")}
        assert plugins == {"engine_scaling", "verl_0_9"}

    def test_no_key_is_one_that_trinity_does_not_know(self):
        from omegaconf.errors import ConfigKeyError
        from trinity.common.config import Config

        known = OmegaConf.structured(Config)
        given = yaml.safe_load((RECIPES / "trinity_rft.yaml").read_text())
        with pytest.raises(ConfigKeyError):
            OmegaConf.merge(known, given | {"unknown": 1})
        OmegaConf.merge(known, given)
