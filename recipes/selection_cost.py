"""Measures what choosing among the tokens of the mini-batch costs in a run: the toy run with and without it.

    python recipes/selection_cost.py                                   # five minutes
    python recipes/selection_cost.py actor_rollout_ref.model.path=runs/toy/model_deep

Each run is repeated, in another order each time. Times are those of verl, as ratios of the first run's: the median over
all steps but the first. On a busy machine `old_log_probs`, which adds nothing, shows how far to trust them. What is not
an option is a Hydra override of every run.
"""

import argparse
import sys
from statistics import median

from training import ROOT, Training, TrainingFailed

UPDATE, STEP = "timing_s/update_actor", "timing_s/step"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
KL_COV = f"{POLICY_LOSS}.loss_mode=kl_cov"
RUNS = {
    "`vanilla`, which chooses nothing": [],
    "`kl_cov`": [KL_COV],
    "`kl_cov`, `selection_pass=old_log_probs`": [KL_COV, f"+{POLICY_LOSS}.selection_pass=old_log_probs"],
}


def measure(overrides: list[str], steps: int) -> dict[str, list[float]]:
    """Train, and return seconds by key of each step but the first."""
    folder = ROOT / "runs" / "selection_cost"
    local = [f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.save_freq=-1"]
    with Training(folder, steps, [*local, *overrides]) as training:
        records = list(training.records())[1:]
    return {key: [record[key] for record in records] for key in (UPDATE, STEP)}


def main(arguments: list[str]) -> int:
    """Print a table in Markdown and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of a run (default: 4)")
    parser.add_argument("--repeat", type=int, default=2, help="how often each is run (default: 2)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of recipes/cpu_grpo.yaml")
    options = parser.parse_args(arguments)
    seconds: dict[str, dict[str, list[float]]] = {name: {UPDATE: [], STEP: []} for name in RUNS}
    for number in range(options.repeat):
        for name in list(RUNS)[:: -1 if number % 2 else 1]:
            try:
                found = measure([*RUNS[name], *options.overrides], options.steps)
            except TrainingFailed as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                return 1
            for key, values in found.items():
                seconds[name][key] += values
    first = next(iter(seconds.values()))
    print(f"| run | {UPDATE} | {STEP} |\n|---|---|---|")
    for name, of_run in seconds.items():
        ratios = (median(of_run[key]) / median(first[key]) for key in (UPDATE, STEP))
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
