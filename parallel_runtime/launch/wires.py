"""Descriptors between the launching process and its ranks, and the messages on them.

Only the two ends of a private pipe ever read or write these messages.
"""

import os
import pickle
from multiprocessing.reduction import DupFd
from typing import Any, final

__all__ = ["Descriptor", "MessageReader", "read_all", "sealed", "send_message"]

_HEADER_BYTES = 8


@final
class Descriptor:
    """A file descriptor that a process is handed while it is being started.

    Attributes:
        fd: Its number in the process that holds this object.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.fd),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


def sealed(data: bytes) -> int:
    """Put bytes into memory that any number of processes can read through a descriptor.

    Args:
        data: Any size; no pipe has to be drained for it.

    Returns:
        A descriptor; the caller closes it.
    """
    fd = os.memfd_create("ranks")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def read_all(fd: int) -> bytes:
    """Read what ``sealed`` wrote, whoever has read it before, and close the descriptor.

    Args:
        fd: From ``sealed``.

    Returns:
        All of its bytes.
    """
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        data = bytearray()
        while len(data) < size:
            data += os.pread(file.fileno(), size - len(data), len(data))
        return bytes(data)


def send_message(fd: int, message: object) -> None:
    """Write one message, waiting until the reader has taken it.

    Args:
        fd: Write end of a private pipe.
        message: Anything that can be pickled.
    """
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    view = memoryview(len(data).to_bytes(_HEADER_BYTES, "little") + data)
    while view:
        view = view[os.write(fd, view) :]


@final
class MessageReader:
    """The read end of such a pipe. Never blocks, so that one stuck writer holds up nobody.

    Args:
        fd: Read end; owned from here on.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray()
        self.is_open = True

    def fileno(self) -> int:
        """The descriptor, for waiting on it."""
        return self._fd

    def read(self) -> list[Any]:
        """Take what has arrived.

        Returns:
            Complete messages, oldest first. The reader closes itself at the end of the stream.
        """
        while self.is_open:
            try:
                chunk = os.read(self._fd, 1 << 20)
            except BlockingIOError:
                break
            self._buffer += chunk
            if not chunk:
                self.close()
        return list(self._complete())

    def _complete(self) -> list[Any]:
        messages, start = [], 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            end = start + _HEADER_BYTES + int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "little")
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[start + _HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return messages

    def close(self) -> None:
        """Close the descriptor. Twice is nothing."""
        if self.is_open:
            self.is_open = False
            os.close(self._fd)
