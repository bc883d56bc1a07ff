"""Starts Ray's workers as forks of one process that has imported torch and transformers already.

A run of verl has about ten Python processes, and each of them spends 5 to 15 seconds of a core on the same imports.
Here one process does that, and Ray's workers are copies of it: a run starts in a third of the time, and the
processes share the memory. Ray starts a worker with the command in ``runtime_env.py_executable``, for which
`launcher_command` returns this file; it asks the server for a copy and waits for its end.

Only what is imported before any worker starts is shared, and that process has one thread, which makes a fork safe.

It is the parent of all workers, so it says which of them was killed. And it ends the whole run when whoever started it
is gone without having done so: then its standard input is closed.
"""

import gc
import importlib.util
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "TRINITY_LOSS_RUN"  # In the environment of every process of a run: even one that lost its parent is found.
KILLED = "fork server: "  # What a line of the log starts with that says who was killed.

# What verl imports and is slow to import. Not Ray, nor verl, which imports it: Ray reads its environment then.
PRELOADED = (
    "torch._dynamo",
    "tensordict",
    "transformers.models.qwen2.modeling_qwen2",
    "datasets",
    "wandb",
    "megatron.core",
    "torchdata.stateful_dataloader",
    "accelerate",
    "peft",
    "hydra",
    "fastapi",
    "aiohttp",
)


def launcher_command(address: str) -> str:
    """Return the command that takes the place of the Python interpreter of a worker."""
    # -S and -I leave out what a launcher does not need: it starts in 20 ms.
    return shlex.join([sys.executable, "-S", "-I", os.path.abspath(__file__), "launch", address])


def processes_of(mark: str) -> "list[psutil.Process]":
    """Return the processes of the run that has this mark."""
    import psutil  # A launcher, which sees nothing but the standard library, imports this file too.

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # It ended meanwhile, or is not ours to look at.
            continue
    return found


def serve(address: str) -> None:
    """Import what workers need, then fork one for each launcher that connects."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)  # Launchers that come during the imports wait here.
        for name in PRELOADED:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            raise RuntimeError(f"{len(threads)} threads after the imports: a fork would not be safe")
        gc.freeze()  # A collection in a copy would write to, and so duplicate, every shared page.
        signal.signal(signal.SIGCHLD, _reap)
        while True:
            readable, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in readable:
                _end_run(Path(address).parent)
                return
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                request = json.loads(stream.readline())
                if os.fork() == 0:
                    server.close()
                    _become_worker(connection, **request)


def _reap(*_: object) -> None:
    """Take note of all copies that ended, and say in the log which of them a signal ended."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            with suppress(OSError):  # The disk of the log is full.
                if ended.si_code != os.CLD_EXITED:
                    name = Path(f"/proc/{ended.si_pid}/comm").read_text().strip()  # Ray gives a worker its name.
                    killed = f"{name} (process {ended.si_pid}) was killed by {signal.Signals(ended.si_status).name}"
                    print(f"{KILLED}{killed}", flush=True)
            os.waitpid(ended.si_pid, 0)


def _end_run(folder: Path) -> None:
    """End all processes of the run this process belongs to and remove Ray's folder."""
    while others := [process for process in processes_of(os.environ[MARK]) if process.pid != os.getpid()]:
        for process in others:
            process.kill()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _become_worker(connection: socket.socket, argv: list[str], environ: dict[str, str], cwd: str) -> None:
    code: object = 0
    try:
        connection.send(b"1")  # The connection stays open until this process ends, by which the launcher knows.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def launch(address: str, argv: list[str]) -> None:
    """Ask for a worker that runs ``argv`` and wait for its end; without a server, become that worker."""
    request = {"argv": argv, "environ": dict(os.environ), "cwd": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            if connection.recv(1):
                connection.recv(1)
                return
    except OSError as error:
        print(f"no fork server at {address}: {error}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *argv])


if __name__ == "__main__":
    command, where, *arguments = sys.argv[1:]
    if command == "serve":
        serve(where)
    else:
        launch(where, arguments)
