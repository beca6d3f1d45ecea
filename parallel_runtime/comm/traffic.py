"""What every coordinator over one communicator shares, so that aliases of a group cannot run into each other."""

import os
from threading import Lock
from typing import final

from parallel_runtime.comm.recorder import Recorder

__all__ = ["Traffic"]


@final
class Traffic:
    """State of one communicator that its coordinators share.

    Attributes:
        lock: Held while an operation runs; a second thread is refused, not queued.
        sequence: Number of the newest operation.
        recorder: What ran and what runs.
        pid: The process it belongs to.
        users: Open coordinators; the last one to close closes the communicator.
    """

    __slots__ = ("lock", "pid", "recorder", "sequence", "users")

    def __init__(self) -> None:
        self.lock = Lock()
        self.sequence = 0
        self.recorder = Recorder()
        self.pid = os.getpid()
        self.users = 0
