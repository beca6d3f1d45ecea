"""Tables on the screen: with frames and colours on a terminal, plain text elsewhere."""

import sys
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final, final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from parallel_runtime.config.plan_text import Table, render_tables

__all__ = ["STYLES", "show_tables"]

STYLES: Final = MappingProxyType({"ok": "green", "note": "yellow", "warn": "yellow", "bad": "bold red"})
"""How a verdict looks on a terminal."""


def show_tables(headline: str, tables: Iterable[Table]) -> None:
    """Show tables on standard output.

    Args:
        headline: What stands above them, or ``""``.
        tables: In order.
    """
    console = Console()
    if not console.is_terminal:
        above = f"{headline}\n\n" if headline else ""
        sys.stdout.write(f"{above}{render_tables(tables)}")
        return
    if headline:
        console.print(headline, style="bold", highlight=False, markup=False)
    for table in tables:
        console.print(_as_rich(table))


def _as_rich(table: Table) -> RichTable:
    rich = RichTable(
        title=table.title, caption=table.note or None, title_justify="left", caption_justify="left", header_style="bold cyan"
    )
    for name in table.header:
        rich.add_column(name, overflow="fold")
    for row in table.rows:
        cells = zip(table.header, row, strict=True)
        rich.add_row(*(_Groups(cell) if name == "members" else Text(cell, style=STYLES.get(cell, "")) for name, cell in cells))
    return rich


@final
class _Groups:
    """A cell that lists groups, broken between two of them and never inside one."""

    def __init__(self, text: str) -> None:
        groups = text.split("; ")
        self._parts = [f"{group};" for group in groups[:-1]] + groups[-1:]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts)), len(" ".join(self._parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            if line and len(line) + 1 + len(part) > options.max_width:
                yield Text(line)
                line = part
            else:
                line = f"{line} {part}".strip()
        yield Text(line)
