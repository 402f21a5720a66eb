"""Colours, on a terminal only: `NO_COLOR` and `TERM=dumb` turn them off."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["print_table", "print_wgsl"]


def print_wgsl(text: str) -> None:
    """WGSL, highlighted where somebody looks at it; exactly the text elsewhere."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    syntax = Syntax(text, "wgsl", theme="ansi_dark", background_color="default")
    Console().print(syntax)


def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> None:
    """A table whose first column is bold on a terminal; ``numbers`` are right-aligned.

    Elsewhere cells are never cut: each row is one line, columns two blanks apart.
    """
    if not sys.stdout.isatty():
        widths = [
            max(len(row[k]) for row in [titles, *rows]) for k in range(len(titles))
        ]
        for row in [titles, *rows]:
            cells = [
                c.rjust(w) if k in numbers else c.ljust(w)
                for k, (c, w) in enumerate(zip(row, widths))
            ]
            print("  ".join(cells).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, title in enumerate(titles):
        table.add_column(
            title,
            justify="right" if k in numbers else "left",
            style="bold" if k == 0 else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
