"""Messages between two members: tags, any size, no deadlock when both send first.

A message is a header (tag, size) and its bytes, through the ring of its pair. Of a large one only the header goes through, where
the members can read each other's memory: the receiver copies it from the sender's tensor, and the sender is done when it sees
that the header was consumed. What has no receive yet is kept in private
memory, so that a later message with another tag can pass it. Everything moves on in every wait of this member, of messages and
of collectives; nothing moves in between, there is no thread behind it.
"""

import mmap
import threading
from collections.abc import Callable
from typing import Final, final

from torch import Tensor

from parallel_runtime.comm.communicator import Work
from parallel_runtime.comm.shm.geometry import Geometry
from parallel_runtime.comm.shm.memory import view_bytes
from parallel_runtime.comm.shm.messages import Incoming, MessageWork, Outgoing, SentWork
from parallel_runtime.comm.shm.remote import RemoteMemory
from parallel_runtime.comm.shm.ring import RingEnd
from parallel_runtime.comm.shm.waiting import Bells, Waiter
from parallel_runtime.errors import PeerError

__all__ = ["Mailbox"]

_DIRECT_BYTES_PAIR: Final = 16 << 10
_MAX_VIEWS: Final = 512


@final
class Mailbox:
    """All messages of one member.

    Args:
        memory: The segment.
        geometry: Its layout.
        rank_in_group: This member.
        waiter: Moves this mailbox on while it waits for something else.
        bells: Wakes peers.

    Attributes:
        on_break: Told when a message stopped half-way, so that nothing can follow it.
    """

    def __init__(self, memory: mmap.mmap, geometry: Geometry, rank_in_group: int, waiter: Waiter, bells: Bells) -> None:
        self.on_break: Callable[[BaseException], None] | None = None
        self._is_direct = False
        self._direct_bytes = min(_DIRECT_BYTES_PAIR, geometry.ring_bytes) if geometry.world_size == 2 else geometry.ring_bytes
        peers = [peer for peer in range(geometry.world_size) if peer != rank_in_group]
        self._outgoing = {peer: Outgoing(_open_ring(memory, geometry, rank_in_group, peer, is_writer=True)) for peer in peers}
        self._incoming = {
            peer: Incoming(_open_ring(memory, geometry, peer, rank_in_group, is_writer=False), peer) for peer in peers
        }
        self._waiter = waiter
        self._looks = 1 if waiter.is_crowded else waiter.looks
        self._bells = bells
        self._lock = threading.Lock()
        self._num_open = 0
        self._sent = SentWork()
        self._views: dict[tuple[int, int], memoryview] = {}

    def read_from(self, remote: RemoteMemory) -> None:
        """Let large messages be read where they lie; agreed by all members, before any message."""
        self._is_direct = True
        for peer, incoming in self._incoming.items():
            incoming.read = remote.reader(peer)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start sending ``tensor``; it is kept alive and must not change until the work is done."""
        memory, outgoing = self._view(tensor), self._outgoing[dst]
        address = 0
        if len(memory) > self._direct_bytes and self._is_direct and not tensor.is_pinned():
            address = tensor.data_ptr()
        with self._lock:
            if not address and outgoing.write_whole(tag, memory):
                self._ring()
                return self._sent
            work = MessageWork(self, memory, tensor, dst, tag, is_send=True)
            work.address = address
            self._remember()
            if (address and outgoing.offer(work)) or outgoing.enqueue(work):
                self._ring()
        return work

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Start filling ``tensor``; it is kept alive until the work is done."""
        work = MessageWork(self, self._view(tensor), tensor, src, tag, is_send=False)
        work.address = tensor.data_ptr()
        with self._lock:
            self._remember()
            self._incoming[src].post(work)
        return work

    def progress(self) -> bool:
        """Move on whatever can be moved on without waiting; whether anything was."""
        with self._lock:
            return self._progress()

    def run_errand(self) -> bool:
        """``progress`` on behalf of a wait in whichever group of this rank; nothing where another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._progress()
        except BaseException as exc:  # interrupted in the middle of a copy
            if self.on_break is not None:
                self.on_break(exc)
            raise
        finally:
            self._lock.release()

    def _progress(self) -> bool:
        moved = False
        for outgoing in self._outgoing.values():
            if not outgoing.is_idle() and outgoing.progress():
                moved = True
        for incoming in self._incoming.values():
            if incoming.progress():
                moved = True
        if moved:
            self._ring()
        return moved

    def wait(self, work: MessageWork, timeout_s: float) -> None:
        """Move everything on until ``work`` is done; an error of the wait becomes the work's own."""
        end = self._outgoing[work.peer] if work.is_send else self._incoming[work.peer]
        for _ in range(self._looks):  # cheap ones, before those of the waiter, which move everything on
            if end.has_news():
                with self._lock:
                    if end.progress():
                        self._ring()
                if not work.is_open:
                    return
        self._waiter.deadline = None
        try:
            self._waiter.until(lambda: not work.is_open or (self._move(end) and not work.is_open), timeout_s, lambda: [work.peer])
        except PeerError as exc:
            with self._lock:
                is_whole = end.withdraw(work)
            work.finish(exc)
            if not is_whole and self.on_break is not None:
                self.on_break(exc)
        except BaseException as exc:  # interrupted in the middle of a copy
            if self.on_break is not None:
                self.on_break(exc)
            raise

    def forget(self) -> None:
        """One work less is under way."""
        self._num_open -= 1
        if not self._num_open:
            self._waiter.errands.discard(self._waiter.owner)

    def _view(self, tensor: Tensor) -> memoryview:
        """``view_bytes``, remembered: messages often come from the same places."""
        key = (tensor.data_ptr(), tensor.nbytes)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = view_bytes(tensor)
        return view

    def _move(self, end: Outgoing | Incoming) -> bool:
        """Move on one end, or all of them where more than one work is under way."""
        with self._lock:
            if self._num_open > 1:
                return self._progress()
            moved = end.progress()
            if moved:
                self._ring()
            return moved

    def _remember(self) -> None:
        self._num_open += 1
        if self._num_open == 1:
            self._waiter.errands.add(self._waiter.owner, self.run_errand)

    def _ring(self) -> None:
        if any(self._bells.words):
            self._bells.ring()

    def fail(self, error: Exception) -> None:
        """Nothing under way will ever be done: everybody who waits for it gets ``error``."""
        for outgoing in self._outgoing.values():
            outgoing.fail(error)
        for incoming in self._incoming.values():
            incoming.fail(error)
        self.on_break = None
        self._waiter.errands.discard(self._waiter.owner)


def _open_ring(memory: mmap.mmap, geometry: Geometry, src: int, dst: int, *, is_writer: bool) -> RingEnd:
    whole = memoryview(memory)
    start = geometry.ring(src, dst)
    written, consumed = geometry.written(src, dst) // 8, geometry.consumed(src, dst) // 8
    mine, theirs = (written, consumed) if is_writer else (consumed, written)
    ring = whole[start : start + geometry.ring_bytes]
    return RingEnd(ring, whole.cast("q"), mine=mine, theirs=theirs, is_writer=is_writer)
