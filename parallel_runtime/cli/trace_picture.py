"""The picture of a traced run: one line per rank, and what it did when."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from parallel_runtime.config.picture import Box, Picture, Words
from parallel_runtime.serving.controls import RankProfile, Span

__all__ = ["trace_picture"]

_COLORS: Final = MappingProxyType({"compute": "#3b7dd8", "receive": "#e8e8e8", "schedule": "#e0912f"})
_LEGEND: Final = (
    ("compute", "computes (forward, sampling)"),
    ("schedule", "schedules"),
    ("receive", "waits for the stage before"),
)
_LEFT: Final = 190
_WIDTH: Final = 1100
_ROW: Final = 34
_TOP: Final = 64


def trace_picture(profiles: Sequence[RankProfile], title: str, *, window_s: float) -> Picture:
    """Draw the middle of a run.

    Args:
        profiles: One of each rank, on one clock.
        title: What stands above.
        window_s: How long a stretch of time to show, at most.

    Returns:
        The picture.
    """
    spans = [span for profile in profiles for span in profile.spans if span.what == "compute"]
    first_s, last_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    window_s = min(window_s, last_s - first_s)
    begin_s = first_s + (last_s - first_s - window_s) / 2
    scale = (_WIDTH - _LEFT - 20) / window_s
    marks: list[Box | Words] = [Words(x=20, y=28, text=title, size=15, is_bold=True)]
    for number, profile in enumerate(profiles):
        y = _TOP + number * _ROW
        marks.append(Words(x=20, y=y + 17, text=f"rank {profile.rank}, stage {profile.stage}: {profile.busy:.0%} busy"))
        for span in profile.spans:
            if span.end_s > begin_s and span.start_s < begin_s + window_s and span.what in _COLORS:
                marks.append(_box(span, y, begin_s, begin_s + window_s, scale))
    y = _TOP + len(profiles) * _ROW + 22
    marks.append(Words(x=20, y=y, text=f"{window_s * 1e3:.0f} of {(last_s - first_s) * 1e3:,.0f} ms"))
    for number, (what, text) in enumerate(_LEGEND):
        x = _LEFT + number * 240
        marks += [Box(x=x, y=y - 11, width=14, height=14, fill=_COLORS[what]), Words(x=x + 20, y=y, text=text)]
    return Picture(width=_WIDTH, height=y + 20, title=title, marks=tuple(marks))


def _box(span: Span, y: float, begin_s: float, end_s: float, scale: float) -> Box:
    left, right = max(span.start_s, begin_s), min(span.end_s, end_s)
    x = _LEFT + (left - begin_s) * scale
    return Box(x=round(x, 2), y=y, width=round(max((right - left) * scale - 0.4, 0.2), 2), height=24, fill=_COLORS[span.what])
