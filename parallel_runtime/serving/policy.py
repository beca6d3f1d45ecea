"""What runs next: continuous batching over a paged KV cache, as a pure state machine.

Every rank of a replica holds one of these and feeds it the same calls, so all of them take the same decisions: there is no clock,
no random number, no hash order and no look at the machine in here. Requests are served in one fixed order, that of arrival, where
each step of priority counts as a head start of ``HEAD_START`` arrivals. Whoever is first gets blocks first; when they run out,
the last one that runs is put back and computed again later. So the first always advances, a bounded number can ever get ahead of
anyone, and nobody starves.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import final

from parallel_runtime.errors import ArgumentError, QueueFullError, RequestError
from parallel_runtime.serving.batch import Batch, Chunk
from parallel_runtime.serving.blocks import BlockPool, blocks_for
from parallel_runtime.serving.live_request import LiveRequest, RequestState
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput

__all__ = ["PolicyLimits", "SchedulingPolicy"]

_order = attrgetter("order")


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
        prefix_reuse: Whether full blocks are kept for later requests that begin alike.

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
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "prefix_reuse" and getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_batch_tokens < self.max_batch_requests:
            raise ArgumentError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_batch_requests={self.max_batch_requests}: "
                "every running request needs one token of the batch"
            )


@final
class SchedulingPolicy:
    """The requests of one replica and what they compute next.

    A turn is: ``complete`` the oldest batch under way, ``abort``, ``add``, then ``schedule`` the next batch. Up to
    ``limits.num_slots`` batches may be under way; a request is in one of them at most.

    Args:
        limits: What may run at once.

    Attributes:
        limits: What may run at once.
        num_reused_tokens: Tokens that were found in the KV cache instead of being computed, over all requests so far.
        num_preemptions: How often a request was put back so far.
        weights_version: What outputs are marked with.
    """

    def __init__(self, limits: PolicyLimits) -> None:
        self.limits = limits
        self.num_reused_tokens = self.num_preemptions = self.weights_version = 0
        self._pool = BlockPool(limits.num_blocks)
        self._alive: dict[str, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []
        self._running: list[LiveRequest] = []
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
        """Blocks that no request holds; the contents of ``num_cached_blocks`` of them are remembered."""
        return self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request holds and that the next one that begins alike takes over."""
        return self._pool.num_cached

    @property
    def num_under_way(self) -> int:
        """Batches scheduled and not complete."""
        return len(self._under_way)

    @property
    def has_work(self) -> bool:
        """Whether a request waits, or runs and is in no batch under way."""
        return bool(self._waiting) or any(not live.is_in_flight for live in self._running)

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the requests that wait or run, in order of arrival."""
        return tuple(self._alive)

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive and no batch is under way."""
        return not self._alive and not self._under_way

    def state(self, request_id: str) -> RequestState | None:
        """Look a request up.

        Args:
            request_id: Name of the request.

        Returns:
            Its state, or ``None`` where it is not alive.
        """
        live = self._alive.get(request_id)
        return None if live is None else live.state

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
        if request.request_id in self._alive:
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
        live = LiveRequest(request=request, arrival=self._num_arrived, tokens=[*request.prompt, *request.made])
        self._num_arrived += 1
        self._alive[request.request_id] = live
        insort(self._waiting, live, key=_order)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is and free its blocks. An unknown id is nothing.

        Blocks of a request in a batch under way are free at once: stages run batches in order, so their next owner writes later.

        Args:
            request_id: Name of the request.

        Returns:
            Whether it was alive.
        """
        live = self._alive.get(request_id)
        if live is None:
            return False
        if live.state is RequestState.WAITING:
            self._waiting.remove(live)
        self._end(live, RequestState.ABORTED)
        return True

    def forget_prefixes(self) -> int:
        """Keep no block for others that begin alike; what runs goes on with its own.

        Returns:
            Blocks that were kept.
        """
        return self._pool.forget()

    def restart(self) -> None:
        """Put every running request back, to be computed again from its first token: its keys and values are not valid any more.

        Raises:
            ArgumentError: A batch is under way; complete it first.
        """
        if self._under_way:
            raise ArgumentError(f"{len(self._under_way)} batches are under way; complete them before requests are put back")
        for live in reversed(self._running.copy()):
            self._put_back(live)
        self._pool.forget()

    def schedule(self) -> Batch:
        """Choose what is computed next: running requests first, then waiting ones as far as there is room.

        Of the running ones every one that wants a single token gets it; prompts share what is left of the batch.

        Returns:
            The batch; it counts as under way until ``complete`` unless it is empty.

        Raises:
            ArgumentError: ``limits.num_slots`` batches are under way already.
        """
        if len(self._under_way) >= self.limits.num_slots:
            raise ArgumentError(
                f"{len(self._under_way)} batches are under way and num_slots={self.limits.num_slots}; complete one first"
            )
        room = _Room(tokens=self.limits.max_batch_tokens, requests=self._share())
        chunks: list[Chunk] = []
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
            live = self._alive.get(chunk.request_id)
            if live is None or live.arrival != chunk.arrival:
                continue
            live.is_in_flight = False
            if token is not None:
                outputs.append(self._append(live, token))
        return outputs

    def _share(self) -> int:
        """Requests one batch may hold so that every slot gets some."""
        at_once = min(len(self._alive), self.limits.max_batch_requests)
        return -(-at_once // self.limits.num_slots)

    def _continue_running(self, chunks: list[Chunk], room: "_Room") -> None:
        ready = [live for live in self._running if not live.is_in_flight]
        num_decodes = sum(live.is_decoding for live in ready)
        for live in ready:
            num_decodes -= live.is_decoding
            kept = min(num_decodes, room.requests - 1)  # tokens for those behind it
            count = min(len(live.tokens) - live.num_computed, room.tokens - kept)
            if live.state is RequestState.WAITING or count < 1:  # put back by one before it, or beyond the budget
                continue
            if room.requests < 1:
                return
            if self._make_room(live, live.num_computed + count):
                self._take(live, count, chunks, room)
            else:
                room.is_short = True

    def _admit_waiting(self, chunks: list[Chunk], room: "_Room") -> None:
        limits = self.limits
        while self._waiting and room.has_some and len(self._running) < limits.max_batch_requests:
            live = self._waiting[0]
            known = self._find_prefix(live)
            start = len(known) * limits.page_size
            count = min(len(live.tokens) - start, room.tokens)
            wanted = blocks_for(start + count, limits.page_size) - len(known) + self._pool.num_cached_among(known)
            if wanted > self._pool.num_available:
                return
            self._pool.share(known)
            self.num_reused_tokens += start
            live.num_computed, live.blocks = start, known
            live.move(RequestState.PREFILL)
            del self._waiting[0]
            insort(self._running, live, key=_order)
            self._grow(live, start + count)
            self._take(live, count, chunks, room)

    def _find_prefix(self, live: LiveRequest) -> list[int]:
        """Blocks that hold its beginning already; one token at least is left to compute, in a block of its own."""
        if not self.limits.prefix_reuse:
            return []
        return self._pool.find(live.keys(len(live.tokens) - 1, self.limits.page_size))

    def _take(self, live: LiveRequest, count: int, chunks: list[Chunk], room: "_Room") -> None:
        """Add a chunk. Blocks that it fills can be found at once: who takes one over is computed in this batch or a later one."""
        page_size, start = self.limits.page_size, live.num_computed
        room.tokens -= count
        room.requests -= 1
        chunks.append(live.take(count))
        if self.limits.prefix_reuse:
            keys = live.keys(live.num_computed, page_size)
            for index in range(start // page_size, len(keys)):
                self._pool.remember(live.blocks[index], keys[index])

    def _make_room(self, live: LiveRequest, length: int) -> bool:
        """Get blocks for ``length`` tokens, putting those behind back, the last one first; whether ``live`` has them.

        One that gets none keeps what it holds and waits: those before it end, or take its blocks.
        """
        wanted = blocks_for(length, self.limits.page_size) - len(live.blocks)
        while wanted > self._pool.num_available:
            behind = [other for other in self._running if other.order > live.order and not other.is_in_flight]
            if not behind:
                return False
            self._put_back(behind[-1])
        self._grow(live, length)
        return True

    def _grow(self, live: LiveRequest, length: int) -> None:
        live.blocks += self._pool.allocate(max(0, blocks_for(length, self.limits.page_size) - len(live.blocks)))

    def _put_back(self, live: LiveRequest) -> None:
        self.num_preemptions += 1
        self._free(live)
        live.num_computed = 0
        live.move(RequestState.WAITING)
        insort(self._waiting, live, key=_order)

    def _append(self, live: LiveRequest, token: int) -> StepOutput:
        live.tokens.append(token)
        sampling = live.request.sampling
        reason = None
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif live.num_new_tokens >= sampling.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(live, RequestState.FINISHED)
        elif live.state is RequestState.PREFILL:
            live.move(RequestState.DECODE)
        name, version = live.request.request_id, self.weights_version
        return StepOutput(request_id=name, token_ids=(token,), finish_reason=reason, weights_version=version)

    def _end(self, live: LiveRequest, state: RequestState) -> None:
        if live.state is not RequestState.WAITING:
            self._free(live)
        live.move(state)
        del self._alive[live.request.request_id]

    def _free(self, live: LiveRequest) -> None:
        self._running.remove(live)
        self._pool.release(live.blocks)
        live.blocks = []


@dataclass(slots=True)
class _Room:
    """What is left of one batch's budgets, and whether someone who runs found no block, so that nobody new may take one."""

    tokens: int
    requests: int
    is_short: bool = False

    @property
    def has_some(self) -> bool:
        return self.tokens > 0 and self.requests > 0 and not self.is_short
