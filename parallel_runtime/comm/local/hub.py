"""Where ranks that are threads meet: what they have brought, who waits for whom, and whose turn it is.

All state is under one lock. Whenever something changed, a waiting rank looks whether it can go on, whether a member it waits for
has left, and whether it is among ranks that only wait for each other.
"""

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from time import monotonic
from typing import Final, final

from torch import Tensor

from parallel_runtime.comm.diagnosis import last_in_line
from parallel_runtime.comm.local.turns import Turns
from parallel_runtime.comm.local.waits import Wait, never_ending
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["LocalHub", "Meeting", "Slot"]

_SLICE_S: Final = 0.25
"""How long a rank waits between two looks at what has happened outside its groups."""
_SUSPICIOUS_S: Final = 1.5
"""A wait that takes so long tells that this process did not run."""
_SETTLE_S: Final = 0.05
"""How long ranks have to be seen waiting for each other before it is called a deadlock: a thread that has not spoken may help."""


@final
class Slot:
    """One collective of one group: who has entered it, with what, and why it failed."""

    __slots__ = ("entries", "error", "finished", "rooms")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[str, list[Tensor]]] = {}
        self.rooms: dict[int, Sequence[Tensor]] = {}
        self.error: PeerError | None = None
        self.finished = 0

    def enter(self, member: int, what: str, brought: list[Tensor], room: Sequence[Tensor] | None) -> None:
        """Note what ``member`` entered and brought, and what it has room for where each member brings something for each."""
        self.entries[member] = (what, brought)
        if room is not None:
            self.rooms[member] = room

    def said(self) -> dict[int, str]:
        """What each member that has come entered."""
        return {member: what for member, (what, _) in self.entries.items()}

    def handed(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Per (taker, giver) that have both come, the room of the one and what the other one brought for it."""
        return {
            (taker, giver): (room[giver], brought[taker])
            for taker, room in self.rooms.items()
            for giver, (_, brought) in self.entries.items()
        }


@final
class Meeting:
    """What the members of one group share."""

    __slots__ = ("closed", "mail", "ranks", "slots")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.slots: dict[int, Slot] = {}
        self.mail: dict[tuple[int, int, int, int], Tensor] = {}
        self.closed: set[int] = set()


@final
class LocalHub:
    """Where the threads of one process meet; one for all groups of all their contexts.

    Attributes:
        monitors: What answers for each (context, rank), where whoever opened the context put it.

    Args:
        world_size: How many ranks take part.
        seed: Lets one thread run at a time, from one communication point to the next, in an order that this number decides. A
            rank that is away from them for more than a second, or waits for another one by other means, is not waited for.

    Raises:
        ArgumentError: ``world_size`` is not positive, or ``seed`` is no int.
    """

    def __init__(self, world_size: int, *, seed: int | None = None) -> None:
        if world_size < 1:
            raise ArgumentError(f"a LocalHub needs at least one rank, got world_size={world_size}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ArgumentError(f"seed={seed!r} must be an int, or None for threads that run as they like")
        self.world_size = world_size
        self.changed = threading.Condition()
        self.monitors: dict[tuple[str, int], object] = {}
        self._turns = None if seed is None else Turns(seed)
        self._meetings: dict[str, Meeting] = {}
        self._waits: list[Wait] = []
        self._threads: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
        self._left: dict[int, str] = {}

    def leave(self, rank: int, reason: str = "it has left") -> None:
        """Note that ``rank`` will do nothing more, and wake whoever waits for it.

        Args:
            rank: World rank.
            reason: For the errors of its peers, like ``"it raised ValueError: ..."``.
        """
        with self.changed:
            self._left.setdefault(rank, reason)
            self.changed.notify_all()

    def join(self, key: str, ranks: tuple[int, ...]) -> Meeting:
        """What the members of the group ``key`` share, made by the first of them."""
        with self.changed:
            return self._meetings.setdefault(key, Meeting(ranks))

    def part(self, key: str, rank: int) -> None:
        """Note that ``rank`` has closed the group ``key``."""
        with self.changed:
            meeting = self._meetings.get(key)
            if meeting is not None:
                meeting.closed.add(rank)
                if len(meeting.closed) == len(meeting.ranks):
                    del self._meetings[key]
            self.changed.notify_all()

    def point(self, rank: int, what: str) -> None:
        """A communication point: where turns are taken, go on when it is this thread's. The caller holds the lock."""
        if self._turns is not None:
            self.wait(Wait(rank, what, lambda: True, lambda: (), lambda: None), float("inf"), lambda: None)

    def why_left(self, rank: int) -> str:
        """Why ``rank`` will do nothing more; ``""`` where it may."""
        return self._left.get(rank, "")

    def lost(self, ranks: Sequence[int], meeting: Meeting) -> PeerError | None:
        """The error of waiting for ``ranks`` of a group, where one of them is gone."""
        for rank in ranks:
            if why := self.why_left(rank) or ("it has closed this group" if rank in meeting.closed else ""):
                return PeerLostError(f"waited for rank {rank}, but {why}")
        return None

    def wait(self, wait: Wait, timeout_s: float, alarm: Callable[[], PeerError | None]) -> None:
        """Block until ``wait.ready()``; the caller holds the lock.

        Args:
            wait: For what, and for whom.
            timeout_s: Deadline in seconds.
            alarm: Asked a few times per second; the error to raise, if it gives one.

        Raises:
            PeerLostError: Someone it waits for has left.
            PeerTimeoutError: The deadline passed.
            CollectiveMismatchError: Ranks wait for each other, so that none of them can go on.
            PeerError: As ``alarm`` says.
        """
        if self._turns is None and wait.ready():
            return
        self._know(wait)
        self._waits.append(wait)
        wait.until = monotonic() + timeout_s
        look_at = 0.0
        try:
            while True:
                if not wait.ready() and monotonic() >= look_at:
                    look_at = monotonic() + self._look_for_deadlock()
                    wait.error = wait.error or wait.lost() or self._lateness(wait, timeout_s) or alarm()
                if self._has_turn(wait) and wait.can_end():
                    break
                self._sleep(wait, look_at)
        finally:
            self._waits.remove(wait)
            if self._turns is not None:
                self._turns.resume(wait)
        if wait.ready():
            return
        raise wait.error or wait.lost() or self._lateness(wait, timeout_s) or PeerError("the wait ended for no reason")

    def _has_turn(self, wait: Wait) -> bool:
        if self._turns is None:
            return True
        if self._turns.choose(self._waits, self._living()):
            self.changed.notify_all()
        return self._turns.is_chosen(wait)

    def _sleep(self, wait: Wait, look_at: float) -> None:
        asleep_at = monotonic()
        pause_s = min(look_at - asleep_at, _SLICE_S) if look_at else _SLICE_S
        self.changed.wait(max(min(pause_s, wait.until - asleep_at), 0.0))
        if (still_s := monotonic() - asleep_at) > _SUSPICIOUS_S:
            wait.until += still_s  # stopped itself, so nobody else is late

    def _lateness(self, wait: Wait, timeout_s: float) -> PeerError | None:
        if monotonic() < wait.until:
            return None
        return PeerTimeoutError(f"waited {timeout_s:.3g} s for rank {_names(wait.absent())}; {self._table()}")

    def _know(self, wait: Wait) -> None:
        for threads in self._threads.values():
            threads.discard(wait.thread)
        self._threads.setdefault(wait.rank, set()).add(wait.thread)

    def _living(self) -> Mapping[int, Set[int]]:
        """The living threads of every rank that has not left."""
        alive = {thread.ident for thread in threading.enumerate()}
        return {rank: threads & alive for rank, threads in self._threads.items() if rank not in self._left}

    def _look_for_deadlock(self) -> float:
        """Give every rank that can never go on the same verdict.

        Returns:
            After how many seconds to look again.
        """
        now = monotonic()
        stuck = never_ending(self._waits, self._living())
        for wait in self._waits:
            if wait not in stuck:
                wait.stuck_since = None
            elif wait.stuck_since is None:
                wait.stuck_since = now
        if not stuck:
            return _SLICE_S
        ripe_in_s = max(wait.stuck_since or now for wait in stuck) + _SETTLE_S - now
        if ripe_in_s <= 0:
            self._condemn(stuck)
        return max(ripe_in_s, 0.001)

    def _condemn(self, stuck: Sequence[Wait]) -> None:
        ranks = {wait.rank for wait in stuck}
        whom = "every rank waits" if len(ranks | self._left.keys()) >= self.world_size else f"ranks {_names(sorted(ranks))} wait"
        text = f"{whom} and none can go on: {self._table()}"
        waits = {wait.rank: wait.absent() for wait in stuck}
        for wait in stuck:
            wait.error = CollectiveMismatchError(text)
            wait.error.ranks = last_in_line(waits, wait.absent())
        self.changed.notify_all()

    def _table(self) -> str:
        """What every rank of the hub does."""
        waits = sorted((wait for wait in self._waits if not wait.ready()), key=lambda wait: (wait.rank, wait.what))
        rows = [f"rank {wait.rank} in {wait.what} waits for rank {_names(wait.absent())}" for wait in waits]
        silent = sorted(set(range(self.world_size)) - {wait.rank for wait in waits})
        rows += [f"rank {rank} is gone: {self._left[rank]}" if rank in self._left else f"rank {rank} runs" for rank in silent]
        return "; ".join(rows)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
