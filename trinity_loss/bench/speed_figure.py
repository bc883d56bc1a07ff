"""The figure of a run. Imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity_loss.bench.cost import Result

_TITLES = {"sequences": "sequences", "longest": "longest response", "fill": "fill"}
_STYLES: dict[str, dict[str, Any]] = {
    "verl": {"label": "verl", "color": "tab:orange", "linewidth": 3, "alpha": 0.6},
    "trinity": {"label": "Trinity-RFT", "color": "tab:green", "linestyle": ":"},
    "ours": {"label": "trinity_loss", "color": "tab:blue"},
}


def draw(results: Sequence[Result], path: str) -> None:
    """Draws time against each size that varies while the others are those of the first case.

    Where none varies alone, against the number of tokens.

    Args:
        results: What was measured.
        path: Where to write; the ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed (extra ``tools``).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {name: curve for name in _TITLES if len(curve := _vary(results, name)) > 1}
    curves = curves or {"tokens": sorted(((r.num_tokens, r) for r in results), key=lambda pair: pair[0])}
    figure, panels = plt.subplots(
        1, len(curves), figsize=(4.2 * len(curves), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (size, curve) in zip(panels[0], curves.items(), strict=True):
        for name, style in _STYLES.items():
            points = [(x, r.costs[name].seconds * 1e3) for x, r in curve if name in r.costs]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        if size != "fill":
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.set_xlabel(_TITLES.get(size, "response tokens"))
    panels[0][0].set_ylabel("forward + backward, ms")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _vary(results: Sequence[Result], name: str) -> list[tuple[float, Result]]:
    """Cases that differ from the first in ``name`` only, in its order."""
    base = vars(results[0].case) | {"goal": None}
    found = {getattr(r.case, name): r for r in results if vars(r.case) | {"goal": None, name: base[name]} == base}
    return sorted(found.items())
