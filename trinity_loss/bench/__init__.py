"""What a loss costs beside others: time, memory, operations and host reads, on the same micro-batches.

The command is ``trinity-loss bench``. Needs verl, whose ``ppo_loss`` is what everything is measured against.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from trinity_loss.bench.cases import GOALS, SCALING, SWEEP, Case, product
from trinity_loss.bench.cost import Result, measure
from trinity_loss.bench.peers import LOSS_NAMES, Unsupported, make_losses
from trinity_loss.errors import ConfigError
from trinity_loss.rules import COUNT, SHARE, check, list_of, number, one_of

__all__ = ["CASE_SETS", "LOSS_NAMES", "BenchOptions", "Case", "Result", "bench", "measure"]

#: Those of verl, which everything is measured against.
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CASE_SETS = {"goals": GOALS, "sweep": SWEEP, "scaling": SCALING}


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and how to show it.

    Attributes:
        cases: A set by name; None: ``goals``, unless one of the next four is given: then all their combinations.
        sequences: Numbers of sequences.
        longest: Longest responses.
        fill: Shares of sequences × longest that are response tokens.
        modes: Aggregation modes.
        losses: Which losses, of :data:`LOSS_NAMES`.
        runs: Timed runs of each loss and case.
        device: Where.
        engine_share: Whether to measure the share of a whole step of verl's training worker too.
        json: Print JSON instead of a table.
        plot: File for a figure.
        seed: Of lengths and values.
    """

    cases: str | None = None
    sequences: tuple[int, ...] = ()
    longest: tuple[int, ...] = ()
    fill: tuple[float, ...] = ()
    modes: tuple[str, ...] = ()
    losses: tuple[str, ...] = LOSS_NAMES
    runs: int = 9
    device: str = "cpu"
    engine_share: bool = False
    json: bool = False
    plot: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, rule in (
            ("runs", self.runs, number("a whole number above 0", lambda value: value == int(value) > 0)),
            ("fill", self.fill, list_of(SHARE)),
            ("modes", self.modes, list_of(one_of(*_MODES))),
            ("seed", self.seed, COUNT),
        ):
            check(name, value, rule)
        sizes = [name for name in ("sequences", "longest", "fill", "modes") if getattr(self, name)]
        if sizes and self.cases is not None:
            raise ConfigError(f"--cases {self.cases} has no effect with --{sizes[0]}, which takes the place of a set")


def bench(options: BenchOptions) -> bool:
    """Measures, prints and draws.

    Returns:
        Whether the losses' values and gradients agree with verl's.

    Raises:
        ConfigError: A loss or a set of cases that does not exist, or a device that is not here.
        ImportError: verl or, for a plot, matplotlib is not installed.
    """
    import torch

    from trinity_loss.bench import cost_table

    unknown = set(options.losses) - set(LOSS_NAMES)
    name = options.cases or "goals"
    if unknown or name not in CASE_SETS:
        raise ConfigError(f"--losses takes {', '.join(LOSS_NAMES)}; --cases takes {', '.join(CASE_SETS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds none")
    given = (options.sequences, options.longest, options.fill, options.modes)
    cases = product(*given) if any(given) else CASE_SETS[name]
    threads = torch.get_num_threads()
    # Time spent by this thread is all that is spent, and other processes do not count.
    torch.set_num_threads(1)
    try:
        results = [_measure(case, options) for case in cases]
    finally:
        torch.set_num_threads(threads)
    shares = {}
    if options.engine_share:
        from trinity_loss.bench.engine_share import measure_shares

        shares = measure_shares(options.losses, options.runs)
    if options.json:
        print(json.dumps(cost_table.as_dict(results, shares, options.device, options.runs), indent=2))
    else:
        cost_table.print_report(results, shares, options.device, options.runs)
    if options.plot is not None:
        from trinity_loss.bench.speed_figure import draw

        draw(results, options.plot)
    return all(result.agrees for result in results)


def _measure(case: Case, options: BenchOptions) -> Result:
    losses = {}
    for name, make in make_losses(options.losses).items():
        with suppress(Unsupported):
            losses[name] = make(case.mode)
    return measure(case, losses, device=options.device, runs=options.runs, seed=options.seed)
