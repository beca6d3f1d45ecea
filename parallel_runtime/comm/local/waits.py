"""One thread that waits, and who among those that wait can never go on."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from time import monotonic
from typing import final

from parallel_runtime.errors import PeerError

__all__ = ["Wait", "never_ending"]


@final
@dataclass(slots=True, eq=False)
class Wait:
    """One thread that waits: for what, and for which world ranks at this moment.

    Attributes:
        rank: World rank of the thread.
        what: For people.
        ready: Whether there is nothing left to wait for.
        absent: World ranks that have to do something first.
        lost: The error, where one of them never will.
        until: Its deadline on the monotonic clock.
        thread: Which one it is.
        stuck_since: Since when it has been seen in ``never_ending``.
        error: What ends it, once somebody knows.
    """

    rank: int
    what: str
    ready: Callable[[], bool]
    absent: Callable[[], Sequence[int]]
    lost: Callable[[], PeerError | None]
    until: float = float("inf")
    thread: int = field(default_factory=threading.get_ident)
    stuck_since: float | None = None
    error: PeerError | None = None

    def can_end(self) -> bool:
        """Whether its thread can go on, with a result or an error."""
        return self.ready() or self.error is not None or self.lost() is not None or monotonic() >= self.until


def never_ending(waits: Iterable[Wait], threads: Mapping[int, Set[int]]) -> list[Wait]:
    """Waits that only each other could end.

    A rank all of whose threads wait is stuck if each of them waits for at least one rank that is stuck.

    Args:
        waits: All that there are.
        threads: Per rank that has not left, its living threads; a rank of which none is known may still help.

    Returns:
        Those of the stuck ranks.
    """
    blocked = [wait for wait in waits if not wait.can_end()]
    waiting = {wait.thread for wait in blocked}
    stuck = {rank for rank, known in threads.items() if known and known <= waiting}
    while helped := {wait.rank for wait in blocked if wait.rank in stuck and stuck.isdisjoint(wait.absent())}:
        stuck -= helped
    return [wait for wait in blocked if wait.rank in stuck]
