"""Messages from one member to another: a frame, the body where it does not fit, big tensors, and a confirmation on the way back.

A send does not wait for its receiver, up to ``CAPACITY`` messages per stream, so that two members may both send first.
"""

from typing import Final, NamedTuple, final

from torch import Tensor

from parallel_runtime.comm.codec import Body, Encoded, decode, encode, open_body
from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.frames import (
    Content,
    Frame,
    Kind,
    blank_frame,
    bytes_of,
    has_arrived,
    odd_content,
    pack_frame,
    raw_tensor,
    read_frame,
)
from parallel_runtime.comm.outbox import Clock, Outbox, Sending
from parallel_runtime.errors import CollectiveMismatchError, PeerEncodingError, PeerError

__all__ = ["NO_DIGEST", "Incoming", "Outcome", "attempt", "failed", "plane_of", "post", "take", "unpack"]

NO_DIGEST: Final = bytes(8)
"""Of a message without a schema."""


@final
class Outcome(NamedTuple):
    """What encoding gave.

    Attributes:
        encoded: The bytes, or the text of the error as a body.
        error: Why it could not be encoded; to be raised once the receivers know.
    """

    encoded: Encoded
    error: BaseException | None


def attempt(value: object, *, pickle: bool, keep_out: bool = True) -> Outcome:
    """Encode ``value``; a failure is kept, so that the receivers can be told before it is raised."""
    try:
        return Outcome(encode(value, pickle=pickle, keep_out=keep_out), None)
    except BaseException as exc:
        return failed(exc)


def failed(exc: BaseException) -> Outcome:
    """The outcome that tells the receivers of ``exc``."""
    return Outcome(Encoded(bytearray(f"{type(exc).__name__}: {exc}".encode(errors="replace")), []), exc)


def plane_of(core: GroupCore, tensor: Tensor) -> Communicator:
    """Who moves ``tensor``: the communicator of the group's device, or the one between CPUs."""
    return core.communicator if tensor.device.type == core.spec.device.type else core.control


def unpack(body: Body | str, whose: str, *, pickle: bool) -> object:
    """Build the object that arrived.

    Args:
        body: What arrived, or the sender's failure.
        whose: The sender, for the error.
        pickle: Allow a pickled one.

    Returns:
        The object.

    Raises:
        PeerEncodingError: The sender could not encode it.
        SerializationError: It cannot be decoded here.
    """
    if isinstance(body, str):
        raise PeerEncodingError(f"{whose} could not encode its object: {body}")
    return decode(body, pickle=pickle)


def post(
    core: GroupCore,
    outbox: Outbox,
    outcome: Outcome,
    stream: tuple[int, int],
    limit_s: float,
    content: Content,
    *,
    digest: bytes = NO_DIGEST,
    copy: bool = True,
) -> Sending:
    """Start sending a message. Runs inside an operation of the group.

    Args:
        core: The group.
        outbox: Keeps it until it is confirmed.
        outcome: What to send.
        stream: (peer, base tag).
        limit_s: How long it may wait for room on the stream, in seconds.
        content: What it is.
        digest: Of the schema.
        copy: Whether to copy big tensors, so that the caller may change them at once.

    Returns:
        The send.

    Raises:
        PeerError: The oldest unconfirmed message of the stream failed, or an earlier one had.
    """
    outbox.reap()
    outbox.make_room(stream, limit_s)
    peer, base = stream
    sequence = core.traffic.streams.next_sent(stream)
    core.traffic.recorder.pass_message(True, stream, sequence)
    body, buffers = outcome.encoded
    kind = Kind.VALUE if outcome.error is None else Kind.ERROR
    frame, follows = pack_frame(body, kind=kind, content=content, sequence=sequence, digest=digest)
    keep = [frame]
    works = [core.control.isend(frame, peer, base)]
    if follows:
        keep.append(raw_tensor(body))
        works.append(core.control.isend(keep[-1], peer, base + 1))
    for buffer in buffers:
        work, moved = core.start_sending(buffer.clone() if copy else buffer, peer, base + 1)
        works.append(work)
        keep.append(moved)
    sending = Sending(works, keep, core.control, core.traffic.streams, stream, "a message")
    outbox.add(sending)
    return sending


@final
class Incoming:
    """The next message of a stream, its frame being received. Made inside an operation of the group.

    Args:
        core: The group.
        stream: (peer, base tag).

    Raises:
        EarlierFailureError: An earlier receive of this stream failed.
    """

    __slots__ = ("_core", "_frame", "_sequence", "_work", "stream")

    def __init__(self, core: GroupCore, stream: tuple[int, int]) -> None:
        streams = core.traffic.streams
        streams.check_receivable(stream)
        self._core = core
        self.stream = stream
        self._frame = blank_frame()
        self._work = core.control.irecv(self._frame, *stream)
        self._sequence = streams.received[stream] = streams.received.get(stream, 0) + 1

    def has_arrived(self) -> bool:
        """Whether the sender has sent it. Never blocks."""
        return has_arrived(self._frame) or self._work.is_done()

    def take(self, limit_s: float, content: Content, digest: bytes = NO_DIGEST) -> Body | str:
        """Wait for the whole message and confirm it. Runs inside an operation of the group.

        Args:
            limit_s: Deadline in seconds.
            content: What it has to be.
            digest: The schema it has to be of.

        Returns:
            The body, or the text of the sender's failure.

        Raises:
            CollectiveMismatchError: It is something else, out of sequence or of another schema; the sender learns of it.
            PeerError: The sender is late or gone.
        """
        core, (peer, base), clock = self._core, self.stream, Clock(limit_s)
        try:
            self._work.wait(clock.left_s)
            frame = read_frame(self._frame)
            body = self._rest(frame, clock)
            fault = self._fault(frame, content, digest)
            answer, _ = pack_frame(bytearray(fault.encode()), kind=Kind.ERROR if fault else Kind.VALUE)
            core.control.isend(answer, peer, base + 2).wait(clock.left_s)
        except PeerError as exc:
            core.traffic.streams.broken[self.stream] = str(exc)
            raise
        if fault:
            raise CollectiveMismatchError(f"from member {peer}: {fault}")
        core.traffic.recorder.pass_message(False, self.stream, self._sequence)
        return body

    def _rest(self, frame: Frame, clock: Clock) -> Body | str:
        core, (peer, base) = self._core, self.stream
        data = frame.inline
        if data is None:
            raw = raw_tensor(bytearray(frame.length))
            core.control.irecv(raw, peer, base + 1).wait(clock.left_s)
            data = bytes_of(raw)
        if frame.kind is Kind.ERROR:
            return data.decode(errors="replace")
        body = open_body(data, core.spec.device)
        for buffer in body.buffers:
            core.fill(buffer, peer, base + 1, clock.left_s)
        return body

    def _fault(self, frame: Frame, content: Content, digest: bytes) -> str:
        if frame.sequence != self._sequence:
            return f"expected message no. {self._sequence} of the stream, got no. {frame.sequence}"
        if frame.digest != digest:
            return "the two ends of the channel have different schemas"
        return odd_content(frame.content, content)


def take(core: GroupCore, outbox: Outbox, stream: tuple[int, int], limit_s: float, content: Content) -> Body | str:
    """Receive the next message of a stream. Runs inside an operation of the group.

    Args:
        core: The group.
        outbox: What it may let go of.
        stream: (peer, base tag).
        limit_s: Deadline in seconds.
        content: What it has to be.

    Returns:
        The body, or the text of the sender's failure.

    Raises:
        PeerError: The sender is late or gone, or the message is out of sequence or something else.
    """
    outbox.reap()
    return Incoming(core, stream).take(limit_s, content)
