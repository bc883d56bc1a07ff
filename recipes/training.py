"""Runs `python -m verl.trainer.main_ppo` with the CPU recipe as a subprocess, follows it, and stops all of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from fork_server import KILLED, MARK, launcher_command, processes_of

ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "runs" / "toy"

_GRACE = 10  # Seconds in which verl may end by itself after one of its processes was killed.


class TrainingFailed(Exception):
    """Training ended before its last step; the message is the reason."""


class Training:
    """One run of verl's trainer, as a context: leaving it leaves no process behind.

    Args:
        folder: Where the run writes: ``output.log`` (all that verl prints), ``verl.jsonl`` (verl's own metrics),
            ``hydra/`` (the configuration).
        steps: The last step.
        overrides: Hydra overrides for the recipe.
        stall_timeout: Seconds without a new step after which the run counts as hanging.
        recipe: A configuration in this folder that runs on a CPU.
    """

    def __init__(
        self, folder: Path, steps: int, overrides: list[str], stall_timeout: float = 600, recipe: str = "cpu_grpo"
    ) -> None:
        self.folder, self.steps, self.stall_timeout, self.recipe = folder, steps, stall_timeout, recipe
        self.log, self.metrics = folder / "output.log", folder / "verl.jsonl"
        self.overrides = [f"trainer.total_training_steps={steps}", f"hydra.run.dir={folder / 'hydra'}", *overrides]
        self.memory: dict[str, int] = {}  # Bytes of each process, when they were last looked at.
        self.peak_memory = 0
        self._looked = 0.0
        self._killed_at: float | None = None
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> "Training":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.metrics.unlink(missing_ok=True)
        # Not under TMPDIR: the paths of Ray's sockets have to stay short.
        self._ray_folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": self._ray_folder,  # wandb's temporary folders outlive a process that is killed.
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            "HYDRA_FULL_ERROR": "1",
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # One thread a process: there are more processes than cores, and sums keep their order.
            "OMP_NUM_THREADS": "1",
            "TQ_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # A process with threads cannot be forked.
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_task_events_report_interval_ms": "0",  # No history of tasks: it grows by 0.3 MiB a step.
        }
        task = [sys.executable, ROOT / "recipes" / "toy" / "task.py", TOY]
        subprocess.run(task, check=True, capture_output=True, env=environment)
        address = f"{self._ray_folder}/fork.sock"
        launcher = launcher_command(address)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(ROOT / "recipes")]
        command += ["--config-name", self.recipe, f"+ray_kwargs.ray_init._temp_dir={self._ray_folder}"]
        command += [f"++ray_kwargs.ray_init.runtime_env.py_executable='{launcher}'", *self.overrides]
        server = [sys.executable, str(ROOT / "recipes" / "fork_server.py"), "serve", address]
        with self.log.open("w") as log:
            self._fork_server, self._process = (
                subprocess.Popen(
                    arguments,
                    cwd=ROOT,
                    env=environment,
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only this process, which then stops the others in order.
                )
                # The server ends the run when this pipe closes, which it does too when this process is killed.
                for arguments, stdin in ((server, subprocess.PIPE), (command, subprocess.DEVNULL))
            )
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each step's metrics, with ``step`` and ``seconds``, when verl has written them.

        Raises:
            TrainingFailed: If verl ends before the last step, or makes no step for ``stall_timeout`` seconds.
        """
        position, step, last = 0, 0, time.monotonic()
        while True:
            running = self._process.poll() is None
            self._look_around()
            lines, position = self._read_lines(position)
            for line in lines:
                entry = json.loads(line)
                step, now = entry["step"], time.monotonic()
                yield {"step": step, "seconds": now - last, **entry["data"]}
                last = now
            if step >= self.steps and not running:
                return
            if not running:
                raise TrainingFailed(self._failure(f"verl ended with code {self._process.returncode}", step))
            if time.monotonic() - last > self.stall_timeout:
                raise TrainingFailed(self._failure(f"no step for {self.stall_timeout:.0f} s", step))
            if self._killed_at is not None and time.monotonic() - self._killed_at > _GRACE:
                raise TrainingFailed(self._failure("verl did not end", step))
            time.sleep(0.2)

    def left_behind(self) -> list[str]:
        """Return what outlived the run, after its end: processes and Ray's folder."""
        processes = [f"process {process.pid}" for process in processes_of(self._mark)]
        return processes + [self._ray_folder] * Path(self._ray_folder).exists()

    def _read_lines(self, position: int) -> tuple[list[bytes], int]:
        if not self.metrics.exists():
            return [], position
        with self.metrics.open("rb") as file:
            file.seek(position)
            complete = file.read().rpartition(b"\n")[0]
        return complete.splitlines(), position + len(complete) + bool(complete)

    def _failure(self, what: str, step: int) -> str:
        """Return what happened in a sentence, then what there is to read about it."""
        code = self._process.poll() or 0
        error = find_error(self._text())
        if code < 0:
            error = f"verl's driver (process {self._process.pid}) was killed by {signal.Signals(-code).name}"
        sentence, details = error.splitlines()[-1], f"\n{error}" if "\n" in error else ""
        return f"after step {step}, {sentence}\n\n{what}{details}\nThe whole log: {self.log}"

    def _text(self) -> str:
        return self.log.read_bytes().decode(errors="replace")  # `read_text` makes a line's end of a carriage return.

    def _look_around(self) -> None:
        if time.monotonic() < self._looked + 2:  # The kernel walks every page table for the memory.
            return
        self._looked, self.memory = time.monotonic(), {}
        for process in processes_of(self._mark):
            with suppress(psutil.Error):  # It ended meanwhile.
                name = f"{_name(process)} ({process.pid})"
                self.memory[name] = process.memory_full_info().pss  # Shared pages count once.
        self.peak_memory = max(self.peak_memory, sum(self.memory.values()))
        if self._killed_at is None and _KILLED.search(self._text()):
            self._killed_at = time.monotonic()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._fork_server.kill()
        self._fork_server.communicate()
        deadline = time.monotonic() + 5  # Ray's processes end by themselves once their driver is gone.
        while remaining := processes_of(self._mark):
            if time.monotonic() > deadline:
                for process in remaining:
                    process.kill()
            time.sleep(0.1)


def _name(process: psutil.Process) -> str:
    """Return what a process is: Ray's name for a worker, the script that Python runs, or the program."""
    name, arguments = process.name(), process.cmdline()[1:]
    if name.startswith("python"):
        return Path(next((word for word in arguments if not word.startswith("-")), name)).name
    return name.partition(".")[0]  # Ray adds the method that runs just now.


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SOURCE = re.compile(r"^(\([^()]*pid=\d+[^()]*\)) ?(.*)$")
_KILLED = re.compile(rf"^{KILLED}(.*)$", re.MULTILINE)
_GONE = re.compile(r"Worker PID: (\d+) Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits")
# A worker's traceback that Ray prints without the usual head.
_FROM_A_WORKER = re.compile(r"(Unhandled error .*: ray::|ray\.exceptions\.RayTaskError\()")
# What follows when another process fails, or is killed: Ray's errors, gloo's, and those of verl's agent loop.
_CONSEQUENCE = re.compile(
    r"no materializable trajectories|KeyboardInterrupt|CancelledError|ActorDiedError|ActorUnavailableError|"
    r"RayletDied|gloo.*(onnection|peer)|SystemExit"
)


def find_error(log: str) -> str:
    """Return what comes first in a log of verl and Ray and is not the consequence of something else.

    That is a traceback, or a line about a process that was killed. verl's agent loop logs what went wrong and goes
    on; the trainer then fails with something else.
    """
    lines_of: dict[str, list[tuple[int, str]]] = {}
    errors: list[tuple[int, str]] = []
    # A progress bar starts with a carriage return, behind which its line would lose the name of its process.
    plain = COLOUR.sub("", log).replace("\r", "").splitlines()
    for number, line in enumerate(plain):
        if killed := _KILLED.match(line):
            errors.append((number, killed[1]))
        match = _SOURCE.match(line)
        source, text = match.groups() if match else ("", line)
        lines_of.setdefault(source, []).append((number, text))
    errors = sorted([*errors, *(block for lines in lines_of.values() for block in _tracebacks(lines))])
    causes = [text for _, text in errors if not _CONSEQUENCE.search(text)]
    # Ray sees that a worker is gone even where the fork server had no time to say so.
    causes = causes or [f"a worker (process {pid}) was killed or crashed" for pid in _GONE.findall(log)]
    causes = causes or [text for _, text in errors]
    return causes[0] if causes else "\n".join(["the log ends with", *plain[-20:], "it ended without a traceback"])


def _tracebacks(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    start = 0
    for number, text in lines:
        if text.startswith("Traceback (most recent call last)") or (not block and _FROM_A_WORKER.match(text)):
            block, start = [text], number
        elif block:
            block.append(text)
            # The first line without indentation names the error; Ray puts a trace of its own behind it.
            if text and not text[0].isspace() and not text.startswith(("ray.exceptions.RayTaskError", "ray::")):
                yield start, "\n".join(block)
                block = []
