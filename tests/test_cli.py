"""The command line: losses by name, bound to a verl configuration; exit codes; what is printed."""

import json
import re

import pytest
import torch

from trinity_loss.cli import main
from trinity_loss.errors import ConfigError
from trinity_loss.invariance import check_invariance, make_mini_batch

ACTOR = "actor_rollout_ref.actor"
FEW = ["--micro-batches", "1,3", "--ranks", "1,2"]


@pytest.fixture(scope="module")
def small_batch(tmp_path_factory):
    """A file with a recorded mini-batch, which makes a call quick."""
    path = tmp_path_factory.mktemp("batch") / "batch.pt"
    torch.save(make_mini_batch(14).to_dict(), path)
    return str(path)


@pytest.fixture
def call(capsys):
    """Calls the command; returns the exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("loss", "overrides", "code", "says"),
    [
        ("verl:vanilla", [], 0, "those of the whole mini-batch"),
        ("verl:geo_mean", [], 1, "averages over its own micro-batch's sequences"),
        ("verl:kl_cov", [], 1, "selection inside the micro-batch"),
        ("verl:clip_cov", [], 1, "selection inside the micro-batch"),
        (
            "verl:vanilla",
            [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=null"],
            1,
            "padded width as the norm",
        ),
        (
            "verl",
            [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
            0,
            "KL off",
        ),
        ("ours", [], 0, "ours:vanilla token-mean: ok"),
        ("ours:gspo", [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], 0, "ours:gspo seq-mean-token-mean: ok"),
        ("ours:dpo", [], 0, "ours:dpo"),
        ("trinity:ppo", [], 1, "local mean"),
        ("scaled_trinity:ppo", [], 0, "scaled_trinity:ppo token-mean: ok"),
        ("scaled_trinity:dpo", [], 0, "scaled_trinity:dpo token-mean: ok"),
        ("scaled_trinity:mix_chord", [], 0, "scaled_trinity:mix_chord token-mean: ok"),
    ],
)
def test_verify(call, small_batch, loss, overrides, code, says):
    got, out, err = call("verify", "--loss", loss, "--batch", small_batch, *FEW, *overrides)
    assert (got, err) == (code, "")
    assert says in out


def test_metrics_count_if_asked(call, small_batch):
    arguments = ("verify", "--loss", "verl:vanilla", "--batch", small_batch, *FEW)
    code, out, _ = call(*arguments)
    assert code == 0
    assert "note: metric depends on the cut" in out
    for flag in ("--strict", "--metrics"):
        code, out, _ = call(*arguments, flag)
        assert code == 1
        assert "fault: metric depends on the cut" in out


def test_json_and_plot(call, small_batch, tmp_path):
    figure = tmp_path / "figure.svg"
    code, out, _ = call(
        "verify", "--loss", "verl:geo_mean", "--batch", small_batch, *FEW, "--json", "--plot", str(figure)
    )
    plain = json.loads(out)
    assert code == 1
    assert plain["ok"] is False
    assert plain["findings"][0]["name"] == "local mean"
    assert "<svg" in figure.read_text()


def test_a_configuration_of_ones_own(call, small_batch, tmp_path):
    """Modes, coefficients and the token budget are read from it; overrides come on top."""
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "actor_rollout_ref:\n  actor:\n    loss_agg_mode: seq-mean-token-sum\n    use_dynamic_bsz: true\n"
        "    ppo_max_token_len_per_gpu: 70\n"
    )
    arguments = ("verify", "--batch", small_batch, *FEW, "--config-dir", str(tmp_path), "--config-name", "mine")
    code, out, err = call(*arguments, "--loss", "ours:cispo")
    assert (code, err) == (0, "")
    assert "ours:cispo seq-mean-token-sum: ok" in out
    assert "at most 70 tokens each" in out
    code, out, _ = call(*arguments, "--loss", "verl", f"{ACTOR}.loss_agg_mode=token-sum")
    assert code == 0
    assert "verl:vanilla token-sum: ok" in out


MODULE = """
import torch
from functools import partial
from verl.trainer.ppo.core_algos import agg_loss


def engine_loss(*, model_output, data, dp_group):
    return model_output["log_probs"].values().mean(), {}


def with_config(config, model_output, data, dp_group=None):
    assert config.clip_ratio == 0.3
    losses = model_output["log_probs"].values()
    return losses.sum() * data["dp_size"] / data["batch_num_tokens"], {}


def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info), {}


def local_policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None,
                      rollout_is_weights=None):
    return (-advantages * log_prob * response_mask).sum() / response_mask.sum().clamp(min=1), {}


def per_token(inputs, *, scale=1.0):
    return -scale * inputs.advantages * inputs.log_prob


def padded_by_hand(*, model_output, data, dp_group):
    losses = model_output["log_probs"] * data["response_mask"]
    return losses.sum() * data["dp_size"] / data["batch_num_tokens"], {}


def nested_only(*, model_output, data, dp_group):
    mask, prompts = data["response_mask"], data["prompts"].offsets().diff()
    rows = zip(model_output["log_probs"].unbind(), mask.unbind(), prompts.tolist())
    loss = sum((torch.where(m.bool(), x[n - 1 : -1], 0.0)).sum() for x, m, n in rows)
    return loss * data["dp_size"] / data["batch_num_tokens"], {}


def broken(*, model_output, data, dp_group):
    return data["nothing"]


number = 3


class Made:
    def __call__(self, *, model_output, data, dp_group):
        return model_output["log_probs"].values().sum(), {}


def nothing(*, model_output, data, dp_group):
    pass


def three(*, model_output, data, dp_group):
    return model_output["log_probs"].values().sum(), {}, 1


def vector(*, model_output, data, dp_group):
    return model_output["log_probs"].values()[None, :2], {}


def whole_number(*, model_output, data, dp_group):
    return data["response_mask"].values().sum(), {}


def detached(*, model_output, data, dp_group):
    return model_output["log_probs"].values().detach().sum(), {}


def of_my_own(*, model_output, data, dp_group):
    weight = data["my_reward"].mean() if len(data) == 0 else float(data["my_scale"])
    return weight * model_output["log_probs"].values().sum() * data["dp_size"] / data["batch_num_tokens"], {}
"""


def test_fields_of_ones_own(call, tmp_path, monkeypatch):
    module = MODULE.replace('data["my_reward"].mean() if len(data) == 0 else float', 'data["my_reward"].sum() * 0 + ')
    (tmp_path / "losses_with_fields.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["--field", "my_reward=sequence", "--field", "my_scale=0.5"]
    code, out, err = call("verify", "--loss", "losses_with_fields:of_my_own", *FEW, *given)
    assert (code, err) == (0, ""), out


def test_a_report_to_paste(call, small_batch):
    code, out, _ = call("verify", "--loss", "verl:geo_mean", "--batch", small_batch, *FEW, "--markdown")
    assert code == 1
    assert out.startswith("**verl:geo_mean token-mean: NOT INVARIANT: gradient")
    assert "| cut | layout |" in out
    assert re.search(r"torch \d", out)
    assert small_batch not in out
    assert not re.search(r"(?<!actor)/\w", out.partition("| cut |")[0])


def test_a_loss_by_name_in_a_test_suite():
    from trinity_loss.invariance import assert_invariant
    from trinity_loss.losses_by_name import bind_loss

    few = {"batch": make_mini_batch(14), "micro_batches": (1, 3), "dp_sizes": (1, 2)}
    assert (
        assert_invariant(bind_loss("verl:gspo", f"{ACTOR}.clip_ratio=0.1"), **few).loss_name == "verl:gspo token-mean"
    )
    assert assert_invariant(bind_loss("ours:dpo"), **few).ok
    with pytest.raises(AssertionError, match="averages over its own micro-batch"):
        assert_invariant(bind_loss("verl:geo_mean"), **few)
    with pytest.raises(ConfigError, match="losses; expected one"):
        bind_loss("ours:all")


def test_a_test_suite_has_what_the_command_has(tmp_path, monkeypatch):
    from trinity_loss.invariance import assert_invariant
    from trinity_loss.losses_by_name import bind_loss

    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    few = {"batch": make_mini_batch(14), "micro_batches": (1, 3), "dp_sizes": (1, 2)}
    own = "losses_of_mine:of_my_own"
    assert assert_invariant(bind_loss(own, fields={"my_scale": "0.5"}), **few).ok
    with pytest.raises(ConfigError, match="the mini-batch has that field"):
        assert_invariant(bind_loss(own, fields={"advantages": "token"}), **few)
    paired = check_invariance(bind_loss("verl:geo_mean", group_size=2), **few)
    assert {len(rows) % 2 for row in paired.rows for rank in row.cut.ranks for rows in rank} == {0}
    report = assert_invariant(bind_loss("test_contracts:slime", contract="slime"), **few)
    assert report.tolerance == 1e-5  # It is computed in float32.
    with pytest.raises(ConfigError, match="token_budgets has no effect with the contract trl"):
        check_invariance(bind_loss("test_contracts:compute_local", contract="trl"), token_budgets=(100,))


@pytest.mark.parametrize(
    ("name", "code"),
    [("engine_loss", 1), ("with_config", 0), ("policy_loss", 0), ("local_policy_loss", 1), ("per_token", 0)],
)
def test_a_loss_of_ones_own(call, small_batch, tmp_path, monkeypatch, name, code):
    """An engine loss, one that takes verl's configuration, a policy loss of verl's signature and one per token."""
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    got, out, err = call(
        "verify", "--loss", f"losses_of_mine:{name}", "--batch", small_batch, *FEW, f"{ACTOR}.clip_ratio=0.3"
    )
    assert (got, err) == (code, "")
    assert ("local mean" in out) is bool(code)


def test_a_layout_of_the_engines_that_was_left_out_is_in_the_sentence(call, tmp_path, monkeypatch):
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = call("verify", "--loss", "losses_of_mine:nested_only", *FEW)
    assert code == 0
    assert "; nothing is known of the padded layout, which verl's engines send" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--loss", "losses_of_mine:padded_by_hand"], "cannot be run: "),
        (["verify", "--loss", "verl:misspelled"], "verl has no loss 'misspelled'"),
        (["verify", "--loss", "nonsense"], "--loss is 'nonsense'"),
        (["verify", "--loss", "no_such_module:loss"], "No module named"),
        (["verify", "--loss", "losses_of_mine:number"], "expected a callable"),
        (["verify", "--loss", "losses_of_mine:broken"], "cannot be run: KeyError"),
        (["verify", "--loss", "losses_of_mine:Made"], "is a class; expected a function or an object"),
        (["verify", "--loss", "losses_of_mine:nothing"], "the loss returned None"),
        (["verify", "--loss", "losses_of_mine:three"], "the loss returned a tuple of 3"),
        (["verify", "--loss", "losses_of_mine:vector"], "a tensor of shape [1, 2]"),
        (["verify", "--loss", "losses_of_mine:whole_number"], "the loss is a whole number, torch.int64"),
        (["verify", "--loss", "losses_of_mine:detached"], "has no graph"),
        (["verify", "--loss", "losses_of_mine:of_my_own"], "--field my_scale=token, my_scale=sequence or"),
        (["verify", "--loss", "wrong_syntax:loss"], "SyntaxError"),
        (["verify", "--loss", "leaves_at_import:loss"], "SystemExit"),
        (["verify", "--plot", "figure.xyz"], "expected a file that ends in one of .png"),
        (["verify", "--json", "--markdown"], "argument --markdown: not allowed with argument --json"),
        (["audit", "x", "--json", "--markdown"], "argument --markdown: not allowed with argument --json"),
        (["verify", "--loss", "ours:all", "--plot", "figure.png"], "--plot draws 4 losses at most; here are "),
        (["bench", "--runs", "0"], "runs is 0; expected a whole number above 0"),
        (["bench", "--modes", "token_mean"], "modes is ('token_mean',); expected a list, each entry one of token-mean"),
        (["bench", "--cases", "sweep", "--sequences", "8"], "--cases sweep has no effect with --sequences"),
        (["verify", "--group-size", "0"], "--group-size is 0; expected a whole number above 0"),
        (["bench", "--seed", "-1"], "seed is -1; expected a whole number, 0 or more"),
        (["verify", "--engine", "fsdp", "--seed", "1"], "--seed has no effect with --engine"),
        (["verify", "--field", "advantages=3"], "the mini-batch has that field"),
        (["verify", "--contract", "areal", "--loss", "a:b", f"{ACTOR}.clip_ratio=0.3"], "configures verl; --contract"),
        (["verify", "--steps", "3"], "--steps has no effect without --engine"),
        (["verify", "--engine", "fsdp2", "--steps", "0"], "--steps is 0; expected a whole number above 0"),
        (["verify", "--engine", "fsdp2", "--contract", "areal"], "which know no --contract areal"),
        (["verify", "--contract", "nonsense"], "--contract is 'nonsense'; expected one of verl, trinity"),
        (["verify", "--weight-fn", "a:b"], "--weight-fn is AReaL's"),
        (["verify", "--field", "nonsense"], "is no NAME=WHAT"),
        (["verify", "--tolerance", "-1"], "tolerance is -1.0; expected null or a finite number, 0 or more"),
        (["verify", "--unknown"], "unrecognized: --unknown"),
        (["verify", "stray"], "unrecognized: stray"),
        (["verify", "--micro-batches", "0"], "no list of whole numbers"),
        (["verify", f"{ACTOR}.loss_agg_mode=mean"], "Invalid loss_agg_mode"),
        (["verify", f"{ACTOR}.no_such_key=1"], "cannot be composed"),
        (["verify", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], "needs a positive finite number"),
        (["verify", "--config-dir", "/no/such/folder"], "is no folder"),
        (["verify", "--batch", "/no/such/file.pt"], "/no/such/file.pt"),
        (["frobnicate"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_call_is_one_line(call, tmp_path, monkeypatch, arguments, says):
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    (tmp_path / "wrong_syntax.py").write_text("def loss(:\n")
    (tmp_path / "leaves_at_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_several_losses_a_line_each(call):
    """Four or more are judged in two processes."""
    names = ("verl:vanilla", "verl:geo_mean", "ours", "ours:gspo")
    code, out, _ = call("verify", *(word for name in names for word in ("--loss", name)), *FEW)
    assert code == 1
    assert re.search(r"verl:vanilla token-mean +ok", out)
    assert re.search(r"verl:geo_mean token-mean +NOT INVARIANT .*local mean", out)
    assert re.search(r"ours:vanilla token-mean +ok", out)
    assert re.search(r"ours:gspo token-mean +ok", out)
    assert "4 losses, 1 not invariant" in out


def test_trinity_rft_as_measured():
    """Stock TrinityPolicyLoss: eight ragged sequences in 1, 2, 4, 8 micro-batches."""
    from trinity_loss.losses_by_name import candidates
    from trinity_loss.verl.composed import compose

    batch = make_mini_batch(8, seed=3, masked=0)
    measured = {}
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        (make,) = candidates("trinity:ppo", compose(overrides=[f"{ACTOR}.loss_agg_mode={mode}"]))
        report = check_invariance(make().loss_fn, batch, dp_sizes=(1,))
        measured[mode] = [report.curve(1)[n] for n in (1, 2, 4, 8)]
        assert report.findings[0].name == "local mean"
        assert ("tokens" if mode == "token-mean" else "sequences") in report.sentence
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        assert measured[mode] == pytest.approx([1, 2, 4, 8], rel=1e-6)
    assert measured["token-mean"] == sorted(measured["token-mean"])
    assert measured["token-mean"][3] > 8


def test_names_need_a_configuration_that_makes_a_loss():
    from trinity_loss.losses_by_name import candidates
    from trinity_loss.verl.composed import compose

    config = compose()
    with pytest.raises(ConfigError, match="Trinity-RFT has no loss 'misspelled'"):
        next(candidates("trinity:misspelled", config))()
    with pytest.raises(ConfigError, match=r"expected one of ours:NAME, .*scaled_trinity:NAME or package.module:name"):
        next(candidates("trinity_scaled", config))
