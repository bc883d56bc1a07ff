"""Tables on a terminal: with rich where it is installed (extra ``tools``), plain otherwise."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is words, the others are numbers."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join(plain_table(headers, cells)))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right", no_wrap=i == 0)
    for line in cells:
        table.add_row(*line)
    console = Console()
    # A pipe has no width of its own; a table wrapped to 80 columns is hard to read.
    Console(width=None if console.is_terminal else 160).print(table)


def plain_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in plain text."""
    rows = [list(headers), *map(list, cells)]
    widths = [max(len(line[i]) for line in rows) for i in range(len(headers))]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [rows[0], rule, *rows[1:]]
    ]
