"""A ring of bytes from one member to another: one writer, one reader, two positions.

Each position is written by one side only and grows for ever; the difference is what lies in the ring. A side copies first and
announces its position afterwards. What belongs together starts on a cache line: copies between addresses that differ by a few
bytes within a page are several times slower on some processors.
"""

import struct
import threading
from typing import Final, final

from parallel_runtime.comm.shm.waiting import full_fence, needs_fence

__all__ = ["RingEnd"]

_PIECE_BYTES: Final = 256 << 10
_LINE_BYTES: Final = 64
_HEADER: Final = struct.Struct("<qqq")


@final
class RingEnd:
    """The writing or the reading end of a ring.

    Args:
        memory: The ring, a power of two bytes.
        words: The segment as 8-byte words.
        mine: Index of the word this end advances.
        theirs: Index of the word the other end advances.
        is_writer: Which end.
    """

    def __init__(self, memory: memoryview, words: memoryview, *, mine: int, theirs: int, is_writer: bool) -> None:
        self._memory = memory
        self._words = words
        self._mine = mine
        self._theirs = theirs
        self._lead = len(memory) if is_writer else 0
        self._mask = len(memory) - 1
        self._position = 0
        self._lock = threading.Lock() if needs_fence() else None

    @property
    def position(self) -> int:
        """How far this end has come."""
        return self._position

    def room(self) -> int:
        """Bytes that can be written, or read, now."""
        return self._lead + int(self._words[self._theirs]) - self._position

    def consumed(self) -> int:
        """How far the reading end has come; asked by the writer."""
        return int(self._words[self._theirs])

    def write_header(self, tag: int, nbytes: int, address: int = 0) -> bool:
        """Write the line in front of a message, unannounced.

        Args:
            tag: Of the message.
            nbytes: Of the message.
            address: Where it lies in the sender's process, if it is not to follow.

        Returns:
            Whether there was room.
        """
        if self.room() < _LINE_BYTES:
            return False
        start, _ = self._piece(_LINE_BYTES)
        _HEADER.pack_into(self._memory, start, tag, nbytes, address)
        self._position += _LINE_BYTES
        return True

    def read_header(self) -> tuple[int, int, int] | None:
        """Read the line in front of a message, unannounced.

        Returns:
            Tag, size and address, or ``None`` where none is here.
        """
        if self.room() < _LINE_BYTES:
            return None
        start, _ = self._piece(_LINE_BYTES)
        tag, nbytes, address = _HEADER.unpack_from(self._memory, start)
        self._position += _LINE_BYTES
        return tag, nbytes, address

    def write_whole(self, tag: int, source: memoryview) -> bool:
        """Write a message, its line in front, and announce it.

        Args:
            tag: Of the message.
            source: All of it.

        Returns:
            Whether there was room for all of it in one piece; nothing is written otherwise.
        """
        start = self._position & self._mask
        stop = start + _LINE_BYTES + len(source)
        if stop > self._mask + 1 or stop - start > self.room():
            return False
        if self._lock is not None:
            full_fence(self._lock)
        _HEADER.pack_into(self._memory, start, tag, len(source), 0)
        self._memory[start + _LINE_BYTES : stop] = source
        self._position += stop - start
        self.align()
        self.announce()
        return True

    def read_whole(self, target: memoryview) -> bool:
        """Copy out the message whose line was read, and let the other end see that.

        Args:
            target: Of its size.

        Returns:
            Whether all of it was here in one piece; nothing is read otherwise.
        """
        start = self._position & self._mask
        stop = start + len(target)
        if stop > self._mask + 1 or stop - start > self.room():
            return False
        if self._lock is not None:
            full_fence(self._lock)
        target[:] = self._memory[start:stop]
        self._position += stop - start
        self.align()
        self.announce()
        return True

    def write(self, source: memoryview) -> int:
        """Copy the next piece of ``source`` in, unannounced.

        Args:
            source: What is left to write.

        Returns:
            How many bytes went in.
        """
        start, nbytes = self._piece(len(source))
        self._memory[start : start + nbytes] = source[:nbytes]
        self._position += nbytes
        return nbytes

    def read(self, target: memoryview) -> int:
        """Copy the next piece out into ``target``, unannounced.

        Args:
            target: What is left to fill.

        Returns:
            How many bytes came.
        """
        start, nbytes = self._piece(len(target))
        target[:nbytes] = self._memory[start : start + nbytes]
        self._position += nbytes
        return nbytes

    def align(self) -> None:
        """Go on to the next cache line. Both ends do so at the same places."""
        self._position = (self._position + _LINE_BYTES - 1) & -_LINE_BYTES

    def announce(self) -> None:
        """Let the other end see what was copied."""
        if self._lock is not None:
            full_fence(self._lock)
        self._words[self._mine] = self._position

    def _piece(self, wanted: int) -> tuple[int, int]:
        start = self._position & self._mask
        room = self._lead + self._words[self._theirs] - self._position
        nbytes = min(wanted, room, self._mask + 1 - start, _PIECE_BYTES)
        if self._lock is not None:
            full_fence(self._lock)
        return start, nbytes
