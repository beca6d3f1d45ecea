"""The front side of data parallelism: which replica serves a request, and who waits for its tokens."""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import final

from parallel_runtime.errors import ContextStateError, ParallelRuntimeError
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.controls import Answer
from parallel_runtime.serving.deliveries import Sink
from parallel_runtime.serving.dispatch import Action, Deliver, Dispatcher, Send
from parallel_runtime.serving.engine_controls import EngineControls
from parallel_runtime.serving.links import LeaderLinks
from parallel_runtime.serving.messages import (
    FrontMessage,
    LeaderMessage,
    Ready,
    Rejected,
    Request,
    Shutdown,
    StepOutput,
    Submit,
)

__all__ = ["DataParallelController"]


@dataclass(slots=True)
class _Replica:
    """What the front knows of one replica. ``links`` are of the world that runs now."""

    links: LeaderLinks | None = None
    ready: dict[int, Ready] = field(default_factory=dict)


@final
class DataParallelController:
    """Spreads requests over the leaders of all replicas and hands their tokens to whoever waits.

    Any thread may submit, abort and wait; for each replica one thread calls ``pump`` again and again. Submitting waits for no
    answer. Data-parallel ranks are counted through all replicas: rank ``d`` of replica ``r`` is ``r * dp + d``. When a replica is
    lost, what it held goes on elsewhere, after the tokens that were handed out.

    Args:
        links: To the leaders of the only replica, where its world is there already; ``dp`` is then their number. Borrowed.
        replicas: Independent worlds, which ``connect`` brings in.
        dp: Data-parallel ranks of each.
        policy: How requests are spread.
        max_requests: Requests under way on all replicas together; one more is refused at once.
        max_per_rank: Requests with one data-parallel rank; the rest wait here. ``None`` sets no limit.
        max_runs: Replicas that may be lost while they run one request, before it is given up.
        lockstep: Whether the data-parallel ranks of a replica compute in step, so that each must know of another's requests.
        seed: Base of the seeds of requests that draw tokens and have none; ``None`` draws it.

    Attributes:
        dp: Data-parallel ranks of each replica.
        was_ready: Whether there was a time when all replicas served.
        controls: What can be asked of all replicas beside requests.

    Raises:
        ArgumentError: There is no replica or link, or a limit is below 1.
    """

    def __init__(
        self,
        links: Sequence[Connection] | None = None,
        *,
        replicas: int = 1,
        dp: int = 1,
        policy: BalancePolicy = BalancePolicy.LEAST_REQUESTS,
        max_requests: int = 1024,
        max_per_rank: int | None = None,
        max_runs: int = 3,
        lockstep: bool = False,
        seed: int | None = None,
    ) -> None:
        self.dp = dp if links is None else len(links)
        self.was_ready = False
        self.controls = EngineControls(self)
        self._dispatcher = Dispatcher(
            replicas,
            dp=self.dp,
            policy=policy,
            most_alive=max_requests,
            most_per_worker=max_per_rank,
            max_runs=max_runs,
            lockstep=lockstep,
            seed=secrets.randbits(63) if seed is None else seed,
        )
        self._replicas = [_Replica() for _ in range(replicas)]
        self._sinks: dict[str, tuple[Sink, dict[str, int]]] = {}
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        self._failure: ParallelRuntimeError | None = None
        self._ready: dict[tuple[int, int], Ready] = {}
        if links is not None:
            self.connect(0, links)
            self.admit(0)

    @property
    def is_ready(self) -> bool:
        """Whether every replica serves, and gets requests unless it is drained."""
        return all(self.serves(number) and self._dispatcher.is_open(number) for number in range(len(self._replicas)))

    @property
    def ready(self) -> tuple[Ready, ...]:
        """What each data-parallel rank said when it was last ready, in their order."""
        return tuple(ready for _, ready in sorted(self._ready.items(), key=lambda item: item[0]))

    @property
    def failure(self) -> ParallelRuntimeError | None:
        """What has ended it; ``None`` while it serves."""
        return self._failure

    @property
    def leaders(self) -> tuple[tuple[int, int], ...]:
        """Replica and data-parallel rank of each leader that serves."""
        return tuple((number, rank) for number in range(len(self._replicas)) if self.serves(number) for rank in range(self.dp))

    def num_ranks(self, replica: int) -> int:
        """Ranks of a replica that serves."""
        return sum(len(ready.ranks) for ready in self._replicas[replica].ready.values())

    @property
    def requests_per_rank(self) -> tuple[int, ...]:
        """Requests with each data-parallel rank of each replica."""
        with self._lock:
            return self._dispatcher.requests_per_worker

    @property
    def num_held(self) -> int:
        """Requests that wait here for a replica with room."""
        with self._lock:
            return self._dispatcher.num_held

    def wait_ready(self, timeout_s: float | None = None) -> tuple[Ready, ...]:
        """Wait until every replica serves.

        Args:
            timeout_s: Longest wait; ``None`` waits until they serve or the engine fails.

        Returns:
            What each data-parallel rank said, in their order; fewer where the time was up.

        Raises:
            ParallelRuntimeError: A replica could not be started.
        """
        with self._lock:
            self._has_news.wait_for(lambda: self._failure is not None or self.is_ready, timeout_s)
            self._check()
            return tuple(replica.ready[rank] for replica in self._replicas for rank in sorted(replica.ready))

    def submit(self, request: Request, sink: Sink, *, to: int | None = None, places: dict[str, int] | None = None) -> int | None:
        """Take a request, and send it to a replica as soon as one has room.

        Args:
            request: The request; its name is not under way.
            sink: Gets its deliveries; the last one has a finish reason or is an error.
            to: The data-parallel rank that has to serve it; another one does where that is lost meanwhile.
            places: Kept up to date with the data-parallel rank that serves the request; 0 until there is one.

        Returns:
            The data-parallel rank it went to, or ``None`` where it waits here.

        Raises:
            QueueFullError: ``max_requests`` are under way.
            RequestError: Its name is under way already, or ``to`` is no rank that takes requests.
            ParallelRuntimeError: No replica is left.
        """
        with self._lock:
            self._check()
            actions = self._dispatcher.submit(request, to=to)
            places = {} if places is None else places
            places.setdefault(request.request_id, 0)
            self._sinks[request.request_id] = (sink, places)
            self._do(actions)
            worker = self._dispatcher.worker_of(request.request_id)
        self._flush()
        return worker

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them. Its sink gets what it made and a finish reason. Unknown and ended ones are nothing.

        Args:
            request_id: The request; ``None`` for all.
        """
        with self._lock:
            self._do(self._dispatcher.abort(request_id))
        self._flush()

    def shutdown(self) -> None:
        """Tell every replica to abort what runs and leave its loop."""
        for replica in range(len(self._replicas)):
            self.tell(replica, Shutdown())

    def connect(self, replica: int, links: Sequence[Connection]) -> None:
        """Bring in the world of a replica. It gets requests once all its leaders have said that they serve.

        Args:
            replica: Its number.
            links: One per data-parallel rank, in that order. Borrowed.
        """
        with self._lock:
            self._replicas[replica] = _Replica(links=LeaderLinks(links))

    def lose(self, replica: int, error: ParallelRuntimeError) -> None:
        """Take a replica out whose world has failed. What it held goes on elsewhere, or waits here; its pipes are not used again.

        Args:
            replica: Its number.
            error: What happened.
        """
        with self._lock:
            self._replicas[replica] = _Replica()
            self._do(self._dispatcher.lose(replica, error))
        self._flush()
        self.controls.lose(replica, error)

    def drain(self, replica: int, timeout_s: float | None = None) -> bool:
        """Give a replica no more requests, and wait until it has ended those it has. ``resume`` ends this, and so does a restart.

        Args:
            replica: Its number.
            timeout_s: Longest wait in seconds; ``None`` waits for as long as it takes.

        Returns:
            Whether it has none left.

        Raises:
            ParallelRuntimeError: No replica is left.
        """
        with self._lock:
            self._check()
            self._dispatcher.drain(replica)
            self._has_news.wait_for(lambda: self._failure is not None or self._dispatcher.is_drained(replica), timeout_s)
            self._check()
            return self._dispatcher.is_drained(replica)

    def resume(self, replica: int) -> None:
        """Give a replica that was drained requests again.

        Args:
            replica: Its number.

        Raises:
            ContextStateError: It does not serve, or waits for the weights of the others.
        """
        if not self.serves(replica) or self.controls.is_behind(replica):
            raise ContextStateError(f"replica {replica} does not serve; it gets requests by itself once it has started")
        if self.controls.is_stale(replica):
            raise ContextStateError(f"replica {replica} lacks weights version {self.controls.version}; update all weights first")
        self.admit(replica)

    def admit(self, replica: int) -> None:
        """Give a replica requests from now on, unless it was lost meanwhile.

        Args:
            replica: Its number; all its leaders serve.
        """
        with self._lock:
            if self._replicas[replica].links is None:
                return
            self._do(self._dispatcher.open(replica))
            self.was_ready = self.was_ready or self.is_ready
            self._has_news.notify_all()
        self._flush()

    def pump(self, timeout_s: float, *, replica: int = 0) -> frozenset[int]:
        """Hand out what the leaders of a replica have said.

        Args:
            timeout_s: Longest wait for a first message.
            replica: Its number.

        Returns:
            Its data-parallel ranks whose leaders have said something.

        Raises:
            SerializationError: A leader said what is no message.
        """
        links = self._replicas[replica].links
        if links is None:
            return frozenset()
        messages = links.read(timeout_s)
        for dp_rank, message in messages:
            self._handle(message, replica, dp_rank)
        links.flush()
        return frozenset(dp_rank for dp_rank, _ in messages)

    def num_open_links(self, replica: int = 0) -> int:
        """Leaders of a replica that have not hung up.

        Args:
            replica: Its number.
        """
        links = self._replicas[replica].links
        return 0 if links is None else len(links.open)

    def serves(self, replica: int) -> bool:
        """Whether every leader of a replica has said that it serves.

        Args:
            replica: Its number.
        """
        return len(self._replicas[replica].ready) == self.dp

    def tell(self, replica: int, message: FrontMessage) -> None:
        """Tell every leader of a replica something, if it has a world.

        Args:
            replica: Its number.
            message: The message.
        """
        with self._lock:
            links = self._replicas[replica].links
            if links is not None:
                for dp_rank in range(self.dp):
                    links.post(dp_rank, message)
        self._flush()

    def fail(self, error: ParallelRuntimeError) -> None:
        """End every request with an error, and refuse new ones with it. The first failure stays.

        Args:
            error: What happened.
        """
        with self._lock:
            self._failure = self._failure or error
            self._do(self._dispatcher.fail(error))
            self._has_news.notify_all()
        self.controls.lose(None, error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _handle(self, message: LeaderMessage, replica: int, dp_rank: int) -> None:
        if isinstance(message, Ready):
            self._replicas[replica].ready[dp_rank] = self._ready[replica, dp_rank] = message
            if self.serves(replica):
                self.controls.join(replica)
        elif isinstance(message, Answer):
            self.controls.take(replica, dp_rank, message)
        elif isinstance(message, StepOutput | Rejected):
            with self._lock:
                self._do(self._dispatcher.take(replica * self.dp + dp_rank, message))

    def _do(self, actions: Sequence[Action]) -> None:
        """Under the lock: queue what is to be sent, and hand out what is to be delivered."""
        for action in actions:
            match action:
                case Send(worker=worker, message=message):
                    self._place(worker, message)
                case Deliver(request_id=name, what=what, is_last=is_last):
                    sink, _ = self._sinks.pop(name) if is_last else self._sinks[name]
                    sink.put((name, what))
                    if is_last:
                        self._has_news.notify_all()

    def _place(self, worker: int, message: FrontMessage) -> None:
        replica, dp_rank = divmod(worker, self.dp)
        links = self._replicas[replica].links
        assert links is not None, f"replica {replica} has no world"
        if isinstance(message, Submit):
            _, places = self._sinks[message.request.request_id]
            places[message.request.request_id] = worker
        links.post(dp_rank, message)

    def _flush(self) -> None:
        for replica in self._replicas:
            links = replica.links
            if links is not None and links.has_unsent:
                links.flush()
