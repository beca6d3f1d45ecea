"""What travels between the front process, the leaders and the other ranks: plain data, encoded with msgpack, never with pickle.

Front process to a leader: ``Submit``, ``Abort``, ``Shutdown``, ``Wake``, ``Ping``, ``Control``. Leader to the front process:
``Ready``, ``StepOutput``, ``Rejected``, ``Pong``, ``Answer``. Leader to the other ranks of its replica: one ``Step`` per turn of
the loop and, over a channel of their own, the ``Control`` messages that it counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeAlias

import msgspec

from parallel_runtime.errors import RequestError, SerializationError
from parallel_runtime.serving.checks import check_name, check_tokens, shown
from parallel_runtime.serving.controls import Answer, Control
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = [
    "MAX_PRIORITY",
    "Abort",
    "FinishReason",
    "FrontMessage",
    "LeaderMessage",
    "Ping",
    "Pong",
    "Ready",
    "Rejected",
    "Request",
    "Sampled",
    "Shutdown",
    "Step",
    "StepOutput",
    "Submit",
    "TokenLogprobs",
    "Unreadable",
    "Wake",
    "decode_front",
    "decode_leader",
    "encode",
    "read_front",
]

MAX_PRIORITY = 8
"""Priorities go from its negative to it."""


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue.

    Attributes:
        request_id: Name of the request, unique among those alive.
        prompt: Token ids, at least one.
        sampling: How tokens are chosen. ``stop_token_ids`` already holds the model's end-of-sequence ids where those count.
        made: New tokens that a replica which is gone has made and handed out; the request goes on after them.
        priority: From -8 to 8. Each step up is worth 64 places in the queue: as if the request had arrived 64 requests earlier.

    Raises:
        RequestError: The prompt is empty, the id is empty, a token id is not an integer >= 0, a value has another type or is
            outside its range, or nothing is left to make.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    made: tuple[int, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        check_name(self.request_id)
        check_tokens(
            f"the prompt of request {self.request_id!r}", self.prompt, each=f"a prompt token of request {self.request_id!r}"
        )
        if not self.prompt:
            raise RequestError(f"request {self.request_id!r} has an empty prompt; give at least one token")
        if type(self.sampling) is not SamplingParams:
            raise RequestError(f"the sampling of request {self.request_id!r} must be SamplingParams, got {self.sampling!r}")
        made = f"what request {self.request_id!r} has made"
        check_tokens(made, self.made, each=f"a token of {made}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"the priority of request {self.request_id!r} must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, "
                f"got {shown(self.priority)}"
            )
        if len(self.made) >= self.sampling.max_new_tokens:
            raise RequestError(f"{made} is {len(self.made)} tokens already, of at most {self.sampling.max_new_tokens}")

    @property
    def max_tokens(self) -> int:
        """Tokens it holds at most: the prompt and everything it may make."""
        return len(self.prompt) + self.sampling.max_new_tokens


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: serve this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: end this request, or every one where ``request_id`` is ``None``. An unknown id is nothing.

    Raises:
        RequestError: The id is neither text nor ``None``, or it is empty.
    """

    request_id: str | None = None

    def __post_init__(self) -> None:
        if self.request_id is not None:
            check_name(self.request_id)


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: abort what runs and leave the loop."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: another replica, which this one computes in step with, has got a request."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Front to leader: say that your loop turns, with a ``Pong``."""


class Unreadable(msgspec.Struct, frozen=True):
    """What a leader makes of bytes that are no message; it is never sent.

    Attributes:
        reason: What is wrong with them.
        request_id: The request that waits for an answer, where the bytes are a ``Submit`` that names one.
        brings_work: Whether they were meant to be a message of which every leader gets as many.
    """

    reason: str
    request_id: str | None = None
    brings_work: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: the replica serves.

    Attributes:
        dp_rank: Which data-parallel rank this is.
        num_blocks: Blocks of KV cache that every rank of the replica has.
        page_size: Tokens in one block.
        max_request_tokens: Longest prompt plus new tokens that one request may have.
        vocab_size: Token ids below this exist.
        ranks: One line per rank of this replica: who it is and what its groups run on.
        addresses: Where each of them tells what it does, as ``ParallelContext.answers_at`` says.
    """

    dp_rank: int
    num_blocks: int
    page_size: int
    max_request_tokens: int
    vocab_size: int
    ranks: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """What the model thought of one new token and of the likeliest ones in its place.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        top: Ids and log-probabilities of the most likely tokens, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """What the last stage makes of a batch.

    Attributes:
        token_ids: The token of each of ``batch.sampled``, in that order.
        logprobs: By request, where they are wanted.
    """

    token_ids: tuple[int, ...]
    logprobs: dict[str, TokenLogprobs] = msgspec.field(default_factory=dict)


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: new tokens of one request.

    Attributes:
        request_id: The request.
        token_ids: Tokens made since its last output; may be empty when it ends.
        finish_reason: Why it ended; ``None`` while it goes on.
        logprobs: Of each of ``token_ids``, where they are wanted.
        weights_version: Of the weights that chose ``token_ids``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    weights_version: int = 0


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


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Leader to front: the loop turns."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Leader to the ranks of its replica: everything that decides what happens in one turn of the loop.

    Attributes:
        sampled: Tokens of the oldest batch under way, which is complete now; ``None`` where none is.
        aborts: Requests that end now.
        requests: Requests that arrive now, in order.
        shutdown: Whether the loop ends here.
        together: Whether a batch is computed even if nothing is scheduled, because another replica needs this one's experts.
        holds: Whether nothing is scheduled now: the replica is paused, or about to do what a ``Control`` asks.
        num_controls: Controls that are done at the end of this turn.
    """

    sampled: tuple[int, ...] | None = None
    aborts: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    shutdown: bool = False
    together: bool = False
    holds: bool = False
    num_controls: int = 0


FrontMessage: TypeAlias = Submit | Abort | Shutdown | Wake | Ping | Control
"""What a leader receives."""

LeaderMessage: TypeAlias = Ready | StepOutput | Rejected | Pong | Answer
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


def read_front(payload: bytes) -> FrontMessage | Unreadable:
    """Decode and validate what a leader received, whatever it is.

    Args:
        payload: Any bytes.

    Returns:
        The message, or what can be said of bytes that are none.
    """
    try:
        return decode_front(payload)
    except SerializationError as exc:
        outline = _outline(payload)
        is_submit = outline.type == Submit.__name__
        request_id = outline.request.get("request_id") if is_submit and isinstance(outline.request, dict) else None
        return Unreadable(
            reason=str(exc),
            request_id=request_id if isinstance(request_id, str) else None,
            brings_work=is_submit or outline.type in (Wake.__name__, Control.__name__),
        )


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SerializationError(f"{len(payload)} bytes are not the message expected here: {exc}") from exc


class _Outline(msgspec.Struct):
    """The parts of a front message that tell whom to answer, of any type."""

    type: object = None
    request: object = None


def _outline(payload: bytes) -> _Outline:
    try:
        return msgspec.msgpack.decode(payload, type=_Outline)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Outline()
