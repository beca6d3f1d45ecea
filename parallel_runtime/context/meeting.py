"""What the ranks of a world tell each other in the store once they have met: who has opened what, who has left, who goes on."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from parallel_runtime.comm.c10d import Store
from parallel_runtime.context.member import Member
from parallel_runtime.errors import CollectiveMismatchError, RendezvousError
from parallel_runtime.terms import Rank

__all__ = ["KEPT", "SLICE_S", "Meeting", "blaming", "first_line", "last_closed", "name_ranks", "note_closed", "wait_for_keys"]

SLICE_S = 0.2
"""Longest wait for one thing before looking whether another has happened: another rank's verdict, a rank that left."""
KEPT = "kept"
"""Set where a member serves the store and waits for the others, so that the keys go with the store itself."""
_LONGEST_PAUSE_S = 0.05
"""Between two looks into the store. Its own waits would block Ctrl-C, and log a warning for each that ends without the key."""
_SURVIVORS = "survivors"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A world that has come together.

    Attributes:
        uid: Of the context that is being opened; never used before, equal on every rank.
        room: View of the store that belongs to this context alone.
        ranks: Of its world.
        rank: This one.
        hosts: Name of the host of each of ``ranks``, equal on every rank.
        scope: View of the store in which the contexts of this set of ranks are numbered.
        number: Of this context there, from 1.
    """

    uid: str
    room: Store
    ranks: Sequence[int]
    rank: Rank
    hosts: tuple[str, ...]
    scope: Store
    number: int

    def leave(self, reason: str) -> None:
        """Tell whoever asks that this rank is gone. Waits for nobody; a store that is gone too is no error.

        The last rank to leave a store that somebody else serves takes the keys of this context out of it.

        Args:
            reason: ``""`` for a normal exit.
        """
        with suppress(RuntimeError):
            note_closed(self.scope, self.rank, self.number)
            self.room.set(f"left/{self.rank}", reason or "closed")
            staying = json.loads(self.room.get(_SURVIVORS)) if self.room.check([_SURVIVORS]) else self.ranks
            if self.room.check([f"left/{rank}" for rank in staying]) and not self.room.check([KEPT]):
                for key in self.room.list_keys():
                    if key != _SURVIVORS:  # a rank that was given up may still come and ask
                        self.room.delete_key(key)

    def arrive(self, topic: str) -> None:
        """Note that this rank has come to something that several ranks do together.

        Args:
            topic: Equal on these ranks, and used once.

        Raises:
            RendezvousError: The store is gone.
        """
        try:
            self.room.set(f"{topic}/{self.rank}", "here")
        except RuntimeError as error:
            raise RendezvousError(f"the store in which the ranks meet is gone: {first_line(error)}") from error

    def note_opened(self, ranks: Sequence[int]) -> None:
        """Tell the other members of a group that this rank has it open.

        Args:
            ranks: Of the group.

        Raises:
            RendezvousError: The store is gone.
        """
        self.arrive(f"opened/{name_ranks(ranks)}")

    def wait_until_opened(self, groups: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Stay until every member has its groups open, or is gone: one that is still connecting needs this rank's end.

        Args:
            groups: Ranks of each.
            timeout_s: Longest wait in seconds. A store that is gone ends it, too.
        """
        deadline = time.monotonic() + timeout_s
        keys = {f"opened/{name_ranks(ranks)}/{rank}": rank for ranks in groups for rank in ranks}
        with suppress(RuntimeError):
            roster = self.roster()
            while keys and not wait_for_keys(self.room, list(keys), min(SLICE_S, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    return
                left = {rank for rank in set(keys.values()) if self.room.check([f"left/{rank}"]) or self._is_dead(rank, roster)}
                keys = {key: rank for key, rank in keys.items() if rank not in left}

    def absent(self, topic: str, ranks: Sequence[int]) -> dict[int, str]:
        """Who did not come to it, and why.

        Args:
            topic: As for ``arrive``.
            ranks: Who should have.

        Returns:
            A clause that follows "rank N" for each that never came, left since, or has ended; nothing if the store is gone.
        """
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            roster = self.roster()
            for rank in ranks:
                member = roster.get(rank)
                if self.room.check([f"left/{rank}"]):
                    found[rank] = f"has left ({self.room.get(f'left/{rank}').decode()})"
                elif member and self._is_dead(rank, roster):
                    found[rank] = f"({member.is_where}) has ended"
                elif not self.room.check([f"{topic}/{rank}"]):
                    found[rank] = "never came to open it"
        return found

    def why_gone(self, rank: int) -> str:
        """Why a rank of this meeting does nothing more, as a clause; ``""`` where it may.

        Args:
            rank: World rank.

        Returns:
            Such as ``"has left (closed)"``.
        """
        with suppress(RuntimeError):
            if self.room.check([f"left/{rank}"]):
                return f"has left ({self.room.get(f'left/{rank}').decode()})"
            roster = self.roster()
            if self._is_dead(rank, roster):
                return f"({roster[rank].is_where}) has ended"
        return ""

    def _is_dead(self, rank: int, roster: Mapping[int, Member]) -> bool:
        """Whether its process has ended, as far as this host can tell."""
        return rank in roster and roster[rank].is_ended

    def announce_survivor(self) -> None:
        """Say that this rank means to go on, before its connections go and others take it for lost."""
        with suppress(RuntimeError):
            self.room.set(f"survivor/{self.rank}", "here")

    def survivors(self, timeout_s: float) -> tuple[Rank, ...]:
        """Find out with the others who is still there. Once in the life of a meeting, after ``announce_survivor``.

        Args:
            timeout_s: Longest wait for a rank that neither answers nor has left, in seconds.

        Returns:
            Those that answered, in order; equal on all of them.

        Raises:
            RendezvousError: The others have gone on without this rank, or the store is gone.

        Collective: every rank that is still there.
        """
        deadline = time.monotonic() + timeout_s
        try:
            roster = self.roster()
            while True:
                here = [rank for rank in self.ranks if self.room.check([f"survivor/{rank}"])]
                silent = [rank for rank in self.ranks if rank not in here and not self.room.check([f"left/{rank}"])]
                silent = [rank for rank in silent if not self._is_dead(rank, roster)]
                if not silent or time.monotonic() >= deadline or self.room.check([_SURVIVORS]):
                    break
                wait_for_keys(self.room, [f"survivor/{silent[0]}"], min(SLICE_S, max(0.0, deadline - time.monotonic())))
            found: list[int] = json.loads(self.room.compare_set(_SURVIVORS, "", json.dumps(here)))
        except RuntimeError as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(f"the store in which the ranks meet is gone: {first_line(error)}") from error
        if self.rank not in found:
            raise RendezvousError(f"ranks {found} have gone on without rank {self.rank}, which spoke up too late")
        return tuple(Rank(rank) for rank in found)

    def roster(self) -> dict[int, Member]:
        """Who each rank said it is when they met.

        Returns:
            Members by rank; without those whose entries were taken out of the store by the last to leave.
        """
        keys = {rank: f"member/{rank}" for rank in self.ranks}
        return {rank: Member.from_json(self.room.get(key)) for rank, key in keys.items() if self.room.check([key])}

    def exchange(self, topic: str, value: str, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Tell some ranks something, and learn what they tell.

        Args:
            topic: Equal on these ranks, and used once.
            value: Of this rank.
            ranks: Who takes part, this rank included.
            timeout_s: Longest wait for the others, in seconds.

        Returns:
            What each of them told, by rank.

        Raises:
            RendezvousError: One of them left, or did not speak in time, or the store is gone.
        """
        self.room.set(f"{topic}/{self.rank}", value)
        deadline = time.monotonic() + timeout_s
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        while not wait_for_keys(self.room, list(keys.values()), min(SLICE_S, deadline - time.monotonic())):
            late = [rank for rank, key in keys.items() if not self.room.check([key])]
            for rank in late:
                if why := self.why_gone(rank):
                    raise blaming([rank], f"{topic}: rank {rank} {why}")
            if late and time.monotonic() >= deadline:
                raise blaming(
                    late,
                    f"{topic}: {len(keys) - len(late)} of {len(keys)} ranks came within {timeout_s:g} s (deadlines.join_s); "
                    f"missing: {', '.join(map(str, late))}",
                )
        return {rank: self.room.get(key).decode() for rank, key in keys.items()}

    def agree_on_group(self, number: int, axes: str, ranks: Sequence[int], timeout_s: float) -> None:
        """Compare what members open as their n-th extra group: an order that differs is an error on all of them, never a hang.

        Args:
            number: Of the group among those that this rank has opened.
            axes: Of the group.
            ranks: Its members.
            timeout_s: Longest wait for the others, in seconds.

        Raises:
            CollectiveMismatchError: Another member opens a different one.
            RendezvousError: A member left, or did not come in time.
        """
        told = self.exchange(f"extra group {number}", axes, ranks, timeout_s)
        if len(set(told.values())) > 1:
            said = ", ".join(f"rank {rank} opens {what}" for rank, what in told.items())
            raise CollectiveMismatchError(f"extra groups are opened in the same order on every rank; as no. {number}, {said}")

    def wait_until_all_left(self, timeout_s: float) -> bool:
        """Wait for every rank's ``leave``.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Whether all have left.

        Raises:
            RendezvousError: The store is gone.
        """
        return wait_for_keys(self.room, [f"left/{rank}" for rank in self.ranks], timeout_s)


def wait_for_keys(store: Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Wait until every key is set.

    Args:
        store: Where.
        keys: Which.
        timeout_s: Longest wait in seconds.

    Returns:
        Whether all of them are set.

    Raises:
        RendezvousError: The store is gone.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    try:
        while not store.check(list(keys)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except RuntimeError as error:
        raise RendezvousError(f"the store in which the ranks meet is gone: {first_line(error)}") from error
    return True


def last_closed(scope: Store, rank: int) -> int:
    """The highest number of a room that a rank has left, 0 for none."""
    key = f"closed/{rank}"
    return int(scope.get(key)) if scope.check([key]) else 0


def note_closed(scope: Store, rank: int, number: int) -> None:
    """Note that a rank has left its room of this number."""
    if number > last_closed(scope, rank):
        scope.set(f"closed/{rank}", str(number))


def name_ranks(ranks: Sequence[int]) -> str:
    """A short name for a set of ranks, for keys."""
    if isinstance(ranks, range) and ranks.step == 1:
        return f"{ranks.start}-{ranks.stop - 1}"
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def blaming(ranks: Sequence[int], problem: str) -> RendezvousError:
    """An error of meeting that names who is at fault, for programs as well as for people."""
    error = RendezvousError(problem)
    error.ranks = tuple(ranks)
    return error
