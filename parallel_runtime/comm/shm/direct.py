"""Reading a peer's tensor where it lies, in its own process: one copy instead of two, and two steps however large it is.

The kernel's ``process_vm_readv`` copies from another process of the same user where the system allows it. Whether it does is
tried once when a group opens, and only used where every member can read every other.

*Nothing is read too late.* A member that offers its memory leaves it alone until all readers have entered the closing step. One
that gave up says so before it lets go of its memory, and a reader looks for that after each read: what it read before is valid.
"""

import ctypes
import errno
import os
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from parallel_runtime.comm.shm.plans import AgreedTransfer, Plan
from parallel_runtime.comm.shm.steps import Steps, fingerprint
from parallel_runtime.comm.shm.waiting import Liveness
from parallel_runtime.errors import CollectiveMismatchError, PeerLostError

__all__ = [
    "DirectMove",
    "DirectPlan",
    "DirectWhenLarge",
    "Fetch",
    "Offer",
    "RemoteMemory",
    "address_of",
    "can_read_all",
]

_PAIR: Final = struct.Struct("=qq")
_OFFER: Final = struct.Struct("=qqq")  # whether memory of this member can be read, address, bytes


def address_of(memory: memoryview) -> int:
    """Where writable bytes lie in this process.

    Args:
        memory: Contiguous.

    Returns:
        The address; 0 where there are no bytes.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


@final
class RemoteMemory:
    """The memory of the peers' processes, to be read.

    Args:
        pids: Every member's process.
        liveness: Says who is gone.
    """

    def __init__(self, pids: Sequence[int | None], liveness: Liveness) -> None:
        self._pids = tuple(pids)
        self._liveness = liveness
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        self._here = (ctypes.c_size_t * 2)()
        self._there = (ctypes.c_size_t * 2)()
        self._arguments = (
            ctypes.byref(self._here),
            ctypes.c_ulong(1),
            ctypes.byref(self._there),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if self._call is not None:
            self._call.restype = ctypes.c_ssize_t

    def try_read(self, member: int, source: int, target: int, nbytes: int) -> None:
        """Copy ``nbytes`` from address ``source`` of ``member`` to address ``target`` of this process.

        Raises:
            OSError: The system refuses it, or there is nothing at that address.
        """
        pid, here, there = self._pids[member], self._here, self._there
        if self._call is None or pid is None:
            raise OSError(f"the memory of member {member} cannot be read on this system")
        done = 0
        while done < nbytes:  # the kernel copies 2 GiB at most in one call
            here[0], there[0] = target + done, source + done
            here[1] = there[1] = nbytes - done
            copied = self._call(pid, *self._arguments)
            if copied <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"reading {nbytes} bytes of member {member}: {os.strerror(error)}")
            done += copied

    def read(self, member: int, source: int, target: int, nbytes: int) -> None:
        """``try_read`` from a member that offered its memory.

        Raises:
            PeerLostError: It is gone, so its memory may be used for something else by now.
        """
        try:
            self.try_read(member, source, target, nbytes)
        except OSError as exc:
            ended = f"the process of member {member} ended" if exc.errno == errno.ESRCH else None
            why = ended or self._liveness.why_gone(member) or f"member {member} does not let its memory be read"
            raise PeerLostError(f"waited for member {member}: {why}: {exc}") from exc
        if self._liveness.is_out(member) and (gone := self._liveness.why_gone(member)):
            raise PeerLostError(f"while its memory was read, {gone}")


def can_read_all(steps: Steps, remote: RemoteMemory, timeout_s: float) -> bool:
    """Whether every member can read the memory of every other.

    Args:
        steps: Of this member.
        remote: The peers' memory.
        timeout_s: Seconds.

    Returns:
        The same on every member.

    Raises:
        PeerError: A member is late or gone.

    Collective: two steps.
    """
    text = "opening"
    print_ = fingerprint(text)
    token, found = ctypes.c_int64(int.from_bytes(os.urandom(7), "little")), ctypes.c_int64()
    steps.begin(timeout_s)
    slot = steps.free_slot()
    _PAIR.pack_into(steps.slots[steps.rank_in_group][slot], 0, ctypes.addressof(token), token.value)
    steps.announce(print_)
    steps.collect(steps.peers, steps.sequence, print_, text)
    is_able = True
    for peer in steps.peers:
        address, expected = _PAIR.unpack_from(steps.slots[peer][slot])
        try:
            remote.try_read(peer, address, ctypes.addressof(found), 8)
        except OSError:
            is_able = False
        else:
            is_able = is_able and found.value == expected
    slot = steps.free_slot()
    steps.put_header(slot, is_able)
    steps.announce(print_)
    steps.collect(steps.peers, steps.sequence, print_, text)
    return is_able and all(steps.header(peer, slot) for peer in steps.peers)


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
    """Between two steps, the memory that the members offer may be read.

    Args:
        text: The operation.
        remote: The peers' memory.
        world_size: Number of members.
        offers: What this member offers.

    Attributes:
        ordinary: Run instead where one member's memory is none that others can read.
    """

    def __init__(self, text: str, remote: RemoteMemory, world_size: int, offers: Sequence[Offer]) -> None:
        super().__init__(f"{text}, read in place")
        self.ordinary: Plan | None = None
        self._remote = remote
        self._told = memoryview(bytearray(_OFFER.size * world_size))
        for member in range(world_size):
            _OFFER.pack_into(self._told, _OFFER.size * member, 1, 0, 0)
        for offer in offers:
            _OFFER.pack_into(self._told, _OFFER.size * offer.member, 1, address_of(offer.memory), len(offer.memory))
        self._views: list[memoryview] = []

    def refuse(self) -> None:
        """Tell every member that memory of this one cannot be read."""
        for at in range(0, len(self._told), _OFFER.size):
            _OFFER.pack_into(self._told, at, 0, 0, 0)

    def run(self, steps: Steps, timeout_s: float) -> None:
        """A step to tell addresses, the work, a step to end."""
        rank = steps.rank_in_group
        if not self._views:
            self._views = [slot[: len(self._told)] for slot in steps.slots[rank]]
        slot = steps.exchange(self._told, self._views, self.print, self.text, timeout_s)
        at = _OFFER.size * rank
        offered = [_OFFER.unpack_from(slots[slot], at) for slots in steps.slots]
        for is_readable, _, _ in offered:
            if not is_readable and self.ordinary is not None:
                self.ordinary.run(steps, timeout_s)
                return
        self.work(offered)
        steps.announce(self.print)
        steps.collect(steps.peers, steps.sequence, self.print, self.text)

    @abstractmethod
    def work(self, offered: Sequence[tuple[int, ...]]) -> None:
        """Everything this member reads; ``offered`` to it, by each member: 1, an address, a number of bytes."""


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
        self._copies = [(fetch.memory, fetch.source) for fetch in fetches if fetch.source is not None]
        self._fetches = [
            (fetch.member, address_of(fetch.memory), len(fetch.memory))
            for fetch in fetches
            if fetch.source is None and fetch.memory
        ]

    def work(self, offered: Sequence[tuple[int, ...]]) -> None:
        for member, target, nbytes in self._fetches:
            _, source, there = offered[member]
            if there != nbytes:
                raise CollectiveMismatchError(f"member {member} has {there} bytes where {nbytes} were to be received")
            self._remote.read(member, source, target, nbytes)
        for copied, own in self._copies:
            copied[:] = own


@final
class DirectWhenLarge(Plan):
    """An exchange of parts whose sizes no member knows alone: small ones take one step, others are read in place."""

    def __init__(self, small: AgreedTransfer, large: DirectMove) -> None:
        super().__init__(small.text)
        self._small = small
        self._large = large

    def run(self, steps: Steps, timeout_s: float) -> None:
        """One step that tells how much there is; the rest where that was not all."""
        if not self._small.run_first(steps, timeout_s):
            self._large.run(steps, timeout_s)
