"""How one rank comes to the others: the store, the meeting in it, and word to the others where it cannot come."""

from contextlib import suppress
from typing import final

from parallel_runtime.comm.c10d import Store
from parallel_runtime.config.environment import Identity, current_environ
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.meeting_point import MeetingPoint, find_meeting_point
from parallel_runtime.context.member import Member
from parallel_runtime.context.rendezvous import join_world, refuse_world
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.terms import Rank
from parallel_runtime.values import error_text

__all__ = ["Entrance"]

_LAST_WORD_S = 2.0
"""How long a rank that fails keeps the store it serves, so that the others can read why."""


@final
class Entrance:
    """One rank's way into one context.

    Attributes:
        store: Where the ranks meet; ``None`` until it is found.
        serves_store: Whether this rank serves it.
        has_come: Whether it has begun to join the others, so that they learn of it from there.

    Args:
        identity: Of this rank.
        host: Name of its host.
        store: Of the caller; ``None`` to find it as the launcher says.
    """

    def __init__(self, identity: Identity, host: str, store: Store | None) -> None:
        self.store = store
        self.serves_store = False
        self.has_come = False
        self._identity = identity
        self._host = host
        self._environ = current_environ()
        self._attempt = self._environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def meet(self, config: ParallelConfig, *, name: str, parent: Meeting | None) -> Meeting:
        """Find the store and join the others there.

        Args:
            config: With every size known.
            name: Of the context.
            parent: Of the context around it: a rank that has left that one never comes.

        Returns:
            The meeting.

        Raises:
            RendezvousError: A rank is missing, differs or is there twice.
            PeerTimeoutError: The store does not answer.
        """
        ranks, deadlines = config.layout.ranks, config.deadlines
        store = self._find_store(Rank(ranks[0]), deadlines.join_s)
        self.has_come = True
        return join_world(
            store,
            self._member(config.agreed_settings() | ({"context": name} if name else {})),
            ranks,
            timeout_s=deadlines.join_s,
            is_whole=len(ranks) == self._identity.world_size,
            attempt=self._attempt,
            linger_s=deadlines.exit_s if self.serves_store else 0.0,
            why_gone=(lambda rank: "") if parent is None else parent.why_gone,
        )

    def refuse(self, error: BaseException, config: ParallelConfig) -> None:
        """Tell the others that this rank does not come, so that they do not wait for it. What goes wrong here is no error.

        Args:
            error: Why not. Nothing is said where the program ends, and of what the others learn in another way.
            config: Of the context; one that leaves ranks out is not for all of them.
        """
        is_part = config.ranks is not None or config.rank_offset > 0
        if self.has_come or is_part or self._identity.world_size == 1 or not isinstance(error, Exception):
            return
        with suppress(ParallelRuntimeError):
            store = self._find_store(Rank(0), _LAST_WORD_S)
            linger_s = _LAST_WORD_S if self.serves_store else 0.0
            refuse_world(store, self._member({}), error_text(error), attempt=self._attempt, linger_s=linger_s)

    def keep_store_for(self, meeting: Meeting, exit_s: float, error: BaseException | None) -> None:
        """Where this rank serves the store, keep it until the others have left, or have had the time to read why this one does.

        Args:
            meeting: In the store.
            exit_s: Longest wait after a normal end, in seconds.
            error: With which this rank leaves.

        Raises:
            RendezvousError: The store is gone.
        """
        if self.serves_store:
            meeting.wait_until_all_left(exit_s if error is None else min(exit_s, _LAST_WORD_S))

    def _find_store(self, first_rank: Rank, timeout_s: float) -> Store:
        if self.store is None:
            point: MeetingPoint = find_meeting_point(
                self._identity, first_rank=first_rank, environ=self._environ, timeout_s=timeout_s
            )
            self.store, self.serves_store = point.store, point.server is not None
        return self.store

    def _member(self, settings: dict[str, object]) -> Member:
        size = self._identity.world_size
        return Member.of_this_process(self._identity.rank, settings, self._host, world_size=size)
