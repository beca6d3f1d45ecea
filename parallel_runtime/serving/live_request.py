"""One request in the hands of the scheduling policy: its states, its place in the order, and the blocks it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import final

from parallel_runtime.serving.batch import Chunk
from parallel_runtime.serving.blocks import chain_keys
from parallel_runtime.serving.messages import Request

__all__ = ["HEAD_START", "TRANSITIONS", "LiveRequest", "RequestState"]

HEAD_START = 64
"""Arrivals that one step of priority is worth."""


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
@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request that waits or runs.

    Attributes:
        request: As it came.
        arrival: Its number in the order of arrival.
        tokens: The prompt and what was made so far.
        state: Where it is.
        num_computed: Tokens whose keys and values are in its blocks, or will be once the batch under way is computed.
        blocks: What it holds, in the order of its tokens.
        is_in_flight: Whether a batch under way has a chunk of it.
        order: Its place among all; less is served first, and it never changes.
    """

    request: Request
    arrival: int
    tokens: list[int]
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_in_flight: bool = False
    order: tuple[int, int] = field(init=False)
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = (self.arrival - HEAD_START * self.request.priority, self.arrival)

    @property
    def num_new_tokens(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_decoding(self) -> bool:
        """Whether one token of it is to be computed, as every step of a request that runs smoothly."""
        return len(self.tokens) - self.num_computed == 1

    def move(self, state: RequestState) -> None:
        """Change its state.

        Args:
            state: One that ``TRANSITIONS`` allows.
        """
        assert state in TRANSITIONS[self.state], f"{self.request.request_id}: {self.state} -> {state}"
        self.state = state

    def keys(self, num_tokens: int, page_size: int) -> list[bytes]:
        """Names of the full blocks of its first tokens.

        Args:
            num_tokens: How many tokens.
            page_size: Tokens in one block.
        """
        count = num_tokens // page_size
        if count > len(self._keys):
            self._keys = chain_keys(self.tokens[: count * page_size], page_size, known=self._keys)
        return self._keys[:count]

    def take(self, count: int) -> Chunk:
        """Make the next tokens a part of a batch.

        Args:
            count: How many; its blocks are enough for them.
        """
        start, end = self.num_computed, self.num_computed + count
        self.is_in_flight = True
        self.num_computed = end
        is_sampled, sampling = end == len(self.tokens), self.request.sampling
        return Chunk(
            request_id=self.request.request_id,
            arrival=self.arrival,
            start=start,
            token_ids=tuple(self.tokens[start:end]),
            blocks=tuple(self.blocks),
            is_sampled=is_sampled,
            sampling=sampling,
            num_new_tokens=self.num_new_tokens,
            history=tuple(self.tokens) if is_sampled and sampling.is_penalised else (),
        )
