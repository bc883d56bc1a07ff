"""Audits planted faults in verl's real engines: prints the table of docs/results.md, and draws docs/images/audit.png.

python docs/audit_table.py               # all of them, and the figure
python docs/audit_table.py leak capacity # some, by their names
"""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "tests" / "engines"), str(DOCS.parent / "tests")]

from audit_runs import audit_all  # noqa: E402
from test_audit_in_engines import FSDP, MEGATRON  # noqa: E402

from trinity_loss.invariance.audit_report import AuditReport, plot_audits  # noqa: E402

#: What each run is called, and those of the figure.
NAMES = {
    "faultless": "FSDP2, float32",
    "faultless, verl's loss": "FSDP2, verl's own `vanilla` (shadow mode)",
    "faultless, bf16": "{}, bf16",
    "faultless, two ranks": "FSDP2, two ranks",
    "faultless, data parallel": "Megatron, data parallel, distributed optimizer",
    "faultless, pipeline": "Megatron, pipeline parallel",
    "faultless, tensor": "Megatron, tensor parallel",
    "faultless, not packed": "FSDP2, rows padded, not packed",
    "faultless, by tokens": "FSDP2, two ranks, cut by a token budget",
    "faultless, offloaded": "FSDP2, two ranks, parameters and optimizer offloaded",
    "faultless, FSDP1": "FSDP1, two ranks",
    "faultless, FSDP1, tied": "FSDP1, the head tied to the embedding",
    "faultless, FSDP1, LoRA": "FSDP1, LoRA",
    "faultless, tied": "FSDP2, the head tied to the embedding",
    "faultless, LoRA": "FSDP2, LoRA",
    "faultless, pipeline, tied": "Megatron, pipeline parallel, the head tied to the embedding",
    "faultless, expert bias": "Megatron, experts balanced by a bias",
    "faultless, distilled": "FSDP2, two ranks, a teacher's top k beside the policy loss",
    "faultless, taught alone": "FSDP2, two ranks, a teacher's top k alone, no log-probs",
    "faultless, hybrid": "FSDP2, hybrid sharding on four ranks",
    "faultless, virtual pipeline": "Megatron, virtual pipeline",
    "faultless, experts over ranks": "Megatron, expert parallel",
    "local mean": "a mean over the micro-batch's own tokens",
    "geo_mean": "verl's `geo_mean`",
    "padded width": "verl's `seq-mean-token-sum-norm`, no `loss_scale_factor`",
    "no dp_size": "a forgotten `dp_size`, two ranks",
    "Trinity-RFT": "Trinity-RFT's own PPO loss, two ranks",
    "faultless, Trinity-RFT scaled": "Trinity-RFT's PPO loss, scaled",
    "dropout": "{}, dropout of 0.1",
    "leak": "attention that sees the whole packed row",
    "bf16 reduction": "gradients reduced in bf16",
    "bf16 reduction, two ranks": "gradients reduced in bf16, two ranks, every micro-batch",
    "capacity": "Megatron, a mixture of experts that drops tokens beyond their capacity",
    "router": "Megatron, a mixture of experts with an auxiliary loss",
    "no num_micro_batch": "Megatron without the engine's factor `num_micro_batch`",
}
SHOWN = {"faultless": "ours", "geo_mean": "verl's geo_mean", "leak": "leaking attention", "router": "router's loss"}


def main(chosen: list[str]) -> None:
    """Audits the runs of these names, or all of them and draws the figure."""
    shown = {}
    print("| run | its name | verdict | in words |\n|---|---|---|---|")
    for engine, named in (("fsdp", FSDP), ("megatron", MEGATRON)):
        names = [name for name in named if not chosen or name in chosen]
        results = audit_all(engine, [named[name][0] for name in names]) if names else []
        for name, result in zip(names, results, strict=True):
            report = AuditReport(result.reports[1])
            engine_name = {"fsdp": "FSDP2", "megatron": "Megatron"}[engine]
            words = report.sentence.removeprefix(f"the {report.verdict}: ")
            print(f"| {NAMES[name].format(engine_name)} | `{name}` | {report.verdict} | {words} |")
            if name in SHOWN:
                titled = report.found | {"title": f"{SHOWN[name]}: {report.verdict}"}
                shown[name] = AuditReport(titled)
    if not chosen:
        plot_audits([shown[name] for name in SHOWN], str(DOCS / "images" / "audit.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
