"""Sends that are under way, kept until the receiver has confirmed them, whatever becomes of the caller's handles."""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, final

from torch import Tensor

from parallel_runtime.comm.communicator import Communicator, Work
from parallel_runtime.comm.frames import Kind, blank_frame, has_arrived, read_frame
from parallel_runtime.comm.traffic import Streams
from parallel_runtime.errors import CollectiveMismatchError, PeerError

__all__ = ["CAPACITY", "Clock", "Outbox", "Sending"]

CAPACITY: Final = 64
"""Messages to one peer on one stream that may be unconfirmed; the next one waits for the oldest."""

_logger = logging.getLogger(__name__)


@final
class Clock:
    """What is left of a deadline that several steps share.

    Args:
        limit_s: Seconds for all steps together.
    """

    __slots__ = ("_until",)

    def __init__(self, limit_s: float) -> None:
        self._until = monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, never quite zero."""
        return max(self._until - monotonic(), 1e-3)


@final
class Sending:
    """One send: its pieces, what they read from, and the receiver's confirmation.

    Attributes:
        is_finished: Whether its outcome is known.
        is_watched: Whether somebody will ask for the outcome; otherwise a failure is logged.

    Args:
        works: The pieces under way.
        keep: Memory they read from.
        control: Receives the confirmation.
        streams: Told where it does not come: what is sent later could not be told apart.
        stream: (peer, base tag); the confirmation travels on base tag + 2.
        what: For errors, like ``"float32[4]"``.
    """

    __slots__ = ("_ack", "_ack_work", "_error", "_keep", "_streams", "_what", "_works", "is_finished", "is_watched", "stream")

    def __init__(
        self,
        works: list[Work],
        keep: Sequence[Tensor],
        control: Communicator,
        streams: Streams,
        stream: tuple[int, int],
        what: str,
    ) -> None:
        self.stream = stream
        self._streams = streams
        self.is_finished = False
        self.is_watched = False
        self._works = works
        self._keep: Sequence[Tensor] = keep
        self._what = what
        self._error: PeerError | None = None
        self._ack = blank_frame()
        self._ack_work = control.irecv(self._ack, stream[0], stream[1] + 2)

    def is_confirmed(self) -> bool:
        """Whether ``finish`` would return at once. Never blocks."""
        return self.is_finished or has_arrived(self._ack) or self._ack_work.is_done()

    @property
    def mismatch(self) -> CollectiveMismatchError | None:
        """What the receiver of a confirmed send had expected instead, if anything; other failures end the stream."""
        with suppress(PeerError):
            self.finish(1.0)
        return self._error if isinstance(self._error, CollectiveMismatchError) else None

    def finish(self, limit_s: float) -> None:
        """Wait for the confirmation; a second call returns at once, or raises the same error again.

        Raises:
            CollectiveMismatchError: The receiver expected something else.
            PeerError: The receiver is gone or late.
        """
        if not self.is_finished:
            clock = Clock(limit_s)
            try:
                for work in self._works:
                    work.wait(clock.left_s)
                self._ack_work.wait(clock.left_s)
                verdict = read_frame(self._ack)
                if verdict.kind is Kind.ERROR:
                    text = (verdict.inline or bytearray()).decode(errors="replace")
                    self._error = CollectiveMismatchError(f"sent {self._what} to member {self.stream[0]}: {text}")
            except PeerError as exc:
                self._error = exc
                self._streams.unconfirmed.setdefault(self.stream, str(exc))
            self.is_finished = True
            self._works, self._keep = [], ()
        if self._error is not None:
            raise self._error


@final
class Outbox:
    """The unfinished sends of one coordinator."""

    __slots__ = ("_sendings",)

    def __init__(self) -> None:
        self._sendings: deque[Sending] = deque()

    def __len__(self) -> int:
        return sum(not sending.is_finished for sending in self._sendings)

    def add(self, sending: Sending) -> None:
        """Keep ``sending`` until it is confirmed."""
        self._sendings.append(sending)

    def reap(self) -> None:
        """Let go of what has been confirmed. Never blocks. A failure that nobody waits for is logged."""
        if not self._sendings:
            return
        for sending in tuple(self._sendings):
            if sending.is_finished:
                self._sendings.remove(sending)
            elif sending.is_confirmed():
                self._sendings.remove(sending)
                try:
                    sending.finish(1.0)
                except PeerError as exc:
                    if not sending.is_watched:
                        _logger.error("a send whose handle nobody waited for failed: %s", exc)

    def make_room(self, stream: tuple[int, int], limit_s: float, capacity: int = CAPACITY) -> None:
        """Wait until fewer than ``capacity`` sends of ``stream`` are unconfirmed.

        Raises:
            PeerError: The oldest of them failed.
        """
        mine = [sending for sending in self._sendings if sending.stream == stream and not sending.is_finished]
        if len(mine) >= capacity:
            mine[0].finish(limit_s)

    def settle(self, grace_s: float) -> int:
        """Wait up to ``grace_s`` for everything, then forget it.

        Returns:
            How many sends were not confirmed.
        """
        clock = Clock(grace_s)
        dropped = 0
        for sending in self._sendings:
            if not sending.is_finished and grace_s <= 0 and not sending.is_confirmed():
                dropped += 1
                continue
            try:
                sending.finish(clock.left_s)
            except PeerError:
                dropped += 1
        self._sendings.clear()
        return dropped
