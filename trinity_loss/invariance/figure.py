"""The figure of a check. Imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_loss.invariance.report import Report


def draw(reports: Sequence[Report], path: str, titles: Sequence[str] | None = None) -> None:
    """Draws gradient norms against the number of micro-batches, one panel per report.

    Args:
        reports: Reports, left to right.
        path: Where to write; the ending chooses the format.
        titles: Titles of the panels instead of the names of the losses.

    Raises:
        ImportError: matplotlib is not installed (extra ``tools``).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(reports), figsize=(4.4 * len(reports), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, report, title in zip(panels[0], reports, titles or [r.loss_name for r in reports], strict=True):
        panel.axhline(1, color="0.6", linewidth=1, zorder=0)
        for ranks in sorted({len(row.cut.ranks) for row in report.rows}):
            points = {m: ratio for m, ratio in report.curve(ranks).items() if ratio == ratio}
            if points:
                label = f"{ranks} rank{'s' if ranks > 1 else ''}"
                panel.plot(list(points), list(points.values()), marker="o", markersize=4, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        panel.set_xlabel("micro-batches per rank")
        panel.set_title(title, fontsize=10)
        panel.legend(frameon=False, fontsize=8)
    low, high = panels[0][0].get_ylim()
    panels[0][0].set_ylim(min(low, 0.5), max(high, 2))
    panels[0][0].set_ylabel("gradient norm, whole mini-batch = 1")
    figure.savefig(path, dpi=160)
    plt.close(figure)
