"""What an audit compares, what it concludes, and how it says so."""

import json
import math
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trinity_loss import cli
from trinity_loss.errors import ConfigError
from trinity_loss.invariance.audit_report import AuditReport, draws_random, explain, load_audit
from trinity_loss.invariance.audit_verdict import judge
from trinity_loss.trinity_audit import Audits

verl_policy_options = pytest.importorskip("trinity_loss.verl.policy_options")
from trinity_loss.verl.audit_passes import shape_of  # noqa: E402
from trinity_loss.verl.audit_room import free_host_memory  # noqa: E402
from trinity_loss.verl.audit_settings import AuditSettings  # noqa: E402
from trinity_loss.verl.gradients import Comparison, joined, parameter_group  # noqa: E402
from trinity_loss.verl.kept_state import as_it_was  # noqa: E402


def call(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, capsys.readouterr().out


def test_a_comparison_is_its_definition_in_float64():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5000, generator=draw, dtype=torch.float64) for _ in range(2))
    a[7], b[9] = 0, 1e-30
    ranks = [Comparison(["attention", "mlp", "head"]) for _ in range(2)]
    ranks[0].add("attention", a[:1000], b[:1000])
    ranks[1].add("attention", a[1000:3000], b[1000:3000])
    # Both hold the same: each counts half.
    for comparison in ranks:
        comparison.add("mlp", a[3000:], b[3000:], weight=0.5)
    found = joined(ranks)
    assert sorted(found) == ["all", "attention", "mlp"]  # Nothing is said of what nobody holds.
    for name, x, y in (("attention", a[:3000], b[:3000]), ("mlp", a[3000:], b[3000:]), ("all", a, b)):
        expected = {
            "norm": x.norm(),
            "ratio": y.norm() / x.norm(),
            "cosine": x @ y / x.norm() / y.norm(),
            "error": (y - x).norm() / x.norm(),
            "mean": (y - x).abs().mean() / x.abs().mean(),
            "largest": (y - x).abs().max() / x.abs().max(),
            "halves": (y.bfloat16().double() == y).double().mean(),
        }
        for key, value in expected.items():
            assert getattr(found[name], key) == pytest.approx(float(value), rel=1e-10), (name, key)


def test_vectors_of_zeros_and_infinities_compare():
    comparison = Comparison(["nothing", "appeared", "broken"])
    comparison.add("nothing", torch.zeros(3), torch.zeros(3))
    comparison.add("appeared", torch.zeros(3), torch.ones(3))
    comparison.add("broken", torch.ones(3), torch.tensor([1.0, math.nan, 1.0]))
    found = joined([comparison])
    assert "nothing" not in found
    assert found["appeared"].error == math.inf
    assert math.isnan(found["broken"].error)


@pytest.mark.parametrize(
    ("name", "group_name"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("embedding.word_embeddings.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("output_layer.weight", "head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("base_model.model.model.layers.0.self_attn.v_proj.lora_A.default.weight", "attention"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "experts"),
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", "experts"),
        ("something.else", "other"),
    ],
)
def test_parameters_have_a_kind(name, group_name):
    assert parameter_group(name) == group_name


CLEAN = {"norm": 1.0, "ratio": 1.0, "cosine": 1.0, "error": 1e-7, "mean": 1e-7, "largest": 1e-7, "halves": 0.001}


def a_pass(
    name: str,
    micro_batches: int = 2,
    gradient: dict | None = None,
    of_tokens: dict | None = None,
    **tokens: float,
) -> dict:
    values = {"log_probs": 1e-8, "loss gradient": 1e-8} | {key.replace("_", " "): v for key, v in tokens.items()}
    values["log_probs"] = values.pop("log probs", values["log_probs"])
    return {
        "name": name,
        "against": "",
        "dynamic": True,
        "size": 64,
        "seconds": 0.5,
        "micro_batches": micro_batches,
        "loss": 0.25,
        "metrics": {"actor/ppo_kl": 0.1},
        "gradient": {"all": CLEAN | (gradient or {}), "mlp": CLEAN, "head": CLEAN},
        "tokens": {
            key: CLEAN | {"error": value, "norm": (of_tokens or {}).get(key, 1.0)} for key, value in values.items()
        },
    }


def findings(*passes: dict, dtype: str = "float32", first: dict | None = None, **other: object) -> dict:
    found = {
        "format": 1,
        "step": 1,
        "loss": "a loss",
        "dtype": dtype,
        "tolerance": 1e-4 if dtype == "float32" else 2e-2,
        "ranks": 2,
        "data_parallel": 2,
        "device": "CPU",
        "layout": {"strategy": "fsdp2"},
        "versions": {"verl": "0.9.1"},
        "runs": [first or a_pass("as configured"), *passes],
        "left_out": [["single", "64 rows per rank are more than 16"]],
        "host_bytes": 2**20,
        "seconds": 3.0,
        "replay": {"ok": True, "sentence": "all is well"},
        "random": ["attention_dropout 0.1"],
        **other,
    }
    found["verdict"], found["sentence"] = judge(found)
    return found


FAR = {"error": 0.5, "ratio": 1.5}
WRONG = {"ok": False, "sentence": "gradient is 2 times too large"}
SAME = a_pass("repeat", gradient={"error": 0.0})


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (findings(SAME, a_pass("half")), "faultless", "which is rounding"),
        (findings(a_pass("repeat", gradient={"error": 5e-5}), a_pass("half", gradient={"error": 1.2e-4})),
         "faultless", "as far as the repeated pass, which is noise"),
        (findings(SAME, a_pass("half", gradient=FAR, log_probs=0.2), replay=WRONG), "loss", "2 times too large"),
        (findings(SAME, a_pass("half", gradient=FAR, loss_gradient=0.4)), "loss", "gave the same log-probs"),
        (findings(a_pass("repeat", log_probs=0.1), a_pass("same random numbers", log_probs=0.0)),
         "model", "dropout or another random layer is on (attention_dropout 0.1)"),
        (findings(a_pass("repeat", log_probs=0.1), a_pass("same random numbers", log_probs=0.1)),
         "model", "whatever is random"),
        (findings(SAME, a_pass("single", log_probs=0.1, first_in_a_row=1e-8, behind_others=0.2)),
         "model", "attention leaks between packed sequences"),
        (findings(SAME, a_pass("single", log_probs=0.1, first_in_a_row=0.1, behind_others=0.2)),
         "model", "or on rounding"),
        (findings(SAME, a_pass("half", 4, {"error": 0.5, "ratio": 0.5})), "engine", "divides by the number"),
        (findings(SAME, a_pass("half", 4, {"error": 1.0, "ratio": 2.0})), "engine", "multiplies by the number"),
        (findings(SAME, a_pass("half", gradient=FAR), a_pass("half, no router loss") | {"against": "no router loss"}),
         "engine", "that loss is averaged per micro-batch"),
        (findings(SAME, a_pass("half", gradient={"error": 0.003, "halves": 1.0})), "engine", "in bf16"),
        (findings(SAME, a_pass("half", gradient={"halves": 1.0})), "engine", "in bf16"),
        (findings(SAME, a_pass("half", gradient={"halves": 1.0}), dtype="bfloat16"), "faultless", "(bfloat16)"),
        (findings(SAME, a_pass("half", gradient={"error": 0.01}), dtype="bfloat16"), "faultless", "(bfloat16)"),
        (findings(SAME, a_pass("half", gradient={"error": math.nan})), "engine", "not finite"),
        (findings(SAME, a_pass("half", gradient=FAR, log_probs=5e-5)), "model", "its log-probs are 5e-05 off at half"),
        (findings(SAME, a_pass("half", log_probs=5e-5)), "faultless", "which is rounding"),
        (findings(SAME, a_pass("half", gradient=FAR, log_probs=5e-5), a_pass("no expert capacity"),
                  a_pass("half, no expert capacity") | {"against": "no expert capacity"}),
         "model", "without the capacity of experts they are not"),
        (findings(SAME, a_pass("half", gradient=FAR, log_probs=5e-5), a_pass("no expert capacity"),
                  a_pass("half, no expert capacity", log_probs=5e-5) | {"against": "no expert capacity"}),
         "model", "or on rounding"),
        (findings(a_pass("half", log_probs=0.1)), "model", "(attention_dropout 0.1), which the pass repeat would tell"),
        (findings(SAME, first=a_pass("as configured", gradient={"norm": 0.0})), "faultless", "nothing is known"),
        (findings(a_pass("half"), first=a_pass("as configured", gradient={"norm": 0.0})),
         "faultless", "gradient is 0 in every pass (no token in the mask, or no advantage)"),
        (findings(SAME), "faultless", "nothing is known of model and engine; the loss tried by itself: all is well"),
        (findings(SAME, first=a_pass("as configured", of_tokens={"log_probs": math.nan})),
         "model", "its log-probs are not finite"),
        (findings(SAME, first=a_pass("as configured", of_tokens={"loss gradient": math.inf})),
         "loss", "its gradient by the log-probs, which are finite, is not"),
        (findings(SAME, first=a_pass("as configured", gradient={"norm": math.inf})),
         "engine", "the parameters' gradient is not"),
        (findings(SAME, a_pass("half", gradient=FAR)), "engine", "most in the"),
    ],
)  # fmt: skip
def test_the_verdict(found, verdict, words):
    assert found["verdict"] == verdict, found["sentence"]
    assert words in found["sentence"]


def test_a_report_is_printed_written_and_read_again(tmp_path, capsys):
    report = AuditReport(findings(SAME, a_pass("half", 4, {"error": 0.5, "ratio": 0.5})))
    report.write(tmp_path / "reports")
    path = tmp_path / "reports" / "audit-step-1.json"
    assert load_audit(path) == report
    text = path.with_suffix(".md").read_text()
    assert "left out: single: 64 rows" in text
    assert "strategy=fsdp2" in text
    assert str(tmp_path) not in text
    assert text.count("\n| half |") == 1
    code, out = call(capsys, "audit", str(path), "--plot", str(tmp_path / "audit.png"))
    assert code == 1
    assert out.startswith("audit of step 1: ENGINE: the engine")
    assert (tmp_path / "audit.png").stat().st_size > 1000
    assert call(capsys, "audit", str(path), "--markdown")[1] == text + "\n"
    assert json.loads(call(capsys, "audit", str(path), "--json")[1]) == report.found


def test_a_report_names_no_folder_and_no_machine(tmp_path):
    """Whatever a loss is called by, an engine is told, or an error says."""

    @dataclass
    class Engine:
        strategy: str = "fsdp2"
        use_dynamic_bsz: bool = True
        param_offload: bool = False
        fsdp_size: int = 1
        override_transformer_config: dict = field(
            default_factory=lambda: {"recompute": Path("/scratch/me/x.json"), "dtype": torch.float32}
        )

    host = socket.gethostname()
    found = findings(SAME, loss="Loss(file='/home/me/loss.py')", left_out=[["half", f"gloo: {host} [10.1.2.3]:2950"]])
    report = explain(found, lambda **_: None, [], [], Engine())
    report.write(tmp_path)
    for text in (report.markdown(), str(report), (tmp_path / "audit-step-1.json").read_text()):
        assert not re.search(r"home|scratch|10\.1|2950", text)
        assert not re.search(rf"\b{re.escape(host)}\b", text)
    assert "`Loss(file='loss.py')`" in report.markdown()
    assert "gloo: HOST [HOST]" in report.markdown()
    assert "{'recompute': 'x.json', 'dtype': 'torch.float32'}" in report.markdown()
    assert "gradient ×" in report.markdown()
    assert report.found["layout"].keys() == {"strategy", "use_dynamic_bsz", "override_transformer_config"}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", '"text"', '{"format": 1, "runs": []}', '{"format": 1, "runs": [{}]}'),
        json.dumps(findings(SAME))[:-40],
        json.dumps(findings(SAME) | {"format": 2}),
        json.dumps(findings(SAME) | {"runs": [1]}),
    ],
)
def test_what_is_no_report_is_refused(content, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no report of an audit"):
        load_audit(path)
    assert call(capsys, "audit", str(path))[0] == 2
    assert call(capsys, "audit", str(tmp_path / "missing.json"))[0] == 2


def test_metrics_are_numbers_that_no_name_reduces_wrongly():
    metrics = AuditReport(findings(SAME, a_pass("half", gradient=FAR))).metrics()
    assert metrics["audit/fault"] == 3
    assert metrics["audit/gradient_off"] == 0.5
    assert metrics["audit/updates"] == 6
    assert not any("min" in name or "max" in name for name in metrics)  # verl reduces by these words.
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_metric_that_is_off_is_told_with_its_log_probs():
    far = {"metrics": {"actor/ppo_kl": 0.2}}
    for log_probs, words in ((1e-8, "with the same log-probs"), (8e-4, "where the log-probs are 8e-04 off")):
        report = AuditReport(findings(SAME, a_pass("half", log_probs=log_probs) | far, dtype="bfloat16"))
        assert re.match(f"metric actor/ppo_kl is 50.00% off at half,? {words}$", report.notes()[0])


def test_dropout_is_found_where_it_hides():
    class Attention(torch.nn.Module):
        attention_dropout = 0.25

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"hidden_dropout": 0.5, "attention_dropout": 0.0})()
            self.parts = torch.nn.ModuleList([Attention(), torch.nn.Dropout(0.1), torch.nn.Dropout(0.0)])

    assert sorted(draws_random([Block()])) == ["Dropout(0.1)", "attention_dropout 0.25", "hidden_dropout 0.5"]
    assert draws_random([torch.nn.Linear(2, 2)]) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("audit_steps", [0], "a training step, 1 or more"),
        ("audit_steps", "1,2", "expected a list"),
        ("audit_steps", 1, "expected a list, each entry a training step"),
        ("audit_steps", [1.5], "a training step, 1 or more"),
        ("audit_steps", [1], "audit_dir is not set"),
        ("audit_cuts", ["halve"], "one of repeat, half, twice, reverse, single"),
        ("audit_cuts", "half", "expected a list"),
        ("audit_cuts", [], "expected some of repeat, half"),
        ("audit_dir", 3, "a folder"),
        ("audit_dir", "", "a folder"),
    ],
)
def test_a_wrong_configuration_is_refused(field, value, words):
    needed = {"audit_steps": [1], "audit_dir": "x"} if value == [] else {}
    with pytest.raises(ConfigError, match=words) as error:
        verl_policy_options.PolicyLossOptions(**{**needed, field: value})
    assert f"policy_loss.{field}" in str(error.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_less_memory_than_its_host(version, tmp_path):
    host = free_host_memory(tmp_path)
    assert host > 2**20
    prefix = "" if version == 2 else "memory/"
    names = ["max", "current"] if version == 2 else ["limit_in_bytes", "usage_in_bytes"]
    (tmp_path / "memory").mkdir()
    (tmp_path / f"{prefix}memory.{names[0]}").write_text("1000\n")
    (tmp_path / f"{prefix}memory.{names[1]}").write_text("700\n")
    (tmp_path / f"{prefix}memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file 50\n")
    assert free_host_memory(tmp_path) == 350
    (tmp_path / f"{prefix}memory.{names[0]}").write_text("max\n")
    assert free_host_memory(tmp_path) > 2**20


def test_what_cannot_be_put_back_or_compared_is_refused():
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1), tf_config=SimpleNamespace(fp8="e4m3", fp8_recipe="delayed"))
    with pytest.raises(NotImplementedError, match="fp8_recipe=delayed"), as_it_was(engine):
        pass
    worker = SimpleNamespace(engine_config=SimpleNamespace(dynamic_context_parallel=True))
    with pytest.raises(NotImplementedError, match="dynamic_context_parallel"):
        shape_of(None, worker)


def test_what_a_run_will_not_audit_is_said(tmp_path):
    settings = AuditSettings(frozenset([1, 5, 60, 61]), tmp_path / "a" / "b")
    assert settings.notices(5, 60) == [
        "audit_steps [1] have gone by: the run begins with step 5",
        "audit_steps [61] will not come: the run ends with step 60",
    ]
    assert settings.folder.is_dir()
    assert settings.notices(1, -1) == []
    (tmp_path / "file").touch()
    (notice,) = AuditSettings(frozenset([1]), tmp_path / "file" / "reports").notices(1, 60)
    assert notice.endswith("file/reports cannot be written: the log alone will have the reports")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["audit_steps=[1,100]"], "audits steps [1, 100], of which [100] will not come (trainer.total_training_steps"),
        (
            ["audit_steps=[1]", "audit_cuts=[half]"],
            "2 times (as configured, with 128 tokens; half), so about 2 updates",
        ),
        (
            ["audit_step=[1]"],
            "none: policy_loss has no audit_step; an audit is configured by audit_steps, audit_dir, audit_cuts",
        ),
        (["audit_steps=1"], "none: policy_loss.audit_steps is 1; expected a list"),
        ([], "none; +actor_rollout_ref.actor.policy_loss.audit_steps=[1,100]"),
    ],
)
def test_a_forecast_says_what_an_audit_would_do(overrides, words, tmp_path):
    from trinity_loss.audit_forecast import forecast
    from trinity_loss.verl.composed import compose

    path = "+actor_rollout_ref.actor.policy_loss"
    asked = [f"{path}.{text}" for text in [*overrides, f"audit_dir={tmp_path}"]]
    folder = Path(__file__).parent.parent / "recipes"
    assert words in forecast(compose(str(folder), "cpu_grpo", ["trainer.total_training_steps=60", *asked]))


@pytest.mark.parametrize(
    ("steps", "folder", "words"),
    [("1, 100", "", "FOLDER|TRINITY_LOSS_AUDIT_DIR is not set"), ("0", "x", "such as 1,100"), ("1;2", "x", "'1;2'")],
)
def test_wrong_variables_of_trinity_rft_are_refused(steps, folder, words):
    with pytest.raises(ConfigError, match=words):
        Audits({"TRINITY_LOSS_AUDIT_STEPS": steps, "TRINITY_LOSS_AUDIT_DIR": folder})


def test_trinity_rft_audits_the_first_mini_batch_of_a_chosen_step(monkeypatch):
    seen = []
    monkeypatch.setattr("trinity_loss.verl.audit.audit", lambda *a: seen.append(a[2:]) or {"audit/fault": 0.0})
    audits = Audits({"TRINITY_LOSS_AUDIT_STEPS": "2", "TRINITY_LOSS_AUDIT_DIR": "x"})
    found = []
    for _ in range(3):
        audits.next_batch()
        found += [audits.of(None, None, 2) for _ in range(2)]
    assert found == [{}, {}, {"audit/fault": 0.0}, {}, {}, {}]
    ((settings, step, group_size),) = seen
    assert (sorted(settings.steps), step, group_size) == ([2], 2, 2)
    assert Audits({}).of(None, None, 1) == {}
