"""One call of an engine: its requests, what is on its way, and what comes back. Those who wait for it give it the deliveries."""

from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import final

from parallel_runtime.errors import QueueFullError, RequestError
from parallel_runtime.serving.answers import AnswerReader, StreamEvent
from parallel_runtime.serving.deliveries import Delivery, Sink, Submitter
from parallel_runtime.serving.messages import StepOutput
from parallel_runtime.serving.metrics import EngineMetrics, RequestTimer

__all__ = ["Call", "call_events"]


@final
class Call:
    """The requests of one call, of which no more are under way than the controller allows; the rest follow as others end.

    Further answers to a prompt are sent once the first one has begun, and to the same rank, which then has the prompt's keys and
    values already.

    Args:
        submitter: Serves them. Borrowed.
        answers: What is wanted, in this order; answers to one prompt follow each other.
        sink: Where deliveries go.
        metrics: Counts them.
        share_from: Tokens from which on a prompt is worth waiting for; ``None`` sends all answers at once.
        dp_rank: The data-parallel rank that has to serve them; ``None`` leaves the choice to the controller.
    """

    def __init__(
        self,
        submitter: Submitter,
        answers: Sequence[AnswerReader],
        sink: Sink,
        *,
        metrics: EngineMetrics,
        share_from: int | None = None,
        dp_rank: int | None = None,
    ) -> None:
        self._submitter = submitter
        self._sink = sink
        self._metrics = metrics
        self._dp_rank = dp_rank
        self._waiting: deque[AnswerReader] = deque()
        self._behind: dict[int, list[AnswerReader]] = {}
        self._running: dict[str, tuple[AnswerReader, RequestTimer]] = {}
        self._places: dict[str, int] = {}
        for answer in answers:
            if answer.sample and share_from is not None and len(answer.request.prompt) >= share_from:
                self._behind.setdefault(answer.index, []).append(answer)
            else:
                self._waiting.append(answer)
        self._leading: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to come."""
        return not self._running and not self.has_more

    @property
    def has_more(self) -> bool:
        """Whether ``submit`` may have something to send."""
        return bool(self._waiting)

    def submit(self) -> None:
        """Send as many requests as there is room for; at least one where none of this call is under way.

        Raises:
            QueueFullError: Other calls keep the queue full.
            RequestError: A request can never be served.
            ParallelRuntimeError: No replica is left.
        """
        while self._waiting:
            answer = self._waiting[0]
            try:
                self._send(answer)
            except QueueFullError:
                if not self._running:
                    raise
                return
            self._running[answer.request.request_id] = (answer, self._metrics.start(len(answer.request.prompt)))
            self._waiting.popleft()

    def take(self, delivery: Delivery) -> StreamEvent | None:
        """Take what the controller has delivered.

        Args:
            delivery: From the sink.

        Returns:
            What the caller gets; ``None`` where it is about a request that has ended for the caller.

        Raises:
            RequestError: A request can never be served.
            ParallelRuntimeError: No replica is left, or a request was given up.
        """
        name, output = delivery
        if name not in self._running:
            return None
        answer, timer = self._running[name]
        if not isinstance(output, StepOutput):
            timer.end("error")
            del self._running[name]
            raise output
        event = answer.read(output, dp_rank=self._places[name])
        timer.note(event)
        self._let_follow(answer, event)
        if answer.is_over:
            del self._running[name]
            if output.finish_reason is None:
                self._submitter.abort(name)
        return event

    def close(self) -> None:
        """Abort what still runs. Twice is nothing."""
        self._waiting.clear()
        self._behind.clear()
        running, self._running = self._running, {}
        for name, (_, timer) in running.items():
            timer.end("abort")
            self._submitter.abort(name)

    def _send(self, answer: AnswerReader) -> None:
        to = self._leading.get(answer.index, self._dp_rank) if answer.sample else self._dp_rank
        try:
            self._submitter.submit(answer.request, self._sink, to=to, places=self._places)
        except QueueFullError:
            raise
        except RequestError:
            if to is None or to == self._dp_rank:
                raise
            self._submitter.submit(answer.request, self._sink, places=self._places)  # that rank is gone meanwhile

    def _let_follow(self, answer: AnswerReader, event: StreamEvent) -> None:
        if event.index in self._behind and not answer.sample:
            self._leading[event.index] = event.dp_rank
            self._waiting.extendleft(reversed(self._behind.pop(event.index)))


def call_events(call: Call, sink: "SimpleQueue[Delivery]") -> Iterator[StreamEvent]:
    """Hand out the events of a call as they come, in the caller's thread. Leaving early aborts what still runs.

    Args:
        call: Fresh.
        sink: Its sink.

    Raises:
        QueueFullError: Other calls keep the queue full.
        RequestError: A request can never be served.
        ParallelRuntimeError: No replica is left, or a request was given up.
    """
    try:
        while not call.is_over:
            call.submit()
            event = call.take(sink.get())
            if event is not None:
                yield event
    finally:
        call.close()
