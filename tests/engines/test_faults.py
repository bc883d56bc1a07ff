"""Training that is broken while it runs: what `recipes/train_cpu.py` says, what it leaves, how it goes on.

One run is broken in every way, one after the other, and resumed each time; so what comes out at its end is at once
compared with a run that nothing happened to.
"""

import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from test_train_cpu import METRICS, left_behind, read_log, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 9
SECONDS = 60  # In which a broken run has to end; here about 10, more where the machine is busy.
RANK = "ray::WorkerDict"


@dataclass
class Broken:
    """What is seen of a run after something happened to it."""

    victim: int | None
    code: int
    output: str
    seconds: float
    left: list
    logged: list[int]


class Disk:
    """A small file system of its own, which is really full when it is filled; a folder where it cannot be mounted."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.ballast = folder, folder / "ballast"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
        # Nothing else fills a disk for real: a limit of a file's size gives another error, and /dev/full is one file.
        self.mounted = subprocess.run(mount, capture_output=True).returncode == 0

    def fill(self, left: int = 0) -> None:
        free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        self.ballast.write_bytes(bytes(free - left))

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def steps_of(folder) -> list[int]:
    return [record["step"] for record in read_log(folder)] if (folder / "log.jsonl").exists() else []


def processes() -> list[tuple[psutil.Process, str]]:
    """The processes of runs that are started here, with their command lines."""
    found = []
    for process in left_behind():
        try:
            found.append((process, " ".join(process.cmdline()).strip()))
        except psutil.Error:
            continue
    return found


def break_run(process, folder, steps, fault) -> Broken:
    """Wait until a run has logged `steps` steps more, then until `fault` has happened; see how it ends."""
    logged = len(steps_of(folder)) if (folder / "checkpoints").exists() else 0
    while len(steps_of(folder)) < logged + steps:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    while (victim := fault()) is None:
        assert process.poll() is None, process.communicate()[0]
    happened = time.monotonic()
    output = process.communicate()[0]
    seconds = time.monotonic() - happened
    print(f"--- ended {seconds:.0f} s after the fault\n{output}")  # Shown when a test fails.
    while left_behind() and time.monotonic() < happened + SECONDS:
        time.sleep(0.1)
    return Broken(victim, process.returncode, output, seconds, left_behind(), steps_of(folder))


def kill_rank(busy):
    """Kill one rank, within a step's update of the weights, or while it waits."""

    def fault():
        # Ray writes what a worker is doing behind its name.
        wanted = f"{RANK}.actor_rollout_ref_update_actor" if busy else RANK
        for rank, doing in processes():
            if doing == wanted:
                rank.kill()
                return rank.pid
        return None

    return fault


def kill_driver():
    (driver,) = (process for process, line in processes() if "-m verl.trainer.main_ppo" in line)
    driver.kill()
    return driver.pid


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    process = start(folder, "--steps", str(STEPS))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What was seen of each fault, by name, the log of the run that had them all, and what verl said on a full disk."""
    base = tmp_path_factory.mktemp("broken")
    disk, small = Disk(base / "disk", 64), Disk(base / "small", 1)
    folder, recorded = disk.folder / "run", small.folder / "recorded"
    policy_loss = "actor_rollout_ref.actor.policy_loss"
    recording = [f"+{policy_loss}.record_steps=[2,8]", f"+{policy_loss}.record_dir={recorded}"]

    def begin(*arguments):
        return start(folder, "--steps", str(STEPS), *arguments)

    def full_for_a_checkpoint():
        disk.fill(left=300_000)
        return 0

    seen = {}
    try:
        process = begin(*recording)
        if small.mounted:
            small.fill()
        seen["between"] = break_run(process, folder, 2, kill_rank(busy=False))
        said = (folder / "output.log").read_text()
        if small.mounted:
            small.ballast.unlink()
        seen["within"] = break_run(begin("--resume"), folder, 1, kill_rank(busy=True))
        seen["driver"] = break_run(begin("--resume"), folder, 1, kill_driver)
        if disk.mounted:
            seen["checkpoint"] = break_run(begin("--resume"), folder, 1, full_for_a_checkpoint)
            # Nothing is lost, either, when there is no room to go on.
            seen["full"] = break_run(begin("--resume"), folder, 0, lambda: 0)
            disk.ballast.unlink()
        process = begin("--resume")

        def kill_parent():
            process.kill()
            return process.pid

        seen["parent"] = break_run(process, folder, 1, kill_parent)
        process = begin("--resume")
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert (recorded / "step-8" / "mini-batch-1" / "rank-1.pt").exists()
        yield seen, read_log(folder), said if small.mounted else None
    finally:
        for process in left_behind():
            process.kill()
        disk.unmount()
        small.unmount()


def seen_on_a_full_disk(found):
    """What was found, where there was a `Disk`; it could not be mounted otherwise, and nothing else is really full."""
    if found is None:
        pytest.skip("a small file system, to be filled, can be mounted by root only")
    return found


def run_of(broken, fault) -> Broken:
    return seen_on_a_full_disk(broken[0].get(fault))


FAULTS = ("between", "within", "driver", "checkpoint", "full", "parent")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_run_ends_and_leaves_no_process(broken, fault):
    run = run_of(broken, fault)
    assert run.code == (-signal.SIGKILL if fault == "parent" else 1), run.output
    assert not run.left
    assert run.seconds < SECONDS


@pytest.mark.parametrize("fault", ["between", "within"])
def test_a_killed_worker_is_named(broken, fault):
    run = broken[0][fault]
    # On a busy machine Ray has once been the only one to notice.
    who = (f"{RANK} (process {run.victim}) was killed by SIGKILL", f"a worker (process {run.victim}) was killed")
    assert any(f"training failed: after step {run.logged[-1]}, {one}" in run.output for one in who)


def test_a_killed_driver_is_named(broken):
    run = broken[0]["driver"]
    assert f"verl's driver (process {run.victim}) was killed by SIGKILL" in run.output


def test_a_recording_that_cannot_be_written_is_named_and_ends_nothing(broken):
    said = seen_on_a_full_disk(broken[2])
    assert "failed, and training goes on without it: OSError: [Errno 28] No space left on device: " in said
    assert "recorded/step-2/mini-batch-1/rank-" in said


def test_a_checkpoint_that_cannot_be_written_is_named(broken):
    run = run_of(broken, "checkpoint")
    assert "could not be written, with 0.0 MiB left on the disk" in run.output
    assert f"global_step_{run.logged[-1] + 1}/actor/" in run.output


def test_no_room_to_go_on_is_said(broken):
    assert "training failed: [Errno 28] No space left on device: " in run_of(broken, "full").output


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_what_to_do_is_said(broken, fault):
    run = run_of(broken, fault)
    # A step may be saved and not yet logged.
    steps = (run.logged[-1], run.logged[-1] + 1)
    assert any(f"`make train RESUME=1` goes on from the checkpoint of step {step}\n" in run.output for step in steps)


def test_resumed_and_uninterrupted_runs_give_the_same_numbers(broken, straight):
    resumed, whole = ({record["step"]: record for record in log} for log in (broken[1], read_log(straight)))
    # A step that was saved, and not logged when its run was killed, is not trained again.
    assert len(resumed) >= STEPS - 4
    assert max(resumed) == STEPS
    for step, record in resumed.items():
        for key in METRICS:
            assert math.isclose(record[key], whole[step][key], rel_tol=1e-5, abs_tol=1e-7), (step, key)
