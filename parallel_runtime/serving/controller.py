"""The front side of data parallelism: which replica serves a request, and who waits for its tokens."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Self, TypeAlias, final

from parallel_runtime.errors import ArgumentError, ParallelRuntimeError, QueueFullError, RequestError
from parallel_runtime.serving.balancer import BalancePolicy, Balancer
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ready,
    Rejected,
    Request,
    Shutdown,
    StepOutput,
    Submit,
    Wake,
    decode_leader,
    encode,
)

__all__ = ["DataParallelController", "Delivery", "RequestResult", "RequestStream", "Sink"]

Delivery: TypeAlias = tuple[str, StepOutput | ParallelRuntimeError]
"""The name of a request, and its new tokens or the error that ended it."""

Sink: TypeAlias = SimpleQueue[Delivery]
"""Where the deliveries of a request go; several requests may share one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Everything one request made.

    Attributes:
        request_id: The request.
        token_ids: New tokens, a stop token included.
        finish_reason: Why it ended.
        dp_rank: The data-parallel rank that served it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    dp_rank: int


@dataclass(slots=True, kw_only=True)
class _Pending:
    sink: Sink
    dp_rank: int
    is_sent: bool = False
    is_unwanted: bool = False


@final
class DataParallelController:
    """Spreads requests over the leaders of the replicas and hands their tokens to whoever waits.

    Any thread may submit, abort and wait; one thread calls ``pump`` again and again. Submitting waits for no answer.

    Args:
        links: One per data-parallel rank, in that order. Only bytes are exchanged over them. Borrowed.
        policy: How requests are spread.
        max_requests: Requests under way on all replicas together; one more is refused at once.
        lockstep: Whether the replicas compute in step, so that each has to know when another gets a request.

    Raises:
        ArgumentError: There is no link, or ``max_requests`` is below 1.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        *,
        policy: BalancePolicy = BalancePolicy.LEAST_REQUESTS,
        max_requests: int = 1024,
        lockstep: bool = False,
    ) -> None:
        if max_requests < 1:
            raise ArgumentError(f"max_requests={max_requests} must be at least 1")
        self._links = list(links)
        self._send_locks = [threading.Lock() for _ in links]
        self._balancer = Balancer(len(self._links), policy=policy)
        self._max_requests = max_requests
        self._lockstep = lockstep
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._ready: dict[int, Ready] = {}
        self._failure: ParallelRuntimeError | None = None
        self._open = set(range(len(self._links)))
        self._all_ready = threading.Event()

    @property
    def num_open_links(self) -> int:
        """Leaders that have not hung up."""
        return len(self._open)

    @property
    def has_lost_links(self) -> bool:
        """Whether a leader has hung up."""
        return len(self._open) < len(self._links)

    @property
    def is_ready(self) -> bool:
        """Whether every replica has said that it serves."""
        return len(self._ready) == len(self._links)

    @property
    def requests_per_rank(self) -> tuple[int, ...]:
        """Requests under way on each data-parallel rank."""
        with self._lock:
            return self._balancer.requests

    def wait_ready(self, timeout_s: float | None = None) -> tuple[Ready, ...]:
        """Wait until every replica serves.

        Args:
            timeout_s: Longest wait; ``None`` waits until they serve or one fails.

        Returns:
            What each said, in order of data-parallel rank; fewer where the time was up.

        Raises:
            ParallelRuntimeError: A rank failed first.
        """
        self._all_ready.wait(timeout_s)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return tuple(self._ready[dp_rank] for dp_rank in sorted(self._ready))

    def submit(self, request: Request, sink: Sink) -> int:
        """Send a request to a replica.

        Args:
            request: The request; its name is not under way.
            sink: Gets its deliveries; the last one has a finish reason or is an error.

        Returns:
            The data-parallel rank it went to.

        Raises:
            QueueFullError: ``max_requests`` are under way.
            RequestError: Its name is under way already.
            ParallelRuntimeError: A rank has failed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if request.request_id in self._pending:
                raise RequestError(f"request {request.request_id!r} is alive already; every request needs an id of its own")
            if len(self._pending) >= self._max_requests:
                raise QueueFullError(
                    f"request {request.request_id!r} refused: {len(self._pending)} requests are under way and the limit is "
                    f"{self._max_requests}; try again later"
                )
            dp_rank = self._balancer.assign(request.request_id, num_tokens=request.max_tokens)
            pending = self._pending[request.request_id] = _Pending(sink=sink, dp_rank=dp_rank)
        self._send(dp_rank, Submit(request))
        self._wake_others(dp_rank)
        with self._lock:
            pending.is_sent = True
        if pending.is_unwanted:
            self._send(dp_rank, Abort(request.request_id))
        return dp_rank

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them. Its sink gets what it made and a finish reason. Unknown and ended ones are nothing.

        Args:
            request_id: The request; ``None`` for all.
        """
        with self._lock:
            names = list(self._pending) if request_id is None else [request_id]
            targets = {name: self._pending[name] for name in names if name in self._pending}
            for pending in targets.values():
                pending.is_unwanted = True
        for name, pending in targets.items():
            if pending.is_sent:
                self._send(pending.dp_rank, Abort(name))

    def shutdown(self) -> None:
        """Tell every replica to abort what runs and leave its loop."""
        for dp_rank in range(len(self._links)):
            self._send(dp_rank, Shutdown())

    def pump(self, timeout_s: float) -> None:
        """Hand out what the leaders have said.

        Args:
            timeout_s: Longest wait for a first message.
        """
        links = {self._links[dp_rank]: dp_rank for dp_rank in self._open}
        for link in wait(list(links), timeout_s):
            assert isinstance(link, Connection)
            self._drain(link, links[link])

    def fail(self, error: ParallelRuntimeError) -> None:
        """End every request with an error, and refuse new ones with it. The first failure stays.

        Args:
            error: What happened.
        """
        with self._lock:
            self._failure = self._failure or error
            ended, self._pending = self._pending, {}
            for name in ended:
                self._balancer.release(name)
        self._all_ready.set()
        for name, pending in ended.items():
            pending.sink.put((name, error))

    def stream(self, requests: Sequence[Request]) -> "RequestStream":
        """Serve requests and hand out their tokens as they come.

        Args:
            requests: Any number, none included.

        Returns:
            An iterator; closing it early, or an error in it, aborts what still runs.
        """
        return RequestStream(self, requests)

    def gather(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Serve requests to their end.

        Args:
            requests: Any number, none included.

        Returns:
            Their results, in the order of ``requests``.

        Raises:
            RequestError: One of them can never be served; the others are aborted.
            ParallelRuntimeError: A rank failed.
        """
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        reasons: dict[str, FinishReason] = {}
        with closing(self.stream(requests)) as stream:
            for output in stream:
                tokens[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
        return [
            RequestResult(request_id=name, token_ids=tuple(made), finish_reason=reasons[name], dp_rank=stream.dp_ranks[name])
            for name, made in tokens.items()
        ]

    def _wake_others(self, dp_rank: int) -> None:
        if self._lockstep:
            for other in range(len(self._links)):
                if other != dp_rank:
                    self._send(other, Wake())

    def _send(self, dp_rank: int, message: FrontMessage) -> None:
        """A link that is broken is left to ``pump``, which sees the same and knows the reason."""
        try:
            with self._send_locks[dp_rank]:
                self._links[dp_rank].send_bytes(encode(message))
        except OSError:
            return

    def _drain(self, link: Connection, dp_rank: int) -> None:
        try:
            while link.poll():
                self._handle(decode_leader(link.recv_bytes()), dp_rank)
        except (EOFError, OSError):
            self._open.discard(dp_rank)

    def _handle(self, message: LeaderMessage, dp_rank: int) -> None:
        match message:
            case Ready():
                with self._lock:
                    self._ready[dp_rank] = message
                if self.is_ready:
                    self._all_ready.set()
            case Rejected(request_id=name, message=text, queue_full=is_full):
                self._deliver(name, QueueFullError(text) if is_full else RequestError(text), is_last=True)
            case StepOutput(request_id=name, finish_reason=reason):
                self._deliver(name, message, is_last=reason is not None)

    def _deliver(self, name: str, what: StepOutput | ParallelRuntimeError, *, is_last: bool) -> None:
        with self._lock:
            pending = self._pending.pop(name, None) if is_last else self._pending.get(name)
            if is_last:
                self._balancer.release(name)
        if pending is not None:
            pending.sink.put((name, what))


@final
class RequestStream:
    """The outputs of several requests, as they come, in one iterator.

    No more requests are under way at once than the controller allows; the rest follow as others end.

    Args:
        controller: Serves them. Borrowed.
        requests: To serve, in this order.

    Attributes:
        dp_ranks: The data-parallel rank of every request that was sent.
    """

    def __init__(self, controller: DataParallelController, requests: Sequence[Request]) -> None:
        self.dp_ranks: dict[str, int] = {}
        self._controller = controller
        self._waiting = deque(requests)
        self._running: set[str] = set()
        self._sink: Sink = SimpleQueue()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepOutput:
        """Wait for the next output.

        Raises:
            RequestError: A request can never be served.
            ParallelRuntimeError: A rank failed.
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
                self.dp_ranks[self._waiting[0].request_id] = self._controller.submit(self._waiting[0], self._sink)
            except QueueFullError:
                if not self._running:
                    raise
                return
            self._running.add(self._waiting.popleft().request_id)
