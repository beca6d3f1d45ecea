"""What the front of an engine measures: how many requests and tokens, and how long they took."""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from parallel_runtime.serving.answers import StreamEvent

__all__ = ["EngineMetrics", "Histogram", "MetricsSnapshot", "RequestTimer"]

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often durations fell between bounds.

    Attributes:
        bounds_s: Upper bounds in seconds, ascending; a last bucket has none.
        counts: Durations in each bucket, one more than bounds.
        sum_s: All durations together.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Durations in all buckets."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Estimate the duration below which ``share`` of all lie, as if they were spread evenly within their bucket.

        Args:
            share: Such as 0.99.

        Returns:
            Seconds; the last bound where it lies beyond, 0 where nothing was measured.
        """
        rank, below = share * self.count, 0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low = self.bounds_s[index - 1] if index else 0.0
                return low + (self.bounds_s[index] - low) * (rank - below) / count
            below += count
        return self.bounds_s[-1] if self.count else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """The state of an engine's front at one moment; counts are since it was opened.

    Attributes:
        num_running: Requests that have made a token and go on.
        num_waiting: Requests that have made none yet, whether they wait or their prompt is computed.
        num_finished: Requests that ended, by reason; ``error`` for those that a failure or a refusal ended.
        num_prompt_tokens: Tokens of the prompts of all requests taken.
        num_new_tokens: Tokens made.
        time_to_first_token: From submission, per request.
        time_between_tokens: Per token after the first.
        request_time: From submission to the end, per request.
    """

    num_running: int
    num_waiting: int
    num_finished: Mapping[str, int]
    num_prompt_tokens: int
    num_new_tokens: int
    time_to_first_token: Histogram
    time_between_tokens: Histogram
    request_time: Histogram


@final
class EngineMetrics:
    """Counts for one engine, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._num_waiting = 0
        self._finished: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_new_tokens = 0
        self._first, self._between, self._whole = _Buckets(), _Buckets(), _Buckets()

    def start(self, num_prompt_tokens: int) -> "RequestTimer":
        """A request was submitted.

        Args:
            num_prompt_tokens: Of its prompt.

        Returns:
            Its timer.
        """
        with self._lock:
            self._num_waiting += 1
            self._num_prompt_tokens += num_prompt_tokens
        return RequestTimer(self)

    def snapshot(self) -> MetricsSnapshot:
        """Everything as it is now."""
        with self._lock:
            return MetricsSnapshot(
                num_running=self._num_running,
                num_waiting=self._num_waiting,
                num_finished=MappingProxyType(dict(self._finished)),
                num_prompt_tokens=self._num_prompt_tokens,
                num_new_tokens=self._num_new_tokens,
                time_to_first_token=self._first.frozen(),
                time_between_tokens=self._between.frozen(),
                request_time=self._whole.frozen(),
            )

    def _note(self, timer: "RequestTimer", count: int, now: float) -> None:
        with self._lock:
            self._num_new_tokens += count
            if timer.has_begun:
                self._between.add((now - timer.last_s) / count, count)
                return
            self._num_waiting -= 1
            self._num_running += 1
            self._first.add(now - timer.started_s)
            if count > 1:
                self._between.add(0.0, count - 1)

    def _end(self, timer: "RequestTimer", reason: str, now: float) -> None:
        with self._lock:
            if timer.has_begun:
                self._num_running -= 1
            else:
                self._num_waiting -= 1
            self._finished[reason] += 1
            self._whole.add(now - timer.started_s)


@final
class RequestTimer:
    """Measures one request; ``EngineMetrics.start`` makes it.

    Args:
        metrics: Where it counts.

    Attributes:
        started_s: When it was submitted, by ``time.perf_counter``.
        last_s: When the last token came.
        has_begun: Whether a token has come.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._is_over = False
        self.started_s = self.last_s = time.perf_counter()
        self.has_begun = False

    def note(self, event: "StreamEvent") -> None:
        """Tokens have come, or the end.

        Args:
            event: What the caller gets.
        """
        now = time.perf_counter()
        if event.token_ids:
            self._metrics._note(self, len(event.token_ids), now)
            self.has_begun, self.last_s = True, now
        if event.finish_reason is not None:
            self.end(str(event.finish_reason))

    def end(self, reason: str) -> None:
        """The request has ended; a second call is nothing.

        Args:
            reason: Why.
        """
        if not self._is_over:
            self._is_over = True
            self._metrics._end(self, reason, time.perf_counter())


class _Buckets:
    """A histogram that grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(_BOUNDS_S, seconds)] += count
        self._sum_s += seconds * count

    def frozen(self) -> Histogram:
        return Histogram(bounds_s=_BOUNDS_S, counts=tuple(self._counts), sum_s=self._sum_s)
