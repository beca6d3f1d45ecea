"""Operations on tensors where they lie, each in its own process: one copy instead of two, and few steps however large they are.

In the first step every member tells where its tensor lies; in the last one, that it touches nobody's any more.

*What waits is hidden.* What a member copies within its own memory it does while the others' announcements are on their way; of a
large tensor it copies a piece, and then reads a piece of the others', who have that piece in the cache just then.
"""

import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, final

from parallel_runtime.comm.shm.plans import AgreedTransfer, Plan
from parallel_runtime.comm.shm.reductions import Reducer
from parallel_runtime.comm.shm.remote import RemoteMemory, address_of
from parallel_runtime.comm.shm.steps import Steps
from parallel_runtime.errors import CollectiveMismatchError

__all__ = ["DirectAllReduce", "DirectBroadcast", "DirectMove", "DirectPlan", "DirectReduce", "DirectWhenLarge", "Fetch", "Offer"]

_OFFER: Final = struct.Struct("=qqq")  # whether memory of this member can be reached, address, bytes
_CHUNK_BYTES: Final = 1 << 20
_PAGE: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """``memory`` may be read by ``member``."""

    member: int
    memory: memoryview


@final
@dataclass(frozen=True, slots=True)
class Fetch:
    """``memory`` is filled with what ``member`` offers; with this member's own ``source`` where that is given."""

    memory: memoryview
    member: int
    source: memoryview | None = None


class DirectPlan(Plan):
    """Between two steps, the memory that the members offer may be reached.

    Args:
        text: The operation.
        remote: The peers' memory.
        world_size: Number of members.
        offers: What this member offers.

    Attributes:
        ordinary: Run instead where one member's memory is none that others can reach.
    """

    def __init__(self, text: str, remote: RemoteMemory, world_size: int, offers: Sequence[Offer]) -> None:
        super().__init__(f"{text}, in place")
        self.ordinary: Plan | None = None
        self._remote = remote
        self._told = memoryview(bytearray(_OFFER.size * world_size))
        for member in range(world_size):
            _OFFER.pack_into(self._told, _OFFER.size * member, 1, 0, 0)
        for offer in offers:
            _OFFER.pack_into(self._told, _OFFER.size * offer.member, 1, address_of(offer.memory), len(offer.memory))
        self._views: list[memoryview] = []

    def refuse(self) -> None:
        """Tell every member that memory of this one cannot be reached."""
        for at in range(0, len(self._told), _OFFER.size):
            _OFFER.pack_into(self._told, at, 0, 0, 0)

    def run(self, steps: Steps, timeout_s: float) -> None:
        """A step to tell addresses, the work, a step to end."""
        rank = steps.rank_in_group
        if not self._views:
            self._views = [slot[: len(self._told)] for slot in steps.slots[rank]]
        slot = steps.enter(self._told, self._views, self.print, timeout_s)
        self.prepare()
        steps.collect(steps.peers, steps.sequence, self.print, self.text)
        at = _OFFER.size * rank
        offered = [_OFFER.unpack_from(slots[slot], at) for slots in steps.slots]
        for offer in offered:
            if not offer[0] and self.ordinary is not None:
                self.ordinary.run(steps, timeout_s)
                return
        self.work(steps, offered)
        self.end(steps)

    def end(self, steps: Steps) -> None:
        """The closing step."""
        steps.announce(self.print)
        self.finish()
        steps.collect(steps.peers, steps.sequence, self.print, self.text)

    def prepare(self) -> None:
        """What this member does by itself while the others' addresses are on their way."""

    @abstractmethod
    def work(self, steps: Steps, offered: Sequence[tuple[int, ...]]) -> None:
        """Everything this member reads; ``offered`` to it, by each member: 1, an address, a number of bytes."""

    def finish(self) -> None:
        """What this member does by itself while others still read."""


@final
class DirectMove(DirectPlan):
    """Copies what the others offer.

    Raises:
        CollectiveMismatchError: When run: a member offers another number of bytes than is to be received.
    """

    def __init__(
        self, text: str, remote: RemoteMemory, world_size: int, offers: Sequence[Offer], fetches: Sequence[Fetch]
    ) -> None:
        super().__init__(text, remote, world_size, offers)
        own = [
            (fetch.memory[start : start + _CHUNK_BYTES], fetch.source[start : start + _CHUNK_BYTES])
            for fetch in fetches
            if fetch.source is not None
            for start in range(0, len(fetch.memory), _CHUNK_BYTES)
        ]
        self._first, self._last = own[:1], own[1:][-1:]
        self._own = own[1:-1]
        others = [(fetch.member, address_of(fetch.memory), len(fetch.memory)) for fetch in fetches if fetch.source is None]
        self._awaited = [(member, nbytes) for member, _, nbytes in others]
        most = max((nbytes for _, _, nbytes in others), default=0)
        readers = {member: remote.reader(member) for member, _, _ in others}
        self._pieces = [
            (readers[member], member, start, address + start, min(_CHUNK_BYTES, nbytes - start))
            for start in range(0, most, _CHUNK_BYTES)
            for member, address, nbytes in others
            if start < nbytes
        ]

    def prepare(self) -> None:
        for target, source in self._first:
            target[:] = source

    def work(self, steps: Steps, offered: Sequence[tuple[int, ...]]) -> None:
        for member, nbytes in self._awaited:
            there = offered[member][2]
            if there != nbytes:
                raise CollectiveMismatchError(f"member {member} has {there} bytes where {nbytes} were to be received")
        for piece, copy in zip_longest(self._pieces, self._own):
            if piece is not None:
                read, member, start, address, nbytes = piece
                read(offered[member][1] + start, address, nbytes)
            if copy is not None:
                target, source = copy
                target[:] = source

    def finish(self) -> None:
        for target, source in self._last:
            target[:] = source


@final
class DirectBroadcast(DirectPlan):
    """From one member to the only other one: it reads the first half, and the source writes the second.

    Args:
        text: The operation.
        remote: The peers' memory.
        peer: The other member.
        memory: The tensor.
        is_source: Whether this member sends.
    """

    def __init__(self, text: str, remote: RemoteMemory, peer: int, memory: memoryview, *, is_source: bool) -> None:
        super().__init__(text, remote, 2, [Offer(peer, memory)])
        self._peer = peer
        self._is_source = is_source
        half = len(memory) // 2 // _PAGE * _PAGE
        here = address_of(memory)
        self._start = half if is_source else 0
        self._here, self._nbytes = (here + half, len(memory) - half) if is_source else (here, half)
        self._copy = remote.writer(peer) if is_source else remote.reader(peer)

    def run(self, steps: Steps, timeout_s: float) -> None:
        """Nobody leaves while the source may be writing."""
        try:
            super().run(steps, timeout_s)
        except BaseException:
            self.is_exposed = not (self._is_source or self._remote.await_writer(self._peer, timeout_s))
            raise

    def work(self, steps: Steps, offered: Sequence[tuple[int, ...]]) -> None:
        self._copy(offered[self._peer][1] + self._start, self._here, self._nbytes)


@final
class DirectReduce(DirectPlan):
    """Combines what all members offer to this one.

    Args:
        text: The operation.
        remote: The peers' memory.
        rank_in_group: This member.
        scratch: A block per member.
        offers: What this member offers to the others.
        local: This member's operand.
        out: Where the result goes; may be ``local``. ``None`` where this member gets none.
        reducer: Combines.
    """

    def __init__(
        self,
        text: str,
        remote: RemoteMemory,
        rank_in_group: int,
        scratch: Sequence[memoryview],
        offers: Sequence[Offer],
        local: memoryview,
        out: memoryview | None,
        reducer: Reducer,
    ) -> None:
        super().__init__(text, remote, len(scratch), offers)
        self._sums = _Sums(remote, rank_in_group, scratch, local, out, reducer) if out is not None else None

    def work(self, steps: Steps, offered: Sequence[tuple[int, ...]]) -> None:
        if self._sums is not None:
            self._sums.run([address for _, address, _ in offered])


@final
class _Sums:
    """Reads a block of every other member's operand at a time, and combines it with this member's own.

    Args:
        remote: The peers' memory.
        rank_in_group: This member.
        scratch: A block per member.
        local: This member's operand.
        out: Where the result goes; may be ``local``.
        reducer: Combines.
    """

    def __init__(
        self,
        remote: RemoteMemory,
        rank_in_group: int,
        scratch: Sequence[memoryview],
        local: memoryview,
        out: memoryview,
        reducer: Reducer,
    ) -> None:
        self._reducer = reducer
        self._local = local
        self._out = out
        self._rank = rank_in_group
        self._scratch = scratch
        self._block = len(scratch[0])
        self._is_separate = rank_in_group < 2 or address_of(local) != address_of(out)
        self._peers = [
            (member, remote.reader(member), address_of(block)) for member, block in enumerate(scratch) if member != rank_in_group
        ]

    def run(self, sources: Sequence[int]) -> None:
        """Combine what lies at address ``sources[m]`` of each member ``m``."""
        vector = self._reducer.vector
        rank, total = self._rank, len(self._local)
        for start in range(0, total, self._block):
            nbytes = min(self._block, total - start)
            for member, read, address in self._peers:
                read(sources[member] + start, address, nbytes)
            operands = [vector(block[:nbytes]) for block in self._scratch]
            operands[rank] = vector(self._local[start : start + nbytes])
            out = self._out[start : start + nbytes]
            if self._is_separate:  # one of the first two operands may be the result as well
                self._reducer.combine(operands, vector(out))
            else:
                result = self._scratch[rank][:nbytes]
                self._reducer.combine(operands, vector(result))
                out[:] = result


@final
class DirectAllReduce(DirectPlan):
    """Each member combines one part of all tensors in its own; then everybody reads the other parts.

    Args:
        text: The operation.
        remote: The peers' memory.
        steps: Of this member.
        scratch: A block per member.
        local: Its tensor.
        reducer: Combines.
    """

    def __init__(
        self,
        text: str,
        remote: RemoteMemory,
        steps: Steps,
        scratch: Sequence[memoryview],
        local: memoryview,
        reducer: Reducer,
    ) -> None:
        rank, world_size = steps.rank_in_group, steps.world_size
        super().__init__(text, remote, world_size, [Offer(peer, local) for peer in steps.peers])
        part = -(-len(local) // world_size // _PAGE) * _PAGE
        self._starts = [min(part * member, len(local)) for member in range(world_size + 1)]
        mine = local[self._starts[rank] : self._starts[rank + 1]]
        self._sums = _Sums(remote, rank, scratch, mine, mine, reducer)
        self._base = address_of(local)
        order = (*range(rank + 1, world_size), *range(rank))
        self._readers = [(member, remote.reader(member)) for member in order]

    def work(self, steps: Steps, offered: Sequence[tuple[int, ...]]) -> None:
        starts, rank = self._starts, steps.rank_in_group
        self._sums.run([address + starts[rank] for _, address, _ in offered])
        steps.announce(self.print)
        steps.collect(steps.peers, steps.sequence, self.print, self.text)
        for member, read in self._readers:
            start, nbytes = starts[member], starts[member + 1] - starts[member]
            if nbytes:
                read(offered[member][1] + start, self._base + start, nbytes)


@final
class DirectWhenLarge(Plan):
    """An exchange of parts whose sizes no member knows alone: small ones take one step, others are read in place."""

    def __init__(self, small: AgreedTransfer, large: DirectMove) -> None:
        super().__init__(small.text)
        self._small = small
        self._large = large

    def run(self, steps: Steps, timeout_s: float) -> None:
        """One step that tells how much there is and where; the rest where that was not all."""
        large = self._large
        offered = self._small.run_first(steps, timeout_s, large.prepare)
        if not offered:
            return
        if all(offer[0] for offer in offered):
            large.work(steps, offered)
            large.end(steps)
        else:
            self._small.run(steps, timeout_s)
