"""Writes docs/invariance.md from what ``trinity-loss verify --json`` found.

trinity-loss verify --loss ours:all --json > runs/ours.json
trinity-loss verify --loss ours:all --dtype float32 --json > runs/ours-float32.json
trinity-loss verify --loss verl:all --json > runs/verl.json
trinity-loss verify --loss trinity:all --json > runs/trinity.json
trinity-loss verify --loss scaled_trinity:all --json > runs/scaled_trinity.json
python docs/tables.py runs/{ours,ours-float32,verl,trinity,scaled_trinity}.json > docs/invariance.md
"""

import contextlib
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.invariance import Report, check_invariance, make_mini_batch
from trinity_loss.verify import Options, verify
from trinity_loss.verl.composed import compose

HEAD = """# What depends on the cut

Made by `python docs/tables.py`, whose head names the commands. A mini-batch of ragged sequences, with holes in masks
and fully masked ones is cut into micro-batches (even, uneven, by verl's dynamic batch size), dealt to one and to three
ranks, reordered, padded to other widths, packed, and scaled as FSDP and as Megatron do.

A cell is the largest relative deviation from the mini-batch in one piece, over all cuts: **bold** where it is more than
rounding, `0` where no bit differs, `∞` where the loss raises an error or is NaN on some cut, `–` where there is no such
combination.
"""

SMALL_ERRORS = """## Are the zeros zeros?

The cells of trinity_loss are as good as the arithmetic. The gradient of a token is computed from its own sequence and
one weight, and the same numbers give the same bits in any micro-batch. Only three ranks leave a trace, since the weight
is multiplied by their number and the engine divides by it; with one, two and four ranks every cell is 0. What adds up
over micro-batches, the reported loss and the metrics, differs by the order of the sum.

The check sees what is larger than that. `ppo` with a factor of 1 + ε on the loss of every piece, but not of the whole:
"""

ONE_CELL = """ One cell by itself:

```bash
trinity-loss verify --loss ours:vespo +actor_rollout_ref.actor.policy_loss.loss_agg_mode=trajectory-mean
```"""
OPTIONS_HEAD = """## What goes with a loss

`trinity-loss verify --loss ours` with these arguments and `+actor_rollout_ref.actor.policy_loss.loss_agg_mode=…`: the
largest relative deviation of a gradient or a metric.
"""

TITLES = {
    "ours": "trinity_loss",
    "ours-float32": "trinity_loss, float32",
    "verl": "verl 0.9.1",
    "trinity": "Trinity-RFT 0.6.0",
    "scaled_trinity": "Trinity-RFT 0.6.0, scaled",
}
#: What is taken for rounding and not written in bold.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
SCALED = """Trinity-RFT's own losses through `trinity_loss.trinity_rft`. `seq-mean-token-sum-norm` divides by the width
that responses are padded to, which differs between the cuts here. Trinity-RFT's trainer pads a batch before it is cut,
so that there is one width in a run, and the gradient is exact there.
"""
CHECKED = """What `verify` says first and after it, by cause, and where that stands in the source, looked up by hand.
"""
_AGG, _UTILS = "`core_algos.py:1191` (`loss_mask.shape[-1]` without a `loss_scale_factor`)", "`algorithm/utils.py`"
_MIX = "`mix_policy_loss.py:75-113`, `chord_policy_loss.py:192-233`"
#: Of a family, by cause, then by loss (``*``: any other), where in its source that stands.
SOURCES = {
    "verl": {
        "padded width as the norm": {"*": _AGG},
        "random numbers": {"clip_cov": "`core_algos.py:1823` (`torch.randperm`)"},
        "selection inside the micro-batch": {
            "clip_cov": "`core_algos.py:1812` (a covariance with means of the micro-batch)",
            "kl_cov": "`core_algos.py:1905-1907` (`topk` of that covariance)",
        },
        "local mean": {"geo_mean": "`core_algos.py:2000` (`torch.mean` over rows, whatever the mode)"},
        "empty micro-batch": {"bypass_mode": "`rollout_corr_helper.py:442, 690, 838` (raise)"},
    },
    "trinity": {
        "local mean": {
            "rec": "`rec_policy_loss.py:132` (`masked_mean`, whatever the mode)",
            "mix": _MIX,
            "mix_chord": _MIX,
            "*": f"{_UTILS}:28, 33, 38 (`masked_mean`, `mean`), and `trainer/verl/losses.py` weights nothing",
        },
        "padded width as the norm": {"*": f"{_UTILS}:42 (`mask.shape[-1]`)"},
        "missing dp_size": {"*": f"{_UTILS}:43 (a sum over a constant), times nothing in `losses.py`"},
        "statistic of the micro-batch as a factor": {"dpo": "`dpo_loss.py:35-50` (one pair of all rows' sums)"},
        "local count as a factor": {"mix": _MIX, "mix_chord": _MIX},
        "fails on a cut": {
            "mix": "`mix_policy_loss.py:99, 113` (no metrics where a micro-batch has no such rows)",
            "mix_chord": "`chord_policy_loss.py:209-233` (a mean over no rows)",
        },
    },
}
_MOMENTS = "trinity_loss/moments/"
_POLICY_LOSS, _KL = "+actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.actor.use_kl_loss=true"
#: What goes with a loss: arguments of ``trinity-loss verify --loss ours``.
OPTIONS = {
    "a weight for each row": ["--field", "loss_weight=sequence", f"{_POLICY_LOSS}.row_weights=loss_weight"],
    "a weight for each token": ["--field", "loss_weight=token", f"{_POLICY_LOSS}.row_weights=loss_weight"],
    "`nll_on_positives`": [f"{_POLICY_LOSS}.nll_on_positives=0.1"],
    "`off_policy_mask`": [f"{_POLICY_LOSS}.off_policy_mask=0.1"],
    "`kl_unbiased`": [_KL, f"{_POLICY_LOSS}.kl_unbiased=true"],
    "`top_entropy_quantile`": [f"{_POLICY_LOSS}.top_entropy_quantile=0.2"],
    "`dppo_tv` with `kl_tau`": [
        "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv",
        f"{_POLICY_LOSS}.loss_args.kl_tau=0.01",
    ],
    "metrics of `rollout_metrics`": [f"{_POLICY_LOSS}.rollout_metrics=sequence"],
}
OPTION_MODES = ("token-mean", "seq-mean-token-mean", "trajectory-mean")


def reports(path: str) -> list[dict[str, Any]]:
    """The reports of one call."""
    found = json.loads(Path(path).read_text())
    return found if isinstance(found, list) else [found]


def dtype_of(family: str) -> torch.dtype:
    """What a family was computed in."""
    return torch.float32 if family.endswith("float32") else torch.float64


def of_metrics(family: str) -> float:
    """What is taken for rounding in a family's metrics; Trinity-RFT computes some in float32."""
    return ROUNDING[torch.float32 if family.endswith("trinity") else dtype_of(family)]


def number(value: Any) -> float:
    """A deviation; what is not finite is written as a word."""
    return float(value) if value is not None else math.nan


def written(error: float, rounding: float) -> str:
    """A cell: plain where it is rounding, bold where it is not."""
    if math.isnan(error):
        return "–"
    if error <= rounding:
        return f"{error:.0e}" if error else "0"
    return f"**{error:.0e}**" if error < 1e-3 else f"**{error:.1%}**" if error < 1e3 else "**∞**"


def worst(report: Mapping[str, Any]) -> float:
    """The largest relative deviation of any gradient, each term alone, over all cuts."""
    errors = [number(d["error"]) for row in report["rows"] for d in row["gradients"].values()]
    errors += [math.inf for row in report["rows"] if row["failure"]]
    return max((e for e in errors if not math.isnan(e)), default=math.nan)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gradient_table(found: list[dict[str, Any]], rounding: float) -> str:
    """Rows are losses, columns are modes."""
    cells = {}
    for report in found:
        loss, _, mode = report["loss"].partition(":")[2].partition(" ")
        cells[loss, mode] = worst(report)
    losses, modes = list(dict.fromkeys(k[0] for k in cells)), list(dict.fromkeys(k[1] for k in cells))
    rows = [[f"`{loss}`", *(written(cells.get((loss, mode), math.nan), rounding) for mode in modes)] for loss in losses]
    return table(["loss", *(f"`{mode}`" for mode in modes)], rows)


def verified(arguments: list[str]) -> dict[str, Any]:
    """What ``trinity-loss verify --loss ours --json`` prints with these arguments."""
    fields = dict(arguments[i + 1].split("=") for i, word in enumerate(arguments) if word == "--field")
    overrides = [word for word in arguments if ".policy_loss." in word or ".actor." in word]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        verify(Options(json=True, fields=fields), compose(None, "ppo_trainer", overrides))
    report: dict[str, Any] = json.loads(printed.getvalue())
    return report


def option_table() -> str:
    """Rows are options, columns are modes: the larger deviation of the gradients and of the metrics."""
    rows = []
    for title, arguments in OPTIONS.items():
        cells = []
        for mode in OPTION_MODES:
            report = verified([*arguments, f"{_POLICY_LOSS}.loss_agg_mode={mode}"])
            of_metrics = max(metric_errors([report]).values())
            cells.append(written(max(worst(report), of_metrics), ROUNDING[torch.float64]))
        rows.append([title, *cells, f"`{' '.join(arguments)}`"])
    return table(["what goes with a loss", *(f"`{mode}`" for mode in OPTION_MODES), "arguments"], rows)


def causes_table(family: str, found: list[dict[str, Any]]) -> str:
    """What is said of each loss, in which modes, and where it stands in the source."""
    modes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for report in found:
        loss, _, mode = report["loss"].partition(":")[2].partition(" ")
        causes = tuple(dict.fromkeys(finding["name"] for finding in report["findings"] if finding["counts"]))
        modes.setdefault((loss, causes), []).append(mode)
    most = max(len({mode for (loss, _), of in modes.items() if loss == one for mode in of}) for one, _ in modes)
    losses: dict[tuple[str, ...], list[str]] = {}
    for (loss, causes), of in modes.items():
        places = [SOURCES[family][cause].get(loss) or SOURCES[family][cause]["*"] for cause in causes]
        all_of = "all" if len(of) == most else ", ".join(f"`{mode}`" for mode in of)
        row = (all_of, ", then ".join(causes) or "ok", "; ".join(dict.fromkeys(places)) or "–")
        losses.setdefault(row, []).append(f"`{loss}`")
    rows = [[", ".join(names), *row] for row, names in losses.items()]
    return table(["losses", "modes", "causes", "in the source"], rows)


def metric_errors(found: list[dict[str, Any]]) -> dict[str, float]:
    """Each metric's largest relative deviation over all losses, modes and cuts.

    What a loss divides by the padded width is left out. A statistic of ours that is made of sums at the end of a
    mini-batch is as far off as the worst of its sums.
    """
    worst_of: dict[str, float] = {}
    for report in found:
        if report["loss"].endswith(("seq-mean-token-sum-norm", "seq-mean-token-sum-norm/None")):
            continue
        for row in report["rows"]:
            for key, deviation in row["metrics"].items():
                name = key.removeprefix(_MOMENTS).split("/", 2)[2] if key.startswith(_MOMENTS) else key
                error = number(deviation["error"])
                if not math.isnan(error):
                    worst_of[name] = max(worst_of.get(name, 0.0), error)
    return worst_of


def planted(epsilon: float, dtype: torch.dtype) -> Report:
    """The report of a loss that is off by a factor of 1 + ``epsilon`` on every piece."""
    loss_fn, batch = EnginePolicyLoss(LossConfig()), make_mini_batch(14)

    def off(*, model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        return loss * (1 if len(data) == batch.num_sequences else 1 + epsilon), metrics

    return check_invariance(off, batch, (1, 3), (1, 3), layouts=("nested", "padded"), dtype=dtype)


def planted_table() -> str:
    """What the gradient's cell shows of errors that were planted."""
    cases = [(e, torch.float64) for e in (0.0, 1e-14, 1e-12, 1e-9)] + [(e, torch.float32) for e in (0.0, 1e-6, 1e-4)]
    rows = [
        [f"{epsilon:g}", str(dtype).removeprefix("torch."), written(worst(report.to_dict()), ROUNDING[dtype])]
        for epsilon, dtype in cases
        for report in [planted(epsilon, dtype)]
    ]
    return table(["ε", "computed in", "cell"], rows)


def main(paths: list[str]) -> None:
    """Prints the page."""
    families = {Path(path).stem: reports(path) for path in paths}
    print(HEAD)
    for family, found in families.items():
        print(f"## Gradient: {TITLES.get(family, family)}\n\nEach term alone.{ONE_CELL * (family == 'ours')}\n")
        if family == "scaled_trinity":
            print(SCALED)
        print(gradient_table(found, ROUNDING[dtype_of(family)]) + "\n")
        if family in SOURCES:
            print(CHECKED)
            print(causes_table(family, found) + "\n")
        if family == "ours":
            print(SMALL_ERRORS)
            print(planted_table() + "\n")
            print(OPTIONS_HEAD)
            print(option_table() + "\n")
    print("## Metrics\n\nOver all losses, modes and cuts, without those that divide by the padded width. ", end="")
    print("Trinity-RFT computes some in float32.\n")
    columns = {family: metric_errors(found) for family, found in families.items()}
    rows = [
        [f"`{key}`", *(written(errors.get(key, math.nan), of_metrics(f)) for f, errors in columns.items())]
        for key in sorted({key for errors in columns.values() for key in errors})
    ]
    print(table(["metric", *(TITLES.get(family, family) for family in columns)], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
