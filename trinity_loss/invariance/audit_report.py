"""What an audit found: whose fault a deviation is, as one sentence, a table, metrics, Markdown and a figure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.audit_verdict import VERDICTS, apart, cuts_of, judge, percent, worst_metric
from trinity_loss.invariance.check import check_invariance
from trinity_loss.invariance.recorded import join_ranks
from trinity_loss.tables import plain_table
from trinity_loss.verl.agreement import without_places
from trinity_loss.verl.compat import installed
from trinity_loss.verl.gradients import noise, off

_PACKAGES = ("trinity-loss", "verl", "torch", "transformers", "megatron-core", "mbridge", "flash-attn", "vllm",
             "sglang")  # fmt: skip
_LAYOUT = re.compile(
    r"strategy|dtype|_size$|_parallel|use_(dynamic_bsz|remove_padding|distributed_optimizer|no_sync|torch_compile|fused)|"
    r"mixed_precision|offload|(max_token_len|micro_batch_size)_per_gpu$|override_transformer_config"
)
_SAME = 1e-6  # Log-probs that are less far off are the same, in float32.
_HEADERS = ("pass", "micro-batches", "gradient ×", "cosine", "gradient off", "log-probs off", "loss's gradient off",
            "loss off", "metrics off", "seconds")  # fmt: skip


@dataclass(frozen=True)
class AuditReport:
    """An audit with its verdict, as plain data.

    Attributes:
        found: What :mod:`trinity_loss.verl.audit` measured, with ``verdict`` and ``sentence``; what is written as JSON.
    """

    found: dict[str, Any]

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        return str(self.found["verdict"])

    @property
    def sentence(self) -> str:
        """Whose fault it is and by what that is known."""
        return str(self.found["sentence"])

    @property
    def cuts(self) -> list[dict[str, Any]]:
        """The passes that are compared with the mini-batch as configured, the repeated one among them."""
        return cuts_of(self.found)

    @property
    def worst(self) -> dict[str, Any]:
        """The pass whose gradient is furthest off; the first where there is no other."""
        return max(self.cuts, key=off, default=self.found["runs"][0])

    def metrics(self) -> dict[str, float]:
        """The ``audit/…`` metrics of verl's log."""
        runs, worst = self.cuts, self.worst
        first = self.found["runs"][0]
        return {
            "audit/fault": float(VERDICTS.index(self.verdict)),
            "audit/gradient_off": off(worst),
            "audit/gradient_norm_ratio": worst["gradient"]["all"]["ratio"],
            "audit/gradient_cosine": worst["gradient"]["all"]["cosine"],
            "audit/noise": noise(self.found["runs"]),
            "audit/log_probs_off": max((off(run, "log_probs") for run in runs), default=0.0),
            "audit/loss_gradient_off": max((off(run, "loss gradient") for run in runs), default=0.0),
            "audit/loss_off": max((apart(run["loss"], first["loss"]) for run in runs), default=0.0),
            "audit/seconds": self.found["seconds"],
            "audit/updates": self.found["seconds"] / first["seconds"] if first["seconds"] else 0.0,
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and cells: a row per pass, compared with the mini-batch as configured."""
        first = self.found["runs"][0]
        by_name = {run["name"]: run for run in self.found["runs"]}
        cells = []
        for run in self.found["runs"]:
            size = f"{run['size']} {'tokens' if run['dynamic'] else 'rows'}"
            against = by_name.get(run["against"], first)
            gradient = run["gradient"]["all"]
            numbers = [f"{gradient['ratio']:.6g}", f"{gradient['cosine']:.6g}"]
            numbers += [percent(off(run)), percent(off(run, "log_probs")), percent(off(run, "loss gradient"))]
            metric = worst_metric(run, against)
            numbers += [percent(apart(run["loss"], against["loss"])), percent(metric[0])]
            if run is first:
                numbers = [f"norm {gradient['norm']:.6g}", *[""] * 6]
            cells.append([run["name"], f"{run['micro_batches']} of {size}", *numbers, f"{run['seconds']:.2f}"])
        return list(_HEADERS), cells

    def groups(self) -> tuple[list[str], list[list[str]]]:
        """Headers and cells: a row per kind of parameters, of the pass that is furthest off."""
        rows = [
            [name, f"{d['norm']:.3g}", f"{d['ratio']:.6g}", f"{d['cosine']:.6g}"]
            + [percent(d[key]) for key in ("error", "mean", "largest")]
            for name, d in self.worst["gradient"].items()
        ]  # fmt: skip
        return ["parameters", "norm", "gradient ×", "cosine", "off", "mean off", "largest off"], rows

    def notes(self) -> list[str]:
        """What else is worth knowing, a line each."""
        found, lines = self.found, []
        first = found["runs"][0]
        far = max(self.cuts, key=lambda run: worst_metric(run, first)[0], default=first)
        error, metric = worst_metric(far, first)
        if error > found["tolerance"]:
            given = off(far, "log_probs")
            why = f", where the log-probs are {percent(given)} off" if given > _SAME else " with the same log-probs"
            lines.append(f"metric {metric} is {percent(error)} off at {far['name']}{why}")
        lines += [f"left out: {name}: {reason}" for name, reason in found["left_out"]]
        lines.append(f"the loss tried again on the recorded log-probs: {found['replay']['sentence']}")
        multiple = f"{found['seconds'] / first['seconds']:.1f}" if first["seconds"] else "?"
        lines.append(
            f"took {found['seconds']:.1f} s, {multiple} times a forward and backward pass, and "
            f"{found['host_bytes'] / 2**20:.1f} MiB of host memory on each rank"
        )
        return lines

    def __str__(self) -> str:
        title = f"audit of step {self.found['step']}: {self.verdict.upper()}: {self.sentence}"
        return "\n".join([title, *plain_table(*self.table()), *(f"  {note}" for note in self.notes())])

    def markdown(self) -> str:
        """A text for an issue: versions, layout, tables, verdict; no path and no name of a machine."""
        found = self.found
        ranks = f"{found['ranks']} ranks ({found['data_parallel']} data-parallel)"
        facts = {
            "verdict": f"**{self.sentence}**",
            "loss": f"`{found['loss']}`",
            "computed in": f"{found['dtype']} on {ranks}, {found['device']}",
            "versions": ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        }
        facts["engine"] = ", ".join(f"`{name}={value}`" for name, value in found["layout"].items())
        lines = [f"### Audit of step {found['step']}", "", *(f"- {name}: {text}" for name, text in facts.items()), ""]
        lines += [*_markdown(*self.table()), "", f"By kind of parameter, at *{self.worst['name']}*:", ""]
        lines += [*_markdown(*self.groups()), "", *(f"- {note}" for note in self.notes()), ""]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes ``audit-step-N.json`` and ``.md``.

        Raises:
            OSError: They cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"audit-step-{self.found['step']}.json"
        path.write_text(json.dumps(self.found, indent=2) + "\n")
        path.with_suffix(".md").write_text(self.markdown())


def plot_audits(reports: Sequence[AuditReport], path: str) -> None:
    """Draws how far each pass of each audit is off: log-probs, the loss's gradient, the parameters' gradient.

    Args:
        reports: A panel each.
        path: Where to write the figure; the ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed (extra ``tools``).
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(reports), figsize=(2 + 3 * len(reports), 3), sharey=True, squeeze=False, layout="constrained"
    )
    lines = {"log_probs": "log-probs", "loss gradient": "loss's gradient", "all": "parameters' gradient"}
    for report, axes in zip(reports, panels[0], strict=True):
        for marker, (name, label) in zip("sD^", lines.items(), strict=True):
            values = [min(max(off(run, name), 1e-9), 1e2) for run in report.cuts]
            axes.plot(values, [run["name"] for run in report.cuts], marker, label=label)
        axes.axvline(report.found["tolerance"], color="0.5", linestyle="--", label="rounding")
        axes.set(xscale="log", xlim=(5e-10, 2e2), title=report.found.get("title", report.verdict))
    panels[0][0].invert_yaxis()
    figure.supxlabel("relative deviation from the mini-batch as configured", fontsize="medium")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def load_audit(path: str | Path) -> AuditReport:
    """Reads what an audit wrote.

    Raises:
        ConfigError: The file holds something else.
        OSError: It cannot be read.
    """
    try:
        report = AuditReport(json.loads(Path(path).read_text()))
        if report.found["format"] != 1:
            raise ValueError(report.found["format"])
        str(report), report.markdown()  # Neither can be made of anything else.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no report of an audit; expected an audit-step-N.json") from error
    return report


def explain(
    found: dict[str, Any],
    loss_fn: Callable[..., Any],
    parts: list[dict[str, Any]],
    modules: Sequence[nn.Module],
    engine_config: Any,
) -> AuditReport:
    """Finds the verdict.

    Args:
        found: What was measured.
        loss_fn: The loss that trains.
        parts: Recorded micro-batches, as :mod:`trinity_loss.recorder` keeps them.
        modules: The model, to name what draws random numbers.
        engine_config: verl's configuration of the engine.
    """
    found["layout"], found["versions"] = _layout(engine_config), installed(*_PACKAGES)
    found["replay"] = _replay(loss_fn, parts)
    found["random"] = draws_random(modules)
    found["verdict"], found["sentence"] = judge(found)
    return AuditReport(_without_places(found))


def _without_places(value: Any) -> Any:
    """Plain data whose texts name no folder and no machine."""
    if isinstance(value, Mapping):
        return {name: _without_places(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else without_places(str(value))


def draws_random(modules: Iterable[nn.Module]) -> list[str]:
    """What draws random numbers in training, by name: dropout as a module, an attribute or an option."""
    names: dict[str, None] = {}
    for module in (part for whole in modules for part in whole.modules()):
        if isinstance(module, nn.Dropout) and module.p > 0:
            names[f"Dropout({module.p:g})"] = None
        for owner in (module, getattr(module, "config", None)):
            for option in ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps"):
                value = getattr(owner, option, None)
                if isinstance(value, float) and value > 0:
                    names[f"{option} {value:g}"] = None
    return list(names)


def _layout(config: Any) -> dict[str, Any]:
    """Options of the engine that a gradient may depend on, those that are set."""
    names = [name for name in getattr(config, "__dataclass_fields__", ()) if _LAYOUT.search(name)]
    found = {name: getattr(config, name) for name in names}
    # True equals 1, which is what no parallel size has to be named for.
    told: dict[str, Any] = {name: v for name, v in found.items() if v is True or v not in (None, False, {}, 1)}
    return {name: dict(v) if hasattr(v, "items") else v for name, v in told.items()}


def _replay(loss_fn: Callable[..., Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The loss on the log-probs that were recorded, cut in every way and over other numbers of ranks."""
    try:
        batch = replace(join_ranks(parts), totals={}, cut=None)
        report = check_invariance(loss_fn, batch, (1, 2, 4), (1, 2), strict=False)
    except Exception as error:
        return {"ok": True, "sentence": f"not done: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"ok": report.ok, "sentence": report.sentence}


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]
