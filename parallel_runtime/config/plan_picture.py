"""The picture of a plan: ranks as cells on their hosts, one colour for each group, a legend."""

import colorsys
from dataclasses import dataclass
from typing import final

from parallel_runtime.config.picture import Box, Picture, Words

__all__ = ["PictureCell", "PictureHost", "PictureLine", "PictureTag", "draw_world"]

_CELL_WIDTH, _CELL_HEAD, _TAG_HEIGHT, _GAP = 98, 26, 20, 8
_MARGIN, _HOST_HEAD, _HOST_PAD = 24, 28, 10
_CELLS_IN_A_LINE = 8
_CHIP_GAP, _CHIP_LINE = 16, 22
_LETTER = 0.62


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PictureTag:
    """A group as it shows on a rank's cell and in the legend.

    Attributes:
        label: Such as ``"tp#3"``.
        ranks: Its members as text, for the legend.
        crosses_hosts: Whether it is marked as crossing hosts.
    """

    label: str
    ranks: str
    crosses_hosts: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PictureCell:
    """A rank.

    Attributes:
        title: Such as ``"rank 5"``.
        tags: One for each line of the legend, in its order.
    """

    title: str
    tags: tuple[PictureTag, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PictureHost:
    """A host, or a remark that stands where hosts were left out.

    Attributes:
        title: Its name and ranks.
        cells: The ranks that are drawn.
        note: What is not drawn, or ``""``.
    """

    title: str
    cells: tuple[PictureCell, ...]
    note: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLine:
    """A line of the legend: one name of groups.

    Attributes:
        name: Such as ``"tp"``, or ``"tp = ep"`` where both are the same groups.
        text: What it is, and how many groups of how many ranks.
        tags: The groups that are listed, in order.
        note: What is not listed, or ``""``.
    """

    name: str
    text: str
    tags: tuple[PictureTag, ...]
    note: str = ""


def draw_world(*, title: str, notes: tuple[str, ...], hosts: tuple[PictureHost, ...], legend: tuple[PictureLine, ...]) -> Picture:
    """Draw ranks on their hosts, with a legend below.

    Args:
        title: First line.
        notes: Lines below it.
        hosts: In the order they are drawn; narrow ones stand side by side.
        legend: One line for each tag of a cell, in the same order.

    Returns:
        The picture.
    """
    listed = [tag for line in legend for tag in line.tags]
    drawn = [tag for host in hosts for cell in host.cells for tag in cell.tags]
    colors = {label: _color(place) for place, label in enumerate(dict.fromkeys(tag.label for tag in [*listed, *drawn]))}
    marks: list[Box | Words] = [Words(x=_MARGIN, y=_MARGIN + 16, text=title, size=19, is_bold=True)]
    marks += [
        Words(x=_MARGIN, y=_MARGIN + 40 + 19 * place, text=note, size=13, color="#444444") for place, note in enumerate(notes)
    ]
    y = _MARGIN + 40.0 + 19 * len(notes)
    width = _MARGIN + 480.0
    x, line_height = float(_MARGIN), 0.0
    for host in hosts:
        host_width, host_height = _host_size(host, len(legend))
        if x > _MARGIN and x + host_width > _MARGIN + _line_width():
            x, y, line_height = _MARGIN, y + line_height + 14, 0.0
        marks += _draw_host(host, x, y, len(legend), colors)
        x += host_width + 14
        line_height = max(line_height, host_height)
        width = max(width, x - 14)
    width = max(width, _MARGIN + 560.0) + _MARGIN
    legend_marks, bottom = _draw_legend(legend, y + line_height + 34, width, colors)
    return Picture(width=width, height=bottom + _MARGIN - 8, title=title, marks=(*marks, *legend_marks))


def _line_width() -> float:
    return _CELLS_IN_A_LINE * (_CELL_WIDTH + _GAP) + 60


def _host_size(host: PictureHost, num_tags: int) -> tuple[float, float]:
    across = min(len(host.cells), _CELLS_IN_A_LINE)
    down = -(-len(host.cells) // _CELLS_IN_A_LINE)
    width = max(across * (_CELL_WIDTH + _GAP) - _GAP, _text_width(host.title, 13), _text_width(host.note, 12)) + 2 * _HOST_PAD
    if not host.cells:
        return _line_width(), 26
    height = _HOST_HEAD + down * (_cell_height(num_tags) + _GAP) - _GAP + _HOST_PAD + (20 if host.note else 0)
    return width, height


def _cell_height(num_tags: int) -> float:
    return _CELL_HEAD + num_tags * (_TAG_HEIGHT + 2) + 3


def _draw_host(host: PictureHost, x: float, y: float, num_tags: int, colors: dict[str, str]) -> list[Box | Words]:
    width, height = _host_size(host, num_tags)
    if not host.cells:
        return [Words(x=x + _HOST_PAD, y=y + 18, text=host.note, size=13, color="#444444", is_bold=True)]
    marks: list[Box | Words] = [
        Box(x=x, y=y, width=width, height=height, fill="#f1f3f5", line="#868e96"),
        Words(x=x + _HOST_PAD, y=y + 19, text=host.title, size=13, is_bold=True, color="#343a40"),
    ]
    for place, cell in enumerate(host.cells):
        line, column = divmod(place, _CELLS_IN_A_LINE)
        cell_x = x + _HOST_PAD + column * (_CELL_WIDTH + _GAP)
        cell_y = y + _HOST_HEAD + line * (_cell_height(num_tags) + _GAP)
        marks += _draw_cell(cell, cell_x, cell_y, colors)
    if host.note:
        marks.append(Words(x=x + _HOST_PAD, y=y + height - 10, text=host.note, size=12, color="#444444"))
    return marks


def _draw_cell(cell: PictureCell, x: float, y: float, colors: dict[str, str]) -> list[Box | Words]:
    marks: list[Box | Words] = [
        Box(x=x, y=y, width=_CELL_WIDTH, height=_cell_height(len(cell.tags)), fill="#ffffff", line="#495057"),
        Words(x=x + _CELL_WIDTH / 2, y=y + 18, text=cell.title, size=14, is_bold=True, anchor="middle"),
    ]
    for place, tag in enumerate(cell.tags):
        tag_y = y + _CELL_HEAD + place * (_TAG_HEIGHT + 2)
        marks += _draw_tag(tag, x + 4, tag_y, _CELL_WIDTH - 8, colors[tag.label])
    return marks


def _draw_tag(tag: PictureTag, x: float, y: float, width: float, color: str) -> list[Box | Words]:
    line = "#1a1a1a" if tag.crosses_hosts else ""
    text = f"{tag.label} ↔" if tag.crosses_hosts else tag.label
    return [
        Box(x=x, y=y, width=width, height=_TAG_HEIGHT, fill=color, line=line, is_dashed=True),
        Words(x=x + width / 2, y=y + 14.5, text=text, size=12, anchor="middle", color=_ink(color)),
    ]


def _draw_legend(
    legend: tuple[PictureLine, ...], y: float, width: float, colors: dict[str, str]
) -> tuple[list[Box | Words], float]:
    """Paint the legend from ``y`` down; returns its marks and where they end."""
    left = _MARGIN + max((_text_width(line.text, 11) for line in legend), default=0) + _CHIP_GAP
    marks: list[Box | Words] = []
    for line in legend:
        texts = [f"{tag.label}: {tag.ranks}{' ↔' if tag.crosses_hosts else ''}" for tag in line.tags]
        chip_width = 20 + max(_text_width(text, 12) for text in texts) + _CHIP_GAP
        across = max(1, int((width - _MARGIN - left) // chip_width))
        marks += [
            Words(x=_MARGIN, y=y, text=line.name, size=14, is_bold=True),
            Words(x=_MARGIN, y=y + 16, text=line.text, size=11, color="#444444"),
        ]
        for place, text in enumerate([*texts, *([line.note] if line.note else [])]):
            down, column = divmod(place, across)
            x, chip_y = left + column * chip_width, y - 11 + down * _CHIP_LINE
            if place < len(texts):
                marks.append(Box(x=x, y=chip_y, width=14, height=14, fill=colors[line.tags[place].label]))
                x += 20
            marks.append(Words(x=x, y=chip_y + 11.5, text=text, size=12))
        lines = -(-(len(texts) + bool(line.note)) // across)
        y += max(lines * _CHIP_LINE, 32) + 14
    return marks, y - 20


def _text_width(text: str, size: float) -> float:
    return len(text) * size * _LETTER


def _color(place: int) -> str:
    """Hues a golden angle apart, in three depths, so that neighbours in the list never look alike."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + place * 0.381966) % 1, (0.74, 0.58, 0.84)[place % 3], 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _ink(color: str) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#1a1a1a" if 299 * red + 587 * green + 114 * blue > 128_000 else "#ffffff"
