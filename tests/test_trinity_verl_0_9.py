"""Trinity-RFT's configuration of verl, as its training workers instantiate it."""

import importlib
import types
from pathlib import Path

import pytest
import torch
import verl
from tensordict import TensorDict
from trinity.common.config import load_config
from trinity.common.config_validator import BufferConfigValidator, validators
from trinity.trainer.verl import config as trinity_config
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead

RECIPE = Path(__file__).parent.parent / "recipes" / "trinity_rft.yaml"
STRATEGIES = ("fsdp", "fsdp2", "megatron")
PATCHED = [
    (FSDPEngine, "_build_module"),
    (FSDPEngine, "save_checkpoint"),
    (FSDPEngineWithLMHead, "prepare_model_inputs"),
]
STOCK = trinity_config.build_verl_config


@pytest.fixture(scope="module")
def bridge():
    """The module, whose import changes verl's engine as in a training worker; afterwards it is verl's again."""
    stock = [getattr(kind, name) for kind, name in PATCHED]
    yield importlib.import_module("trinity_loss.trinity_verl_0_9")
    for (kind, name), value in zip(PATCHED, stock, strict=True):
        setattr(kind, name, value)
    FSDPEngine._patched = False


@pytest.fixture
def installed(bridge, monkeypatch):
    monkeypatch.setattr(trinity_config, "build_verl_config", STOCK)
    bridge.install()
    bridge.install()


@pytest.fixture
def config(tmp_path):
    """The recipe, as Trinity-RFT validates it before it starts anything.

    That of buffers imports a database driver, which only the environment of `make trinity-rft` has.
    """
    config = load_config(str(RECIPE))
    config.checkpoint_root_dir = str(tmp_path)
    for validator in validators:
        if not isinstance(validator, BufferConfigValidator):
            validator.validate(config)
    config.buffer.train_batch_size = config.buffer.batch_size * config.algorithm.repeat_times
    return config


def instantiate(config):
    """What a worker makes of each part (``ActorRolloutRefWorker.init_model``)."""
    built = trinity_config.build_verl_config(config)
    for key in [key for key in built.ref if key.startswith("log_prob_")]:
        built.ref[key.replace("log_prob", "ppo")] = built.ref.pop(key)
        built.ref.use_dynamic_bsz = built.ref.pop("ppo_use_dynamic_bsz", built.ref.get("use_dynamic_bsz"))
    return {name: omega_conf_to_dataclass(built[name]) for name in ("actor", "ref", "rollout", "critic")}, built


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_verl_0_9_refuses_what_trinity_builds(config, strategy):
    config.trainer.trainer_strategy = strategy
    with pytest.raises(Exception, match="unexpected keyword argument"):
        instantiate(config)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_the_plugin_verl_takes_it(config, strategy):
    config.trainer.trainer_strategy = strategy
    parts, built = instantiate(config)
    assert parts["actor"].profiler.tool_config == {}
    assert parts["actor"].ppo_mini_batch_size == config.buffer.train_batch_size
    assert parts["actor"].engine.router_replay.mode == "disabled"
    assert list(built.model.external_lib) == ["trinity_loss.trinity_verl_0_9"]


@pytest.mark.usefixtures("installed")
def test_what_a_user_writes_stays(config):
    config.trainer.trainer_config = {"model": {"external_lib": "mine"}, "actor": {"loss_scale_factor": 2.0}}
    parts, built = instantiate(config)
    assert parts["actor"].loss_scale_factor == 2.0
    assert list(built.model.external_lib) == ["mine", "trinity_loss.trinity_verl_0_9"]
    config.trainer.trainer_config = {"actor": {"router_relay": {}}}
    with pytest.raises(Exception, match="router_relay"):
        instantiate(config)


def test_with_verl_0_8_nothing_happens(bridge, monkeypatch):
    monkeypatch.setattr(trinity_config, "build_verl_config", STOCK)
    monkeypatch.setattr(verl, "__version__", "0.8.0")
    bridge.install()
    assert trinity_config.build_verl_config is STOCK


@pytest.mark.usefixtures("bridge")
@pytest.mark.parametrize("packed", [True, False])
def test_the_inputs_of_the_model_have_a_pad_size(packed):
    rows = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    data = TensorDict({"input_ids": rows, "position_ids": rows}, batch_size=[2])
    tu.assign_non_tensor(data, temperature=1.0, use_remove_padding=packed)
    _, outputs = FSDPEngineWithLMHead.prepare_model_inputs(types.SimpleNamespace(use_ulysses_sp=False), data)
    assert outputs["pad_size"] == 0
