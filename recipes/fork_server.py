"""Starts Ray's workers as forks of one process that has imported torch and transformers already.

A run of verl has about ten Python processes, and each of them spends 5 to 15 seconds of a core on the same imports.
Here one process does that, and Ray's workers are copies of it: a run starts in a third of the time, and the
processes share the memory. Ray starts a worker with the command in ``runtime_env.py_executable``, for which
`launcher_command` returns this file; it asks the server for a copy and waits for its end.

Only what is imported before any worker starts is shared, and that process has one thread, which makes a fork safe.
"""

import gc
import importlib.util
import json
import os
import runpy
import shlex
import signal
import socket
import sys
import traceback

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
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # A copy that ended leaves nothing to wait for.
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                request = json.loads(stream.readline())
                if os.fork() == 0:
                    server.close()
                    _become_worker(connection, **request)


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
