"""Waiting for another process: spin, then yield, then sleep until it rings.

Nothing here costs the fast path more than one read: a member that found what it waits for never comes here, and a writer
looks at one word to learn whether anybody sleeps.

*No wake-up is lost.* The sleeper marks itself, then looks once more, then sleeps; the writer publishes, then looks for marks.
Each side must see the other's store before its own look, which takes a full fence on both; the sleeper pays for both with
``membarrier``, which interrupts every other registered process and fences it. Where the kernel refuses that, a sleep is
cut into milliseconds instead. The bell word changes with every ring to a value its ringer never used before, so a ring
between the last look and the sleep is seen by the kernel.
"""

import ctypes
import mmap
import os
import platform
import select
import sys
import threading
from collections.abc import Callable, Iterable
from time import monotonic, perf_counter, sleep
from types import MappingProxyType
from typing import Final, final

from parallel_runtime.comm.shm.geometry import Geometry
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.errors import PeerError, PeerLostError, PeerTimeoutError

__all__ = ["Bells", "Errands", "Liveness", "Waiter", "full_fence", "needs_fence"]

_SYSCALLS: Final = MappingProxyType({"x86_64": (202, 324), "aarch64": (98, 283)})  # futex, membarrier
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_MEMBARRIER_GLOBAL_EXPEDITED: Final = 2
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: Final = 4
_LOOKS: Final = 300
_LOOKS_CROWDED: Final = 20
_YIELD_S: Final = 0.001
_ERRAND_SLEEP_S: Final = 0.001
_FIRST_SLEEP_S: Final = 0.1
"""Sleeps get longer as a wait does: whoever waits for long loses little when it notices a little later that a peer is gone."""
_PATIENCE: Final = 8
_FENCED_SLEEP_S: Final = 0.5
_UNFENCED_SLEEP_S: Final = 0.001
_SUSPICIOUS_S: Final = 1.0
"""A short sleep that takes so long tells that this process did not run."""
_IN_USE: Final = 0
_LEFT: Final = 1
_GAVE_UP: Final = 2
_WRITING: Final = 2
"""Where, behind a member's state, the word is that says that it writes into the memory of another."""


def needs_fence(machine: str = platform.machine()) -> bool:
    """Whether this processor may reorder the stores of data and of the flag that announces it.

    Args:
        machine: Name of the architecture.

    Returns:
        ``False`` on x86-64, where stores become visible in program order and loads are not reordered with loads.
    """
    return machine not in ("x86_64", "AMD64")


def full_fence(lock: threading.Lock) -> None:
    """Order everything before this call before everything after it, on every processor Python runs on.

    A lock is taken with an acquire load and given back with a release store. One round alone lets a later store overtake the
    release; the acquire of a second round cannot pass the release of the first (a load-acquire never overtakes an earlier
    store-release), and nothing after it can pass the acquire.

    Args:
        lock: Held by nobody else.
    """
    with lock:
        pass
    with lock:
        pass


@final
class Bells:
    """One word per member that it sleeps on, and one byte per member that says that it does."""

    def __init__(self, memory: mmap.mmap, geometry: Geometry, rank_in_group: int) -> None:
        self._rank = rank_in_group
        self._world_size = geometry.world_size
        self._marks = memoryview(memory)[geometry.sleepers : geometry.sleepers + 8 * geometry.sleeper_words]
        self.words = self._marks.cast("q")
        self._bells = [ctypes.c_uint32.from_buffer(memory, geometry.bell(peer)) for peer in range(geometry.world_size)]
        self._addresses = [ctypes.addressof(bell) for bell in self._bells]
        self._rung = rank_in_group
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        numbers: tuple[int | None, int | None] = _SYSCALLS.get(platform.machine(), (None, None))
        self._futex, self._membarrier = numbers
        self.is_fenced = self._fence(_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED)
        self._sleep_s = _FENCED_SLEEP_S if self.is_fenced else _UNFENCED_SLEEP_S

    def _fence(self, command: int) -> bool:
        return self._membarrier is not None and self._syscall(self._membarrier, command, 0, 0) == 0

    def ring(self) -> None:
        """Wake every peer that sleeps."""
        for peer in range(self._world_size):
            if self._marks[peer] and peer != self._rank:
                self._rung = (self._rung + self._world_size) & 0xFFFFFFFF
                self._bells[peer].value = self._rung
                if self._futex is not None:
                    self._syscall(self._futex, ctypes.c_void_p(self._addresses[peer]), _FUTEX_WAKE, 1, None, None, 0)

    def sleep(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Sleep until somebody rings, at most ``limit_s`` seconds and never long.

        Args:
            ready: Asked once more after the mark is set.
            limit_s: Seconds, not negative.
        """
        heard = self._bells[self._rank].value
        self._marks[self._rank] = 1
        try:
            if self.is_fenced:
                self._fence(_MEMBARRIER_GLOBAL_EXPEDITED)
            if not ready():
                self._pause(heard, min(limit_s, self._sleep_s))
        finally:
            self._marks[self._rank] = 0

    def _pause(self, heard: int, seconds: float) -> None:
        if self._futex is None:
            sleep(min(seconds, _UNFENCED_SLEEP_S))
            return
        timeout = (ctypes.c_int64 * 2)(int(seconds), int(seconds % 1 * 1e9))
        address = ctypes.c_void_p(self._addresses[self._rank])
        self._syscall(self._futex, address, _FUTEX_WAIT, ctypes.c_uint32(heard), ctypes.byref(timeout), None, 0)


@final
class Liveness:
    """Which peers are gone: closed, gave up after an error, or whose process ended."""

    def __init__(self, words: memoryview, geometry: Geometry, pids: Iterable[int | None], rank_in_group: int) -> None:
        self._words = words
        self._states = [geometry.member(peer) // 8 + 1 for peer in range(geometry.world_size)]
        self._mine = self._states[rank_in_group]
        self.world_size = geometry.world_size
        self._lock = threading.Lock() if needs_fence() else None
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        self._poll = select.poll()
        for peer, pid in enumerate(pids):
            if pid is None or pid == os.getpid():
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(peer)
            except OSError:  # refused: deadlines and the peers' own states are left
                continue
            else:
                self._pidfds[descriptor] = peer
                self._poll.register(descriptor, select.POLLIN)

    def leave(self, *, gave_up: bool) -> None:
        """Tell every peer that this member takes part no longer."""
        if self._lock is not None:
            full_fence(self._lock)
        if self._words[self._mine] == _IN_USE:
            self._words[self._mine] = _GAVE_UP if gave_up else _LEFT

    def is_out(self, peer: int) -> bool:
        """Whether ``peer`` said that it takes part no longer; after what was read of its memory before."""
        if self._lock is not None:
            full_fence(self._lock)
        return bool(self._words[self._states[peer]] != _IN_USE)

    def set_writing(self, value: bool) -> None:
        """Tell the peers whether this member may be writing into the memory of one of them."""
        self._words[self._mine + _WRITING] = value

    def is_writing(self, peer: int) -> bool:
        """Whether ``peer`` may be writing into the memory of another process."""
        return bool(self._words[self._states[peer] + _WRITING])

    def has_ended(self, peer: int) -> bool:
        """Whether the process of ``peer`` is known to have ended."""
        self.why_gone(peer)
        return peer in self._dead

    def why_gone(self, peer: int) -> str | None:
        """Why ``peer`` will never come, or ``None`` as far as anybody knows."""
        state = self._words[self._states[peer]]
        for descriptor, _ in self._poll.poll(0):
            self._dead.add(self._pidfds[descriptor])
            self._poll.unregister(descriptor)
        if self._lock is not None:  # what the peer did before it went is looked for after this
            full_fence(self._lock)
        if state == _LEFT:
            return f"member {peer} left"
        if state == _GAVE_UP:
            return f"member {peer} gave up after an error of its own"
        return f"the process of member {peer} ended" if peer in self._dead else None

    def close(self) -> None:
        """Free the descriptors."""
        while self._pidfds:
            descriptor, _ = self._pidfds.popitem()
            os.close(descriptor)
        self._poll = select.poll()


@final
class Errands:
    """What one rank has to move on while it waits in any of its groups: the messages that are under way in all of them.

    A message larger than its ring moves on only when its sender looks after it. One that waited in another group meanwhile, for
    members that wait for that message in the end, would wait for ever.
    """

    def __init__(self) -> None:
        self._runs: dict[object, Callable[[], bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, owner: object, run: Callable[[], bool]) -> None:
        """Have ``run`` called in every wait; it does nothing where another thread is at it."""
        self._runs[owner] = run

    def discard(self, owner: object) -> None:
        """Nothing of ``owner`` is under way any more."""
        self._runs.pop(owner, None)

    def has_others(self, owner: object) -> bool:
        """Whether something is under way that is not ``owner``'s: no bell of this group rings for it."""
        return any(other is not owner for other in tuple(self._runs))

    def run(self) -> bool:
        """Move everything on; whether anything was."""
        moved = [run() for run in tuple(self._runs.values())]
        return any(moved)


@final
class Waiter:
    """Waits on behalf of one member.

    Attributes:
        deadline: When the operation under way gives up; ``None`` until it has to wait for the first time.
        errands: What else to move on while waiting.
        owner: Stands for this group among the owners of errands; its own bells ring for those.
        traffic: Of the communicator, whose diagnostician may end a wait.
        hand_over: Gives the core, or the interpreter, to whoever wants it.
        looks: How often to look without a clock; the core is handed over in between where ``is_crowded``.
        is_crowded: Whether members share cores.
    """

    def __init__(
        self, bells: Bells, liveness: Liveness, *, is_crowded: bool, shares_process: bool, errands: Errands | None = None
    ) -> None:
        self._bells = bells
        self._liveness = liveness
        self.is_crowded = is_crowded
        self.looks = _LOOKS_CROWDED if is_crowded else _LOOKS
        self.hand_over: Callable[[], None] = _release_interpreter if shares_process else os.sched_yield
        self.deadline: float | None = None
        self.errands = Errands() if errands is None else errands
        self.owner: Final = object()
        self.traffic: Traffic | None = None

    @property
    def is_timed(self) -> bool:
        """Whether somebody wants to know how long waits take."""
        return self.traffic is not None and bool(self.traffic.recorder.observers)

    def until(self, ready: Callable[[], bool], timeout_s: float, missing: Callable[[], list[int]]) -> None:
        """Return as soon as ``ready`` says so.

        Args:
            ready: Cheap; asked often.
            timeout_s: Seconds for the whole operation, counted from its first wait.
            missing: Whom ``ready`` is waiting for at the moment.

        Raises:
            PeerTimeoutError: The deadline passed.
            PeerLostError: One of ``missing`` is gone.
            PeerError: As the diagnostician says.
        """
        start = perf_counter()
        try:
            self._until(ready, timeout_s, missing)
        finally:
            if self.is_timed and self.traffic is not None:
                self.traffic.recorder.add_wait(perf_counter() - start)

    def _until(self, ready: Callable[[], bool], timeout_s: float, missing: Callable[[], list[int]]) -> None:
        if self._look(ready):
            return
        start = monotonic()
        if self.deadline is None:
            self.deadline = start + timeout_s
        limit = min(start + _YIELD_S, self.deadline)
        while monotonic() < limit:
            self.hand_over()
            if ready():
                return
            if self.errands:
                self.errands.run()

        def stirred() -> bool:
            return ready() or (bool(self.errands) and self.errands.run())

        looked_at = monotonic()
        while not ready():
            limit_s = min(max(self.deadline - looked_at, 0.0), _FIRST_SLEEP_S + (looked_at - start) / _PATIENCE)
            self._bells.sleep(stirred, min(limit_s, _ERRAND_SLEEP_S) if self.errands.has_others(self.owner) else limit_s)
            now = monotonic()
            if now - looked_at > _SUSPICIOUS_S:
                self.deadline += now - looked_at  # stopped itself, so nobody else is late
            looked_at = now
            self._judge(ready, timeout_s, missing, now)

    def _look(self, ready: Callable[[], bool]) -> bool:
        for _ in range(self.looks):
            if ready():
                return True
            if self.is_crowded:
                self.hand_over()
        return False

    def _judge(self, ready: Callable[[], bool], timeout_s: float, missing: Callable[[], list[int]], now: float) -> None:
        """Nothing came for a while: raise where nothing will come."""
        peers = missing()
        gone = [why for peer in peers if (why := self._liveness.why_gone(peer))]
        if ready():  # the last thing a peer did before it went
            return
        error: PeerError | None = None
        if gone:
            error = PeerLostError(f"waited for {_members(peers)}: {', '.join(gone)}")
        elif self.deadline is not None and now >= self.deadline:
            error = PeerTimeoutError(f"{_members(peers)} did not take part within {timeout_s:g} s")
        elif self.traffic is not None and self.traffic.diagnostician is not None:
            ranks = self.traffic.ranks
            known = [ranks[peer] for peer in peers] if len(ranks) == self._liveness.world_size else ()
            error = self.traffic.diagnostician.interruption(known, "", sys.maxsize)
            if error is not None and ready():
                return
        if error is not None:
            error.members = tuple(peers)
            raise error


def _members(peers: list[int]) -> str:
    return f"member{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"


def _release_interpreter() -> None:
    """Let another thread of this process run; ``sched_yield`` keeps the interpreter to itself."""
    sleep(0)
