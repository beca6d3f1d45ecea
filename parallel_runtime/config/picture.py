"""A picture as boxes and texts, written as SVG without any library, or as PNG through matplotlib."""

from dataclasses import dataclass
from os import PathLike
from typing import Literal, final
from xml.sax.saxutils import escape, quoteattr

from parallel_runtime.errors import ConfigError

__all__ = ["Box", "Picture", "Words", "write_png"]

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_PNG_SCALE = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle, in pixels from the top left.

    Attributes:
        x: Left edge.
        y: Top edge.
        width: Width.
        height: Height.
        fill: Colour, ``"#rrggbb"``.
        line: Colour of the edge, or ``""`` for none.
        is_dashed: Whether the edge is dashed.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = ""
    is_dashed: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One line of text.

    Attributes:
        x: Left edge, or the middle where it is centred.
        y: Base line.
        text: The text.
        size: Height of the letters in pixels.
        color: Colour, ``"#rrggbb"``.
        is_bold: Whether it is bold.
        anchor: What ``x`` is.
    """

    x: float
    y: float
    text: str
    size: float = 12
    color: str = "#1a1a1a"
    is_bold: bool = False
    anchor: Literal["start", "middle"] = "start"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Boxes and texts, painted in order on white.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
        title: Said by screen readers.
        marks: What is painted.
    """

    width: float
    height: float
    title: str
    marks: tuple[Box | Words, ...]

    def to_svg(self) -> str:
        """Write the picture as a stand-alone SVG document.

        Returns:
            Text that ends with a newline.
        """
        size = f"{self.width:g} {self.height:g}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {size}" '
            f'role="img" aria-label={quoteattr(self.title)} font-family={quoteattr(_FONT)}>'
        )
        body = [f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>', *map(_svg_mark, self.marks)]
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *body, "</svg>", ""])


def _svg_mark(mark: Box | Words) -> str:
    if isinstance(mark, Words):
        weight = ' font-weight="bold"' if mark.is_bold else ""
        anchor = ' text-anchor="middle"' if mark.anchor == "middle" else ""
        where = f'x="{mark.x:g}" y="{mark.y:g}" font-size="{mark.size:g}" fill="{mark.color}"'
        return f"<text {where}{weight}{anchor}>{escape(mark.text)}</text>"
    where = f'x="{mark.x:g}" y="{mark.y:g}" width="{mark.width:g}" height="{mark.height:g}" rx="4" fill="{mark.fill}"'
    dash = ' stroke-dasharray="4 2"' if mark.is_dashed else ""
    return f'<rect {where} stroke="{mark.line}" stroke-width="1.4"{dash}/>' if mark.line else f"<rect {where}/>"


def write_png(picture: Picture, path: str | PathLike[str]) -> None:
    """Write the picture as PNG, two dots for each pixel.

    Args:
        picture: What to paint.
        path: File to write; replaced where it exists.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError as error:
        raise ConfigError(
            "PNG needs matplotlib: pip install 'parallel-runtime[plot]', or write SVG, which needs nothing"
        ) from error
    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=100 * _PNG_SCALE, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for mark in picture.marks:
        if isinstance(mark, Words):
            axes.text(
                mark.x,
                mark.y,
                mark.text.replace("$", r"\$"),
                fontsize=mark.size * 0.72,
                color=mark.color,
                fontweight="bold" if mark.is_bold else "normal",
                ha="center" if mark.anchor == "middle" else "left",
                va="baseline",
            )
            continue
        axes.add_patch(
            FancyBboxPatch(
                (mark.x, mark.y),
                mark.width,
                mark.height,
                boxstyle="round,pad=0,rounding_size=4",
                facecolor=mark.fill,
                edgecolor=mark.line or "none",
                linestyle=(0, (3, 1.5)) if mark.is_dashed else "solid",
                linewidth=1,
            )
        )
    FigureCanvasAgg(figure).print_png(path)
