"""The command ``trinity-loss``: ``verify`` a loss, let the ``doctor`` look at a configuration, ``bench`` the cost, read
an ``audit``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from trinity_loss import __version__
from trinity_loss.errors import ConfigError, TrinityLossError

_VERIFY = """\
Cuts a mini-batch every way and compares gradient, reported loss and metrics with the whole.

examples:
  trinity-loss verify --loss ours actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
  trinity-loss verify --loss verl:geo_mean
  trinity-loss verify --loss my_package.my_module:my_loss --plot figure.png
  trinity-loss verify --loss verl:all                      every loss of verl in every mode, a line each
  trinity-loss verify --loss ours --config-dir conf --config-name my_run --batch recordings/step-1/mini-batch-1

exit code: 0 all is well, 1 a loss depends on the cut, 2 the call is wrong"""

_DOCTOR = """\
Says which versions and hooks are in place, here and in a Ray worker, which loss a verl configuration ends up
with, and what is likely to go wrong in it.

exit code: 0 nothing wrong, 1 something is, 2 the call is wrong"""

_BENCH = """\
Measures time, peak memory, operations and host reads of forward + backward: this package's loss, verl's and,
where it is installed, Trinity-RFT's, on the same micro-batches, in turn.

examples:
  trinity-loss bench                                      four cases with their goals
  trinity-loss bench --cases sweep --plot speed.png       sequences, longest response, fill and mode, one at a time
  trinity-loss bench --cases scaling --losses ours        what the cost depends on, and what not
  trinity-loss bench --sequences 8,32 --fill 0.2,1        all combinations

exit code: 0 the losses agree, 1 they do not, 2 the call is wrong"""

_AUDIT = """\
Prints the report of an audit again, and draws it. A run makes one where it is given
  +actor_rollout_ref.actor.policy_loss.audit_steps=[1,100] +actor_rollout_ref.actor.policy_loss.audit_dir=DIR

examples:
  trinity-loss audit DIR/audit-step-1.json
  trinity-loss audit DIR/audit-step-1.json --markdown            the text for an issue
  trinity-loss audit DIR/audit-step-1.json --plot audit.png

exit code: 0 faultless, 1 a fault was found, 2 the call is wrong"""

_OF_VERL = ("verl", "omegaconf", "hydra", "ray")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: it scrolls the message away."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with its code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = [*options.overrides, *rest]
    wrong = [word for word in overrides if not word.startswith("~") and (word.startswith("--") or "=" not in word)]
    if wrong:
        parser.error(f"unrecognized: {' '.join(wrong)}; Hydra overrides are key=value")
    options.overrides = overrides
    # verl announces that it found no accelerator, Ray and torch what will change: none of it is the answer.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        passed = options.run(options)
    except (TrinityLossError, OSError, ImportError) as error:
        missing = isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _OF_VERL
        hint = "; it comes with verl: pip install 'trinity-loss[verl]'" if missing else ""
        parser.exit(2, f"{parser.prog} {options.command}: {' '.join(str(error).split())}{hint}\n")
    sys.exit(0 if passed else 1)


def _parser() -> _Parser:
    parser = _Parser(prog="trinity-loss", description=__doc__)
    parser.add_argument("--version", action="version", version=f"trinity-loss {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], bool], name: str, what: str, text: str) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=what, description=text, formatter_class=formatter)
        added.set_defaults(run=run, overrides=[])
        return added

    verify = command(_run_verify, "verify", "verify a loss", _VERIFY)
    add = verify.add_argument
    names = "ours, verl, trinity, scaled_trinity, each also with :NAME or :all, or package.module:name; may be repeated"
    add("--loss", action="append", dest="losses", metavar="NAME", help=f"{names} (default: ours)")
    whose = "whose engine calls it: verl (default), trinity, areal, nemo-rl, slime, miles, trl, prime-rl"
    add("--contract", metavar="NAME", help=whose)
    add("--weight-fn", metavar="NAME", help="AReaL's loss_weight_fn, package.module:name (default: valid tokens)")
    _add_config(verify)
    add("--batch", metavar="PATH", help="a recorded mini-batch, its folder, instead of one that is drawn")
    add("--engine", choices=("fsdp2", "fsdp", "megatron"), help="run verl's own on a CPU instead of playing it")
    add("--steps", type=int, metavar="N", help="with --engine: compare the weights after N optimizer steps too")
    add("--micro-batches", type=_numbers, metavar="N,N", help="per rank (default: 1,2,4,8; with :all 1,3)")
    add("--ranks", type=_numbers, metavar="N,N", help="data-parallel ranks (default: 1,2,4; with :all 1,3)")
    add("--token-budgets", type=_numbers, metavar="N,N", help="of verl's dynamic batch size, per micro-batch")
    add("--group-size", type=int, metavar="N", help="so many consecutive sequences stay together in every cut")
    own = "a field of your own: token or sequence for numbers that are drawn, or a number; may be given again"
    add("--field", action="append", type=_field, dest="fields", metavar="NAME=WHAT", help=own)
    add("--dtype", choices=("float64", "float32"), help="(default: float64)")
    add("--seed", type=int, metavar="N", help="of all that is drawn: mini-batch, cuts (default: 0)")
    add("--tolerance", type=float, metavar="X", help="relative, taken for rounding (default: 1e-6, float32 1e-5)")
    strict = "metrics that depend on the cut and NaN at masked tokens fail the loss too (default: ours only)"
    add("--strict", "--metrics", action=argparse.BooleanOptionalAction, help=strict)
    form = verify.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--markdown", action="store_true", help="print the report to paste it: verdict, versions, table")
    add("--plot", metavar="FILE", help="draw gradient norms against the number of micro-batches, of 4 losses at most")
    doctor = command(_run_doctor, "doctor", "look for trouble", _DOCTOR)
    _add_config(doctor)
    doctor.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True, help="look into a Ray worker")
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    bench = command(_run_bench, "bench", "measure the cost", _BENCH)
    add = bench.add_argument
    add("--cases", choices=("goals", "sweep", "scaling"), help="(default: goals)")
    add("--sequences", type=_numbers, default=(), metavar="N,N", help="instead of a set of cases")
    add("--longest", type=_numbers, default=(), metavar="N,N", help="longest response")
    add("--fill", type=_shares, default=(), metavar="X,X", help="tokens / (sequences × longest)")
    add("--modes", type=_words, default=(), metavar="NAME,NAME", help="aggregation modes")
    add("--losses", type=_words, default=None, metavar="NAME,NAME", help="of verl, ours, trinity")
    add("--runs", type=int, default=9, metavar="N", help="(default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--engine-share", action="store_true", help="the share of a step of verl's training worker too")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", action="store_true", help="print what was measured as JSON")
    add("--plot", metavar="FILE", help="draw time against each size that varies")
    audit = command(_run_audit, "audit", "read an audit", _AUDIT)
    audit.add_argument("files", metavar="FILE", nargs="+", help="audit-step-N.json")
    form = audit.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the text for an issue")
    form.add_argument("--json", action="store_true", help="print what was found as JSON")
    audit.add_argument("--plot", metavar="FILE", help="draw how far each pass is off")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-dir", metavar="DIR", help="folder of a verl configuration (default: verl's own)")
    parser.add_argument("--config-name", metavar="NAME", default="ppo_trainer", help="(default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")


def _list_of(kind: type, fits: Callable[[Any], bool], expected: str) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(map(kind, text.split(",")))
        except ValueError:
            values = ()
        if not values or not all(map(fits, values)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {expected}")
        return values

    return parse


_numbers = _list_of(int, lambda number: number > 0, "whole numbers above 0, such as 1,2,4")
_shares = _list_of(float, lambda share: 0 < share <= 1, "numbers above 0 and up to 1, such as 0.2,1")
_words = _list_of(str, bool, "words")


def _field(text: str) -> tuple[str, str]:
    name, _, what = text.partition("=")
    if not name or not what:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=WHAT, such as reward=sequence")
    return name, what


def _given(options: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that bear the names of a dataclass's fields, as far as they were given."""
    names = [field.name for field in fields(options)]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def _run_verify(arguments: argparse.Namespace) -> bool:
    from trinity_loss.invariance.recorded import load_recording
    from trinity_loss.verify import Options, verify
    from trinity_loss.verl.composed import compose

    given = _given(Options, arguments) | {"fields": dict(arguments.fields or ())}
    if arguments.batch is not None:
        given["batch"] = load_recording(arguments.batch)
    options = Options(**given)
    if options.contract not in ("verl", "trinity") and arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]} configures verl; --contract is {options.contract}")
    return verify(options, compose(arguments.config_dir, arguments.config_name, arguments.overrides))


def _run_doctor(arguments: argparse.Namespace) -> bool:
    from trinity_loss.doctor import examine
    from trinity_loss.verl.composed import compose

    config = compose(arguments.config_dir, arguments.config_name, arguments.overrides)
    return examine(config, ray=arguments.ray, as_json=arguments.json)


def _run_bench(arguments: argparse.Namespace) -> bool:
    from trinity_loss.bench import BenchOptions, bench

    if arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]!r} is a Hydra override; bench reads no configuration")
    return bench(BenchOptions(**_given(BenchOptions, arguments)))


def _run_audit(arguments: argparse.Namespace) -> bool:
    from trinity_loss.invariance.audit_report import load_audit, plot_audits

    reports = [load_audit(file) for file in arguments.files]
    if arguments.plot is not None:
        plot_audits(reports, arguments.plot)
    for report in reports:
        text = report.markdown() if arguments.markdown else report
        print(json.dumps(report.found, indent=2) if arguments.json else text)
    return all(report.verdict == "faultless" for report in reports)


if __name__ == "__main__":
    main()
