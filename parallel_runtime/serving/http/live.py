"""What goes on in the HTTP server right now, and how fast tokens came lately. For one event loop."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from parallel_runtime.serving.http.refusals import RefusedError

__all__ = ["LiveRequest", "LiveRequests", "TokenRates"]


@final
@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One HTTP request for answers.

    Attributes:
        name: What its answers are called.
        path: What it asks.
        started_s: When it came, by ``time.monotonic``.
        is_streamed: Whether its answers go out as they come.
        num_answers: Answers it asks for.
        num_prompt_tokens: Of all its prompts; 0 until they are read.
        num_new_tokens: Of all its answers so far.
        dp_ranks: Data-parallel ranks that serve it.
    """

    name: str
    path: str
    started_s: float
    is_streamed: bool = False
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    dp_ranks: set[int] = field(default_factory=set)


@final
class LiveRequests:
    """All HTTP requests for answers, and a limit on them.

    Args:
        most: Under way at once.

    Attributes:
        num_responses: Responses so far, by path and status.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._live: dict[str, LiveRequest] = {}
        self.num_responses: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Requests under way, the oldest first."""
        return iter(tuple(self._live.values()))

    @contextmanager
    def entered(self, name: str, path: str) -> Iterator[LiveRequest]:
        """Count a request for as long as a block lasts.

        Args:
            name: What its answers are called.
            path: What it asks.

        Yields:
            Its entry, to be kept up to date.

        Raises:
            RefusedError: As many are under way as may be.
        """
        if len(self._live) >= self._most:
            message = f"{len(self._live)} requests are under way and the limit is {self._most}; try again later"
            raise RefusedError(503, message, code="too_many_requests", retry_s=1, hangs_up=True)
        entry = self._live[name] = LiveRequest(name=name, path=path, started_s=time.monotonic())
        try:
            yield entry
        finally:
            del self._live[name]


@final
class TokenRates:
    """Tokens per second over the last minutes.

    Args:
        most: Seconds that are kept.
    """

    def __init__(self, most: int = 120) -> None:
        self._rates: deque[float] = deque(maxlen=most)
        self._last: tuple[float, int] | None = None

    def note(self, num_tokens: int, now: float) -> None:
        """Look at the clock and the counter; what is less than a second after the last look is nothing.

        Args:
            num_tokens: Made since the beginning.
            now: Seconds on any clock.
        """
        if self._last is None:
            self._last = (now, num_tokens)
            return
        then, before = self._last
        if now - then >= 1.0:
            self._rates.append((num_tokens - before) / (now - then))
            self._last = (now, num_tokens)

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second in each second, the latest last."""
        return tuple(self._rates)
