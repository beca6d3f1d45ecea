"""Both ends of the messages between two members: what is under way, what is kept, and in which order it moves.

Nothing here waits or locks; ``Mailbox`` does.
"""

from collections import deque
from typing import Protocol, final

import numpy as np
from torch import Tensor

from parallel_runtime.comm.communicator import Work
from parallel_runtime.comm.shm.remote import Copy, address_of
from parallel_runtime.comm.shm.ring import RingEnd
from parallel_runtime.errors import CollectiveMismatchError, PeerError

__all__ = ["Incoming", "Message", "MessageWork", "Outgoing", "Post", "SentWork"]


class Post(Protocol):
    """What a work asks of its mailbox."""

    def forget(self) -> None:
        """One work less is under way."""

    def progress(self) -> bool:
        """Move everything on without waiting; whether anything moved."""

    def wait(self, work: "MessageWork", timeout_s: float) -> None:
        """Move everything on until ``work`` is done."""


@final
class SentWork(Work):
    """A send that was done at once."""

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Nothing is left to wait for."""


@final
class MessageWork(Work):
    """One send or receive.

    Attributes:
        memory: The bytes of its tensor.
        peer: The other side.
        tag: Its tag.
        is_send: Whether it sends.
        is_open: Whether it is still under way.
        address: Where its tensor lies, if the other side, or this one from the other side's, may copy straight; or 0.
    """

    __slots__ = ("_error", "_mailbox", "_tensor", "address", "is_open", "is_send", "memory", "peer", "tag")

    def __init__(self, mailbox: Post, memory: memoryview, tensor: Tensor, peer: int, tag: int, *, is_send: bool) -> None:
        self.memory = memory
        self.peer = peer
        self.tag = tag
        self.is_send = is_send
        self.is_open = True
        self.address = 0
        self._mailbox: Post | None = mailbox
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
class Message:
    """One message on its way in: straight into its receive, or kept until there is one."""

    __slots__ = ("filled", "memory", "nbytes", "tag", "work")

    def __init__(self, tag: int, nbytes: int, work: MessageWork | None) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.work = work
        fits = work is not None and len(work.memory) == nbytes
        self.memory = work.memory if fits and work is not None else np.empty(nbytes, np.uint8).data
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
class Outgoing:
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

    def has_news(self) -> bool:
        """Whether the peer may have taken something since it was looked at."""
        return not self._offered or self._ring.consumed() >= self._offered[0][0]

    def offer(self, work: MessageWork) -> bool:
        """Let the peer read the memory of ``work`` where it lies, if nothing has to go before it; whether it was told so."""
        if self.queue or not self._ring.write_header(work.tag, len(work.memory), work.address):
            return False
        self._offered.append((self._ring.position, work))
        self._ring.announce()
        return True

    def enqueue(self, work: MessageWork) -> bool:
        """Send ``work`` when its turn comes; whether anything went."""
        self.queue.append(work)
        return self.progress()

    def write_whole(self, tag: int, memory: memoryview) -> bool:
        """Send in one go what fits the ring now, if nothing has to go before it; whether that was done."""
        return not self.queue and self._ring.write_whole(tag, memory)

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
class Incoming:
    """What comes from one peer: receives that wait for messages, and messages that wait for receives."""

    def __init__(self, ring: RingEnd, src: int) -> None:
        self.read: Copy | None = None
        self._is_over = False
        self.posted: dict[int, deque[MessageWork]] = {}
        self._kept: dict[int, deque[Message]] = {}
        self._current: Message | None = None
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

    def has_news(self) -> bool:
        """Whether the peer may have sent something since it was looked at."""
        return self._ring.room() > 0

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
                moved = True
                if self._fetch_whole(tag, nbytes, address) if address else self._take_whole(tag, nbytes):
                    continue
                message = self._current = self._begin(tag, nbytes)
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

    def _take_whole(self, tag: int, nbytes: int) -> bool:
        """Fill the receive that waits for this message, where all of it is here in one piece."""
        works = self.posted.get(tag)
        if not works or len(works[0].memory) != nbytes or not self._ring.read_whole(works[0].memory):
            return False
        works.popleft().finish()
        if not works:
            del self.posted[tag]
        return True

    def _fetch_whole(self, tag: int, nbytes: int, address: int) -> bool:
        """Fill the receive that waits for this message, straight from the tensor that the sender offers."""
        works = self.posted.get(tag)
        if not works or len(works[0].memory) != nbytes:
            return False
        work = works[0]
        try:
            assert self.read is not None  # nobody offers anything otherwise
            self.read(address, work.address, nbytes)
        except PeerError as exc:
            self._is_over = True
            work.finish(exc)
        works.popleft()
        if not works:
            del self.posted[tag]
        if not self._is_over:
            self._ring.announce()
            work.finish()
        return True

    def _fetch_message(self, message: Message, address: int) -> bool:
        """Copy a message that the sender offers; ``False`` where it is gone, and nothing follows."""
        try:
            assert self.read is not None  # nobody offers anything otherwise
            self.read(address, address_of(message.memory), message.nbytes)
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

    def _begin(self, tag: int, nbytes: int) -> Message:
        """The message that comes next: for the oldest receive with its tag, or kept."""
        works = self.posted.get(tag)
        if not works:
            message = Message(tag, nbytes, None)
            self._kept.setdefault(tag, deque()).append(message)
            return message
        message = Message(tag, nbytes, works.popleft())
        if not works:
            del self.posted[tag]
        return message
