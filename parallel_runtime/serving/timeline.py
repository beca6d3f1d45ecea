"""What one rank does when: shares of its time always, single stretches while somebody wants a profile."""

import time
from collections.abc import Callable
from typing import final

from parallel_runtime.serving.controls import RankProfile, Span

__all__ = ["MAX_SPANS", "Timeline"]

MAX_SPANS = 20_000
"""Stretches that one profile holds at most, unless told otherwise."""


@final
class Timeline:
    """Stretches of work, each from ``begin`` to ``end``; one at a time.

    Only for telling: nothing that is decided depends on it, since clocks differ between ranks.

    Args:
        rank: In its world.
        stage: Its pipeline stage.
        clock: Tells seconds.
        max_spans: Stretches that one profile holds at most.
    """

    def __init__(self, *, rank: int, stage: int, clock: Callable[[], float] = time.monotonic, max_spans: int = MAX_SPANS) -> None:
        self._rank = rank
        self._stage = stage
        self._clock = clock
        self._max_spans = max_spans
        self._is_on = False
        self._spans: list[Span] = []
        self._started_s = 0.0

    def now(self) -> float:
        """The time, where a profile runs; 0 otherwise."""
        return self._clock() if self._is_on else 0.0

    def add(self, what: str, start_s: float, *, num_tokens: int = 0) -> None:
        """Write down what ends now.

        Args:
            what: Kind of work.
            start_s: When it began, from ``now``.
            num_tokens: Of the batch.
        """
        if self._is_on and start_s and len(self._spans) < self._max_spans:
            self._spans.append(Span(what, start_s, self._clock(), num_tokens))

    def start(self) -> None:
        """Begin a profile; an earlier one is dropped."""
        self._is_on = True
        self._spans = []
        self._started_s = self._clock()

    def stop(self) -> RankProfile:
        """End the profile.

        Returns:
            What was written down since ``start``; nothing where none was started.
        """
        spans, self._spans = tuple(self._spans), []
        seconds = self._clock() - self._started_s if self._is_on else 0.0
        self._is_on = False
        return RankProfile(
            rank=self._rank,
            stage=self._stage,
            seconds=seconds,
            busy=_share(spans, "compute"),
            scheduling=_share(spans, "schedule"),
            spans=spans,
        )


def _share(spans: tuple[Span, ...], what: str) -> float:
    """Share of the time between the first computation and the last."""
    computed = [span for span in spans if span.what == "compute" and span.num_tokens]
    if not computed:
        return 0.0
    first, last = computed[0].start_s, computed[-1].end_s
    inside = (span for span in spans if span.what == what and span.start_s >= first and span.end_s <= last)
    return sum(span.end_s - span.start_s for span in inside) / (last - first)
