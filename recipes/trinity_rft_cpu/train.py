"""Runs Trinity-RFT's own ``trinity run`` on the CPU, stock and with the adapter, under 1, 2, 4, 8 micro-batches a rank.

All runs train on the same experiences. Ends with a table and a figure (``gradient_norm.png``) of the gradient norm of
both, and with code 1 if a run fails, which ``trinity run`` itself does not tell, or if the adapter's values depend on
the micro-batches. Every run leaves its configuration and its log in a folder of its own.

    python recipes/trinity_rft_cpu/train.py --losses adapter --algorithm dpo --micro-batches 1 4
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent
sys.path.insert(0, str(RECIPES))

import experiences  # noqa: E402
from fork_server import MARK, launcher_command, processes_of  # noqa: E402
from training import COLOUR, TrainingFailed, find_error  # noqa: E402

PLUGINS = {"stock": ("verl_0_9",), "adapter": ("verl_0_9", "engine_scaling")}
NORM, LOSS, PIECES = "actor/grad_norm", "actor/loss", "actor/micro_batches"
SAID = "trinity_loss: training with ScaledTrinityPolicyLoss"  # By a worker, in the log of a run with the adapter.
TOLERANCE = 1e-5
REFERENCE = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.05}}
ENTROPY = {"entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": 0.01}}
ALONE = {"kl_loss_fn": "none", "entropy_loss_fn": "none"}
MIXTURE = {
    "sample_strategy": "default",  # The rows say themselves which are an expert's; `mix` wants a second buffer.
    "policy_loss_fn_args": {
        "clip_range": 0.2,
        "use_dynamic_bsz": True,
        "ppo_mini_batch_size": 32,
        "ngpus_trainer": 2,
        "train_batch_size_usual": 24,
        "train_batch_size_expert": 8,
    },
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"policy_loss_fn": "ppo", "policy_loss_fn_args": {"clip_range": 0.2}, **REFERENCE, **ENTROPY},
    "rec": {"policy_loss_fn": "rec", **REFERENCE, **ENTROPY},
    "sft": {"policy_loss_fn": "sft", **ALONE},
    "sft_is": {"algorithm_type": "sft", "policy_loss_fn": "sft_is", **ALONE},
    "sft_phi": {"algorithm_type": "sft", "policy_loss_fn": "sft_phi", **ALONE},
    "dpo": {"policy_loss_fn": "dpo", **REFERENCE, "entropy_loss_fn": "none"},
    "mix": {"policy_loss_fn": "mix", **MIXTURE, **REFERENCE, **ENTROPY},
    "mix_chord": {"policy_loss_fn": "mix_chord", **MIXTURE, **REFERENCE, **ENTROPY},
}

console = Console(highlight=False)
console.width = max(console.width, 110)  # Of the table, also in a file.


def write_configuration(folder: Path, data: Path, options: argparse.Namespace, limit: int) -> Path:
    """Write the configuration of a run into its folder, with a copy of the experiences: reading marks them."""
    config = OmegaConf.load(HERE / "train.yaml")
    algorithm = {"algorithm_type": options.algorithm, **ALGORITHMS[options.algorithm]}
    kind = algorithm["algorithm_type"]
    schema = kind if kind in ("sft", "dpo") else "experience"
    shutil.copy(data / f"{schema}.db", folder)
    settings: dict[str, Any] = {
        "name": folder.name,
        "checkpoint_root_dir": str(folder / "checkpoints"),
        "model.model_path": str(data / "model"),
        "trainer.total_steps": options.steps,
        "trainer.max_token_len_per_gpu": limit,
        "buffer.trainer_input.experience_buffer.name": schema,
        "buffer.trainer_input.experience_buffer.path": f"sqlite:///{folder / schema}.db",
        **{f"algorithm.{key}": value for key, value in algorithm.items()},
    }
    if kind == "dpo":
        settings["buffer.train_batch_size"] = 16  # Pairs, which are two rows each.
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(options.overrides))
    if config.trainer.trainer_strategy == "megatron":
        # mbridge saves in that way only what was loaded from several files. FSDP's checkpoints have no such field.
        OmegaConf.update(config, "trainer.trainer_config.actor.checkpoint.mbridge_config.memory_efficient", False)
    OmegaConf.save(config, folder / "config.yaml")
    return folder / "config.yaml"


class Run:
    """One ``trinity run`` on a Ray node of its own, as a context: leaving it leaves no process behind."""

    def __init__(self, folder: Path, config: Path, plugins: Path) -> None:
        self.folder, self.log, self._mark = folder, folder / "output.log", uuid.uuid4().hex
        self._arguments = ["run", "--config", str(config), "--plugin-dir", str(plugins)]

    def __enter__(self) -> "Run":
        import ray

        # Not below `runs`: the paths of Ray's sockets have to stay short.
        self._ray_folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        token = self._ray_folder / "token"  # One for this node, known to all that talk to it.
        token.touch(mode=0o600)
        token.write_text(uuid.uuid4().hex)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = launcher_command(f"{self._ray_folder}/fork.sock")
        scripts = Path(ray.__file__).parents[4] / "bin"  # `trinity run` calls `ray status`.
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            MARK: self._mark,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path),
            "TMPDIR": str(self._ray_folder),
            "VERL_PLATFORM": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TYPER_STANDARD_TRACEBACK": "1",  # Python's own, not one in boxes.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # A process with threads cannot be forked.
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": launcher}}),
        }
        node = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=32"]
        node += [f"--num-gpus={experiences.RANKS}", "--include-dashboard=false", "--object-store-memory=200000000"]
        node += [f"--temp-dir={self._ray_folder}"]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            server = [str(RECIPES / "fork_server.py"), "serve", f"{self._ray_folder}/fork.sock"]
            self._start(server, self.log, stdin=subprocess.PIPE)  # Ends the run when this process is gone.
            self._start(["-m", "ray.scripts.scripts", *node], self.folder / "ray.log", without=("RAY_ADDRESS",))
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in (self.folder / "ray.log").read_text():
                if time.monotonic() > deadline or self._processes[-1].poll() is not None:
                    raise TrainingFailed(f"Ray does not start; its log: {self.folder / 'ray.log'}")
                time.sleep(0.2)
            self._start(["-m", "trinity.cli.launcher", *self._arguments], self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, arguments: list[str], log: Path, stdin: int = subprocess.DEVNULL, without: tuple = ()) -> None:
        environment = {name: value for name, value in self._environment.items() if name not in without}
        command = [sys.executable, *arguments]
        with log.open("ab") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=environment,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only this process, which then stops the others.
                )
            )

    def __exit__(self, *_: object) -> None:
        for process in [*self._processes, *processes_of(self._mark)]:
            process.kill()
        for process in self._processes:
            process.wait()
        while remaining := processes_of(self._mark):
            for process in remaining:
                process.kill()
            time.sleep(0.1)
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    def wait(self, timeout: float, steps: int, adapter: bool) -> list[dict[str, float]]:
        """Return the metrics of each step.

        Raises:
            TrainingFailed: It does not end in ``timeout`` seconds, fails, says that it failed, has fewer steps, or
                trained with the other loss.
        """
        try:
            code = self._processes[-1].wait(timeout)
        except subprocess.TimeoutExpired:
            raise TrainingFailed(self._failure(f"it did not end in {timeout:.0f} s")) from None
        text = self.log.read_text(errors="replace")
        if code or re.search(r"Error in Trainer|Trainer failed|Failed to load plugin", text):
            raise TrainingFailed(self._failure(f"trinity run ended with code {code}"))
        records = read_metrics(self.folder)
        if len(records) != steps:
            raise TrainingFailed(self._failure(f"trinity run reported {len(records)} of {steps} steps"))
        if (SAID in text) != adapter:
            raise TrainingFailed(self._failure(f"the log {'lacks' if adapter else 'has'} the line {SAID!r}"))
        return records

    def _failure(self, what: str) -> str:
        # Trinity-RFT puts the head of a line of its log before every line of a traceback.
        head = r"(?m)^(\([^()]*pid=\d+[^()]*\) )?[A-Z]+ \d\d-\d\d [\d:]{8} \[[^\]]*\] "
        # Ray's own prefix stands before it, in colours.
        error = find_error(re.sub(head, r"\1", COLOUR.sub("", self.log.read_text(errors="replace"))))
        return f"{what}: {error.splitlines()[-1]}\n\n{error}\nThe whole log: {self.log}"


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what Trinity-RFT's monitor recorded, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, float]] = {}
    for events in folder.glob("checkpoints/**/tensorboard/trainer"):
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(tag):
                found.setdefault(event.step, {})[tag] = event.value
    return [found[step] for step in sorted(found) if NORM in found[step]]


def train(loss: str, pieces: int, options: argparse.Namespace, data: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of one run."""
    folder = options.folder / f"{options.algorithm}-{loss}-{pieces}"
    shutil.rmtree(folder, ignore_errors=True)
    plugins = folder / "plugins"
    plugins.mkdir(parents=True)
    for name in PLUGINS[loss]:
        shutil.copy(RECIPES / "trinity_plugins" / f"{name}.py", plugins)
    limit = 4096 if pieces == 1 else experiences.token_limits([pieces])[pieces]
    config = write_configuration(folder, data, options, limit)
    with console.status(f"{loss}, {pieces} micro-batches a rank, half a minute"), Run(folder, config, plugins) as run:
        records = run.wait(options.timeout, options.steps, loss == "adapter")
    first = records[0]
    console.print(
        f"{loss:<8} micro-batches a rank {first[PIECES]:<4g} gradient norm {first[NORM]:.7g}  loss {first[LOSS]:+.7g}"
    )
    return records


def spread(records: list[list[dict[str, float]]], key: str) -> float:
    """Return how far apart a metric is in some runs, over all steps: relatively, for small values to 0.1.

    A mean that is small because its terms cancel has their rounding in float32.
    """
    steps = [[record[key] for record in of_step] for of_step in zip(*records, strict=True)]
    return max((max(values) - min(values)) / max(map(abs, [*values, 0.1])) for values in steps)


def draw(norms: dict[str, dict[float, float]], file: Path) -> None:
    """Draw the gradient norm of step 1 against the number of micro-batches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for loss, points in norms.items():
        axis.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=f"Trinity-RFT 0.6.0, {loss}")
    ticks = sorted({x for points in norms.values() for x in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_xlabel("micro-batches a rank")
    axis.set_ylabel("gradient norm, step 1")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, 1 for a failed run or one whose values depend on the cut, 130 for an interrupted one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8], help="a rank (default: 1 2 4 8)")
    parser.add_argument("--losses", nargs="+", choices=PLUGINS, default=list(PLUGINS), help="default: both")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo", help="default: grpo")
    parser.add_argument("--steps", type=int, choices=range(1, experiences.STEPS + 1), default=2, help="default: 2")
    parser.add_argument("--folder", type=Path, default=RECIPES.parent / "runs" / "trinity_rft", help="what it writes")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that a run may take (default: 900)")
    parser.add_argument("overrides", nargs="*", help="settings of train.yaml, such as algorithm.loss_agg_mode=...")
    options = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # What make sends gets the same order as Ctrl-C.
    options.folder = options.folder.resolve()
    data = options.folder / "data"
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        task = [sys.executable, HERE / "experiences.py", data]
        subprocess.run(task, check=True, capture_output=True)  # It prints a lot.
        for loss in options.losses:
            for pieces in options.micro_batches:
                runs[loss, pieces] = train(loss, pieces, options, data)
    except TrainingFailed as failure:
        console.print(f"[bold red]training failed[/]: {escape(str(failure))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    names = [
        n
        for n in (NORM, LOSS, "actor/final_loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy_loss")
        if all(n in r[0] for r in runs.values())
    ]
    table = Table("loss", "micro-batches a rank", *(name.removeprefix("actor/") for name in names), title="step 1")
    for (loss, _), records in runs.items():
        table.add_row(loss, f"{records[0][PIECES]:g}", *(f"{records[0][name]:.7g}" for name in names))
    console.print(table)
    norms: dict[str, dict[float, float]] = {}
    for (loss, _), records in runs.items():
        norms.setdefault(loss, {})[records[0][PIECES]] = records[0][NORM]
    draw(norms, options.folder / "gradient_norm.png")
    console.print(f"figure: {options.folder / 'gradient_norm.png'}", soft_wrap=True)
    ours = [records for (loss, _), records in runs.items() if loss == "adapter"]
    keys = [key for key in ours[0][0] if re.match("actor/(?!perf/|micro_batches|lr)", key)] if ours else []
    apart = {key: spread(ours, key) for key in keys}
    if wrong := {key: f"{value:.1e}" for key, value in apart.items() if value > TOLERANCE}:
        console.print(f"[bold red]with the adapter these depend on the micro-batches[/], relatively by: {wrong}")
        return 1
    if ours:
        console.print(f"with the adapter {len(keys)} metrics agree to {max(apart.values()):.1e}, in every step")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
