"""Who serves which request, what was handed out of it, and where it goes on when its replica is lost. Pure: no pipe, no clock.

Workers are the data-parallel ranks of all replicas, counted through: worker ``replica * dp + dp_rank``. What happens goes in by a
method, what has to be done comes out as actions, in order. No request is lost and none is answered twice: it waits here, or is
with one worker, or has had its last delivery; what another worker says about it is dropped.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, final

import msgspec

from parallel_runtime.errors import ArgumentError, ParallelRuntimeError, PeerLostError, QueueFullError, RequestError
from parallel_runtime.serving.balancer import BalancePolicy, Balancer
from parallel_runtime.serving.live_request import HEAD_START
from parallel_runtime.serving.messages import Abort, FinishReason, FrontMessage, Rejected, Request, StepOutput, Submit, Wake
from parallel_runtime.serving.token_keys import mix_seed

__all__ = ["Action", "Deliver", "Dispatcher", "Send"]


@final
class Send(NamedTuple):
    """Tell a worker's leader something.

    Attributes:
        worker: The worker.
        message: For its leader.
    """

    worker: int
    message: FrontMessage


@final
class Deliver(NamedTuple):
    """Hand something to whoever waits for a request.

    Attributes:
        request_id: The request.
        what: New tokens, or the error that ended it.
        is_last: Whether nothing follows.
    """

    request_id: str
    what: StepOutput | ParallelRuntimeError
    is_last: bool


Action: TypeAlias = Send | Deliver
"""What has to be done."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One request alive. Without a worker it waits here."""

    request: Request
    arrival: int
    wanted: int | None = None
    worker: int | None = None
    made: list[int] = field(default_factory=list)
    num_runs: int = 0
    is_unwanted: bool = False


def _order(entry: _Entry) -> int:
    return entry.arrival - HEAD_START * entry.request.priority


@final
class Dispatcher:
    """The requests of an engine, over all its replicas.

    Args:
        num_replicas: Independent worlds.
        dp: Data-parallel ranks of each.
        policy: How requests are spread over workers.
        most_alive: Requests alive at once; one more is refused.
        most_per_worker: Requests with one worker at once; the rest wait here. ``None`` sets no limit.
        max_runs: Replicas that may be lost while they run one request, before it is given up.
        lockstep: Whether the data-parallel ranks of a replica compute in step, so that each must know of another's requests.
        seed: Base of the seeds of requests that draw and have none, so that every replica draws the same tokens for them.

    Raises:
        ArgumentError: A number is below 1.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        dp: int = 1,
        policy: BalancePolicy = BalancePolicy.LEAST_REQUESTS,
        most_alive: int = 1024,
        most_per_worker: int | None = None,
        max_runs: int = 3,
        lockstep: bool = False,
        seed: int = 0,
    ) -> None:
        for name, number in (("num_replicas", num_replicas), ("dp", dp), ("max_requests", most_alive), ("max_runs", max_runs)):
            if number < 1:
                raise ArgumentError(f"{name}={number} must be at least 1")
        self._dp = dp
        self._balancer = Balancer(num_replicas * dp, policy=policy)
        self._most_alive = most_alive
        self._most_per_worker = most_per_worker
        self._max_runs = max_runs
        self._lockstep = lockstep
        self._seed = seed
        self._open: set[int] = set()
        self._draining: set[int] = set()
        self._entries: dict[str, _Entry] = {}
        self._held: list[_Entry] = []
        self._num_arrived = 0

    @property
    def num_alive(self) -> int:
        """Requests that have not had their last delivery."""
        return len(self._entries)

    @property
    def num_held(self) -> int:
        """Requests that are with no worker."""
        return len(self._held)

    @property
    def requests_per_worker(self) -> tuple[int, ...]:
        """Requests with each worker."""
        return self._balancer.requests

    def worker_of(self, request_id: str) -> int | None:
        """Find the worker of a request.

        Args:
            request_id: Name of the request.

        Returns:
            Its number; ``None`` where the request waits here or is not alive.
        """
        return self._balancer.worker_of(request_id)

    def wants(self, request_id: str) -> int | None:
        """Find the worker that a request was given for.

        Args:
            request_id: Name of the request.

        Returns:
            Its number; ``None`` where any may run it, or the request is not alive.
        """
        entry = self._entries.get(request_id)
        return None if entry is None else entry.wanted

    def submit(self, request: Request, *, to: int | None = None) -> list[Action]:
        """Take a request.

        Args:
            request: Its name is not alive.
            to: The worker that has to run it; where that one is lost meanwhile, another does. ``None`` leaves the choice here.

        Returns:
            What has to be done.

        Raises:
            QueueFullError: As many requests are alive as may be.
            RequestError: Its name is alive already, or there is no worker ``to``, or its replica does not serve.
        """
        if request.request_id in self._entries:
            raise RequestError(f"request {request.request_id!r} is alive already; every request needs an id of its own")
        if len(self._entries) >= self._most_alive:
            raise QueueFullError(
                f"request {request.request_id!r} refused: {len(self._entries)} requests are under way and the limit is "
                f"{self._most_alive}; try again later"
            )
        if to is not None:
            self._check_route(request, to)
        if not request.sampling.is_greedy and request.sampling.seed is None:
            sampling = msgspec.structs.replace(request.sampling, seed=mix_seed(self._seed, self._num_arrived))
            request = msgspec.structs.replace(request, sampling=sampling)
        entry = _Entry(request=request, arrival=self._num_arrived, wanted=to)
        self._num_arrived += 1
        self._entries[request.request_id] = entry
        insort(self._held, entry, key=_order)
        return list(self._place())

    def abort(self, request_id: str | None = None) -> list[Action]:
        """End a request, or all of them. Unknown and ended ones are nothing.

        Args:
            request_id: The request; ``None`` for all.

        Returns:
            What has to be done.
        """
        names = list(self._entries) if request_id is None else [request_id]
        actions: list[Action] = []
        for entry in (self._entries[name] for name in names if name in self._entries):
            if entry.worker is None:
                self._held.remove(entry)
                actions.append(self._end(entry, FinishReason.ABORT))
            elif not entry.is_unwanted:
                entry.is_unwanted = True
                actions.append(Send(entry.worker, Abort(entry.request.request_id)))
        return actions

    def take(self, worker: int, message: StepOutput | Rejected) -> list[Action]:
        """Take in what a worker says about a request. What it says about one that is not with it is dropped.

        Args:
            worker: Who says it.
            message: New tokens, or a refusal.

        Returns:
            What has to be done.
        """
        entry = self._entries.get(message.request_id)
        if entry is None or entry.worker != worker:
            return []
        what: StepOutput | ParallelRuntimeError
        if isinstance(message, Rejected):
            what, is_last = (QueueFullError if message.queue_full else RequestError)(message.message), True
        else:
            what, is_last = message, message.finish_reason is not None
            entry.made += message.token_ids
        actions: list[Action] = [Deliver(message.request_id, what, is_last)]
        if is_last:
            self._forget(entry)
            actions += self._place()
        return actions

    def open(self, replica: int) -> list[Action]:
        """Give a replica requests from now on.

        Args:
            replica: Its number.

        Returns:
            What has to be done: what waits may go there.
        """
        self._open.add(replica)
        self._draining.discard(replica)
        return list(self._place())

    def is_open(self, replica: int) -> bool:
        """Find out whether a replica was opened and not lost since.

        Args:
            replica: Its number.
        """
        return replica in self._open

    def drain(self, replica: int) -> None:
        """Give a replica no more requests; it ends those it has. ``open`` ends this.

        Args:
            replica: Its number.
        """
        self._draining.add(replica)

    def is_drained(self, replica: int) -> bool:
        """Find out whether a replica has no request.

        Args:
            replica: Its number.
        """
        return not any(self._balancer.requests[worker] for worker in self.workers_of(replica))

    def lose(self, replica: int, error: ParallelRuntimeError) -> list[Action]:
        """A replica is gone, with all it held: that goes on elsewhere, after the tokens that were handed out.

        Args:
            replica: Its number.
            error: What happened to it.

        Returns:
            What has to be done.
        """
        self._open.discard(replica)
        actions: list[Action] = []
        workers = self.workers_of(replica)
        for worker in workers:
            self._balancer.forget(worker)
        for entry in self._held:
            entry.wanted = None if entry.wanted in workers else entry.wanted
        for entry in [entry for entry in self._entries.values() if entry.worker in workers]:
            self._balancer.release(entry.request.request_id)
            entry.worker = entry.wanted = None
            if entry.is_unwanted:
                actions.append(self._end(entry, FinishReason.ABORT))
            elif len(entry.made) >= entry.request.sampling.max_new_tokens:
                actions.append(self._end(entry, FinishReason.LENGTH))
            elif entry.num_runs >= self._max_runs:
                actions.append(self._give_up(entry, error))
            else:
                insort(self._held, entry, key=_order)
        return [*actions, *self._place()]

    def fail(self, error: ParallelRuntimeError) -> list[Action]:
        """End every request with an error.

        Args:
            error: What happened.

        Returns:
            What has to be done.
        """
        self._open.clear()
        self._held.clear()
        actions: list[Action] = []
        for entry in list(self._entries.values()):
            self._forget(entry)
            actions.append(Deliver(entry.request.request_id, error, is_last=True))
        return actions

    def workers_of(self, replica: int) -> range:
        """List the workers of a replica.

        Args:
            replica: Its number.
        """
        return range(replica * self._dp, (replica + 1) * self._dp)

    def _check_route(self, request: Request, worker: int) -> None:
        count = len(self._balancer.requests)
        if not 0 <= worker < count:
            raise RequestError(f"request {request.request_id!r} is for worker {worker}; there are {count}, 0 to {count - 1}")
        if not self._serves(worker):
            state = "takes no more requests" if worker // self._dp in self._open else "does not serve"
            raise RequestError(
                f"request {request.request_id!r} is for worker {worker}, but replica {worker // self._dp} {state}; "
                "leave the choice to the balancer, or try again later"
            )

    def _serves(self, worker: int) -> bool:
        replica = worker // self._dp
        return replica in self._open and replica not in self._draining

    def _has_room(self, worker: int) -> bool:
        return self._most_per_worker is None or self._balancer.requests[worker] < self._most_per_worker

    def _place(self) -> Iterator[Action]:
        """Send what waits, in order, as far as there is room. One that must go to a certain worker holds up no other."""
        kept: list[_Entry] = []
        while self._held:
            entry = self._held.pop(0)
            candidates = range(len(self._balancer.requests)) if entry.wanted is None else (entry.wanted,)
            among = [worker for worker in candidates if self._serves(worker) and self._has_room(worker)]
            if among:
                yield from self._send(entry, among)
                continue
            kept.append(entry)
            if entry.wanted is None:
                break
        self._held[:0] = kept

    def _send(self, entry: _Entry, among: list[int]) -> Iterator[Action]:
        request = entry.request
        entry.num_runs += 1
        entry.worker = self._balancer.assign(
            request.request_id, num_tokens=request.max_tokens, prompt=request.prompt, among=among
        )
        yield Send(entry.worker, Submit(msgspec.structs.replace(request, made=(*request.made, *entry.made))))
        if self._lockstep:
            for other in self.workers_of(entry.worker // self._dp):
                if other != entry.worker:
                    yield Send(other, Wake())

    def _give_up(self, entry: _Entry, error: ParallelRuntimeError) -> Deliver:
        self._forget(entry)
        name = entry.request.request_id
        problem = PeerLostError(f"request {name!r} was given up: {entry.num_runs} replicas were lost while they ran it; {error}")
        problem.__cause__ = error
        return Deliver(name, problem, is_last=True)

    def _end(self, entry: _Entry, reason: FinishReason) -> Deliver:
        self._forget(entry)
        name = entry.request.request_id
        return Deliver(name, StepOutput(request_id=name, finish_reason=reason), is_last=True)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        self._balancer.release(entry.request.request_id)
