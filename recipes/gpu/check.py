"""Checks on a machine with GPUs what a CPU cannot show; takes ten minutes at most.

    python recipes/gpu/check.py

Says of each check whether it passed, failed or was skipped, and why. Ends with 0 if all that ran passed, 1 if one
failed, 2 if there is no CUDA. ``--device cpu`` runs those parts that a CPU can run, to see that this file works.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss
from trinity_loss.bench import BenchOptions, bench
from trinity_loss.invariance.audit_report import load_audit
from trinity_loss.tables import print_table
from trinity_loss.verl.harness import BatchSpec, EngineCase, EngineResult, run_cases

RECIPES = Path(__file__).resolve().parents[1]
SECONDS = 600
# Of the gradient, relative. bf16 keeps 8 bits, and how sequences share a row decides what is rounded: a CPU shows 2e-3.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
LOCAL_MEAN = 0.1  # A local mean is off by more, so a check that passes could have failed.

OURS = EnginePolicyLoss(LossConfig(entropy_coeff=0.01, use_kl_loss=True))
BASE = EngineCase(OURS, trinity_worker=True, batch=BatchSpec(layout="nested"))


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: What is shown.
        run: From the device and the seconds that are left to whether it passed, and what was seen.
        gpus: How many it needs.
        modules: What has to be installed.
        cpu: Whether it runs on a CPU as well.
        file: A file that has to be there.
    """

    name: str
    run: Callable[[str, float], tuple[bool, str]]
    gpus: int = 1
    modules: tuple[str, ...] = ()
    cpu: bool = False
    file: Path | None = None


def speed(device: str, seconds: float) -> tuple[bool, str]:
    """Compare loss and gradient with verl's ppo_loss, and time both, in the cases of docs/speed.md."""
    options = (
        BenchOptions(device=device)
        if device == "cuda"
        else BenchOptions(sequences=(8,), longest=(64,), fill=(0.5,), modes=("token-mean",), runs=1)
    )
    return bench(options), "agrees with verl's ppo_loss in every case, times above"


def engine(name: Any, **options: Any) -> Callable[[str, float], tuple[bool, str]]:
    """Return a check of one engine: each cut against the whole on one rank, and a local mean, which has to be off.

    What is asked for has to be in effect, and with the per-token loss the error of context parallelism is taken out.
    """

    def run(device: Any, seconds: float) -> tuple[bool, str]:
        whole = replace(BASE, device=device, dtype=options.get("dtype", "float32"))
        case = replace(whole, **options)
        cuts = [replace(case, micro_batches=pieces) for pieces in (2, 4)]
        if case.world_size > 1 and case.tensor == case.pipeline == case.sequence_parallel == 1:
            cuts = cuts[:1]  # Four rows a rank, and the empty one shall not be alone.
        local = replace(case, loss=TrinityPolicyLoss(LossConfig()), micro_batches=2)
        local_whole = replace(whole, loss=local.loss)
        first, first_local, *results, far = run_cases(name, [whole, local_whole, *cuts, local], timeout=seconds)
        wrong = ignored(results, options)
        if wrong is not None:
            return False, wrong
        error = max(
            replace(result, gradient=result.gradient / too_large(result)).gradient_error(first) for result in results
        )
        off = far.gradient_error(first_local)
        seen = f"deviates by {error:.1e} of {TOLERANCE[case.dtype]:.0e} allowed; a local mean by {off:.2f}"
        return error < TOLERANCE[case.dtype] and off > LOCAL_MEAN, seen

    return run


def ignored(results: Sequence[EngineResult], options: dict[str, Any]) -> str | None:
    """Return an option that an engine did not take, or None: the gradient would be right without it, too."""
    for result in results:
        for rank in result.ranks:
            for key, value in options.items():
                if rank.layout.get(key, value) != value:
                    return f"{key} is {rank.layout[key]}, not {value}"
    return None


def too_large(result: EngineResult) -> float:
    """Return what the engine multiplies the gradient by: it divides by sums of tokens that are rounded down."""
    shared = result.case.sequence_parallel
    if not result.case.per_token_loss or shared == 1:
        return 1.0
    lengths = [piece.length for rank in result.ranks for piece in rank.micro_batches]
    return sum(lengths) / sum(length // shared * shared for length in lengths)


def train(recipe: str) -> Callable[[str, float], tuple[bool, str]]:
    """Return a check that trains one step of a recipe with vLLM, with verl's loss and ours beside it."""

    def run(device: Any, seconds: float) -> tuple[bool, str]:
        asked = ["trainer.total_training_steps=1", "data.train_batch_size=64"]
        done = main_ppo(recipe, [*asked, "+actor_rollout_ref.actor.policy_loss.shadow=true"], seconds)
        steps = [line for line in done.stdout.splitlines() if "shadow/grad_norm_ratio" in line]
        wanted = ("actor/loss", "shadow/loss", "shadow/grad_norm_ratio", "shadow/grad_cosine")
        shown = [part.strip() for part in (steps or [""])[-1].split(" - ") if part.strip().startswith(wanted)]
        return done.returncode == 0 and bool(steps), ", ".join(shown) or done.stderr[-300:]

    return run


def audited(recipe: str, *overrides: str) -> Callable[[str, float], tuple[bool, str]]:
    """Return a check that trains two steps of a recipe with vLLM and audits both: neither loss nor engine at fault."""

    def run(device: Any, seconds: float) -> tuple[bool, str]:
        with tempfile.TemporaryDirectory() as folder:
            asked = ["+actor_rollout_ref.actor.policy_loss.audit_steps=[1,2]", "data.train_batch_size=64", *overrides]
            asked += [f"+actor_rollout_ref.actor.policy_loss.audit_dir={folder}", "trainer.total_training_steps=2"]
            done = main_ppo(recipe, asked, seconds)
            reports = [load_audit(path) for path in sorted(Path(folder).glob("audit-step-*.json"))]
        for report in reports:
            print(f"{recipe}, {report}\n", flush=True)
        passed = done.returncode == 0 and len(reports) == 2
        passed &= all(report.verdict in ("faultless", "model") for report in reports)
        return passed, "; ".join(report.sentence for report in reports) or done.stderr[-300:]

    return run


def main_ppo(recipe: str, overrides: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Train some steps of a recipe, without validation and checkpoints."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(RECIPES), "--config-name", recipe]
    command += ["trainer.test_freq=-1", "trainer.save_freq=-1", *overrides]
    return subprocess.run(command, timeout=seconds, capture_output=True, text=True)


MEGATRON = ("megatron.core", "mbridge")
TE = "transformer_engine"
GSM8K = Path("~/data/gsm8k/train.parquet").expanduser()
BF16 = {"dtype": "bfloat16"}
CHECKS = (
    Check("bench on the device", speed, cpu=True),
    Check("FSDP2, one rank, float32", engine("fsdp"), cpu=True),
    Check("FSDP2, one rank, bf16", engine("fsdp", **BF16), cpu=True),
    Check("FSDP2, two ranks", engine("fsdp", world_size=2), gpus=2, cpu=True),
    Check("FSDP2, Ulysses", engine("fsdp", world_size=2, sequence_parallel=2, **BF16), 2, ("flash_attn",)),
    Check("Megatron, one rank, bf16", engine("megatron", **BF16), 1, MEGATRON, cpu=True),
    Check(
        "Megatron, two ranks, distributed optimizer, bf16",
        engine("megatron", world_size=2, distributed_optimizer=True, **BF16),
        2,
        MEGATRON,
    ),
    Check("Megatron, tensor parallel, bf16", engine("megatron", world_size=2, tensor=2, **BF16), 2, MEGATRON),
    Check(
        "Megatron, tensor and sequence parallel, bf16",
        engine("megatron", world_size=2, tensor=2, split_norms=True, **BF16),
        2,
        (*MEGATRON, TE),
    ),
    Check("Megatron, pipeline, bf16", engine("megatron", world_size=2, pipeline=2, **BF16), 2, MEGATRON),
    Check(
        "Megatron, context parallel, bf16",
        engine("megatron", world_size=2, sequence_parallel=2, **BF16),
        2,
        (*MEGATRON, TE),
    ),
    Check(
        "Megatron, context parallel, per-token loss, bf16",
        engine("megatron", world_size=2, sequence_parallel=2, per_token_loss=True, **BF16),
        2,
        (*MEGATRON, TE),
    ),
    Check("fsdp_grpo.yaml with vLLM, two steps audited", audited("fsdp_grpo"), 2, ("vllm",), file=GSM8K),
    Check(
        "megatron_grpo.yaml with vLLM, two steps audited",
        audited("megatron_grpo", "trainer.n_gpus_per_node=2"),
        2,
        ("vllm", TE, *MEGATRON),
        file=GSM8K,
    ),
    Check("fsdp_grpo.yaml with vLLM, one step in shadow mode", train("fsdp_grpo"), 2, ("vllm",), file=GSM8K),
)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def obstacle(check: Check, device: str, seconds: float) -> str | None:
    """Return why a check cannot run here, or None."""
    if device == "cpu" and not check.cpu:
        return "needs CUDA"
    if device == "cuda" and torch.cuda.device_count() < check.gpus:
        return f"needs {check.gpus} GPUs, there are {torch.cuda.device_count()}"
    missing = [module for module in check.modules if not installed(module)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if check.file is not None and not check.file.exists():
        return f"{check.file} is not there; see recipes/gsm8k.yaml"
    return None if seconds > 0 else f"the {SECONDS} s are over"


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="checks whose name has this in it")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA on this machine: nothing was checked")
        return 2
    deadline = time.monotonic() + SECONDS
    table, failed = [], False
    for check in (check for check in CHECKS if options.only in check.name):
        started = time.monotonic()
        why = obstacle(check, options.device, deadline - started)
        if why is not None:
            table.append((check.name, "skipped", why, ""))
            continue
        try:
            passed, seen = check.run(options.device, deadline - started)
        except Exception as error:  # The other checks still say something.
            passed, seen = False, str(error).strip().splitlines()[-1]
        failed |= not passed
        table.append((check.name, "passed" if passed else "FAILED", seen, f"{time.monotonic() - started:.0f} s"))
    print_table(("check", "result", "what was seen", "time"), table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
