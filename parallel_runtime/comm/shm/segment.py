"""Memory that several processes map and that no process can leave behind.

A segment is a file without a name: ``memfd_create``, or ``O_TMPFILE`` where the kernel lacks it. All its bytes are reserved
before anybody maps it, so that a full memory is an error at opening and never a SIGBUS later; its size is sealed. Peers open it
through ``/proc/<pid>/fd/<n>``, which the kernel grants to the same user only, or receive the descriptor over a Unix socket. The
kernel frees it with the last mapping, whatever ended the processes.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Literal, Protocol, TypeAlias, final

from parallel_runtime.errors import RendezvousError

__all__ = ["KeyValueStore", "Segment", "SegmentWay", "Unavailable", "available_bytes", "create_file", "open_segment"]

SegmentWay: TypeAlias = Literal["proc", "socket"]
"""How a member gets at the segment: through ``/proc/<pid>/fd``, or over a Unix socket."""

_TOKEN_BYTES: Final = 16
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_CGROUP_FILES: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_ASKS_FOR_SOCKET: Final = "socket"


class KeyValueStore(Protocol):
    """What members that do not know each other yet exchange their first words through."""

    def set(self, key: str, value: bytes) -> None:
        """Publish ``value`` under ``key``."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until ``key`` is published and return its value; a ``TimeoutError`` after ``timeout_s``."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why the members agreed not to use shared memory; equal on all of them.

    Attributes:
        reason: One line for people.
    """

    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One member's mapping of the memory that all members share.

    Attributes:
        memory: The mapping. It is unmapped when the last view of it is gone.
        nbytes: Its size, as agreed.
        pids: Every member's process id, in group order; ``None`` for one in another pid namespace.
        way: How this member got it; the creator reads ``"proc"``.
        num_cores: Cores that the members may run on, all together.
    """

    memory: mmap.mmap
    nbytes: int
    pids: tuple[int | None, ...]
    way: SegmentWay
    num_cores: int


def available_bytes() -> int:
    """Memory that can be reserved now without harm: what the machine and the control group have left, halved.

    Returns:
        Bytes. The kernel itself would grant a reservation and then end processes to fulfil it.
    """
    left = []
    with open("/proc/meminfo") as file:
        left += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable")]
    for limit, usage in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError), open(limit) as limit_file, open(usage) as usage_file:
            left.append(int(limit_file.read()) - int(usage_file.read()))
    return max(min(left), 0) // 2


def create_file(sizes: Sequence[int]) -> tuple[int, int]:
    """Create a nameless file in memory with all its bytes reserved.

    Args:
        sizes: Sizes in bytes to try, in order of preference.

    Returns:
        Descriptor, owned by the caller, and the size that could be had.

    Raises:
        OSError: Not even the last size could be reserved.
    """
    descriptor = _nameless_file()
    try:
        os.fchmod(descriptor, 0o600)
        for position, nbytes in enumerate(sizes):
            try:
                if nbytes > (available := available_bytes()):
                    raise OSError(errno.ENOSPC, f"{nbytes} bytes asked for, {available} can be spared")
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError:
                os.ftruncate(descriptor, 0)
                if position == len(sizes) - 1:
                    raise
                continue
            with contextlib.suppress(OSError):  # not on O_TMPFILE: the file is ours alone even so
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return descriptor, nbytes
        raise OSError("no size was asked for")
    except BaseException:
        os.close(descriptor)
        raise


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)


def _nameless_file() -> int:
    try:
        return os.memfd_create("parallel_runtime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def open_segment(
    store: KeyValueStore,
    key: str,
    rank_in_group: int,
    world_size: int,
    sizes: Sequence[int],
    timeout_s: float,
    ways: Sequence[SegmentWay] = ("proc", "socket"),
) -> Segment | Unavailable:
    """Create a segment on member 0, map it on every member, and agree that all of them have it.

    Args:
        store: Reaches all members.
        key: Prefix of the store keys, never used before.
        rank_in_group: This member's position.
        world_size: Number of members.
        sizes: Sizes in bytes to try, in order of preference; equal on every member.
        timeout_s: Seconds to wait for the other members.
        ways: What this member may try to get at the memory.

    Returns:
        The mapping; or, on all members alike, why one of them could not have it.

    Raises:
        RendezvousError: A member did not take part in time.

    Collective: all members, once per key.
    """
    room = _Room(store, key, rank_in_group, world_size, monotonic() + timeout_s)
    return _lead(room, sizes) if rank_in_group == 0 else _follow(room, ways)


@final
class _Room:
    """Keys of one agreement, and its deadline."""

    def __init__(self, store: KeyValueStore, key: str, rank_in_group: int, world_size: int, deadline: float) -> None:
        self.store = store
        self.key = key
        self.rank_in_group = rank_in_group
        self.world_size = world_size
        self.deadline = deadline

    def left_s(self) -> float:
        return max(self.deadline - monotonic(), 0.001)

    def tell(self, what: str, value: dict[str, object]) -> None:
        self.store.set(f"{self.key}/{what}", json.dumps(value).encode())

    def ask(self, what: str, member: int) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self.store.get(f"{self.key}/{what}", self.left_s()))
        except TimeoutError as exc:
            raise RendezvousError(
                f"shared memory {self.key}: member {member} of {self.world_size} did not publish {what!r} in time; "
                f"this is member {self.rank_in_group}"
            ) from exc
        return answer


def _facts() -> dict[str, Any]:
    host = os.uname().nodename
    with contextlib.suppress(OSError), open(_BOOT_ID) as file:
        host = file.read().strip()
    space, cores = os.stat("/proc/self/ns/pid").st_ino, sorted(os.sched_getaffinity(0))
    return {"host": host, "pid": os.getpid(), "pids": space, "uid": os.geteuid(), "cores": cores}


def _lead(room: _Room, sizes: Sequence[int]) -> Segment | Unavailable:
    with contextlib.ExitStack() as stack:
        try:
            descriptor, nbytes = create_file(sizes)
            stack.callback(os.close, descriptor)
            memory = _map(descriptor, nbytes)
            token = secrets.token_bytes(_TOKEN_BYTES)
            memory[:_TOKEN_BYTES] = token
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(f"\0parallel_runtime-{secrets.token_hex(16)}")
            listener.listen(room.world_size)
        except (OSError, OverflowError, ValueError) as exc:
            reason = f"member 0 cannot create {min(sizes)} bytes of shared memory: {exc}"
            room.tell("offer", {"reason": reason})
            return Unavailable(reason=reason)
        address = listener.getsockname().decode().removeprefix("\0")
        mine = _facts()
        room.tell("offer", {**mine, "fd": descriptor, "nbytes": nbytes, "token": token.hex(), "address": address})
        members, reasons = [mine], []
        joins = [_serve(room, member, listener, descriptor) for member in range(1, room.world_size)]
        for member, joined in enumerate(joins, 1):
            if joined["reason"] == _ASKS_FOR_SOCKET:
                joined = room.ask(f"received/{member}", member)
            members.append(joined)
            if joined["reason"]:
                reasons.append(f"member {member}: {joined['reason']}")
        reason = "; ".join(reasons)
        verdict: dict[str, object] = {
            "reason": reason,
            "pids": [fact["pid"] for fact in members],
            "spaces": [fact["pids"] for fact in members],
            "cores": len({core for fact in members for core in fact["cores"]}),
        }
        memory[:_TOKEN_BYTES] = bytes(_TOKEN_BYTES)
        room.tell("verdict", verdict)
        return Unavailable(reason=reason) if reason else _segment(memory, nbytes, verdict, mine, "proc")


def _serve(room: _Room, member: int, listener: socket.socket, descriptor: int) -> dict[str, Any]:
    """Read what ``member`` says about joining; where it asks for the descriptor, hand it to whoever is first in the line.

    As many are in the line as have asked, so everybody is served once all have been asked.
    """
    joined = room.ask(f"joined/{member}", member)
    if joined["reason"] != _ASKS_FOR_SOCKET:
        return joined
    listener.settimeout(room.left_s())
    with contextlib.suppress(OSError):  # the member reports that nothing came
        connection, _ = listener.accept()
        with connection:
            if _peer_uid(connection) == os.geteuid():
                socket.send_fds(connection, [b"x"], [descriptor])
    return joined


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little")


def _follow(room: _Room, ways: Sequence[SegmentWay]) -> Segment | Unavailable:
    offer = room.ask("offer", 0)
    if offer.get("reason"):
        return Unavailable(reason=str(offer["reason"]))
    mine = _facts()
    guest = _Guest(room, offer, mine)
    try:
        guest.attach(ways)
    except OSError as exc:
        guest.reason = str(exc)
    room.tell(f"{guest.stage}/{room.rank_in_group}", {**mine, "reason": guest.reason})
    verdict = room.ask("verdict", 0)
    if verdict["reason"] or guest.memory is None:
        return Unavailable(reason=str(verdict["reason"]))
    return _segment(guest.memory, len(guest.memory), verdict, mine, guest.way)


@final
class _Guest:
    """A member on its way into the segment that member 0 offers."""

    def __init__(self, room: _Room, offer: dict[str, Any], mine: dict[str, object]) -> None:
        self.room = room
        self.offer = offer
        self.mine = mine
        self.memory: mmap.mmap | None = None
        self.way: SegmentWay = "proc"
        self.stage = "joined"
        self.reason = ""

    def attach(self, ways: Sequence[SegmentWay]) -> None:
        for fact, word in (("host", "runs on host"), ("uid", "runs as user")):
            if self.offer[fact] != self.mine[fact]:
                raise OSError(f"it {word} {self.mine[fact]}, member 0 {word} {self.offer[fact]}")
        try:
            if "proc" in ways:
                self._enter(os.open(f"/proc/{self.offer['pid']}/fd/{self.offer['fd']}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
                return
        except OSError:
            if "socket" not in ways:
                raise
        self.way = "socket"
        self._enter(self._receive())

    def _receive(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self.room.left_s())
            connection.connect("\0" + self.offer["address"])
            if _peer_uid(connection) != os.geteuid():
                raise OSError("another user answers at the address that member 0 gave")
            self.room.tell(f"joined/{self.room.rank_in_group}", {**self.mine, "reason": _ASKS_FOR_SOCKET})
            self.stage = "received"
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise OSError("member 0 sent no descriptor")
        return descriptors[0]

    def _enter(self, descriptor: int) -> None:
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes != self.offer["nbytes"]:
                raise OSError(f"descriptor {self.offer['fd']} of process {self.offer['pid']} has {nbytes} bytes")
            memory = _map(descriptor, nbytes)
        finally:
            os.close(descriptor)
        if memory[:_TOKEN_BYTES].hex() != self.offer["token"]:
            raise OSError(f"descriptor {self.offer['fd']} of process {self.offer['pid']} is not the segment of this group")
        self.memory = memory


def _segment(memory: mmap.mmap, nbytes: int, verdict: dict[str, Any], mine: dict[str, object], way: SegmentWay) -> Segment:
    pids = tuple(pid if space == mine["pids"] else None for pid, space in zip(verdict["pids"], verdict["spaces"], strict=True))
    return Segment(memory=memory, nbytes=nbytes, pids=pids, way=way, num_cores=verdict["cores"])
