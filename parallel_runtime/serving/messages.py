"""What travels between the front process, the leaders and the other ranks: plain data, encoded with msgpack, never with pickle.

Front process to a leader: ``Submit``, ``Abort``, ``Shutdown``, ``Wake``, ``Ping``. Leader to the front process: ``Ready``,
``StepOutput``, ``Rejected``, ``Pong``. Leader to the other ranks of its replica: one ``Step`` per turn of the loop.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from parallel_runtime.errors import RequestError, SerializationError

__all__ = [
    "Abort",
    "FinishReason",
    "FrontMessage",
    "LeaderMessage",
    "Ping",
    "Pong",
    "Ready",
    "Rejected",
    "Request",
    "SamplingParams",
    "Shutdown",
    "Step",
    "StepOutput",
    "Submit",
    "Unreadable",
    "Wake",
    "decode_front",
    "decode_leader",
    "encode",
    "read_front",
]

_MAX_INTEGER = 2**63 - 1
_GREEDY_BELOW = 1e-6


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


_OTHER_NAMES = MappingProxyType(
    {
        **dict.fromkeys(("max_tokens", "max_length", "max_completion_tokens"), "max_new_tokens"),
        **dict.fromkeys(("stop", "stop_strings", "eos_token_id"), "stop_token_ids"),
        "random_seed": "seed",
    }
)


class _ByName(msgspec.StructMeta):
    """Says which setting is meant where an instance is made with a name that other projects use."""

    def __call__(self, *unnamed: object, **values: object) -> Any:
        known = self.__struct_fields__
        if unnamed:
            raise RequestError(
                f"{self.__name__} takes no values without names; give them by name: {self.__name__}({known[0]}=...)"
            )
        for name in values:
            if name not in known:
                close = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
                hint = f"did you mean {close!r}?" if close else f"it has {', '.join(known)}"
                raise RequestError(f"{self.__name__} has no setting {name!r}; {hint}")
        return super().__call__(**values)


class SamplingParams(msgspec.Struct, metaclass=_ByName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: Tokens to make at most, at least 1.
        temperature: 0 is greedy; above 0 draws from the softmax of ``logits / temperature``. What is below 1e-6 is greedy too: no
            other token is left with a probability.
        top_k: Draw among the ``top_k`` most likely tokens only; ``None`` keeps all.
        top_p: Draw among the fewest most likely tokens whose probabilities reach ``top_p``, in ``(0, 1]``.
        seed: Seed of this request's own random stream; equal seeds, equal tokens on every layout. ``None``: the replica chooses.
        stop_token_ids: The request ends after one of these tokens.
        ignore_eos: Go on after the model's end-of-sequence token.

    Raises:
        RequestError: There is no such setting, or a value has another type or is outside its range; nothing is converted.
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
            raise RequestError(f"temperature={_shown(self.temperature)} must be a finite number >= 0; 0 is greedy")
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, low=1)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={_shown(self.top_p)} must be in (0, 1]; 1 keeps every token")
        if self.seed is not None:
            _check_integer("seed", self.seed, low=0)
        _check_tokens("stop_token_ids", self.stop_token_ids, each="a stop token id")
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos={self.ignore_eos!r} must be True or False")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue.

    Attributes:
        request_id: Name of the request, unique among those alive.
        prompt: Token ids, at least one.
        sampling: How tokens are chosen. ``stop_token_ids`` already holds the model's end-of-sequence ids where those count.
        made: New tokens that a replica which is gone has made and handed out; the request goes on after them.

    Raises:
        RequestError: The prompt is empty, the id is empty, a token id is not an integer >= 0, a value has another type, or nothing
            is left to make.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    made: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.request_id)
        _check_tokens(
            f"the prompt of request {self.request_id!r}", self.prompt, each=f"a prompt token of request {self.request_id!r}"
        )
        if not self.prompt:
            raise RequestError(f"request {self.request_id!r} has an empty prompt; give at least one token")
        if type(self.sampling) is not SamplingParams:
            raise RequestError(f"the sampling of request {self.request_id!r} must be SamplingParams, got {self.sampling!r}")
        made = f"what request {self.request_id!r} has made"
        _check_tokens(made, self.made, each=f"a token of {made}")
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
            _check_name(self.request_id)


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
        brings_work: Whether they were meant to be a ``Submit`` or a ``Wake``, of which every leader counts as many.
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
    """

    sampled: tuple[int, ...] | None = None
    aborts: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    shutdown: bool = False
    together: bool = False


FrontMessage: TypeAlias = Submit | Abort | Shutdown | Wake | Ping
"""What a leader receives."""

LeaderMessage: TypeAlias = Ready | StepOutput | Rejected | Pong
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
            brings_work=is_submit or outline.type == Wake.__name__,
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


def _check_integer(what: str, value: object, *, low: int) -> None:
    if type(value) is not int or value < low:
        raise RequestError(f"{what} must be an integer of at least {low}, got {_shown(value)}")
    if value > _MAX_INTEGER:
        raise RequestError(f"{what} must be below 2**63, got {_shown(value)}")


def _shown(value: object) -> str:
    """Python refuses to write down an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _check_tokens(what: str, values: object, *, each: str) -> None:
    if not isinstance(values, tuple):
        raise RequestError(f"{what} must be a tuple of token ids such as (1, 2), got {values!r}")
    for value in values:
        _check_integer(each, value, low=0)


def _check_name(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"a request needs a request_id that is not empty, as text; got {value!r}")
    if not value.isprintable():
        raise RequestError(f"request_id={value!r} has characters that cannot be printed")


def _is_number(value: object) -> bool:
    """Such as every message can carry: a finite float, or an integer of 63 bits."""
    return isfinite(value) if type(value) is float else type(value) is int and abs(value) <= _MAX_INTEGER
