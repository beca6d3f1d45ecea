"""Tables as data, and as plain aligned text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["Table", "format_bytes", "format_count", "format_ranks", "render_tables"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A titled table of texts.

    Attributes:
        title: What stands above it.
        header: Names of the columns.
        rows: Cells, as many in each row as there are columns.
        note: What stands below it, or ``""``.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def render_tables(tables: Iterable[Table]) -> str:
    """Lay tables out as plain text.

    Args:
        tables: In the order they are wanted.

    Returns:
        Text that ends with a newline.
    """
    return "\n".join(_render(table) for table in tables)


def format_ranks(ranks: Sequence[int], *, limit: int = 8) -> str:
    """Write ranks so that a person can read them.

    Args:
        ranks: In order.
        limit: Longest list to write out.

    Returns:
        ``"0-7"`` for consecutive ranks, ``"0 2 4 6"`` for a short list, ``"0 8 ... 120"`` for a long even one, and for any other
        its beginning and how many are left.
    """
    if len(ranks) > 2 and _is_even(ranks, 1):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= limit:
        return " ".join(map(str, ranks))
    if _is_even(ranks, ranks[1] - ranks[0]):
        return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return f"{' '.join(map(str, ranks[:limit]))} ... {len(ranks) - limit:,} more"


def format_count(number: int, noun: str) -> str:
    """Write how many there are of something.

    Args:
        number: How many.
        noun: Of what, in the singular.

    Returns:
        Such as ``"1 rank"`` or ``"1,024 ranks"``.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: int) -> str:
    """Write a number of bytes with the unit that suits it.

    Args:
        count: Bytes.

    Returns:
        Such as ``"12.6 MB"``; units of 1,000.
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _is_even(ranks: Sequence[int], step: int) -> bool:
    return step > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + step * len(ranks), step))


def _render(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "  ".join("-" * width for width in widths)
    parts = [table.title, texts[0], rule, *texts[1:]]
    return "\n".join([*parts, table.note] if table.note else parts) + "\n"
