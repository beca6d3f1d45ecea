"""What one forward computes, as plain data: parts of requests and the blocks they are in."""

from dataclasses import dataclass
from typing import final

from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["Batch", "Chunk"]


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
        num_new_tokens: Tokens made so far.
        history: All tokens so far, the prompt first, where the next one is chosen and its choice depends on them.
    """

    request_id: str
    arrival: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    is_sampled: bool
    sampling: SamplingParams
    num_new_tokens: int = 0
    history: tuple[int, ...] = ()

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
