"""Trains a toy model with GRPO on the CPU: verl's own trainer and FSDP2 engine with the loss of trinity_loss.

Shows a line per step, and leaves in ``runs/cpu`` the metrics (``log.jsonl``), a picture (``picture.png``), all that
verl printed (``output.log``) and the checkpoints. verl saves a step before it reports it, so a step whose run is killed
in between is in a checkpoint, is not trained again, and has no line. What is not an option is a Hydra override:

    python recipes/train_cpu.py --steps 2 trainer.use_v1=false
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints import cut_short, last_checkpoint, step_of
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from training import ROOT, Training, TrainingFailed

SCORE, LOSS, NORM, PIECES = "critic/score/mean", "actor/loss", "actor/grad_norm", "actor/micro_batches"

DEFAULT_RECIPE = "cpu_grpo"

console = Console(highlight=False)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="the last step (default: 60)")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="a recipe for the CPU in recipes/ (default: cpu_grpo)")
    parser.add_argument("--folder", type=Path, help="what it writes (default: runs/cpu, for another recipe runs/NAME)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, as it was configured")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--stall-timeout", type=float, default=600, help="seconds without a step that mean it hangs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the recipe")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps has to be at least 1")
    if options.folder is None:
        options.folder = ROOT / "runs" / ("cpu" if options.recipe == DEFAULT_RECIPE else options.recipe)
    return options


def start_or_resume(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the steps that are done already and the overrides; a new run moves an old one of its name aside."""
    checkpoints, saved = checkpoints_of(folder), folder / "overrides.json"
    overrides = [f"trainer.default_local_dir={checkpoints}", f"trainer.save_freq={options.save_every}"]
    done: list[dict[str, Any]] = []
    if options.resume:
        latest = last_checkpoint(checkpoints)
        if latest is None:
            raise SystemExit(f"nothing to resume: there is no complete checkpoint in {checkpoints}")
        step = step_of(latest)
        if step >= options.steps:
            raise SystemExit(f"nothing to resume: {checkpoints} holds step {step} of {options.steps}")
        done = [record for record in read_log(folder) if record["step"] <= step]
        options.overrides = json.loads(saved.read_text()) + options.overrides
        # Not verl's `auto`: it takes what a file says that a full disk may have emptied.
        overrides += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={latest}"]
    else:
        keep_previous(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(saved, json.dumps(options.overrides))
    replace_file(folder / "log.jsonl", "".join(json.dumps(record) + "\n" for record in done))
    return done, overrides + options.overrides


def keep_previous(folder: Path) -> None:
    """Move what an old run left out of the way of a new one, which may fail at once; remove it if it saved nothing."""
    if last_checkpoint(checkpoints_of(folder)) is None:
        shutil.rmtree(checkpoints_of(folder), ignore_errors=True)
        return
    previous = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)
    console.print(f"the run before is kept in {previous}", soft_wrap=True)


def checkpoints_of(folder: Path) -> Path:
    return folder / "checkpoints"


def replace_file(file: Path, text: str) -> None:
    """Write a file so that, if the disk is full, the one of before stays."""
    new = file.with_name(f".{file.name}")
    write(new, text)
    os.replace(new, file)


def write(file: Path, text: str, mode: str = "w") -> None:
    """Write a file, with its name in the error if that fails: Python leaves it out where the disk is full.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        with file.open(mode) as stream:
            stream.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that were logged; what a full disk left of a line is left out."""
    complete = (folder / "log.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def line_of(record: dict[str, Any], steps: int) -> str:
    """Return one step as a line to read."""
    pieces = f"{record[PIECES]:g}" if PIECES in record else "?"
    return (
        f"step {record['step']:>3}/{steps}  score {record[SCORE]:.3f}  loss {record[LOSS]:+.4f}  "
        f"gradient norm {record[NORM]:.3f}  micro-batches {pieces}  {record['seconds']:.1f} s"
    )


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """Draw score, gradient norm and micro-batches of each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"score": SCORE, "gradient norm": NORM, "micro-batches per step": PIECES}
    figure, axes = plt.subplots(len(panels), 1, sharex=True, figsize=(8, 8), layout="constrained")
    for axis, (title, key) in zip(axes, panels.items(), strict=True):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axis.plot(*zip(*points, strict=True), marker=".", drawstyle="steps-mid" if key == PIECES else "default")
        else:
            axis.text(0.5, 0.5, "not reported by this loss", ha="center", va="center", transform=axis.transAxes)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def loss_that_ran(config: Any, log: str, records: list[dict[str, Any]]) -> str:
    """Return the loss's name: ours is what the workers say in the log, and reports a metric that only it has.

    Raises:
        TrainingFailed: If ours was selected and did not run, or ran and was not selected.
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    said = re.search(r"trinity_loss: training with (.*)", log)
    evidence = {
        f"the configuration selects {policy_loss._target_}": policy_loss._target_.startswith("trinity_loss."),
        f"the workers {'' if said else 'do not '}say that they took it": said is not None,
        f"its metric {PIECES} is {'there' if PIECES in records[-1] else 'missing'}": PIECES in records[-1],
    }
    if len(set(evidence.values())) > 1:
        raise TrainingFailed(f"it is not clear whether the loss of trinity_loss ran: {'; '.join(evidence)}")
    return f"trinity_loss {said[1]}" if said else f"verl's own ppo_loss, loss_mode {policy_loss.loss_mode}"


def summary(folder: Path, training: Training, records: list[dict[str, Any]], first: int, seconds: float) -> dict:
    """Return what ran and how it went, in words."""
    config = OmegaConf.load(folder / "hydra" / ".hydra" / "config.yaml")
    trainer = f"v1 ({config.trainer.v1.trainer_mode})" if config.trainer.use_v1 else "legacy"
    new = records[first:]
    per_step = sum(record["seconds"] for record in new[1:]) / max(1, len(new) - 1)
    scores = (f"{records[i][SCORE]:.3f} at step {records[i]['step']}" for i in (0, -1))
    return {
        "loss": loss_that_ran(config, training.log.read_text(errors="replace"), records),
        "trainer": f"verl {trainer}, {config.trainer.n_gpus_per_node} ranks, {config.actor_rollout_ref.actor.strategy}",
        "score": ", ".join(scores),
        "peak memory": f"{training.peak_memory / 2**30:.1f} GiB, all processes together",
        "time": f"{seconds:.0f} s, {new[0]['seconds']:.0f} s of them to the first step, then {per_step:.1f} s a step",
        "files": f"{folder}: log.jsonl, picture.png, output.log",
    }


def run(options: argparse.Namespace) -> None:
    """Train, and print and save how it goes."""
    folder = options.folder.resolve()
    records, overrides = start_or_resume(folder, options)
    first, started = len(records), time.monotonic()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    try:
        training = Training(folder, options.steps, overrides, options.stall_timeout, options.recipe)
        with training, bar:
            task = bar.add_task("starting Ray and verl, about a minute", total=options.steps, completed=first)
            for record in training.records():
                records.append(record)
                write(folder / "log.jsonl", json.dumps(record) + "\n", mode="a")
                bar.console.print(escape(line_of(record, options.steps)), soft_wrap=True)
                bar.update(task, completed=record["step"], description="training")
    finally:
        if records:
            try:
                draw(records, folder / "picture.png")
            except OSError as error:  # Nothing is lost, and what else went wrong has to be seen.
                console.print(f"no picture: {escape(str(error))}", soft_wrap=True)
    for name, value in summary(folder, training, records, first, time.monotonic() - started).items():
        console.print(f"{name:<12} {escape(value)}", soft_wrap=True)


_NOT_WRITTEN = re.compile(r"PytorchStreamWriter|inline_container|iostream error|No space left on device")


def reason(failure: Exception, checkpoints: Path) -> str:
    """Return why training failed. torch does not say which file it could not write, nor that the disk is full."""
    unwritten = max(cut_short(checkpoints), key=lambda file: file.stat().st_mtime, default=None)
    if unwritten is None or isinstance(failure, OSError):  # Which names its file.
        return str(failure)
    free = shutil.disk_usage(unwritten).free
    if not _NOT_WRITTEN.search(str(failure)) and free > 2**20:
        return str(failure)
    return f"{unwritten} could not be written, with {free / 2**20:.1f} MiB left on the disk\n\n{failure}"


def way_on(folder: Path, recipe: str) -> str:
    """Return what to do after a run that ended early."""
    suffix = "" if recipe == DEFAULT_RECIPE else f" RECIPE={recipe}"
    latest = last_checkpoint(checkpoints_of(folder))
    if latest is None:
        return f"there is no checkpoint yet: `make train{suffix}` starts again"
    return f"`make train RESUME=1{suffix}` goes on from the checkpoint of step {step_of(latest)}"


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, 1 for a failed run, 130 for an interrupted one."""
    options = parse(arguments)
    folder = options.folder.resolve()
    # Whoever asks this process to end, as make does, gets the same order as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options)
    except (TrainingFailed, OSError) as failure:
        why = reason(failure, checkpoints_of(folder))
        console.print(
            f"[bold red]training failed[/]: {escape(why)}\n\n{way_on(folder, options.recipe)}", soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        console.print(f"interrupted; {way_on(folder, options.recipe)}", soft_wrap=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
