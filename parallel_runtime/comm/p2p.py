"""Tensors from one member to another.

A send is a header (sequence, dtype, shape), the payload, and a confirmation on the way back. The receiver compares before it
takes the payload, and takes it in any case: a mismatch is an error on both sides and the stream stays in step.
"""

from collections import deque
from typing import Final, final

import msgspec
import torch
from torch import Tensor

from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.frames import Content, Kind, blank_frame, pack_frame, read_frame
from parallel_runtime.comm.outbox import Clock, Outbox, Sending
from parallel_runtime.comm.tensors import check_writable, dense, dtype_named, is_plain, overlap
from parallel_runtime.comm.traffic import LANES
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerError

__all__ = ["MAX_TAG", "PointToPoint", "RecvHandle", "SendHandle", "check_peer", "check_tag"]

MAX_TAG: Final = 2**24 - 1
"""The highest tag a caller may use."""


def check_tag(tag: int) -> int:
    """The first of the wire tags that belong to ``tag``.

    Raises:
        ArgumentError: It is no int from 0 to ``MAX_TAG``.
    """
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"tag={tag!r} must be an int from 0 to {MAX_TAG}")
    return tag * LANES


def check_peer(core: GroupCore, peer: int | None, word: str, step: int) -> int:
    """The peer of a send or receive; by default the neighbour ``step`` away, around the end.

    Raises:
        ArgumentError: It is not a member, or it is this member itself.
    """
    me, world_size = core.communicator.rank_in_group, core.communicator.world_size
    chosen = (me + step) % world_size if peer is None else core.member(peer, word)
    if chosen == me:
        raise ArgumentError(f"{word}={chosen} is this member of {core.name} itself: a rank cannot send to itself")
    return chosen


@final
class SendHandle:
    """A send under way. Dropping it is safe: the group keeps what it needs until the receiver has confirmed."""

    __slots__ = ("_core", "_sending", "_tensor", "_word")

    def __init__(self, core: GroupCore, sending: Sending, tensor: Tensor | None, word: str) -> None:
        self._core = core
        self._sending = sending
        self._tensor = tensor
        self._word = word

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks."""
        return self._sending.is_confirmed()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the receiver's confirmation; a second wait returns at once, or raises the same error again.

        Args:
            timeout_s: Deadline in seconds; that of point-to-point operations by default.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.
            CollectiveMismatchError: The receiver expected another shape or dtype.
            PeerError: The receiver is late or gone.
        """
        _wait(self._core, self._sending, self._tensor, self._word, timeout_s)


@final
class RecvHandle:
    """A receive under way."""

    __slots__ = ("_core", "_out", "_receiving")

    def __init__(self, core: GroupCore, receiving: "_Receiving", out: Tensor | None) -> None:
        self._core = core
        self._receiving = receiving
        self._out = out

    def is_done(self) -> bool:
        """Whether it is known that ``wait`` would not wait for the sender. Never blocks; over gloo it may say no too long."""
        return self._receiving.is_confirmed()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Wait for the tensor; a second wait returns at once, or raises the same error again.

        Args:
            timeout_s: Deadline in seconds; that of point-to-point operations by default.

        Returns:
            ``out``, or the new tensor.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.
            CollectiveMismatchError: The sender sent another shape or dtype.
            PeerError: The sender is late or gone.
        """
        _wait(self._core, self._receiving, self._out, "irecv", timeout_s)
        return self._receiving.finish(0.0)


def _wait(core: GroupCore, part: "Sending | _Receiving", tensor: Tensor | None, word: str, timeout_s: float | None) -> None:
    limit_s = core.deadline(timeout_s, core.p2p_s)
    if part.is_finished:
        part.finish(limit_s)
    else:
        core.run(word, tensor, part.finish, limit_s)


@final
class PointToPoint:
    """Sends and receives of ``core``."""

    __slots__ = ("_core", "_outbox")

    def __init__(self, core: GroupCore, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox

    def isend(self, tensor: Tensor, dst: int | None, tag: int, copy: bool) -> SendHandle:
        """Start a send."""
        stream = (check_peer(self._core, dst, "dst", 1), check_tag(tag))
        payload = dense(self._core.on_device(tensor))
        if copy and overlap(payload, tensor):
            payload = payload.clone()
        return SendHandle(self._core, self._core.run("isend", tensor, self._start, payload, stream), tensor, "isend")

    def send(self, tensor: Tensor, dst: int | None, tag: int, timeout_s: float | None) -> None:
        """Send and wait for the confirmation."""
        limit_s = self._core.deadline(timeout_s, self._core.p2p_s)
        stream = (check_peer(self._core, dst, "dst", 1), check_tag(tag))
        self._core.run("send", tensor, self._send, dense(self._core.on_device(tensor)), stream, limit_s)

    def irecv(self, src: int | None, tag: int, out: Tensor | None) -> RecvHandle:
        """Start a receive."""
        stream = (check_peer(self._core, src, "src", -1), check_tag(tag))
        if out is not None:
            check_writable(self._core.on_device(out), "irecv")
        return RecvHandle(self._core, self._core.run("irecv", out, _Receiving, self._core, stream, out), out)

    def recv(self, src: int | None, tag: int, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Receive."""
        limit_s = self._core.deadline(timeout_s, self._core.p2p_s)
        stream = (check_peer(self._core, src, "src", -1), check_tag(tag))
        if out is not None:
            check_writable(self._core.on_device(out), "recv")
        return self._core.run("recv", out, self._recv, stream, out, limit_s)

    def exchange(
        self, tensor: Tensor, dst: int | None, src: int | None, tag: int, out: Tensor | None, timeout_s: float | None
    ) -> Tensor:
        """Send one way and receive the other way, both at once."""
        limit_s = self._core.deadline(timeout_s, self._core.p2p_s)
        to = (check_peer(self._core, dst, "dst", 1), check_tag(tag))
        origin = (check_peer(self._core, src, "src", -1), check_tag(tag))
        if out is not None:
            check_writable(self._core.on_device(out), "exchange")
        payload = dense(self._core.on_device(tensor))
        if out is not None and overlap(payload, out):
            payload = payload.clone()
        return self._core.run("exchange", tensor, self._exchange, payload, to, origin, out, limit_s)

    def _start(self, payload: Tensor, stream: tuple[int, int]) -> Sending:
        self._outbox.reap()
        core = self._core
        peer, base = stream
        sequence = core.traffic.streams.next_sent(stream, f", tag {_tag(base)}")
        core.traffic.recorder.pass_message(True, stream, sequence)
        about = msgspec.msgpack.encode((str(payload.dtype), tuple(payload.shape)))
        header, _ = pack_frame(bytearray(about), content=Content.TENSOR, sequence=sequence)
        works = [core.control.isend(header, peer, base)]
        keep = [header]
        if payload.numel():
            work, moved = core.start_sending(payload, peer, base + 1)
            works.append(work)
            keep.append(moved)
        what = f"{_text(payload.dtype, payload.shape)} with tag {_tag(base)}"
        sending = Sending(works, keep, core.control, core.traffic.streams, stream, what)
        self._outbox.add(sending)
        return sending

    def _send(self, payload: Tensor, stream: tuple[int, int], limit_s: float) -> None:
        self._start(payload, stream).finish(limit_s)

    def _recv(self, stream: tuple[int, int], out: Tensor | None, limit_s: float) -> Tensor:
        self._outbox.reap()
        return _Receiving(self._core, stream, out).finish(limit_s)

    def _exchange(
        self, payload: Tensor, to: tuple[int, int], origin: tuple[int, int], out: Tensor | None, limit_s: float
    ) -> Tensor:
        clock = Clock(limit_s)
        sending = self._start(payload, to)
        received = _Receiving(self._core, origin, out).finish(clock.left_s)
        sending.finish(clock.left_s)
        return received


@final
class _Receiving:
    """One receive. Those of one stream finish in the order they were started."""

    __slots__ = ("_core", "_error", "_frame", "_frame_work", "_out", "_sequence", "_stream", "is_finished", "result")

    def __init__(self, core: GroupCore, stream: tuple[int, int], out: Tensor | None) -> None:
        streams = core.traffic.streams
        streams.check_receivable(stream, f", tag {_tag(stream[1])}")
        self._core = core
        self._stream = stream
        self._out = out
        self._error: PeerError | None = None
        self.is_finished = False
        self.result: Tensor | None = None
        self._frame = blank_frame()
        self._frame_work = core.control.irecv(self._frame, *stream)
        self._sequence = streams.received[stream] = streams.received.get(stream, 0) + 1
        streams.waiting.setdefault(stream, deque()).append(self)

    def is_confirmed(self) -> bool:
        return self.is_finished or self._frame_work.is_done()

    def finish(self, limit_s: float) -> Tensor:
        clock = Clock(limit_s)
        queue = self._core.traffic.streams.waiting[self._stream]
        while not self.is_finished:
            oldest: _Receiving = queue.popleft()
            oldest._complete(clock)
        if self._error is not None:
            raise self._error
        assert self.result is not None
        return self.result

    def _complete(self, clock: Clock) -> None:
        """Go through all steps; the outcome is kept for ``finish``."""
        streams = self._core.traffic.streams
        peer, base = self._stream
        try:
            streams.check_receivable(self._stream)
            self._frame_work.wait(clock.left_s)
            self._take(clock)
        except PeerError as exc:
            self._error = type(exc)(f"{exc}, receiving from member {peer} with tag {_tag(base)}")
            if not isinstance(exc, CollectiveMismatchError):
                streams.broken.setdefault(self._stream, str(exc))
        self.is_finished = True
        self._out = None

    def _take(self, clock: Clock) -> None:
        core = self._core
        peer, base = self._stream
        frame = read_frame(self._frame)
        name, shape = msgspec.msgpack.decode(bytes(frame.inline or b""), type=tuple[str, tuple[int, ...]])
        dtype = dtype_named(name)
        fault = self._fault(frame.sequence, dtype, shape)
        out = self._out
        if out is not None and not fault and is_plain(out):
            target = out
        else:
            target = torch.empty(shape, dtype=dtype, device=core.spec.device if out is None else out.device)
        if target.numel():
            core.fill(target, peer, base + 1, clock.left_s)
        answer, _ = pack_frame(bytearray(fault.encode()), kind=Kind.ERROR if fault else Kind.VALUE)
        core.control.isend(answer, peer, base + 2).wait(clock.left_s)
        if fault:
            raise CollectiveMismatchError(fault)
        if out is not None and target is not out:
            out.detach().copy_(target)
        core.traffic.recorder.pass_message(False, self._stream, self._sequence)
        self.result = target if out is None else out

    def _fault(self, sequence: int, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        if sequence != self._sequence:
            return f"expected message no. {self._sequence}, got no. {sequence}"
        if self._out is not None and (self._out.dtype is not dtype or tuple(self._out.shape) != shape):
            return f"the receiver has room for {_text(self._out.dtype, self._out.shape)}, the sender sent {_text(dtype, shape)}"
        return ""


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _tag(base: int) -> int:
    return base // LANES
