"""What runs next: continuous batching over a paged KV cache, as a pure state machine.

Every rank of a replica holds one of these and feeds it the same calls, so all of them take the same decisions: there is no clock,
no random number, no hash order and no look at the machine in here. Requests are served first come, first served; when blocks run
out, the newest one that runs is put back and computed again later, so the oldest always advances and nobody starves.
"""

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import final

from parallel_runtime.errors import ArgumentError, QueueFullError, RequestError
from parallel_runtime.serving.blocks import BlockPool, blocks_for
from parallel_runtime.serving.messages import FinishReason, Request, SamplingParams, StepOutput

__all__ = ["TRANSITIONS", "Batch", "Chunk", "PolicyLimits", "RequestState", "SchedulingPolicy"]


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.ABORTED}),
        RequestState.PREFILL: frozenset({RequestState.DECODE, RequestState.FINISHED, RequestState.WAITING, RequestState.ABORTED}),
        RequestState.DECODE: frozenset({RequestState.FINISHED, RequestState.WAITING, RequestState.ABORTED}),
        RequestState.FINISHED: frozenset(),
        RequestState.ABORTED: frozenset(),
    }
)
"""Every legal change of state. Back to WAITING is preemption: the blocks are gone and the tokens are computed again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    """What one replica may do at once.

    Attributes:
        num_blocks: Blocks of KV cache.
        page_size: Tokens in one block.
        max_batch_tokens: Tokens computed in one batch.
        max_batch_requests: Requests that run at once.
        max_waiting: Requests that wait, beyond those that run.
        max_request_tokens: Prompt plus new tokens of one request; the model's context length.
        num_slots: Batches under way at once: the number of pipeline stages.

    Raises:
        ArgumentError: A limit is below 1, or a batch could not hold one token of each running request.
    """

    num_blocks: int
    page_size: int = 16
    max_batch_tokens: int = 512
    max_batch_requests: int = 32
    max_waiting: int = 1024
    max_request_tokens: int = 2048
    num_slots: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_batch_tokens < self.max_batch_requests:
            raise ArgumentError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_batch_requests={self.max_batch_requests}: "
                "every running request needs one token of the batch"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of one request that a batch computes.

    Attributes:
        request_id: The request.
        arrival: Its number in the order of arrival at this replica; never used again.
        start: Tokens of it that the KV cache holds already.
        token_ids: Tokens to compute, at positions ``start`` and up.
        blocks: Its blocks, enough for ``start + len(token_ids)`` tokens.
        is_sampled: Whether these are its last known tokens, so that the next one is chosen.
        sampling: How.
    """

    request_id: str
    arrival: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    is_sampled: bool
    sampling: SamplingParams

    @property
    def length(self) -> int:
        """Tokens of the request once this chunk is computed."""
        return self.start + len(self.token_ids)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one forward computes.

    Attributes:
        chunks: At most one per request; none for an idle turn.
    """

    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """The chunks whose next token is chosen, in batch order."""
        return tuple(chunk for chunk in self.chunks if chunk.is_sampled)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One request alive."""

    request: Request
    arrival: int
    tokens: list[int]
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_in_flight: bool = False

    def move(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.request.request_id}: {self.state} -> {state}"
        self.state = state

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


def _arrival(entry: _Entry) -> int:
    return entry.arrival


@final
class SchedulingPolicy:
    """The requests of one replica and what they compute next.

    A turn is: ``complete`` the oldest batch under way, ``abort``, ``add``, then ``schedule`` the next batch. Up to
    ``limits.num_slots`` batches may be under way; a request is in one of them at most.

    Args:
        limits: What may run at once.
    """

    def __init__(self, limits: PolicyLimits) -> None:
        self.limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._entries: dict[str, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._under_way: deque[Batch] = deque()
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or were put back."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def num_under_way(self) -> int:
        """Batches scheduled and not complete."""
        return len(self._under_way)

    @property
    def has_work(self) -> bool:
        """Whether a request waits, or runs and is in no batch under way."""
        return bool(self._waiting) or any(not entry.is_in_flight for entry in self._running)

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the requests that wait or run, in order of arrival."""
        return tuple(self._entries)

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive and no batch is under way."""
        return not self._entries and not self._under_way

    def state(self, request_id: str) -> RequestState | None:
        """Look a request up.

        Args:
            request_id: Name of the request.

        Returns:
            Its state, or ``None`` where it is not alive.
        """
        entry = self._entries.get(request_id)
        return None if entry is None else entry.state

    def check(self, request: Request, *, num_ahead: int = 0) -> None:
        """Find out whether ``add`` would take a request. Changes nothing.

        Args:
            request: The request.
            num_ahead: Requests that will be added before it.

        Raises:
            RequestError: It can never be served, or its id is alive.
            QueueFullError: ``limits.max_waiting`` requests wait already.
        """
        limits = self.limits
        if request.request_id in self._entries:
            raise RequestError(f"request {request.request_id!r} is alive already; every request needs an id of its own")
        longest = min(limits.max_request_tokens, limits.num_blocks * limits.page_size)
        if request.max_tokens > longest:
            raise RequestError(
                f"request {request.request_id!r} has {len(request.prompt)} prompt tokens and asks for "
                f"{request.sampling.max_new_tokens} new ones, {request.max_tokens} together; this replica holds {longest} "
                f"(context length {limits.max_request_tokens}, KV cache {limits.num_blocks} blocks of {limits.page_size})"
            )
        if len(self._waiting) + num_ahead >= limits.max_waiting:
            raise QueueFullError(
                f"request {request.request_id!r} refused: {len(self._waiting) + num_ahead} requests wait already and "
                f"max_waiting={limits.max_waiting}; try again later"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Args:
            request: The request.

        Raises:
            RequestError: It can never be served, or its id is alive.
            QueueFullError: ``limits.max_waiting`` requests wait already.
        """
        self.check(request)
        entry = _Entry(request=request, arrival=self._num_arrived, tokens=list(request.prompt))
        self._num_arrived += 1
        self._entries[request.request_id] = entry
        self._waiting.append(entry)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is and free its blocks. An unknown id is nothing.

        Blocks of a request in a batch under way are free at once: stages run batches in order, so their next owner writes later.

        Args:
            request_id: Name of the request.

        Returns:
            Whether it was alive.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.state is RequestState.WAITING:
            self._waiting.remove(entry)
        self._end(entry, RequestState.ABORTED)
        return True

    def schedule(self) -> Batch:
        """Choose what is computed next. Running requests come first, oldest first; then waiting ones as far as there is room.

        Returns:
            The batch; it counts as under way until ``complete`` unless it is empty.

        Raises:
            ArgumentError: ``limits.num_slots`` batches are under way already.
        """
        if len(self._under_way) >= self.limits.num_slots:
            raise ArgumentError(
                f"{len(self._under_way)} batches are under way and num_slots={self.limits.num_slots}; complete one first"
            )
        chunks: list[Chunk] = []
        room = _Room(tokens=self.limits.max_batch_tokens, requests=self._share())
        self._continue_running(chunks, room)
        self._admit_waiting(chunks, room)
        batch = Batch(chunks=tuple(chunks))
        if chunks:
            self._under_way.append(batch)
        return batch

    def complete(self, sampled: Sequence[int]) -> list[StepOutput]:
        """Take the result of the oldest batch under way.

        Args:
            sampled: The token chosen for each of ``batch.sampled``, in that order.

        Returns:
            New tokens per request, with the reason where one ended. Requests that were aborted meanwhile are left out.

        Raises:
            ArgumentError: No batch is under way, or the number of tokens is not the batch's.
        """
        if not self._under_way:
            raise ArgumentError(f"got {len(sampled)} sampled tokens but no batch is under way")
        batch = self._under_way[0]
        if len(sampled) != len(batch.sampled):
            raise ArgumentError(f"got {len(sampled)} sampled tokens for a batch that samples {len(batch.sampled)}")
        self._under_way.popleft()
        tokens = iter(sampled)
        outputs = []
        for chunk in batch.chunks:
            token = next(tokens) if chunk.is_sampled else None
            entry = self._entries.get(chunk.request_id)
            if entry is None or entry.arrival != chunk.arrival:
                continue
            entry.is_in_flight = False
            entry.num_computed = chunk.length
            if token is not None:
                outputs.append(self._append(entry, token))
        return outputs

    def _share(self) -> int:
        """Requests one batch may hold so that every slot gets some."""
        at_once = min(len(self._entries), self.limits.max_batch_requests)
        return -(-at_once // self.limits.num_slots)

    def _continue_running(self, chunks: list[Chunk], room: "_Room") -> None:
        for entry in tuple(self._running):
            if room.is_empty:
                return
            if entry.is_in_flight or entry.state is RequestState.WAITING:
                continue
            count = min(len(entry.tokens) - entry.num_computed, room.tokens)
            if self._make_room(entry, entry.num_computed + count):
                chunks.append(self._take(entry, count, room))

    def _admit_waiting(self, chunks: list[Chunk], room: "_Room") -> None:
        while self._waiting and not room.is_empty and len(self._running) < self.limits.max_batch_requests:
            entry = self._waiting[0]
            count = min(len(entry.tokens), room.tokens)
            if blocks_for(count, self.limits.page_size) > self._pool.num_free:
                return
            self._waiting.popleft()
            insort(self._running, entry, key=_arrival)
            self._grow(entry, count)
            entry.move(RequestState.PREFILL)
            chunks.append(self._take(entry, count, room))

    def _take(self, entry: _Entry, count: int, room: "_Room") -> Chunk:
        room.tokens -= count
        room.requests -= 1
        entry.is_in_flight = True
        start = entry.num_computed
        return Chunk(
            request_id=entry.request.request_id,
            arrival=entry.arrival,
            start=start,
            token_ids=tuple(islice(entry.tokens, start, start + count)),
            blocks=tuple(entry.blocks),
            is_sampled=start + count == len(entry.tokens),
            sampling=entry.request.sampling,
        )

    def _make_room(self, entry: _Entry, length: int) -> bool:
        """Get blocks for ``length`` tokens, putting newer requests back, newest first; whether ``entry`` has them.

        One that gets none keeps what it holds and waits: older ones end, or take its blocks.
        """
        while blocks_for(length, self.limits.page_size) - len(entry.blocks) > self._pool.num_free:
            newer = [other for other in self._running if other.arrival > entry.arrival and not other.is_in_flight]
            if not newer:
                return False
            self._preempt(newer[-1])
        self._grow(entry, length)
        return True

    def _grow(self, entry: _Entry, length: int) -> None:
        entry.blocks += self._pool.allocate(max(0, blocks_for(length, self.limits.page_size) - len(entry.blocks)))

    def _preempt(self, entry: _Entry) -> None:
        self._free(entry)
        entry.num_computed = 0
        entry.move(RequestState.WAITING)
        insort(self._waiting, entry, key=_arrival)

    def _append(self, entry: _Entry, token: int) -> StepOutput:
        entry.tokens.append(token)
        sampling = entry.request.sampling
        reason = None
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif entry.num_new_tokens >= sampling.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(entry, RequestState.FINISHED)
        elif entry.state is RequestState.PREFILL:
            entry.move(RequestState.DECODE)
        return StepOutput(request_id=entry.request.request_id, token_ids=(token,), finish_reason=reason)

    def _end(self, entry: _Entry, state: RequestState) -> None:
        if entry.state is not RequestState.WAITING:
            self._free(entry)
        entry.move(state)
        del self._entries[entry.request.request_id]

    def _free(self, entry: _Entry) -> None:
        self._running.remove(entry)
        self._pool.release(entry.blocks)
        entry.blocks = []


@dataclass(slots=True)
class _Room:
    """What is left of one batch's budgets."""

    tokens: int
    requests: int

    @property
    def is_empty(self) -> bool:
        return self.tokens < 1 or self.requests < 1
