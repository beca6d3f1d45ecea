"""Typed, ordered, two-ended lines between two members of a group."""

import re
from collections import deque
from hashlib import blake2b
from typing import Final, Generic, TypeVar, final

import msgspec

from parallel_runtime.comm.codec import Body, decode_typed, encode_typed
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.frames import Content
from parallel_runtime.comm.mail import Incoming, Outcome, failed, post
from parallel_runtime.comm.outbox import Outbox, Sending
from parallel_runtime.comm.p2p import MAX_TAG
from parallel_runtime.comm.traffic import LANES, MAIL_LANE
from parallel_runtime.errors import ArgumentError, ContextStateError, PeerEncodingError, SerializationError
from parallel_runtime.values import type_problem

__all__ = ["Channel"]

_T = TypeVar("_T")
_FIRST: Final = MAX_TAG + 1
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+|__mp_main__|__main__")


@final
class Channel(Generic[_T]):
    """One end of a line; the peer opens the other end with the same name and schema. From ``GroupCoordinator.channel``.

    Messages arrive once and in order, and never meet those of another channel or tag. ``send`` does not wait for the receiver
    until 64 messages are unconfirmed.

    Args:
        core: The group.
        outbox: Keeps what is under way.
        name: Equal at both ends.
        schema: Type of the messages, equal at both ends: anything msgspec understands, with tensors inside.
        peer: Group-local.

    Raises:
        ArgumentError: The name is no string or taken on this pair, or msgspec does not understand the schema.
    """

    __slots__ = ("_core", "_digest", "_is_open", "_outbox", "_schema", "_sent", "_stream", "name", "peer")

    def __init__(self, core: GroupCore, outbox: Outbox, name: str, schema: type[_T], peer: int) -> None:
        if problem := type_problem("name", name, str, "such as 'requests'"):
            raise ArgumentError(problem)
        self.name = name
        self.peer = peer
        self._core = core
        self._outbox = outbox
        self._schema = schema
        self._digest = _digest(name, schema)
        number = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") % 2**27
        self._stream = (peer, (_FIRST + number) * LANES + MAIL_LANE)
        self._sent: deque[Sending] = deque()
        self._is_open = True
        channels = core.traffic.streams.channels
        if self._stream in channels:
            other = channels[self._stream]
            why = "is open already" if other == name else f"has the same number as {other!r}; rename one of them"
            raise ArgumentError(
                f"channel {name!r} between members {core.communicator.rank_in_group} and {peer} of {core.name} {why}"
            )
        channels[self._stream] = name

    def send(self, value: _T, *, timeout_s: float | None = None) -> None:
        """Send one message. Big tensors in it are copied, so the caller may change them at once.

        Args:
            value: Of the schema.
            timeout_s: How long it may wait for room, in seconds.

        Raises:
            ContextStateError: The channel or its group is closed.
            SerializationError: ``value`` is not of the schema; nothing was sent but a note of it, which the receiver raises.
            CollectiveMismatchError: The peer opened the channel with another schema.
            PeerError: The peer is late or gone. Nothing more can be sent then: how much of it will arrive is not known.
        """
        limit_s = self._limit(timeout_s)
        outcome = self._encoded(value)
        sending = self._core.run(
            f"channel {self.name!r} send",
            None,
            lambda: post(self._core, self._outbox, outcome, self._stream, limit_s, Content.CHANNEL, digest=self._digest),
        )
        sending.is_watched = True
        self._sent.append(sending)
        if outcome.error is not None:
            raise outcome.error

    def recv(self, *, timeout_s: float | None = None) -> _T:
        """Take the next message.

        Args:
            timeout_s: Deadline in seconds.

        Returns:
            A value of the schema.

        Raises:
            ContextStateError: The channel or its group is closed.
            SerializationError: What arrived is not of the schema.
            PeerEncodingError: The peer could not encode it.
            CollectiveMismatchError: The peer opened the channel with another schema.
            PeerError: The peer is late or gone.
        """
        limit_s = self._limit(timeout_s)
        body = self._core.run(f"channel {self.name!r} recv from member {self.peer}", None, self._take, limit_s)
        if isinstance(body, str):
            raise PeerEncodingError(f"channel {self.name!r}: member {self.peer} could not encode its message: {body}")
        result: _T = decode_typed(body, self._schema)
        return result

    def is_ready(self) -> bool:
        """Whether ``recv`` would find a message that was sent. Never waits.

        Raises:
            ContextStateError: The channel or its group is closed.
            PeerLostError: An earlier receive failed.
        """
        self._limit(None)
        return self._core.run(f"channel {self.name!r} is_ready", None, lambda: self._next().has_arrived())

    def close(self) -> None:
        """Free the name. What was sent is still delivered while the group is open. Twice is nothing."""
        if self._is_open:
            self._is_open = False
            self._core.traffic.streams.channels.pop(self._stream, None)

    def _limit(self, timeout_s: float | None) -> float:
        if not self._is_open:
            raise ContextStateError(f"channel {self.name!r} of group {self._core.name} is closed")
        while self._sent and self._sent[0].is_confirmed():
            if error := self._sent.popleft().mismatch:
                raise error
        return self._core.deadline(timeout_s, self._core.p2p_s)

    def _encoded(self, value: _T) -> Outcome:
        try:
            if not _fits(value, self._schema):
                raise SerializationError(f"channel {self.name!r} carries {self._schema}, got {type(value).__name__}")
            return Outcome(encode_typed(value), None)
        except SerializationError as exc:
            return failed(exc)

    def _next(self) -> Incoming:
        posted = self._core.traffic.streams.posted
        if self._stream not in posted:
            posted[self._stream] = Incoming(self._core, self._stream)
        incoming = posted[self._stream]
        assert isinstance(incoming, Incoming)
        return incoming

    def _take(self, limit_s: float) -> Body | str:
        self._outbox.reap()
        incoming = self._next()
        del self._core.traffic.streams.posted[self._stream]
        return incoming.take(limit_s, Content.CHANNEL, self._digest)


def _fits(value: object, schema: object) -> bool:
    """Whether ``value`` can be of ``schema``, as far as isinstance can tell."""
    try:
        return isinstance(value, schema)  # type: ignore[arg-type]
    except TypeError:
        return True


def _digest(name: str, schema: object) -> bytes:
    """Eight bytes that are equal in processes that agree on the schema."""
    try:
        text = repr(msgspec.inspect.type_info(schema))
    except (TypeError, ValueError, NameError) as exc:
        raise ArgumentError(f"channel {name!r}: msgspec cannot use {schema!r} as a schema: {exc}") from exc
    return blake2b(_ADDRESS.sub("", text).encode(), digest_size=8).digest()
