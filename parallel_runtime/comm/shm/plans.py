"""What an operation does in each step, worked out once and remembered.

A plan is found again by the addresses, sizes and kind of an operation, so that a repeated call computes nothing. It knows what
this member writes into its slot (*puts*), what it copies from others (*takes*), what it copies by itself, and what it reduces.
Operations larger than a slot go through in pieces; piece ``k + 1`` is put before piece ``k`` is taken, so that members wait for
each other less and a piece is still in the cache when it is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from struct import Struct
from typing import Final, TypeAlias, final

from parallel_runtime.comm.shm.geometry import NUM_SLOTS
from parallel_runtime.comm.shm.reductions import Reducer, Vector
from parallel_runtime.comm.shm.steps import Steps, fingerprint
from parallel_runtime.errors import CollectiveMismatchError

__all__ = ["SIZE_BYTES", "AgreedTransfer", "OneShot", "Plan", "Put", "Reduction", "SlotVectors", "Take", "Transfer", "TwoShot"]

SIZE_BYTES: Final = 64
"""Room behind every part of an exchange for its length; a line, so that pieces stay aligned."""

_ALIGNMENT: Final = 64
_PART: Final = Struct("=qqq")  # whether it can be reached in its process, address, bytes
_Copies: TypeAlias = list[tuple[memoryview, memoryview]]
_Reads: TypeAlias = tuple[_Copies, list[Vector], Vector | None]


class Plan(ABC):
    """One operation of one member, ready to run again and again.

    Attributes:
        text: What the members have to agree on.
        print: Its fingerprint.
        is_exposed: Whether, after a failure, another process might still write into this member's tensor.
    """

    def __init__(self, text: str) -> None:
        self.is_exposed = False
        self.text = text
        self.print = fingerprint(text)

    @abstractmethod
    def run(self, steps: Steps, timeout_s: float) -> None:
        """Do it.

        Raises:
            PeerError: Another member is late, gone or in another operation.
        """


@final
class SlotVectors:
    """Views of the slots for one size, dtype and reduction; tensors at different addresses share them."""

    def __init__(self, steps: Steps, nbytes: int, reducer: Reducer) -> None:
        self.reducer = reducer
        self.mine = [steps.slots[steps.rank_in_group][slot][:nbytes] for slot in range(NUM_SLOTS)]
        self.sources = [[reducer.vector(slots[slot][:nbytes]) for slots in steps.slots] for slot in range(NUM_SLOTS)]


@final
class OneShot(Plan):
    """All-reduce of what fits a slot: everybody writes all of it, and reduces everything."""

    def __init__(self, text: str, local: memoryview, slots: SlotVectors, rank_in_group: int) -> None:
        super().__init__(text)
        self._local = local
        self._out = slots.reducer.vector(local)
        self._combine = slots.reducer.combine
        self._slots = slots.mine
        self._sources = slots.sources
        if rank_in_group < 2:  # one of the first two operands may be the result as well, which is faster
            self._sources = [[*sources[:rank_in_group], self._out, *sources[rank_in_group + 1 :]] for sources in slots.sources]

    def run(self, steps: Steps, timeout_s: float) -> None:
        """One step; then every member combines all slots."""
        slot = steps.exchange(self._local, self._slots, self.print, self.text, timeout_s)
        self._combine(self._sources[slot], self._out)


@final
@dataclass(frozen=True, slots=True)
class Put:
    """``local`` goes into this member's slot at ``offset``."""

    local: memoryview
    offset: int = 0


@final
@dataclass(frozen=True, slots=True)
class Take:
    """``local`` comes from the slot of ``member`` at ``offset``; from this member's own ``source`` where that is given."""

    local: memoryview
    member: int
    offset: int = 0
    source: memoryview | None = None


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """``out`` is the combination of every member's slot at its offset, ``local`` standing in for this member's own slot."""

    out: memoryview
    local: memoryview
    offsets: tuple[int, ...]
    reducer: Reducer


class Transfer(Plan):
    """Puts, takes and at most one reduction, in pieces of ``piece_bytes``.

    Args:
        text: What the members have to agree on.
        piece_bytes: How much of each put and take goes into one step.
        nbytes: The longest put or take of any member: it gives the number of steps.
        peers: Whom this member waits for.
        puts: What it writes.
        takes: What it copies out.
        reduction: What it combines.
    """

    def __init__(
        self,
        text: str,
        *,
        piece_bytes: int,
        nbytes: int,
        peers: tuple[int, ...] = (),
        puts: Sequence[Put] = (),
        takes: Sequence[Take] = (),
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(text)
        self._piece_bytes = piece_bytes
        self._num_steps = max(-(-nbytes // piece_bytes), 1)
        self._peers = peers
        self._puts = tuple(puts)
        self._takes = tuple(takes)
        self._reduction = reduction
        self._first_writes: dict[int, _Copies] = {}
        self._first_reads: dict[int, _Reads] = {}

    def run(self, steps: Steps, timeout_s: float) -> None:
        """Piece after piece, putting one piece ahead."""
        steps.begin(timeout_s)
        first = steps.sequence + 1
        piece = num_put = 0
        while piece < self._num_steps:
            while num_put < min(piece + 2, self._num_steps):
                self._put(steps, num_put)
                num_put += 1
            steps.collect(self._peers, first + piece, self.print, self.text)
            self._take(steps, piece, (first + piece) % NUM_SLOTS)
            piece += 1

    def _put(self, steps: Steps, piece: int) -> None:
        if self._puts:
            slot = steps.free_slot()
            for target, source in self._writes(steps, piece, slot):
                target[:] = source
        steps.announce(self.print)

    def _take(self, steps: Steps, piece: int, slot: int) -> None:
        copies, sources, out = self._reads(steps, piece, slot)
        for target, source in copies:
            target[:] = source
        if self._reduction is not None and out is not None:
            self._reduction.reducer.combine(sources, out)

    def _writes(self, steps: Steps, piece: int, slot: int) -> _Copies:
        """The views that a put copies between; those of the first piece are kept, small operations have no other."""
        if piece == 0 and slot in self._first_writes:
            return self._first_writes[slot]
        memory = steps.slots[steps.rank_in_group][slot]
        start = piece * self._piece_bytes
        parts = [(put.offset, put.local[start : start + self._piece_bytes]) for put in self._puts]
        copies = [(memory[offset : offset + len(part)], part) for offset, part in parts if part]
        if piece == 0:
            self._first_writes[slot] = copies
        return copies

    def _reads(self, steps: Steps, piece: int, slot: int) -> _Reads:
        """The views that a take copies between, and what it combines; kept like those of a put."""
        if piece == 0 and slot in self._first_reads:
            return self._first_reads[slot]
        start = piece * self._piece_bytes
        stop = start + self._piece_bytes
        copies = []
        for take in self._takes:
            part = take.local[start:stop]
            slots = steps.slots[take.member][slot]
            if part:
                copies.append((part, slots[take.offset :][: len(part)] if take.source is None else take.source[start:stop]))
        reads: _Reads = (copies, *self._operands(steps, start, stop, slot))
        if piece == 0:
            self._first_reads[slot] = reads
        return reads

    def _operands(self, steps: Steps, start: int, stop: int, slot: int) -> tuple[list[Vector], Vector | None]:
        reduction = self._reduction
        if reduction is None:
            return [], None
        out = reduction.out[start:stop]
        memories = [slots[slot][at : at + len(out)] for slots, at in zip(steps.slots, reduction.offsets, strict=True)]
        memories[steps.rank_in_group] = reduction.local[start:stop]
        vector = reduction.reducer.vector
        return [vector(memory) for memory in memories], vector(out)


@final
class AgreedTransfer(Transfer):
    """A transfer of parts whose sizes only the two ends of each know.

    With the first piece each member sends how many steps it needs, of which the largest counts, and behind every part how long
    it is.

    Args:
        text: What the members have to agree on.
        share_bytes: Room of every part in a slot; its last bytes tell how long the part is.
        piece_bytes: How much of a part goes into one step, at most ``share_bytes`` less ``SIZE_BYTES``.
        nbytes: The longest part that this member sends or receives.
        peers: Every other member.
        puts: One per peer.
        takes: One per peer, and this member's own.
        addresses: Where each put lies in this process, if the others can reach it there.

    Raises:
        CollectiveMismatchError: When run: a member sends another number of bytes than is to be received.
    """

    def __init__(
        self,
        text: str,
        *,
        share_bytes: int,
        piece_bytes: int,
        nbytes: int,
        peers: tuple[int, ...],
        puts: Sequence[Put],
        takes: Sequence[Take],
        addresses: Sequence[int] = (),
    ) -> None:
        super().__init__(text, piece_bytes=piece_bytes, nbytes=nbytes, peers=peers, puts=puts, takes=takes)
        at = share_bytes - SIZE_BYTES
        self._is_reachable = bool(addresses)
        self._sent = [
            (put.offset + at, _PART.pack(self._is_reachable, address, len(put.local)))
            for put, address in zip_longest(puts, addresses, fillvalue=0)
            if isinstance(put, Put)
        ]
        self._awaited = [(take.member, take.offset + at, len(take.local)) for take in takes if take.source is None]

    def run(self, steps: Steps, timeout_s: float) -> None:
        """As a transfer, with the steps that all members need."""
        mine = self._num_steps
        try:
            super().run(steps, timeout_s)
        finally:
            self._num_steps = mine

    def run_first(self, steps: Steps, timeout_s: float, prepare: Callable[[], None]) -> list[tuple[int, ...]]:
        """Only the first step of ``run``; without data where this member knows that it cannot be all.

        Args:
            steps: The clock.
            timeout_s: Seconds.
            prepare: Called meanwhile where this member knows that it cannot be all.

        Returns:
            ``[]`` if that was all, for all members. Otherwise what each member has for this one: whether it can be reached in its
            process, address, and number of bytes; of this member only the first counts.
        """
        steps.begin(timeout_s)
        if self._num_steps == 1:
            self._put(steps, 0)
        else:
            self._tell(steps)
            steps.announce(self.print)
            prepare()
        steps.collect(self._peers, steps.sequence, self.print, self.text)
        slot = steps.sequence % NUM_SLOTS
        offered = self._compare(steps, slot)
        if self._num_steps > 1 or any(steps.header(member, slot) > 1 for member in steps.peers):
            if self._num_steps == 1:
                prepare()
            return offered
        Transfer._take(self, steps, 0, slot)
        return []

    def _put(self, steps: Steps, piece: int) -> None:
        if piece == 0:
            self._tell(steps)
        super()._put(steps, piece)

    def _take(self, steps: Steps, piece: int, slot: int) -> None:
        if piece == 0:
            self._compare(steps, slot)
            self._num_steps = max(self._num_steps, *(steps.header(member, slot) for member in steps.peers))
        super()._take(steps, piece, slot)

    def _tell(self, steps: Steps) -> None:
        slot = steps.free_slot()
        steps.put_header(slot, self._num_steps)
        memory = steps.slots[steps.rank_in_group][slot]
        for at, part in self._sent:
            memory[at : at + len(part)] = part

    def _compare(self, steps: Steps, slot: int) -> list[tuple[int, ...]]:
        offered: list[tuple[int, ...]] = [(self._is_reachable, 0, 0)] * steps.world_size
        for member, at, nbytes in self._awaited:
            offered[member] = _PART.unpack_from(steps.slots[member][slot], at)
            there = offered[member][2]
            if there != nbytes:
                raise CollectiveMismatchError(f"member {member} has {there} bytes where {nbytes} were to be received")
        return offered


@final
class TwoShot(Plan):
    """All-reduce in which each member reduces one part of every chunk and all copy the reduced parts.

    Two steps per chunk; the next chunk is put before the reduced parts of this one are taken.
    """

    def __init__(self, text: str, steps: Steps, local: memoryview, reducer: Reducer) -> None:
        super().__init__(text)
        world_size = steps.world_size
        self._local = local
        self._reducer = reducer
        self._num_chunks = -(-len(local) // (steps.slot_bytes // world_size // _ALIGNMENT * _ALIGNMENT * world_size))
        self._part_bytes = -(-len(local) // (self._num_chunks * world_size * _ALIGNMENT)) * _ALIGNMENT

    def _part(self, steps: Steps, chunk: int, member: int) -> memoryview:
        start = (chunk * steps.world_size + member) * self._part_bytes
        return self._local[start : start + self._part_bytes]

    def run(self, steps: Steps, timeout_s: float) -> None:
        """Chunk after chunk, putting the next one before this one's results are taken."""
        steps.begin(timeout_s)
        first = steps.sequence + 1
        self._put(steps, 0)
        for chunk in range(self._num_chunks):
            inputs = first + 2 * chunk
            steps.collect(steps.peers, inputs, self.print, self.text)
            self._reduce(steps, chunk, inputs % NUM_SLOTS)
            if chunk + 1 < self._num_chunks:
                self._put(steps, chunk + 1)
            steps.collect(steps.peers, inputs + 1, self.print, self.text)
            for member in steps.peers:
                part = self._part(steps, chunk, member)
                part[:] = steps.slots[member][(inputs + 1) % NUM_SLOTS][: len(part)]

    def _put(self, steps: Steps, chunk: int) -> None:
        memory = steps.slots[steps.rank_in_group][steps.free_slot()]
        for member in steps.peers:
            part = self._part(steps, chunk, member)
            memory[member * self._part_bytes : member * self._part_bytes + len(part)] = part
        steps.announce(self.print)

    def _reduce(self, steps: Steps, chunk: int, slot: int) -> None:
        part = self._part(steps, chunk, steps.rank_in_group)
        result = steps.slots[steps.rank_in_group][steps.free_slot()][: len(part)]
        if part:
            at = steps.rank_in_group * self._part_bytes
            memories = [slots[slot][at : at + len(part)] for slots in steps.slots]
            memories[steps.rank_in_group] = part
            self._reducer.combine([self._reducer.vector(memory) for memory in memories], self._reducer.vector(result))
            part[:] = result
        steps.announce(self.print)
