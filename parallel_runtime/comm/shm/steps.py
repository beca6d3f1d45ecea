"""The clock of a group: numbered steps, announced by one word per member.

A member takes part in step ``s`` by writing into its slot ``s % NUM_SLOTS`` (if it has something to say) and then setting its
flag to ``s`` and a fingerprint of the operation; a reader waits for the flag, compares the fingerprint, and reads the slot.

*Why no slot is overwritten too early.* A member that announced step ``s`` has finished reading every step up to ``s - 2``:
operations look at most one step ahead. Before writing into step ``s`` a member therefore makes sure that everybody has
announced ``s - 2``: they are done with ``s - NUM_SLOTS``, which used the same slot. Where an operation waits for everybody
anyway, and most do, this costs one comparison.

*Memory order.* Data is written before the flag and read after it. x86-64 keeps both in order by itself: stores become visible
in program order, loads are not reordered with loads, and memcpy ends with a fence where it uses non-temporal stores. Elsewhere
a full fence stands between data and flag on both sides. A flag is an aligned 8-byte word, read and written in one access.
"""

import contextlib
import mmap
import threading
import zlib
from collections.abc import Sequence
from typing import Final, final

from parallel_runtime.comm.diagnosis import odd_members
from parallel_runtime.comm.shm.geometry import NUM_SLOTS, Geometry
from parallel_runtime.comm.shm.waiting import Bells, Waiter, full_fence, needs_fence
from parallel_runtime.errors import CollectiveMismatchError, PeerTimeoutError

__all__ = ["Steps", "fingerprint"]

_PRINT_BITS: Final = 20
_PRINT_MASK: Final = (1 << _PRINT_BITS) - 1
_REPORT_S: Final = 1.0
_HISTORY: Final = 4
"""Where, in a member's line, the words are that keep its last ``NUM_SLOTS`` announcements."""


def fingerprint(text: str) -> int:
    """A number of 20 bits that differs, almost always, where ``text`` differs.

    Args:
        text: What the members have to agree on.

    Returns:
        The number.
    """
    return zlib.crc32(text.encode()) & _PRINT_MASK


@final
class Steps:
    """One member's view of the clock.

    Attributes:
        slots: Per member, its slots as bytes.
        sequence: The last step this member announced.
        peers: Every other member.
        world_size: Number of members.
        rank_in_group: This member's position.
        slot_bytes: Size of a slot.
    """

    def __init__(self, memory: mmap.mmap, geometry: Geometry, rank_in_group: int, waiter: Waiter, bells: Bells) -> None:
        whole = memoryview(memory)
        self.world_size = geometry.world_size
        self.rank_in_group = rank_in_group
        self.slot_bytes = geometry.slot_bytes
        self.peers = tuple(peer for peer in range(self.world_size) if peer != rank_in_group)
        self.slots = tuple(
            tuple(whole[at : at + self.slot_bytes] for at in (geometry.slot(member, slot) for slot in range(NUM_SLOTS)))
            for member in range(self.world_size)
        )
        self.sequence = 0
        self._settled = 0
        self._words = whole.cast("q")
        self._flags = tuple(geometry.member(member) // 8 for member in range(self.world_size))
        self._flag = self._flags[rank_in_group]
        self._headers = tuple(
            tuple(geometry.header(member, slot) // 8 for slot in range(NUM_SLOTS)) for member in range(self.world_size)
        )
        self._reports = tuple(
            whole[at : at + geometry.report_bytes] for at in (geometry.report(member) for member in range(self.world_size))
        )
        self._waiter = waiter
        self._bells = bells
        self._marks = bells.words
        self._many = len(self._marks) > 1
        self._lock = threading.Lock() if needs_fence() else None
        self._timeout_s = 0.0

    def begin(self, timeout_s: float) -> None:
        """Start an operation that may wait ``timeout_s`` seconds in all."""
        self._timeout_s = timeout_s
        self._waiter.deadline = None

    def free_slot(self) -> int:
        """The slot of the step that comes next, once nobody reads it any more."""
        step = self.sequence + 1
        if self._settled < step - 2:
            self._settle(step - 2)
        return step % NUM_SLOTS

    def announce(self, print_: int) -> None:
        """Enter the next step: what was written into its slot may be read."""
        if self._lock is not None:
            full_fence(self._lock)
        self.sequence = sequence = self.sequence + 1
        exact = sequence << _PRINT_BITS | print_
        self._words[self._flag + _HISTORY + sequence % NUM_SLOTS] = exact
        self._words[self._flag] = exact
        if self._marks[0] or (self._many and any(self._marks)):
            self._bells.ring()

    def collect(self, peers: tuple[int, ...], step: int, print_: int, text: str) -> None:
        """Wait until every one of ``peers`` has entered ``step`` with the same operation.

        Raises:
            CollectiveMismatchError: One of them entered another operation.
        """
        words, flags = self._words, self._flags
        exact = step << _PRINT_BITS | print_
        for peer in peers:
            seen = words[flags[peer]]
            if seen != exact:
                if seen < exact - print_:
                    seen = self._wait(peer, exact - print_, peers)
                if seen >> _PRINT_BITS > step:  # a source that has gone on; one that waited for all has compared already
                    seen = words[flags[peer] + _HISTORY + step % NUM_SLOTS]
                if seen >> _PRINT_BITS == step and seen != exact:
                    self._mismatch(text)
        if self._lock is not None:
            full_fence(self._lock)
        if peers is self.peers:
            self._settled = step

    def send_bytes(self, data: bytes | bytearray | memoryview, print_: int, timeout_s: float) -> None:
        """Be the source of bytes whose number the readers do not know.

        Raises:
            PeerError: A reader is far behind, and late or gone.
        """
        self.begin(timeout_s)
        source = memoryview(data).cast("B")
        total = len(source)
        for start in range(0, max(total, 1), self.slot_bytes):
            slot = self.free_slot()
            piece = source[start : start + self.slot_bytes]
            self.slots[self.rank_in_group][slot][: len(piece)] = piece
            self.put_header(slot, total)
            self.announce(print_)

    def receive_bytes(self, src: int, print_: int, text: str, timeout_s: float) -> bytes | bytearray:
        """Be a reader of what ``src`` sends.

        Raises:
            PeerError: ``src`` is late, gone or in another operation.
        """
        self.begin(timeout_s)
        slots = self.slots[src]
        peers = (src,)
        self.announce(print_)
        self.collect(peers, self.sequence, print_, text)
        slot = self.sequence % NUM_SLOTS
        total = self.header(src, slot)
        if total <= self.slot_bytes:
            return bytes(slots[slot][:total])
        received = bytearray(total)
        target = memoryview(received)
        target[: self.slot_bytes] = slots[slot]
        for start in range(self.slot_bytes, total, self.slot_bytes):
            self.announce(print_)
            self.collect(peers, self.sequence, print_, text)
            piece = target[start : start + self.slot_bytes]
            piece[:] = slots[self.sequence % NUM_SLOTS][: len(piece)]
        return received

    def enter(self, source: memoryview, targets: Sequence[memoryview], print_: int, timeout_s: float) -> int:
        """Begin an operation with a step that waits for all: ``begin``, ``free_slot``, a copy and ``announce`` in one call.

        Args:
            source: What this member says.
            targets: Per slot, where it goes.
            print_: Fingerprint of the operation.
            timeout_s: Seconds.

        Returns:
            The slot that everybody uses.

        Raises:
            PeerError: A member is far behind, and late or gone.
        """
        self._timeout_s = timeout_s
        self._waiter.deadline = None
        step = self.sequence + 1
        if self._settled < step - 2:
            self._settle(step - 2)
        slot = step % NUM_SLOTS
        targets[slot][:] = source
        if self._lock is not None:
            full_fence(self._lock)
        self.sequence = step
        self._words[self._flag] = step << _PRINT_BITS | print_
        if self._marks[0] or (self._many and any(self._marks)):
            self._bells.ring()
        return slot

    def exchange(self, source: memoryview, targets: Sequence[memoryview], print_: int, text: str, timeout_s: float) -> int:
        """One whole step of all members: ``enter`` and ``collect`` in one call.

        Args:
            source: What this member says.
            targets: Per slot, where it goes.
            print_: Fingerprint of the operation.
            text: The operation.
            timeout_s: Seconds.

        Returns:
            The slot that everybody used.

        Raises:
            PeerError: A member is late, gone or in another operation.
        """
        slot = self.enter(source, targets, print_, timeout_s)
        words, flags, step = self._words, self._flags, self.sequence
        exact = step << _PRINT_BITS | print_
        for peer in self.peers:
            if words[flags[peer]] != exact:
                self.collect(self.peers, step, print_, text)
                break
        else:
            if self._lock is not None:
                full_fence(self._lock)
        self._settled = step
        return slot

    def put_header(self, slot: int, value: int) -> None:
        """Send one number beside this member's ``slot``."""
        self._words[self._headers[self.rank_in_group][slot]] = value

    def header(self, member: int, slot: int) -> int:
        """The number that came beside ``slot`` of ``member``."""
        return int(self._words[self._headers[member][slot]])

    def _wait(self, peer: int, floor: int, peers: tuple[int, ...]) -> int:
        words, flags, flag = self._words, self._flags, self._flags[peer]
        hand_over = self._waiter.hand_over if self._waiter.is_crowded else None
        for _ in range(0 if self._waiter.is_timed else self._waiter.looks):  # as the waiter does, without calls
            if words[flag] >= floor:
                return int(words[flag])
            if hand_over is not None:
                hand_over()
        self._waiter.until(
            lambda: words[flag] >= floor,
            self._timeout_s,
            lambda: [member for member in peers if words[flags[member]] < floor],
        )
        return int(words[flag])

    def _settle(self, step: int) -> None:
        floor = step << _PRINT_BITS
        for peer in self.peers:
            if self._words[self._flags[peer]] < floor:
                self._wait(peer, floor, self.peers)
        if self._lock is not None:
            full_fence(self._lock)
        self._settled = step

    def _mismatch(self, text: str) -> None:
        """Say what this member entered, hear what the others did, and raise."""
        words, flags, sequence = self._words, self._flags, self.sequence
        mine = text.encode()[: len(self._reports[0]) - 1]
        report = self._reports[self.rank_in_group]
        report[0] = len(mine)
        report[1 : 1 + len(mine)] = mine
        if self._lock is not None:
            full_fence(self._lock)
        words[self._flag + 2] = sequence
        self._bells.ring()
        self.begin(min(_REPORT_S, self._timeout_s))

        def silent() -> list[int]:
            return [peer for peer in self.peers if words[flags[peer] + 2] != sequence]

        with contextlib.suppress(PeerTimeoutError):  # somebody waits for nobody here: report without it
            self._waiter.until(lambda: not silent(), self._timeout_s, silent)
        said = {}
        for member in range(self.world_size):
            heard = words[flags[member] + 2] == sequence
            entered = (
                bytes(self._reports[member][1 : 1 + self._reports[member][0]]).decode(errors="replace")
                if heard
                else "something else"
            )
            said[member] = entered
        table = "; ".join(f"member {member} entered {entered}" for member, entered in said.items())
        error = CollectiveMismatchError(f"the members entered different operations: {table}")
        error.members = odd_members(said, self.rank_in_group)
        raise error
