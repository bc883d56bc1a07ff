"""Configurations that cannot mean what they say are refused when they are made, by name."""

import pickle
from dataclasses import FrozenInstanceError

import pytest

from trinity_loss import LossConfig
from trinity_loss.aggregation import AggregationMode, aggregation_mode_names, register_aggregation_mode
from trinity_loss.errors import ConfigError
from trinity_loss.registry import policy_loss_names, register_policy_loss

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss_mode": "ppoo"}, r"'ppoo'.*expected one of ppo, vanilla, gspo"),
        ({"loss_mode": "no_such_package.module:loss"}, "no_such_package"),
        ({"loss_mode": "math:no_such_loss"}, "no_such_loss"),
        ({"loss_agg_mode": "token_mean"}, r"'token_mean'.*token-mean, token-sum"),
        ({"entropy_agg_mode": "mean"}, "'mean'"),
        ({"kl_loss_type": "k4"}, r"'k4'.*low_var_kl\+"),
        ({"loss_agg_mode": "constant"}, r"loss_scale_factor is None.*constant"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 0}, "loss_scale_factor is 0"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": -3}, "loss_scale_factor is -3"),
        ({"loss_agg_mode": "constant", "loss_scale_factor": True}, "loss_scale_factor is True"),
        ({"loss_agg_mode": "constant", "loss_scale_factor": INF}, "loss_scale_factor is inf"),
        ({"loss_agg_mode": "constant", "loss_scale_factor": "8"}, "loss_scale_factor is '8'"),
        ({"loss_scale_factor": 8}, r"loss_scale_factor is 8.*'token-mean' has no divisor"),
        ({"entropy_coeff": NAN}, "entropy_coeff is nan"),
        ({"kl_loss_coef": INF}, "kl_loss_coef is inf"),
        ({"clip_ratio": -0.1}, "clip_ratio is -0.1"),
        ({"clip_ratio_low": True}, "clip_ratio_low is True"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0"),
        ({"use_kl_loss": "yes"}, "use_kl_loss is 'yes'"),
        ({"loss_args": {"clip_ratio_C": 3}}, r"'clip_ratio_C'.*takes none"),
        ({"loss_args": {"tau_pos": 1.0}}, r"'tau_pos'.*'ppo' takes none"),
        ({"loss_mode": "sapo", "loss_args": {"tau": 1.0}}, "takes tau_pos, tau_neg"),
        ({"loss_mode": "dpo", "loss_args": {"label_smoothing": 1.5}}, r"'label_smoothing'\] is 1.5; .* from 0 to 0.5"),
        ({"loss_mode": "rec", "loss_args": {"epsilon_low": 2}}, r"'epsilon_low'\] is 2; .* at most 1"),
        ({"loss_mode": "rec", "loss_args": {"epsilon_low_prime": 1.5}}, r"'epsilon_low_prime'\] is 1.5; .* at most 1"),
        ({"loss_mode": "sapo", "loss_args": {"tau_pos": 0}}, r"loss_args\['tau_pos'\] is 0.*above 0"),
        ({"loss_mode": "dro"}, "needs loss_args dro_beta"),
        ({"loss_mode": "topr", "loss_args": {"advantage_threshold": NAN}}, "advantage_threshold"),
        ({"loss_mode": "rec", "loss_args": {"clip_mode": "both"}}, r"'both'.*one of none, one-side"),
        ({"loss_mode": "bypass_mode", "loss_args": {"rollout_rs": "token_k9"}}, "token_k9"),
        ({"loss_mode": "bypass_mode", "loss_args": {"rollout_rs": "token_k1"}}, "rollout_rs_threshold is None"),
        ({"loss_mode": "bypass_mode", "loss_args": {"rollout_rs": ["token_k1"]}}, "rollout_rs.*null or a name"),
        (
            {"loss_mode": "bypass_mode", "loss_args": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 0.5}},
            "'0.5'; for seq_sum_k1 expected 1 or more",
        ),
        ({"loss_mode": "bypass_mode", "count_rejected_tokens": False}, "count_rejected_tokens"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'"),
        ({"nonfinite": "neutral", "count_rejected_tokens": False}, "count_rejected_tokens"),
        ({"rollout_metrics": "tokens"}, "'tokens'.*token, sequence, geometric"),
        ({"rollout_metrics_upper": 0.1}, "lower is 0.5, above upper"),
    ],
)
def test_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        LossConfig(**settings)


@pytest.mark.parametrize("field", ["entropy_agg_mode", "kl_agg_mode"])
def test_a_mode_is_named_by_its_field(field):
    with pytest.raises(ConfigError, match=f"^{field}: .*'token_mean'; expected one of token-mean"):
        LossConfig(**{field: "token_mean"})


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match=r"'clip_ratio_C'.*clip_ratio_c, loss_args"):
        LossConfig(clip_ratio_C=3)


def test_frozen_and_picklable():
    config = LossConfig(loss_mode="sapo", loss_args={"tau_pos": 2.0})
    with pytest.raises(FrozenInstanceError):
        config.clip_ratio = 0.3
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_divisor_goes_to_the_term_that_has_one():
    config = LossConfig(kl_agg_mode="constant", loss_scale_factor=8)
    assert config.aggregation_modes["kl"].loss_scale_factor == 8
    assert config.aggregation_modes["pg"].loss_scale_factor is None


def test_a_mode_of_ones_own_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "modes_of_mine.py").write_text(
        "from trinity_loss.aggregation import Constant, TokenMean\n\n\n"
        "class Mine(TokenMean):\n    pass\n\n\nclass Divided(Constant):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mode = LossConfig(loss_agg_mode="modes_of_mine:Mine").aggregation_modes["pg"]
    assert type(mode).__name__ == "Mine"
    divided = LossConfig(loss_agg_mode="modes_of_mine:Divided", loss_scale_factor=8)
    assert divided.aggregation_modes["pg"].loss_scale_factor == 8
    for name, says in (
        ("modes_of_mine:Nobody", "has no attribute 'Nobody'"),
        ("nowhere:Mine", "No module named 'nowhere'"),
        ("mine", "or a mode of your own as 'package.module:Class'"),
    ):
        with pytest.raises(ConfigError, match=rf"loss_agg_mode is '{name}'.*{says}"):
            LossConfig(loss_agg_mode=name)


def test_names_are_taken_once():
    with pytest.raises(ConfigError, match="'ppo' exists"):
        register_policy_loss("ppo")(lambda inputs: inputs.log_prob)
    with pytest.raises(ConfigError, match="'constant' exists"):
        register_aggregation_mode("constant", AggregationMode)
    assert "ppo" in policy_loss_names()
    assert "constant" in aggregation_mode_names()
