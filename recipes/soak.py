"""Trains again and again, then for long, and says what was left behind and whether memory grew.

Leaves in ``runs/soak`` the memory of each process after each step of the long run (``memory.jsonl``) and a picture
(``memory.png``).
Ends with code 1 if a run failed or left a process or a file behind, or if memory grew. A file is one that is new in the
repository's folder, in /tmp or in /dev/shm, so nothing else should run beside it.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

from training import ROOT, Training, TrainingFailed

SHORT_STEPS = 2
PLACES = (ROOT, Path("/tmp"), Path("/dev/shm"))
GROWTH = 0.02  # Of the last fifth of a long run over its second; the first still warms up.
#: Four prompts a step: what stays behind after a step does so after a short one too.
SMALL_STEPS = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
LARGEST = 6  # Processes that are told apart from the rest.
FEWEST = 50  # Steps below which such a comparison says nothing.


def short_run(folder: Path) -> list[str]:
    """Train two steps and return what that left behind, beside what it is told to write."""
    before = entries()
    with Training(folder, SHORT_STEPS, overrides(folder)) as training:
        for _ in training.records():
            pass
    return training.left_behind() + sorted(map(str, entries() - before))


def entries() -> set[Path]:
    """Return what there is where a run may leave something."""
    return {path for folder in PLACES for path in folder.iterdir()}


def long_run(folder: Path, steps: int) -> list[dict[str, int]]:
    """Train ``steps`` steps and return the memory of each process after each of them, in bytes."""
    memory = []
    small = [*overrides(folder), *SMALL_STEPS]
    with Training(folder, steps, small) as training, (folder / "memory.jsonl").open("w") as log:
        for record in training.records():
            memory.append(training.memory)
            log.write(json.dumps({"step": record["step"], "bytes": training.memory}) + "\n")
            log.flush()
            total = sum(training.memory.values()) / 2**20
            print(f"step {record['step']:>4}/{steps}  {total:.0f} MiB  {record['seconds']:.1f} s")
    return memory


def overrides(folder: Path) -> list[str]:
    return [f"trainer.default_local_dir={folder / 'checkpoints'}"]


def growth(memory: list[dict[str, int]]) -> tuple[float, dict[str, float]]:
    """Compare the medians of the second fifth of a run and the last.

    Returns:
        By what share all processes together grew, and by how many bytes each of them did, the most first.
    """
    fifth = len(memory) // 5
    parts = memory[fifth : 2 * fifth], memory[-fifth:]
    before, after = (median(sum(sizes.values()) for sizes in part) for part in parts)
    names = {name for part in parts for sizes in part for name in sizes}
    medians = {name: [median(sizes.get(name, 0) for sizes in part) for part in parts] for name in names}
    grown = {name: last - first for name, (first, last) in medians.items()}
    return after / before - 1, dict(sorted(grown.items(), key=lambda item: -item[1]))


def draw(memory: list[dict[str, int]], file: Path) -> None:
    """Draw the memory after each step, the largest kinds of processes apart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [Counter[str]() for _ in memory]
    for counter, sizes in zip(kinds, memory, strict=True):
        for name, size in sizes.items():
            counter[name.rpartition(" (")[0]] += size  # Without the process's number.
    largest = [name for name, _ in kinds[-1].most_common(LARGEST)]
    layers = {name: [counter[name] / 2**20 for counter in kinds] for name in largest}
    layers["others"] = [sum(counter[name] for name in counter if name not in largest) / 2**20 for counter in kinds]
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    axis.stackplot(range(1, len(memory) + 1), layers.values(), labels=layers, alpha=0.8)
    axis.set(xlabel="step", ylabel="MiB", ylim=(0, None))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right", fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def soak(folder: Path, runs: int, steps: int) -> list[str]:
    """Return what went wrong, a sentence each."""
    wrong = []
    for number in range(1, runs + 1):
        started = time.monotonic()
        left = short_run(folder / "short")
        wrong += [f"run {number} left {what}" for what in left]
        print(f"run {number}/{runs}  {time.monotonic() - started:.0f} s  left behind: {', '.join(left) or 'nothing'}")
    if steps:
        memory = long_run(folder / "long", steps)
        draw(memory, folder / "memory.png")
        shutil.copy(folder / "long" / "memory.jsonl", folder)
        if len(memory) >= FEWEST:
            grown, by_process = growth(memory)
            most = max(sum(sizes.values()) for sizes in memory) / 2**20
            print(f"memory: {most:.0f} MiB at most, {grown:+.1%} from the second fifth to the last, of which")
            for name, size in list(by_process.items())[:LARGEST]:
                print(f"{size / 2**20:+8.2f} MiB  {name}")
            if grown > GROWTH:
                wrong.append(f"memory grew by {grown:.1%}, more than {GROWTH:.0%}")
    return wrong


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="short runs (default: 20)")
    parser.add_argument("--steps", type=int, default=500, help="steps of the long run; 0: none (default: 500)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="what it writes")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        wrong = soak(folder, options.runs, options.steps)
    except TrainingFailed as failure:
        wrong = [f"training failed: {failure}"]
    print("\n".join(wrong) or "nothing went wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
