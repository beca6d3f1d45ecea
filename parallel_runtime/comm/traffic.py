"""What every coordinator over one communicator shares, so that aliases of a group cannot run into each other."""

import os
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, final

from parallel_runtime.comm.diagnosis import Diagnostician
from parallel_runtime.comm.recorder import Recorder
from parallel_runtime.errors import EarlierFailureError

__all__ = ["CONFIRMATIONS", "LANES", "MAIL_LANE", "Streams", "Traffic"]

LANES: Final = 8
"""Wire tags that belong to one tag: frame, body and confirmation of its tensors, then those of its messages."""

MAIL_LANE: Final = 3
"""Added to the first wire tag of a tag: messages never meet the tensors of the same tag."""

CONFIRMATIONS: Final = (2, MAIL_LANE + 2)
"""Where a receiver tells the sender that it has a tensor or a message."""


@final
class Streams:
    """Where the messages between this member and each other one stand, per (peer, wire tag).

    Attributes:
        sent: How many have been started.
        received: How many receives have been started.
        waiting: Receives that have not finished, oldest first.
        broken: Why nothing more can be received, where an earlier receive failed.
        unconfirmed: Why nothing more can be sent, where the receiver did not confirm an earlier send.
        channels: Names of the open channels.
        posted: The next message of a channel that was looked for and not taken yet.
    """

    __slots__ = ("broken", "channels", "posted", "received", "sent", "unconfirmed", "waiting")

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        self.waiting: dict[tuple[int, int], deque[Any]] = {}
        self.broken: dict[tuple[int, int], str] = {}
        self.unconfirmed: dict[tuple[int, int], str] = {}
        self.channels: dict[tuple[int, int], str] = {}
        self.posted: dict[tuple[int, int], Any] = {}

    def check_receivable(self, stream: tuple[int, int], where: str = "") -> None:
        """Check that earlier receives of ``stream`` went well; ``where`` tells its tag.

        Raises:
            EarlierFailureError: One did not.
        """
        if stream in self.broken:
            raise EarlierFailureError(f"nothing more can be received from member {stream[0]}{where}: {self.broken[stream]}")

    def next_sent(self, stream: tuple[int, int], where: str = "") -> int:
        """The number of the message that is sent now; ``where`` tells its tag.

        Raises:
            EarlierFailureError: The receiver did not confirm an earlier one.
        """
        if stream in self.unconfirmed:
            raise EarlierFailureError(f"nothing more can be sent to member {stream[0]}{where}: {self.unconfirmed[stream]}")
        number = self.sent[stream] = self.sent.get(stream, 0) + 1
        return number


@final
class Traffic:
    """State of one communicator that its coordinators share.

    Attributes:
        lock: Held while an operation runs; a second thread is refused, not queued.
        sequence: Number of the newest operation.
        recorder: What ran and what runs.
        streams: Where point-to-point messages stand.
        pid: The process it belongs to.
        users: Open coordinators; the last one to close closes the communicator.
        steps: Collectives of the communicator that this member has finished; counted where a wait can be interrupted.
        diagnostician: Knows why peers do not come, for the coordinator whose operation runs; ``None`` where nobody does.
        ranks: World ranks of the members, in group order; ``()`` before a coordinator is opened.
        is_recording: While graphs are captured: tells whether what runs now becomes part of one. ``None`` otherwise.
    """

    __slots__ = ("diagnostician", "is_recording", "lock", "pid", "ranks", "recorder", "sequence", "steps", "streams", "users")

    def __init__(self) -> None:
        self.lock = Lock()
        self.sequence = 0
        self.recorder = Recorder()
        self.streams = Streams()
        self.pid = os.getpid()
        self.users = 0
        self.steps = 0
        self.diagnostician: Diagnostician | None = None
        self.ranks: tuple[int, ...] = ()
        self.is_recording: Callable[[], bool] | None = None
