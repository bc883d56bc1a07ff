"""The doctor finds what is planted in a configuration or an environment, and nothing in a sound one."""

import json

import pytest

from trinity_loss.cli import main
from trinity_loss.doctor import look, notes, traps
from trinity_loss.verl.composed import TARGET, compose

ACTOR = "actor_rollout_ref.actor"
LOSS = "distillation.distillation_loss"
OURS = f"{ACTOR}.policy_loss._target_={TARGET}"


def examine(*overrides, config_name="ppo_trainer"):
    """What the doctor sees in this process, and the traps."""
    from omegaconf import OmegaConf

    config = compose(config_name=config_name, overrides=overrides)
    actor = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
    correction = OmegaConf.to_container(config.algorithm.rollout_correction)
    distillation = OmegaConf.select(config, "distillation.distillation_loss") if config.distillation.enabled else None
    teacher = None if distillation is None else {"enabled": True, "distillation_loss": dict(distillation)}
    seen = look(actor, teacher, correction)
    return seen, traps(config, seen)


def test_distillation_with_our_loss():
    seen, found = examine(OURS, "distillation.enabled=True", f"{LOSS}.loss_mode=k2")
    assert found == []
    assert "distillation=DistillationLossConfig(loss_mode='k2'" in seen.loss


def test_a_sound_configuration_of_ours():
    seen, found = examine(OURS, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    assert found == []
    assert seen.ours
    assert seen.loss.startswith("EnginePolicyLoss(loss_mode='gspo', loss_agg_mode='seq-mean-token-mean'")
    assert seen.entry_point == "loads"
    assert seen.worker_class.endswith("TrinityTrainingWorker")
    assert {"verl", "torch", "trinity-loss"} <= set(seen.versions)


def test_verls_own_loss():
    seen, found = examine()
    assert found == []
    assert not seen.ours
    assert seen.loss == "verl.workers.utils.losses.ppo_loss (vanilla, token-mean)"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], "padded width"),
        ([OURS, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], "needs a positive finite number"),
        ([f"{ACTOR}.policy_loss.loss_mode=geo_mean"], "averages over its own micro-batch"),
        ([f"{ACTOR}.policy_loss.loss_mode=kl_cov"], "chooses tokens inside"),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo"], "ignores loss_agg_mode"),
        ([f"{ACTOR}.policy_loss.loss_mode=dro"], "dro_beta"),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl3"], "kl_loss_type is kl3"),
        ([f"{ACTOR}.loss_scale_factor=-3"], "loss_scale_factor is -3"),
        (["distillation.enabled=True"], "distillation_ppo_loss"),
        (
            [OURS, "distillation.enabled=True", f"{LOSS}.loss_mode=kl", f"{LOSS}.use_policy_gradient=False"],
            "does not depend on the teacher",
        ),
        ([OURS, f"{ACTOR}.policy_loss.loss_mode=misspelled"], "misspelled"),
    ],
)
def test_traps_of_a_configuration(overrides, says):
    _, found = examine(*overrides)
    assert any(says in text for text in found), found


def test_per_token_regime_without_packing():
    asked = [
        f"+{ACTOR}.megatron.override_transformer_config.calculate_per_token_loss=True",
        "actor_rollout_ref.model.use_remove_padding=False",
    ]
    _, found = examine(*asked, config_name="ppo_megatron_trainer")
    assert any("calculate_per_token_loss is on" in text for text in found), found
    _, found = examine(
        f"{ACTOR}.megatron.context_parallel_size=2",
        "actor_rollout_ref.model.use_remove_padding=False",
        config_name="ppo_megatron_trainer",
    )
    assert any("context parallelism switches" in text for text in found), found
    _, found = examine(asked[0], "actor_rollout_ref.model.use_remove_padding=True", config_name="ppo_megatron_trainer")
    assert found == []


@pytest.mark.parametrize("plugins", ["somebody_else", "none", ""])
def test_plugins_may_be_left_out_unless_a_cpu_is_asked_for(plugins, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", plugins)
    seen, found = examine(OURS)
    assert seen.entry_point == f"left out by VERL_USE_EXTERNAL_PLUGINS={plugins}"
    assert found == []
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    seen, found = examine(OURS)
    assert [text for text in found if "VERL_USE_EXTERNAL_PLUGINS" in text] == found != []


def test_traps_of_an_environment(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "a, b")
    _, found = examine(OURS)
    assert any("blank" in text for text in found)


def test_verls_own_worker_class_that_would_go_around():
    """Nothing selects it, so it is no trap; whoever uses it reads of it here, and in the log of the run."""
    seen, found = examine(OURS)
    assert found == []
    tinker = "verl.workers.engine_workers_tinker.TinkerActorRolloutRefWorker"
    assert [tinker in text and "goes around our loss" in text for text in notes(seen)] == [True]
    assert notes(examine()[0]) == []


CORRECTION, OWN = "algorithm.rollout_correction", f"+{ACTOR}.policy_loss.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=True"
REJECTING = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2")


@pytest.mark.parametrize(
    "overrides",
    [
        [OURS, BYPASS, *REJECTING],
        [OURS, BYPASS, *REJECTING, f"{OWN}=${{{CORRECTION}}}"],
        [OURS, BYPASS, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [BYPASS, f"{OWN}=${{{CORRECTION}}}", f"{ACTOR}.policy_loss.loss_mode=bypass_mode"],
        [f"{CORRECTION}.rollout_is=token"],
        [f"{ACTOR}.entropy_checkpointing=True"],
        [f"{ACTOR}.fsdp_config.entropy_checkpointing=True"],
        ["actor_rollout_ref.model.use_remove_padding=False"],
        [f"{ACTOR}.use_dynamic_bsz=True"],
        ["actor_rollout_ref.rollout.n=4"],
        [f"{ACTOR}.clip_ratio_high=0.28"],
        [f"{ACTOR}.optim.clip_grad=0.3"],
        [f"{ACTOR}.fsdp_config.qat.enable=True"],
    ],
)
def test_options_that_are_kept_twice_and_agree(overrides):
    assert examine(*overrides)[1] == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([BYPASS, *REJECTING], "verl makes its actor before it says so there"),
        ([BYPASS, f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], "verl makes its actor before it says so there"),
        ([OURS, BYPASS, *REJECTING, f"{ACTOR}.policy_loss.loss_mode=gspo"], "loss_mode=bypass_mode makes it reach"),
        ([OURS, BYPASS, *REJECTING, f"{OWN}.rollout_rs=token_k2"], "makes them one"),
        ([OURS, BYPASS, "actor_rollout_ref.rollout.calculate_log_probs=False"], "fails at the first step"),
        ([f"{CORRECTION}.rollout_is=token", "actor_rollout_ref.rollout.calculate_log_probs=False"], "does not say so"),
        ([OURS, f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], "takes them for those of the rollout"),
        ([OURS, f"{OWN}.bypass_mode=True"], "takes them for those of the rollout"),
        ([f"{OWN}.rollout_rs=token_k1", f"{OWN}.rollout_rs_threshold=2"], "which only loss_mode=bypass_mode reads"),
        ([f"{ACTOR}.clip_ratio=0.3"], "clip_ratio_low and clip_ratio_high are read"),
        ([f"{ACTOR}.use_fused_kernels=True"], "verl reads actor_rollout_ref.model.use_fused_kernels"),
        ([f"{ACTOR}.use_remove_padding=False", f"{ACTOR}.fsdp_config.entropy_checkpointing=True"], None),
        (
            [f"{ACTOR}.entropy_checkpointing=True", f"{ACTOR}.fsdp_config.entropy_checkpointing=False"],
            "verl reads actor_rollout_ref.actor.fsdp_config.entropy_checkpointing",
        ),
        ([f"{ACTOR}.grad_clip=0.3"], f"verl reads {ACTOR}.optim.clip_grad, which is 1.0"),
        ([f"{ACTOR}.qat.enable=True"], f"verl reads {ACTOR}.fsdp_config.qat.enable, which is False"),
        ([f"{ACTOR}.rollout_n=2"], "verl reads actor_rollout_ref.rollout.n"),
        (["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True"], "fails at its start"),
        ([f"+{ACTOR}.fsdp_config.use_dynamic_bsz=True"], f"verl reads {ACTOR}.use_dynamic_bsz, which is False"),
        ([f"+{ACTOR}.fsdp_config.max_token_len_per_gpu=9"], f"verl reads {ACTOR}.ppo_max_token_len_per_gpu"),
        ([OURS, "distillation.enabled=True", f"{LOSS}.clip_ratio=0.1"], "clip_ratio_low and clip_ratio_high are read"),
        ([f"{ACTOR}.ppo_micro_batch_size=4"], "reads actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, and fails"),
    ],
)
def test_options_that_are_kept_twice_and_differ(overrides, says):
    found = examine(*overrides)[1]
    assert (len(found) == 1 and says in found[0]) if says else found == [], found


def test_an_entry_point_that_fails(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda self: (_ for _ in ()).throw(ImportError("planted"))
    )
    seen, found = examine(OURS)
    assert "ImportError: planted" in seen.entry_point
    assert any("planted" in text for text in found)


def test_a_worker_class_that_goes_around():
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    class OtherWorker(ActorRolloutRefWorker):
        actor_worker_cls = TrainingWorker

    seen, found = examine(OURS)
    assert any("OtherWorker" in name for name in seen.goes_around)
    assert any("goes around our loss" in text for text in found)
    del OtherWorker.actor_worker_cls


def test_the_command_looks_into_a_ray_worker(capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json", OURS])
    plain = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    assert plain["traps"] == []
    assert set(plain["processes"]) == {"driver", "Ray worker"}
    assert plain["processes"]["Ray worker"]["loss"].startswith("EnginePolicyLoss(")
    assert plain["processes"]["Ray worker"]["worker_class"].endswith("TrinityTrainingWorker")


def test_the_command_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--no-ray", f"{ACTOR}.policy_loss.loss_mode=geo_mean"])
    out = capsys.readouterr().out
    assert left.value.code == 1
    assert "loss: verl.workers.utils.losses.ppo_loss (geo_mean, token-mean)" in out
    assert "trap: policy_loss.loss_mode is geo_mean" in out
