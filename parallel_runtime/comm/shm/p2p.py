"""Messages between two members: tags, any size, no deadlock when both send first.

A message is a header (tag, size) and its bytes, through the ring of its pair. Of a large one only the header goes through, where
the members can read each other's memory: the receiver copies it from the sender's tensor, and the sender is done when it sees
that the header was consumed. What has no receive yet is kept in private
memory, so that a later message with another tag can pass it. Everything moves on in every wait of this member, of messages and
of collectives; nothing moves in between, there is no thread behind it.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, final

from torch import Tensor

from parallel_runtime.comm.communicator import Work
from parallel_runtime.comm.shm.direct import RemoteMemory, address_of
from parallel_runtime.comm.shm.geometry import Geometry
from parallel_runtime.comm.shm.memory import view_bytes
from parallel_runtime.comm.shm.ring import RingEnd
from parallel_runtime.comm.shm.waiting import Bells, Waiter
from parallel_runtime.errors import CollectiveMismatchError, PeerError

__all__ = ["Mailbox", "MessageWork"]

_TRIES: Final = 40
_DIRECT_BYTES: Final = 256 << 10


@final
class MessageWork(Work):
    """One send or receive.

    Attributes:
        memory: The bytes of its tensor.
        peer: The other side.
        tag: Its tag.
        is_send: Whether it sends.
        is_open: Whether it is still under way.
        address: Where the receiver may read it, or 0.
    """

    __slots__ = ("_error", "_mailbox", "_tensor", "address", "is_open", "is_send", "memory", "peer", "tag")

    def __init__(self, mailbox: "Mailbox", tensor: Tensor, peer: int, tag: int, *, is_send: bool) -> None:
        self.memory = view_bytes(tensor)
        self.peer = peer
        self.tag = tag
        self.is_send = is_send
        self.is_open = True
        self.address = 0
        self._mailbox: Mailbox | None = mailbox
        self._tensor: Tensor | None = tensor
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """It is done, or failed with ``error``; once."""
        if self._mailbox is not None:
            self.is_open = False
            self._mailbox.forget()
            self._error = error
            self._mailbox = self._tensor = None

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        if self._mailbox is not None:
            self._mailbox.progress()
        return not self.is_open

    def wait(self, timeout_s: float) -> None:
        """Wait until the tensor may be used again (send) or is filled (receive).

        Args:
            timeout_s: Seconds.

        Raises:
            PeerTimeoutError: The peer did not take part in time.
            PeerLostError: The peer is gone.
            CollectiveMismatchError: The message that came has another size.
            ContextStateError: The communicator was closed before it was done.
        """
        if self._mailbox is not None:
            self._mailbox.wait(self, timeout_s)
        if self._error is not None:
            raise self._error


@final
class _Message:
    """One message on its way in: straight into its receive, or kept until there is one."""

    __slots__ = ("filled", "memory", "nbytes", "tag", "work")

    def __init__(self, tag: int, nbytes: int, work: MessageWork | None) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.work = work
        fits = work is not None and len(work.memory) == nbytes
        self.memory = work.memory if fits and work is not None else memoryview(bytearray(nbytes))
        self.filled = 0

    def deliver(self, src: int) -> None:
        """All bytes are here, and so is the receive."""
        work = self.work
        assert work is not None
        if len(work.memory) != self.nbytes:
            text = f"member {src} sent {self.nbytes} bytes with tag {self.tag} where {len(work.memory)} were to be received"
            work.finish(CollectiveMismatchError(text))
            return
        if self.memory is not work.memory:
            work.memory[:] = self.memory
        work.finish()


@final
class _Outgoing:
    """Sends to one peer, in order."""

    def __init__(self, ring: RingEnd) -> None:
        self.queue: deque[MessageWork] = deque()
        self._ring = ring
        self._sent = -1
        self._offered: deque[tuple[int, MessageWork]] = deque()

    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.queue and not self._offered

    def fail(self, error: Exception) -> None:
        """Nothing more is sent."""
        while self.queue:
            self.queue.popleft().finish(error)
        while self._offered:
            self._offered.popleft()[1].finish(error)

    def withdraw(self, work: MessageWork) -> bool:
        """Forget ``work``; ``False`` where its first bytes are under way already."""
        if work not in self.queue:
            return False
        if self._sent >= 0 and self.queue[0] is work:
            return False
        self.queue.remove(work)
        return True

    def progress(self) -> bool:
        """Write what there is room for; whether anything went."""
        moved = False
        ring = self._ring
        while self._offered and ring.consumed() >= self._offered[0][0]:
            self._offered.popleft()[1].finish()
            moved = True
        while self.queue:
            work = self.queue[0]
            if self._sent < 0:
                if not ring.write_header(work.tag, len(work.memory), work.address):
                    break
                moved = True
                if work.address:
                    self._offered.append((ring.position, self.queue.popleft()))
                    ring.announce()
                    continue
                self._sent = 0
            nbytes = ring.write(work.memory[self._sent :])
            self._sent += nbytes
            is_whole = self._sent == len(work.memory)
            if is_whole:
                ring.align()
            ring.announce()
            if is_whole:
                self.queue.popleft().finish()
                self._sent = -1
            elif nbytes:
                moved = True
            else:
                break
        return moved


@final
class _Incoming:
    """What comes from one peer: receives that wait for messages, and messages that wait for receives."""

    def __init__(self, ring: RingEnd, src: int) -> None:
        self.remote: RemoteMemory | None = None
        self._is_over = False
        self.posted: dict[int, deque[MessageWork]] = {}
        self._kept: dict[int, deque[_Message]] = {}
        self._current: _Message | None = None
        self._ring = ring
        self._src = src

    def post(self, work: MessageWork) -> None:
        """Match ``work`` with the oldest message of its tag that is here, or let it wait for one."""
        kept = self._kept.get(work.tag)
        if not kept:
            self.posted.setdefault(work.tag, deque()).append(work)
            return
        message = kept.popleft()
        if not kept:
            del self._kept[work.tag]
        message.work = work
        if message.filled == message.nbytes:
            message.deliver(self._src)

    def withdraw(self, work: MessageWork) -> bool:
        """Forget ``work``; ``False`` where its first bytes are here already."""
        works = self.posted.get(work.tag)
        if works is None or work not in works:
            return False
        works.remove(work)
        if not works:
            del self.posted[work.tag]
        return True

    def fail(self, error: Exception) -> None:
        """Nothing more is delivered."""
        while self.posted:
            _, works = self.posted.popitem()
            for work in works:
                work.finish(error)
        if self._current is not None and self._current.work is not None:
            self._current.work.finish(error)
        self._current = None
        self._kept.clear()

    def progress(self) -> bool:
        """Read what is here; whether anything came."""
        moved = False
        ring = self._ring
        while not self._is_over:
            message = self._current
            if message is None:
                header = ring.read_header()
                if header is None:
                    return moved
                tag, nbytes, address = header
                message = self._current = self._begin(tag, nbytes)
                moved = True
                if address and not self._fetch_message(message, address):
                    return moved
            nbytes = ring.read(message.memory[message.filled :])
            message.filled += nbytes
            if message.filled == message.nbytes:
                ring.align()
                self._current = None
            ring.announce()
            if self._current is None:
                if message.work is not None:
                    message.deliver(self._src)
            elif nbytes:
                moved = True
            else:
                return moved
        return moved

    def _fetch_message(self, message: _Message, address: int) -> bool:
        """Copy a message that the sender offers; ``False`` where it is gone, and nothing follows."""
        try:
            assert self.remote is not None  # nobody offers anything otherwise
            self.remote.read(self._src, address, address_of(message.memory), message.nbytes)
        except PeerError as exc:
            self._current = None
            self._is_over = True
            if message.work is not None:
                message.work.finish(exc)
            else:
                self._kept[message.tag].remove(message)
            return False
        message.filled = message.nbytes
        return True

    def _begin(self, tag: int, nbytes: int) -> _Message:
        """The message that comes next: for the oldest receive with its tag, or kept."""
        works = self.posted.get(tag)
        if not works:
            message = _Message(tag, nbytes, None)
            self._kept.setdefault(tag, deque()).append(message)
            return message
        message = _Message(tag, nbytes, works.popleft())
        if not works:
            del self.posted[tag]
        return message


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
        peers = [peer for peer in range(geometry.world_size) if peer != rank_in_group]
        self._outgoing = {peer: _Outgoing(_open_ring(memory, geometry, rank_in_group, peer, is_writer=True)) for peer in peers}
        self._incoming = {
            peer: _Incoming(_open_ring(memory, geometry, peer, rank_in_group, is_writer=False), peer) for peer in peers
        }
        self._waiter = waiter
        self._bells = bells
        self._lock = threading.Lock()
        self._num_open = 0

    def read_from(self, remote: RemoteMemory) -> None:
        """Let large messages be read where they lie; agreed by all members, before any message."""
        self._is_direct = True
        for incoming in self._incoming.values():
            incoming.remote = remote

    def isend(self, tensor: Tensor, dst: int, tag: int) -> MessageWork:
        """Start sending ``tensor``; it is kept alive and must not change until the work is done."""
        work = MessageWork(self, tensor, dst, tag, is_send=True)
        if self._is_direct and len(work.memory) >= _DIRECT_BYTES and not tensor.is_pinned():
            work.address = address_of(work.memory)
        outgoing = self._outgoing[dst]
        with self._lock:
            self._remember()
            outgoing.queue.append(work)
            if outgoing.progress():
                self._ring()
        return work

    def irecv(self, tensor: Tensor, src: int, tag: int) -> MessageWork:
        """Start filling ``tensor``; it is kept alive until the work is done."""
        work = MessageWork(self, tensor, src, tag, is_send=False)
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
        for _ in range(_TRIES):
            if not work.is_open:
                return
            self._move(end)
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
            self._waiter.errands.discard(self)

    def _move(self, end: _Outgoing | _Incoming) -> bool:
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
            self._waiter.errands.add(self, self.run_errand)

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
        self._waiter.errands.discard(self)


def _open_ring(memory: mmap.mmap, geometry: Geometry, src: int, dst: int, *, is_writer: bool) -> RingEnd:
    whole = memoryview(memory)
    start = geometry.ring(src, dst)
    written, consumed = geometry.written(src, dst) // 8, geometry.consumed(src, dst) // 8
    mine, theirs = (written, consumed) if is_writer else (consumed, written)
    ring = whole[start : start + geometry.ring_bytes]
    return RingEnd(ring, whole.cast("q"), mine=mine, theirs=theirs, is_writer=is_writer)
