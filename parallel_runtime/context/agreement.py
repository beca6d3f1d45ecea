"""Agreeing that all is well, over the store: a rank that failed tells and goes, nobody waits for one that cannot come."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, final

from parallel_runtime.comm.c10d import Store, prefix_store
from parallel_runtime.comm.diagnosis import Failure
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.monitor import Monitor
from parallel_runtime.errors import ParallelRuntimeError, PeerError, PeerFailedError, PeerTimeoutError, RendezvousError
from parallel_runtime.values import error_text

__all__ = ["Agreement", "failed_error"]

_SHORTEST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.25
_FINE: Final = "-"


@final
class Agreement:
    """The agreements of one set of ranks, one after another.

    Args:
        meeting: Where they met; ``None`` where there is nobody to meet.
        monitor: Knows who is gone, and tells what the late ones are doing; ``None`` where there is nobody to meet.
        group: Name of the group, for people.
        ranks: World ranks, equal on all of them.
        rank: This one.
    """

    def __init__(self, meeting: Meeting | None, monitor: Monitor | None, group: str, ranks: tuple[int, ...], rank: int) -> None:
        is_part = meeting is not None and len(ranks) < len(meeting.ranks)
        self._room = (
            None if meeting is None else prefix_store(meeting.room, f"agree/{'-'.join(map(str, ranks)) if is_part else 'all'}")
        )
        self._monitor = monitor
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._number = 0
        self._told: list[str] = []

    def settle(self, problem: str, timeout_s: float) -> None:
        """Say how it went here, and learn how it went elsewhere. A rank with a problem waits for nobody.

        Args:
            problem: ``""`` if all is well.
            timeout_s: Longest wait for the others, in seconds.

        Raises:
            PeerFailedError: This rank or another one has a problem; raised on all of them.
            PeerLostError: One of them is gone.
            PeerTimeoutError: One of them did not come in time.
            RendezvousError: The store is gone.
        """
        self._number += 1
        try:
            if self._room is not None:
                self._tell(self._room, problem)
            if problem:
                raise failed_error({self._rank: problem})
            if self._room is not None and self._monitor is not None:
                self._wait(self._room, self._monitor, timeout_s)
        except RuntimeError as error:
            if isinstance(error, ParallelRuntimeError):
                raise
            raise RendezvousError(f"the store over which ranks agree is gone: {str(error).splitlines()[0]}") from error

    @contextmanager
    def guard(self, timeout_s: float, *, unmasked: bool = False) -> Iterator[None]:
        """Settle how a block of every rank went.

        Args:
            timeout_s: Longest wait for the others at its end, in seconds.
            unmasked: The rank on which the block raised raises that same error, whatever it is.

        Raises:
            PeerFailedError: The block raised on a rank; raised on all of them. Errors that blame a peer, and those that are no
                ``Exception``, stay as they are on their own rank.
            PeerLostError: One of them is gone.
            PeerTimeoutError: One of them did not come in time.
            RendezvousError: The store is gone.
        """
        try:
            with self._alarmed():
                yield
        except BaseException as error:
            if unmasked:
                with suppress(PeerError):
                    self.settle(error_text(error), timeout_s)
                raise
            try:
                self.settle(error_text(error), timeout_s)
            except PeerFailedError as failed:
                if isinstance(error, Exception) and not isinstance(error, PeerError):
                    raise failed from error
            raise
        self.settle("", timeout_s)

    @contextmanager
    def _alarmed(self) -> Iterator[None]:
        """While the block runs, an operation that waits in vain for a rank with a problem ends at once, where it can."""
        room, monitor, number = self._room, self._monitor, self._number + 1
        if room is None or monitor is None:
            yield
            return
        before, monitor.alarm = monitor.alarm, lambda: self._failure(room, number)
        try:
            yield
        finally:
            monitor.alarm = before

    def _tell(self, room: Store, problem: str) -> None:
        """The mark of a failure comes first: whoever finds that all ranks have spoken finds it too."""
        for key in [*([f"{self._number}/failed"] if problem else []), f"{self._number}/{self._rank}"]:
            room.set(key, problem or _FINE)
            self._told.append(key)

    def _wait(self, room: Store, monitor: Monitor, timeout_s: float) -> None:
        start, pause_s = time.monotonic(), _SHORTEST_PAUSE_S
        look_at = start + _LOOK_S
        keys = [f"{self._number}/{rank}" for rank in self._ranks]
        while not room.check(keys):
            if error := self._failure(room, self._number):
                raise error
            now = time.monotonic()
            late = [position for position, key in enumerate(keys) if not room.check([key])] if now >= look_at else []
            if late and (now - start >= timeout_s or monitor.is_gone([self._ranks[position] for position in late])):
                raise monitor.explain(self._lateness(late, now - start))
            look_at = now + _LOOK_S if late else look_at
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if error := self._failure(room, self._number):
            raise error
        *earlier, latest = self._told  # all have come this far, so nobody looks for anything before it
        for key in earlier:
            room.delete_key(key)
        self._told = [latest]

    def _failure(self, room: Store, number: int) -> PeerError | None:
        with suppress(RuntimeError):
            if room.check([f"{number}/failed"]):
                keys = {rank: f"{number}/{rank}" for rank in self._ranks}
                said = {rank: room.get(key).decode() for rank, key in keys.items() if room.check([key])}
                problems = {rank: problem for rank, problem in said.items() if problem != _FINE}
                return failed_error(problems) if problems else None  # else the reason is about to follow its mark
        return None

    def _lateness(self, late: Sequence[int], seconds: float) -> Failure:
        error = PeerTimeoutError("did not come")
        error.members = tuple(late)
        return Failure(
            group=self._group,
            ranks=self._ranks,
            rank=self._rank,
            sequence=self._number,
            operation="agree",
            what="agree()",
            seconds=seconds,
            error=error,
        )


def failed_error(problems: dict[int, str]) -> PeerError:
    """The error that every rank raises.

    Args:
        problems: Of the ranks that have one.

    Returns:
        It names each of them.
    """
    error = PeerFailedError("; ".join(f"rank {rank} failed: {problem}" for rank, problem in problems.items()))
    error.ranks = tuple(problems)
    return error
