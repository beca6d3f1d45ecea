"""What travels between the front process, the leaders and the other ranks: plain data, encoded with msgpack, never with pickle.

Front process to a leader: ``Submit``, ``Abort``, ``Shutdown``, ``Wake``. Leader to the front process: ``Ready``, ``StepOutput``,
``Rejected``. Leader to the other ranks of its replica: one ``Step`` per turn of the loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from math import isfinite
from typing import TypeAlias

import msgspec

from parallel_runtime.errors import RequestError, SerializationError

__all__ = [
    "Abort",
    "FinishReason",
    "FrontMessage",
    "LeaderMessage",
    "Ready",
    "Rejected",
    "Request",
    "SamplingParams",
    "Shutdown",
    "Step",
    "StepOutput",
    "Submit",
    "Wake",
    "decode_front",
    "decode_leader",
    "encode",
]

_MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: Tokens to make at most, at least 1.
        temperature: 0 is greedy; above 0 draws from the softmax of ``logits / temperature``.
        top_k: Draw among the ``top_k`` most likely tokens only; ``None`` keeps all.
        top_p: Draw among the fewest most likely tokens whose probabilities reach ``top_p``, in ``(0, 1]``.
        seed: Seed of this request's own random stream; equal seeds, equal tokens on every layout. ``None``: the replica chooses.
        stop_token_ids: The request ends after one of these tokens.
        ignore_eos: Go on after the model's end-of-sequence token.

    Raises:
        RequestError: A value is outside its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, low=1)
        if not _is_number(self.temperature) or self.temperature < 0:
            raise RequestError(f"temperature={self.temperature!r} must be a finite number >= 0; 0 is greedy")
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, low=1)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p!r} must be in (0, 1]; 1 keeps every token")
        if self.seed is not None:
            _check_integer("seed", self.seed, low=0)
        for token in self.stop_token_ids:
            _check_integer("a stop token id", token, low=0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue.

    Attributes:
        request_id: Name of the request, unique among those alive.
        prompt: Token ids, at least one.
        sampling: How tokens are chosen. ``stop_token_ids`` already holds the model's end-of-sequence ids where those count.

    Raises:
        RequestError: The prompt is empty, the id is empty, or a token id is not an integer >= 0.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("a request needs a request_id that is not empty")
        if not self.prompt:
            raise RequestError(f"request {self.request_id!r} has an empty prompt; give at least one token")
        for token in self.prompt:
            _check_integer(f"a prompt token of request {self.request_id!r}", token, low=0)

    @property
    def max_tokens(self) -> int:
        """Tokens it holds at most: the prompt and everything it may make."""
        return len(self.prompt) + self.sampling.max_new_tokens


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: serve this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: end this request, or every one where ``request_id`` is ``None``. An unknown id is nothing."""

    request_id: str | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: abort what runs and leave the loop."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: another replica, which this one computes in step with, has got a request."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: the replica serves.

    Attributes:
        dp_rank: Which data-parallel rank this is.
        num_blocks: Blocks of KV cache that every rank of the replica has.
        page_size: Tokens in one block.
        max_request_tokens: Longest prompt plus new tokens that one request may have.
        vocab_size: Token ids below this exist.
        ranks: One line per rank of this replica: who it is and what its groups run on.
    """

    dp_rank: int
    num_blocks: int
    page_size: int
    max_request_tokens: int
    vocab_size: int
    ranks: tuple[str, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: new tokens of one request.

    Attributes:
        request_id: The request.
        token_ids: Tokens made since its last output; may be empty when it ends.
        finish_reason: Why it ended; ``None`` while it goes on.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: a request that was never started.

    Attributes:
        request_id: The request.
        message: The rule it broke.
        queue_full: Whether the same request may be accepted later.
    """

    request_id: str
    message: str
    queue_full: bool = False


class Step(msgspec.Struct, frozen=True, tag=True):
    """Leader to the ranks of its replica: everything that decides what happens in one turn of the loop.

    Attributes:
        sampled: Tokens of the oldest batch under way, which is complete now; ``None`` where none is.
        aborts: Requests that end now.
        requests: Requests that arrive now, in order.
        shutdown: Whether the loop ends here.
        together: Whether a batch is computed even if nothing is scheduled, because another replica needs this one's experts.
    """

    sampled: tuple[int, ...] | None = None
    aborts: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    shutdown: bool = False
    together: bool = False


FrontMessage: TypeAlias = Submit | Abort | Shutdown | Wake
"""What a leader receives."""

LeaderMessage: TypeAlias = Ready | StepOutput | Rejected
"""What the front process receives."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message.

    Args:
        message: Any message of this module.

    Returns:
        Its msgpack bytes.
    """
    return msgspec.msgpack.encode(message)


def decode_front(payload: bytes) -> FrontMessage:
    """Decode and validate what a leader received.

    Args:
        payload: Bytes that ``encode`` made.

    Returns:
        The message.

    Raises:
        SerializationError: The bytes are not such a message.
    """
    with _translated(payload):
        message: FrontMessage = msgspec.msgpack.decode(payload, type=FrontMessage)
    return message


def decode_leader(payload: bytes) -> LeaderMessage:
    """Decode and validate what the front process received.

    Args:
        payload: Bytes that ``encode`` made.

    Returns:
        The message.

    Raises:
        SerializationError: The bytes are not such a message.
    """
    with _translated(payload):
        message: LeaderMessage = msgspec.msgpack.decode(payload, type=LeaderMessage)
    return message


@contextmanager
def _translated(payload: bytes) -> Iterator[None]:
    try:
        yield
    except msgspec.DecodeError as exc:
        raise SerializationError(f"{len(payload)} bytes are not the message expected here: {exc}") from exc


def _check_integer(what: str, value: object, *, low: int) -> None:
    if type(value) is not int or not low <= value <= _MAX_SEED:
        raise RequestError(f"{what} must be an integer of at least {low}, got {value!r}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and isfinite(value)  # type: ignore[arg-type]  # the first half makes it a number
