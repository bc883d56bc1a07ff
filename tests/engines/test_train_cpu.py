"""Real training on the CPU: `recipes/train_cpu.py`, with verl's own trainers, in a process of its own."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("rich")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

METRICS = ("critic/score/mean", "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy")
STEPS = 3

pytestmark = pytest.mark.timeout(1500)


OURS = ("TRINITY_LOSS_TEST", str(os.getpid()))  # Tells the processes of these tests from those of other runs.


def start(folder, *arguments):
    command = [sys.executable, RECIPES / "train_cpu.py", "--folder", folder, "--save-every", "1", *arguments]
    return launch(command)


def launch(command):
    environment = dict([*os.environ.items(), OURS])
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where the tests run in the background, a shell had them ignore Ctrl-C, and what they start too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process, code=0):
    output = process.communicate()[0]
    assert process.returncode == code, output
    assert not left_behind(), "processes outlived the run"
    return output


def left_behind():
    marked = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            ours = environment.get(OURS[0]) == OURS[1] and "TRINITY_LOSS_RUN" in environment
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except psutil.Error:
            continue
    return marked


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, finish(start(folder, "--steps", str(STEPS)))


def test_a_run_says_what_it_did(run):
    folder, output = run
    assert f"step   {STEPS}/{STEPS}  score" in output
    assert "trinity_loss EnginePolicyLoss(loss_mode='vanilla'" in output
    assert "verl v1 (sync), 2 ranks, fsdp2" in output
    assert (folder / "picture.png").stat().st_size > 10_000
    records = read_log(folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["actor/micro_batches"] > 1 for record in records)
    # The loss reports what the whole mini-batch has, so its terms add up to what the engine reports.
    for record in records:
        total = record["actor/pg_loss"] - 0.001 * record["actor/entropy_loss"] + 0.001 * record["actor/kl_loss"]
        assert total == pytest.approx(record["actor/loss"], rel=1e-4)


@pytest.mark.engine
def test_an_interrupted_run_goes_on_and_repeats_the_numbers(run, tmp_path):
    process = start(tmp_path, "--steps", str(STEPS))
    log = tmp_path / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text()):  # verl saves a step before it logs it.
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in finish(process, code=130)
    assert len(read_log(tmp_path)) < STEPS

    logged = len(read_log(tmp_path))
    finish(start(tmp_path, "--steps", str(STEPS), "--resume"))
    ours, theirs = ({record["step"]: record for record in read_log(folder)} for folder in (tmp_path, run[0]))
    # A step that was saved, and not logged when its run was stopped, is not trained again.
    assert set(theirs) - set(ours) <= {logged + 1}
    assert STEPS in ours
    for step, record in ours.items():
        for key in METRICS:
            assert math.isclose(record[key], theirs[step][key], rel_tol=1e-5, abs_tol=1e-7), (step, key)


@pytest.mark.engine
def test_legacy_trainer(run, tmp_path):
    output = finish(start(tmp_path, "--steps", "2", "trainer.use_v1=false"))
    assert "verl legacy, 2 ranks" in output
    assert "trinity_loss EnginePolicyLoss(" in output
    # Both trainers draw the same first batch.
    assert read_log(tmp_path)[0]["critic/score/mean"] == pytest.approx(read_log(run[0])[0]["critic/score/mean"])


LOSS = "distillation.distillation_loss"
BESIDE_THE_REWARD = (
    f"{LOSS}.use_task_rewards=true",
    f"{LOSS}.loss_mode=k1",
    f"{LOSS}.use_policy_gradient=true",
    f"{LOSS}.distillation_loss_coef=0.5",
)


@pytest.mark.engine
@pytest.mark.parametrize("overrides", [(), BESIDE_THE_REWARD], ids=["top k alone", "an estimator beside the reward"])
def test_distillation(tmp_path, overrides):
    output = finish(start(tmp_path, "--recipe", "cpu_distillation", "--steps", "2", *overrides))
    assert "trinity_loss DistillingPolicyLoss(" in output
    for record in read_log(tmp_path):
        total = record["actor/distillation/loss"]
        if overrides:
            total = 0.5 * total + record["actor/pg_loss"]
            assert record["actor/distillation/abs_loss"] > 1
        else:
            assert "actor/pg_loss" not in record
            assert record["actor/distillation/teacher_mass_min"] < record["actor/distillation/teacher_mass"] < 1
        assert total == pytest.approx(record["actor/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.engine
def test_a_failure_shows_its_cause(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    raise ValueError('the reward is broken')\n")
    output = finish(start(tmp_path / "run", "--steps", "1", f"reward.custom_reward_function.path={reward}"), code=1)
    assert "ValueError: the reward is broken" in output


@pytest.mark.slow
def test_a_bad_number_ends_the_step_on_all_ranks(tmp_path):
    """Some rewards are NaN, and so the advantages of their groups: nobody waits for a rank that they stopped."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(ground_truth, **_):\n    return float('nan') if int(ground_truth) % 2 else 1.0\n"
    )
    started = time.monotonic()
    path = f"reward.custom_reward_function.path={reward}"
    output = finish(start(tmp_path / "run", "--steps", "1", "--stall-timeout", "900", path), code=1)
    said = "training failed: after step 0, trinity_loss.errors.NonFiniteError: advantages is nan at response token"
    assert said in output
    assert time.monotonic() - started < 300  # Where a rank that hangs would make it 900.


@pytest.mark.engine
def test_a_wrong_override_shows_its_cause(tmp_path):
    output = finish(start(tmp_path, "--steps", "1", "actor_rollout_ref.actor.no_such_key=1"), code=1)
    assert "no_such_key" in output


@pytest.mark.engine
def test_nothing_to_resume(tmp_path):
    assert "nothing to resume" in finish(start(tmp_path, "--resume"), code=1)


def test_find_error_prefers_the_cause():
    from training import find_error

    log = """
(AgentLoopWorkerTQ pid=1) ERROR: in _run_prompt
\x1b[36m(AgentLoopWorkerTQ pid=1)\x1b[0m Traceback (most recent call last):
(TaskRunnerV1 pid=2) something else
\x1b[36m(AgentLoopWorkerTQ pid=1)\x1b[0m   File "a.py", line 1, in f
\x1b[36m(AgentLoopWorkerTQ pid=1)\x1b[0m ray.exceptions.RayTaskError(KeyError): ray::Server.generate() (pid=3)
\x1b[36m(AgentLoopWorkerTQ pid=1)\x1b[0m   File "b.py", line 2, in g
\x1b[36m(AgentLoopWorkerTQ pid=1)\x1b[0m KeyError: 'cause'
Traceback (most recent call last):
  File "c.py", line 3, in h
RuntimeError: Sync replay buffer selected terminal groups with no materializable trajectories.
"""
    assert find_error(log).splitlines()[-1] == "KeyError: 'cause'"
    assert "just\nlines" in find_error("just\nlines")
    # Another process's progress bar stands within a traceback.
    within = 'Traceback (most recent call last):\n(TaskRunnerV1 pid=2) \rProgress: 33%\n  File "c.py"\nOSError: cause\n'
    assert find_error(within).splitlines()[-1] == "OSError: cause"
    # Ray prints a worker's traceback without the usual head where nobody asked for the result.
    for head in (
        "Unhandled error (suppress with 'X'): ray::W.f() (pid=3)",
        "ray.exceptions.RayTaskError(OSError): ray::W.f()",
    ):
        bare = f'{head}\n  File "c.py"\nOSError: cause\n(raylet) Worker PID: 3 Worker exit type: SYSTEM_ERROR\n'
        assert find_error(bare).splitlines()[-1] == "OSError: cause"


def test_find_error_tells_a_killed_process_from_one_that_ray_ends():
    from training import find_error

    killed = "fork server: ray::WorkerDict (process 7) was killed by SIGKILL\n"
    peer = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    trace = 'Traceback (most recent call last):\n  File "c.py", line 3, in h\n'
    assert find_error(f"{trace}{peer}\n{killed}").startswith("ray::WorkerDict (process 7)")
    assert find_error(f"{trace}ValueError: cause\n{killed}").endswith("ValueError: cause")
    gone = "(raylet) A worker died. Worker PID: 7 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker {}.\n"
    died = f"{trace}ray.exceptions.ActorDiedError: The actor died.\n"
    crashed = gone.format("unexpectedly exits with a connection error")
    assert find_error(crashed + died) == "a worker (process 7) was killed or crashed"
    ended = gone.format("exits unexpectedly by a signal. SystemExit is raised")
    assert find_error(ended + died).endswith("The actor died.")


def save_checkpoint(checkpoints, step):
    """As verl's FSDP engine does on two ranks."""
    (checkpoints / f"global_step_{step}" / "actor").mkdir(parents=True)
    for name in ("actor/model_world_size_2_rank_0", "actor/model_world_size_2_rank_1", "data"):
        torch.save({"step": torch.tensor(step)}, checkpoints / f"global_step_{step}" / f"{name}.pt")


def save_megatron_checkpoint(checkpoints, step):
    """As verl's Megatron engine does, in torch's own distributed format."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    actor = checkpoints / f"global_step_{step}" / "actor"
    weights = {"weight": torch.arange(1000.0), "bias": torch.zeros(3)}
    (actor / "model/huggingface").mkdir(parents=True)
    save_file(weights, actor / "model/huggingface/model.safetensors", metadata={"format": "pt"})
    dcp.save(weights, checkpoint_id=actor / "optimizer/dist_ckpt", no_dist=True)
    torch.save({}, actor / "optimizer/dist_ckpt/common.pt")
    (actor / "ckpt_contents.json").write_text("{}")
    torch.save({}, checkpoints / f"global_step_{step}" / "data.pt")


FILES = {
    save_checkpoint: ("actor/model_world_size_2_rank_1.pt", "data.pt"),
    save_megatron_checkpoint: (
        "actor/model/huggingface/model.safetensors",
        "actor/optimizer/dist_ckpt/__0_0.distcp",
        "actor/optimizer/dist_ckpt/common.pt",
        "actor/optimizer/dist_ckpt/.metadata",
        "actor/ckpt_contents.json",
        "data.pt",
    ),
}


@pytest.mark.parametrize(("save", "file"), [(save, file) for save, files in FILES.items() for file in files])
@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_the_last_whole_checkpoint_is_taken(save, file, harm, tmp_path):
    from checkpoints import last_checkpoint

    assert last_checkpoint(tmp_path) is None
    for step in (8, 9, 10):
        save(tmp_path, step)
    assert last_checkpoint(tmp_path).name == "global_step_10"
    harmed = tmp_path / "global_step_10" / file
    content = harmed.read_bytes()
    harmed.unlink()
    # verl writes its list of contents, and torch its index, when all the rest is there: they are there or not.
    if harm == "cut" and harmed.suffix in (".pt", ".distcp", ".safetensors"):
        harmed.write_bytes(content[:-30])
    (tmp_path / "latest_checkpointed_iteration.txt").touch()  # Left empty by a full disk.
    assert last_checkpoint(tmp_path).name == "global_step_9"


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path):
    from train_cpu import replace_file, write

    replace_file(tmp_path / "log", "old")
    (tmp_path / ".log").unlink(missing_ok=True)
    (tmp_path / ".log").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*\.log"):
        replace_file(tmp_path / "log", "new")
    assert (tmp_path / "log").read_text() == "old"
    with pytest.raises(OSError, match="'/dev/full'"):
        write(Path("/dev/full"), "line", mode="a")


def test_a_new_run_keeps_the_one_before(tmp_path):
    from train_cpu import keep_previous

    folder, previous = tmp_path / "cpu", tmp_path / "cpu.previous"
    save_checkpoint(folder / "checkpoints", 10)
    (folder / "log.jsonl").write_text("ten")
    keep_previous(folder)
    assert not folder.exists()
    assert (previous / "log.jsonl").read_text() == "ten"
    # One that failed before its first checkpoint does not take its place.
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    keep_previous(folder)
    assert not (folder / "checkpoints").exists()
    assert (previous / "checkpoints" / "global_step_10" / "data.pt").exists()


@pytest.mark.slow
def test_soak_for_a_moment(tmp_path):
    command = [sys.executable, RECIPES / "soak.py", "--runs", "1", "--steps", "3", "--folder", tmp_path / "soak"]
    output = finish(launch(command))
    assert "left behind: nothing" in output
    memory = [json.loads(line) for line in (tmp_path / "soak" / "memory.jsonl").read_text().splitlines()]
    assert [record["step"] for record in memory] == [1, 2, 3]
    for record in memory:
        assert sum(record["bytes"].values()) > 2**28
        assert {"gcs_server", "verl.trainer.main_ppo", "fork_server.py"} <= {
            name.split()[0] for name in record["bytes"]
        }
    assert (tmp_path / "soak" / "memory.png").exists()


def test_soak_tells_memory_that_grows():
    from soak import GROWTH, growth

    assert growth([{"a (1)": 10}, *[{"a (1)": 100}] * 99]) == (0, {"a (1)": 0})
    total, by_process = growth([{"a (1)": 100, "b (2)": 100 + step} for step in range(100)])
    assert total == pytest.approx(60 / 229.5)
    assert total > GROWTH
    assert list(by_process.items()) == [("b (2)", 60), ("a (1)", 0)]
