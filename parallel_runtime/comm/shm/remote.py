"""The memory of the peers' processes: read, and in a group of two written, where it lies.

The kernel's ``process_vm_readv`` and ``process_vm_writev`` copy from and to another process of the same user where the system
allows it. Whether it does is tried once when a group opens, and only used where every member can do it with every other.

*Nothing is read too late.* A member that offers its memory leaves it alone until all readers have entered the closing step. One
that gave up says so before it lets go of its memory, and a reader looks for that after each read: what it read before is valid.

*Nothing is written too late.* A writer raises a word of its own, then looks whether the other member has given up, then writes,
then lowers the word. A member that gives up says so, and then waits until that word is down or the writer's process has ended,
before it lets go of its memory. Each side stores before it looks, with a full fence between: one of them sees the other.
"""

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Final, TypeAlias, final

from parallel_runtime.comm.shm.steps import Steps, fingerprint
from parallel_runtime.comm.shm.waiting import Liveness, full_fence
from parallel_runtime.errors import PeerLostError

__all__ = ["Copy", "RemoteMemory", "address_of", "can_reach_all"]

Copy: TypeAlias = Callable[[int, int, int], None]
"""Copies: address in the other process, address in this one, number of bytes."""

_OPENING: Final = struct.Struct("=qqq")  # address of a token, the token, where the peer writes its own
_LOOK_S: Final = 0.001
_ENDING_S: Final = 1.0


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
    """The memory of the peers' processes.

    Args:
        pids: Every member's process.
        liveness: Says who is gone.
    """

    def __init__(self, pids: Sequence[int | None], liveness: Liveness) -> None:
        self._pids = tuple(pids)
        self._liveness = liveness
        library = ctypes.CDLL(None, use_errno=True)
        self._readv = getattr(library, "process_vm_readv", None)
        self._writev = getattr(library, "process_vm_writev", None)
        self._fence = threading.Lock()
        for call in (self._readv, self._writev):
            if call is not None:
                call.restype = ctypes.c_ssize_t

    def try_copy(self, member: int, remote: int, local: int, nbytes: int, *, is_write: bool = False) -> None:
        """Copy ``nbytes`` from address ``remote`` of ``member`` to address ``local`` of this process, or the other way.

        Raises:
            OSError: The system refuses it, or there is nothing at that address.
        """
        pid = self._pids[member]
        here, there, arguments = _vectors()
        call = self._writev if is_write else self._readv
        if call is None or pid is None:
            raise OSError(f"the memory of member {member} cannot be reached on this system")
        done = 0
        while done < nbytes:  # the kernel copies 2 GiB at most in one call
            here[0], there[0] = local + done, remote + done
            here[1] = there[1] = nbytes - done
            copied = call(pid, *arguments)
            if copied <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"copying {nbytes} bytes of member {member}: {os.strerror(error)}")
            done += copied

    def reader(self, member: int) -> Copy:
        """Copies from a member that offers its memory.

        Args:
            member: Whose memory is read.

        Returns:
            A function of the address there, the address here and a number of bytes, for one thread at a time. It raises
            ``PeerLostError`` where the member is gone, so that its memory may be used for something else by now.
        """
        here, there, arguments = _vectors()
        pid, call, is_out = self._pids[member], self._readv, self._liveness.is_out

        def read(source: int, target: int, nbytes: int) -> None:
            here[0], there[0] = target, source
            here[1] = there[1] = nbytes
            if call is None or call(pid, *arguments) != nbytes:
                self._copy(member, source, target, nbytes)
            if is_out(member):
                self._check(member)

        return read

    def writer(self, member: int) -> Copy:
        """Copies to a member that offers its memory, and that calls ``await_writer`` before it lets go of it early.

        Args:
            member: Whose memory is written.

        Returns:
            A function of the address there, the address here and a number of bytes, for one thread at a time. It raises
            ``PeerLostError`` where the member is gone, and writes nothing after the member said so.
        """
        here, there, arguments = _vectors()
        pid, call, fence, liveness = self._pids[member], self._writev, self._fence, self._liveness

        def write(target: int, source: int, nbytes: int) -> None:
            here[0], there[0] = source, target
            here[1] = there[1] = nbytes
            liveness.set_writing(True)
            try:
                full_fence(fence)
                if liveness.is_out(member):
                    raise PeerLostError(f"waited for member {member}: {liveness.why_gone(member)}")
                if call is None or call(pid, *arguments) != nbytes:
                    self._copy(member, target, source, nbytes, is_write=True)
            finally:
                liveness.set_writing(False)

        return write

    def await_writer(self, member: int, timeout_s: float) -> bool:
        """Give up, and wait until ``member`` writes nothing more into this process.

        Args:
            member: May be writing.
            timeout_s: Seconds.

        Returns:
            Whether it is sure that nothing more is written; ``False`` only where ``member`` was stopped in the middle.
        """
        self._liveness.leave(gave_up=True)
        full_fence(self._fence)
        limit = monotonic() + timeout_s
        while self._liveness.is_writing(member) and not self._liveness.has_ended(member):
            if monotonic() > limit:
                return False
            sleep(_LOOK_S)
        return True

    def _check(self, member: int) -> None:
        if gone := self._liveness.why_gone(member):
            raise PeerLostError(f"while its memory was read, {gone}")

    def _copy(self, member: int, remote: int, local: int, nbytes: int, *, is_write: bool = False) -> None:
        try:
            self.try_copy(member, remote, local, nbytes, is_write=is_write)
        except OSError as exc:
            why = f"the process of member {member} ended" if exc.errno == errno.ESRCH else self._await_reason(member)
            raise PeerLostError(f"waited for member {member}: {why}: {exc}") from exc

    def _await_reason(self, member: int) -> str:
        """Why its memory is not to be had: a process that is being killed loses its memory before it has ended."""
        limit = monotonic() + _ENDING_S
        while (why := self._liveness.why_gone(member)) is None and monotonic() < limit:
            sleep(_LOOK_S)
        return why or f"member {member} does not let its memory be reached"


def _vectors() -> tuple[Any, Any, tuple[Any, ...]]:
    """Address and size here, those there, and what the system call takes behind the process."""
    here, there = (ctypes.c_size_t * 2)(), (ctypes.c_size_t * 2)()
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return here, there, (ctypes.byref(here), one, ctypes.byref(there), one, none)


def can_reach_all(steps: Steps, remote: RemoteMemory, timeout_s: float) -> bool:
    """Whether every member can read the memory of every other, and write it in a group of two.

    Args:
        steps: Of this member.
        remote: The peers' memory.
        timeout_s: Seconds.

    Returns:
        The same on every member.

    Raises:
        PeerError: A member is late or gone.

    Collective: three steps.
    """
    text = "opening"
    print_ = fingerprint(text)
    token, copied = ctypes.c_int64(int.from_bytes(os.urandom(7), "little")), (ctypes.c_int64 * 2)()
    here = ctypes.addressof(copied)
    steps.begin(timeout_s)
    slot = steps.free_slot()
    _OPENING.pack_into(steps.slots[steps.rank_in_group][slot], 0, ctypes.addressof(token), token.value, here + 8)
    steps.announce(print_)
    steps.collect(steps.peers, steps.sequence, print_, text)
    is_able = True
    expected = 0
    for peer in steps.peers:
        address, expected, inbox = _OPENING.unpack_from(steps.slots[peer][slot])
        try:
            remote.try_copy(peer, address, here, 8)
            if steps.world_size == 2:
                remote.try_copy(peer, inbox, ctypes.addressof(token), 8, is_write=True)
        except OSError:
            is_able = False
        else:
            is_able = is_able and copied[0] == expected
    is_able = _agree(steps, is_able, print_, text)
    return _agree(steps, is_able and (steps.world_size > 2 or copied[1] == expected), print_, text)


def _agree(steps: Steps, is_fine: bool, print_: int, text: str) -> bool:
    """Whether all members say so."""
    slot = steps.free_slot()
    steps.put_header(slot, is_fine)
    steps.announce(print_)
    steps.collect(steps.peers, steps.sequence, print_, text)
    return is_fine and all(steps.header(peer, slot) for peer in steps.peers)
