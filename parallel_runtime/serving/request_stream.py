"""The outputs of several requests in one iterator, and what became of each."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, Self, TypeAlias, final

from parallel_runtime.errors import ParallelRuntimeError, QueueFullError
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput

__all__ = ["Delivery", "RequestResult", "RequestStream", "Sink", "Submitter"]

Delivery: TypeAlias = tuple[str, StepOutput | ParallelRuntimeError]
"""The name of a request, and its new tokens or the error that ended it."""


class Sink(Protocol):
    """Where the deliveries of a request go; several requests may share one. A ``SimpleQueue`` is one."""

    def put(self, item: Delivery, /) -> None:
        """Take one more; must not wait."""
        ...


class Submitter(Protocol):
    """Serves requests; the ``DataParallelController`` is one."""

    def submit(self, request: Request, sink: Sink, *, to: int | None = None, places: dict[str, int] | None = None) -> int | None:
        """Take a request."""
        ...

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Everything one request made.

    Attributes:
        request_id: The request.
        token_ids: New tokens, a stop token included.
        finish_reason: Why it ended.
        dp_rank: The data-parallel rank that served it to its end, counted through all replicas.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    dp_rank: int


@final
class RequestStream:
    """The outputs of several requests, as they come, in one iterator.

    No more requests are under way at once than the controller allows; the rest follow as others end.

    Args:
        controller: Serves them. Borrowed.
        requests: To serve, in this order.
        to: The data-parallel rank that has to serve them; ``None`` leaves the choice to the controller.

    Attributes:
        dp_ranks: The data-parallel rank that serves, or last served, every request that has been placed, counted through all
            replicas.
    """

    def __init__(self, controller: Submitter, requests: Sequence[Request], *, to: int | None = None) -> None:
        self.dp_ranks: dict[str, int] = {}
        self._controller = controller
        self._waiting = deque(requests)
        self._to = to
        self._running: set[str] = set()
        self._sink: SimpleQueue[Delivery] = SimpleQueue()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepOutput:
        """Wait for the next output.

        Raises:
            RequestError: A request can never be served.
            ParallelRuntimeError: No replica is left, or a request was given up.
        """
        try:
            self._submit()
            if not self._running:
                raise StopIteration
            name, output = self._sink.get()
            if not isinstance(output, StepOutput):
                self._running.discard(name)
                raise output
            if output.finish_reason is not None:
                self._running.discard(name)
        except BaseException:
            self.close()
            raise
        return output

    def close(self) -> None:
        """Abort what still runs. Twice is nothing."""
        self._waiting.clear()
        running, self._running = self._running, set()
        for name in sorted(running):
            self._controller.abort(name)

    def _submit(self) -> None:
        """Send as many as there is room for; at least one where none of ours runs."""
        while self._waiting:
            try:
                self._controller.submit(self._waiting[0], self._sink, to=self._to, places=self.dp_ranks)
            except QueueFullError:
                if not self._running:
                    raise
                return
            self._running.add(self._waiting.popleft().request_id)
