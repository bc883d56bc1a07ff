"""Start an engine run in a process of its own, and its ranks as forks of that process.

The engines change process-wide state (verl's device platform, and for Megatron ``torch.cuda``), so they never
run in the caller's process. Importing verl takes longer than everything else in a run: the process imports it
once, and each rank is a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trinity_loss.verl.harness.engine_case import EngineError

POLL_SECONDS = 0.05
# A rank whose peer died fails too, and may be seen first: wait a moment, then see who failed first.
GRACE_SECONDS = 1.0
TAIL_CHARACTERS = 3000


def launch(module: str, job: Any, *, environment: dict[str, str], timeout: float) -> Any:
    """Run ``python -m module FOLDER`` and return what it left in the folder.

    Args:
        module: A module whose main calls `main`.
        job: What it reads; must be picklable.
        environment: Added to this process's environment.
        timeout: Seconds; after them the process and all its children are killed.

    Returns:
        What the function given to `main` returned.

    Raises:
        EngineError: If the run failed (its traceback is in the message) or time ran out.
        TypeError: If ``job`` cannot be pickled.
    """
    with tempfile.TemporaryDirectory(prefix="trinity_loss_") as name:
        folder = Path(name)
        try:
            (folder / "job").write_bytes(pickle.dumps(job))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"the loss must be picklable, or a string 'package.module:name': {error}") from error
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, name],
                env=_environment(environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise EngineError(f"no result after {timeout:g} s\n{_tail(folder / 'log')}") from None
        finally:
            if process.poll() is None:
                # The whole session: the ranks are forks, and a Ray driver has a cluster.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if (folder / "error").exists():
            raise EngineError(*pickle.loads((folder / "error").read_bytes()))
        if process.returncode:
            raise EngineError(f"the run ended with code {process.returncode}\n{_tail(folder / 'log')}")
        return pickle.loads((folder / "result").read_bytes())


def main(run: Callable[[Any], Any]) -> None:
    """The other side of `launch`: read the job, run it, leave the result or the error, end the process."""
    _finish(Path(sys.argv[1]), "", lambda: run(pickle.loads((Path(sys.argv[1]) / "job").read_bytes())))


def fork_ranks(run: Callable[[], Any], world_size: int, method: str = "fork") -> Any:
    """Run a function in ``world_size`` forks of this process, with the environment that torchrun sets.

    Args:
        run: Called once per rank.
        world_size: Number of ranks.
        method: ``"spawn"`` where a fork is not possible, as with CUDA; ``run`` is pickled then.

    Returns:
        What rank 0 returned.

    Raises:
        EngineError: As soon as one rank fails; the others are ended.
    """
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory(prefix="trinity_loss_ranks_") as name:
        folder = Path(name)
        ranks = [context.Process(target=_rank, args=(run, rank, world_size, folder)) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, folder)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return pickle.loads((folder / "result0").read_bytes())


def _environment(added: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Nothing is compiled here, and importing the compiler takes seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # What can be imported here can be imported there, so that a loss pickled by reference is found.
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        **added,
    }


def _rank(run: Callable[[], Any], rank: int, world_size: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    _finish(folder, str(rank), run)


def _finish(folder: Path, suffix: str, run: Callable[[], Any]) -> None:
    code = 0
    try:
        content, data = "result", pickle.dumps(run())
    except EngineError as error:
        code, content, data = 1, "error", pickle.dumps((str(error), error.finished))
    except BaseException:
        code, content, data = 1, "error", pickle.dumps((traceback.format_exc(), []))
    # Renamed when complete: nobody reads half a file, and the time stamps tell which rank failed first.
    (folder / f"part{suffix}").write_bytes(data)
    (folder / f"part{suffix}").rename(folder / f"{content}{suffix}")
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of process groups wait for peers that may be gone.
    os._exit(code)


def _wait(ranks: Sequence[BaseProcess], folder: Path) -> None:
    while any(rank.exitcode is None for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            time.sleep(GRACE_SECONDS)
            break
        time.sleep(POLL_SECONDS)
    errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        text, _ = pickle.loads(errors[0].read_bytes())
        raise EngineError(f"rank {errors[0].name.removeprefix('error')} failed:\n{text}")
    for number, rank in enumerate(ranks):
        if rank.exitcode:
            raise EngineError(f"rank {number} ended with code {rank.exitcode}")


def _tail(log: Path) -> str:
    return f"--- end of its output ---\n{log.read_text(errors='replace')[-TAIL_CHARACTERS:]}"
