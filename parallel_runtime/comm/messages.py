"""Objects and tensor dicts between the members of one group. The public text of each method is on ``GroupCoordinator``."""

from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch import Tensor

from parallel_runtime.comm.codec import Body, open_body
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.frames import (
    FRAME_BYTES,
    Content,
    Frame,
    Kind,
    bytes_of,
    odd_content,
    pack_frame,
    raw_tensor,
    read_frame,
)
from parallel_runtime.comm.mail import Outcome, attempt, failed, plane_of, post, take, unpack
from parallel_runtime.comm.outbox import Outbox
from parallel_runtime.comm.p2p import check_peer, check_tag
from parallel_runtime.comm.tensors import movable
from parallel_runtime.comm.traffic import MAIL_LANE
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerEncodingError, SerializationError

__all__ = ["Messages"]


@final
class Messages:
    """The messages of ``core``.

    Raises:
        ArgumentError: A value that is no dict where one is needed.
        SerializationError: This member's object cannot be encoded, or another's not decoded.
        PeerEncodingError: Another member could not encode its object.
        CollectiveMismatchError: Another member sent something else.
    """

    __slots__ = ("_core", "_outbox")

    def __init__(self, core: GroupCore, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox

    def broadcast_object(self, value: object, src: int, pickle: bool, timeout_s: float | None) -> object:
        """From ``src`` to all."""
        return self._broadcast("broadcast_object", value, src, pickle, timeout_s)

    def broadcast_tensor_dict(
        self, tensors: Mapping[Any, Any] | None, src: int, pickle: bool, timeout_s: float | None
    ) -> dict[Any, Any]:
        """From ``src`` to all; the value has to be a dict."""
        result = self._broadcast("broadcast_tensor_dict", tensors, src, pickle, timeout_s, Content.TENSOR_DICT)
        return cast(dict[Any, Any], result)

    def all_gather_object(self, value: object, pickle: bool, timeout_s: float | None) -> list[object]:
        """From all to all."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.spec.timeouts.control_s)
        mine = attempt(value, pickle=pickle, keep_out=False)
        bodies = core.run_agreed("all_gather_object", None, (), self._gather_all, mine, limit_s)
        me = core.control.rank_in_group
        if isinstance(mine.error, SerializationError):
            raise SerializationError(f"{core.name} all_gather_object: member {me}, this one: {mine.error}") from mine.error
        if mine.error is not None:
            raise mine.error
        failures = [f"member {member}: {body}" for member, body in enumerate(bodies) if isinstance(body, str)]
        if failures:
            raise PeerEncodingError(f"{core.name} all_gather_object: could not encode its object: {'; '.join(failures)}")
        names = [f"{core.name}: member {member}" for member in range(len(bodies))]
        return [value if m == me else unpack(body, names[m], pickle=pickle) for m, body in enumerate(bodies)]

    def send_object(self, value: object, dst: int | None, tag: int, pickle: bool, timeout_s: float | None) -> None:
        """To one member."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.p2p_s)
        stream = (check_peer(core, dst, "dst", 1), check_tag(tag) + MAIL_LANE)
        outcome = attempt(value, pickle=pickle)
        core.run("send_object", None, post, core, self._outbox, outcome, stream, limit_s, Content.OBJECT)
        if outcome.error is not None:
            raise outcome.error

    def recv_object(self, src: int | None, tag: int, pickle: bool, timeout_s: float | None) -> object:
        """From one member."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.p2p_s)
        stream = (check_peer(core, src, "src", -1), check_tag(tag) + MAIL_LANE)
        body = core.run(
            f"recv_object from member {stream[0]} tag {tag}", None, take, core, self._outbox, stream, limit_s, Content.OBJECT
        )
        return unpack(body, f"{core.name}: member {stream[0]}", pickle=pickle)

    def share(self, value: object, src: int, limit_s: float, operation: str) -> object:
        """Broadcast a small plain value on behalf of another operation."""
        return self._broadcast(operation, value, src, False, limit_s, Content.SHAPE)

    def _broadcast(
        self,
        operation: str,
        value: object,
        src: int,
        pickle: bool,
        timeout_s: float | None,
        content: Content = Content.OBJECT,
    ) -> object:
        core = self._core
        limit_s = core.deadline(timeout_s, core.spec.timeouts.control_s)
        if core.member(src, "src") != core.control.rank_in_group:
            body = core.run_agreed(operation, None, ("from member", src), self._receive_from, content, src, limit_s)
            return unpack(body, f"{core.name} {operation}: member {src}", pickle=pickle)
        if content is Content.TENSOR_DICT and not isinstance(value, dict):
            wrong = ArgumentError(f"{operation}: expected a dict, got {type(value).__name__}")
            outcome = failed(wrong)
        else:
            outcome = attempt(value, pickle=pickle)
        core.run_agreed(operation, None, ("from member", src), self._send_to_all, outcome, content, src, limit_s)
        if outcome.error is not None:
            raise outcome.error
        return value

    def _send_to_all(self, outcome: Outcome, content: Content, src: int, limit_s: float) -> None:
        core = self._core
        body, buffers = outcome.encoded
        body += bytes((content, Kind.VALUE if outcome.error is None else Kind.ERROR))
        core.control.broadcast_bytes(body, src, limit_s)
        for buffer in buffers:
            plane_of(core, buffer).broadcast_(movable(buffer), src, limit_s)

    def _receive_from(self, content: Content, src: int, limit_s: float) -> Body | str:
        core = self._core
        data = memoryview(core.control.broadcast_bytes(None, src, limit_s))
        if data[-1] == Kind.ERROR:
            return bytes(data[:-2]).decode(errors="replace")
        body = open_body(data[:-2], core.spec.device)
        for buffer in body.buffers:
            plane_of(core, buffer).broadcast_(movable(buffer), src, limit_s)
        if fault := odd_content(Content(data[-2]), content):
            raise CollectiveMismatchError(f"from member {src}: {fault}")
        return body

    def _gather_all(self, mine: Outcome, limit_s: float) -> list[Body | str]:
        control = self._core.control
        frame, follows = pack_frame(mine.encoded.body, kind=Kind.VALUE if mine.error is None else Kind.ERROR)
        rows = frame.new_empty((control.world_size, FRAME_BYTES))
        control.all_gather(rows, frame, limit_s)
        frames = [read_frame(row) for row in rows]
        rest = [raw_tensor(bytearray(0 if frame.inline is not None else frame.length)) for frame in frames]
        if any(piece.numel() for piece in rest):
            control.all_gatherv(rest, raw_tensor(mine.encoded.body if follows else bytearray()), limit_s)
        return [self._read(frame, piece) for frame, piece in zip(frames, rest, strict=True)]

    def _read(self, frame: Frame, rest: Tensor) -> Body | str:
        data = bytes_of(rest) if frame.inline is None else frame.inline
        return data.decode(errors="replace") if frame.kind is Kind.ERROR else open_body(data, torch.device("cpu"))
