"""How the ranks of a world find each other: a roster in a store, and one verdict that holds for all of them.

Every rank writes who it is and what it was told. The first rank of the world compares what all of them wrote and settles the
verdict: the identity of the new context, or the text of an error that names the odd one. Whoever sees first that the world cannot
come together (a deadline, a rank that is there twice) may settle it too; the first word counts, and every rank that is there
gets it.

Nothing here knows about groups. Keys are never reused: the n-th time that this set of ranks opens a context on this store is room
n of that set, on every rank.
"""

import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from typing import final

import torch

from parallel_runtime.comm.c10d import Store, prefix_store
from parallel_runtime.context.liveness import has_ended
from parallel_runtime.errors import RendezvousError
from parallel_runtime.terms import Rank

__all__ = ["Meeting", "Member", "compare_members", "join_world", "new_uid", "wait_for_keys"]

_SLICE_S = 0.2
"""Longest wait for one thing before looking whether another has happened: another rank's verdict, a rank that left."""
_LONGEST_PAUSE_S = 0.05
"""Between two looks into the store. Its own waits would block Ctrl-C, and log a warning for each that ends without the key."""
_SURVIVORS = "survivors"
_KEPT = "kept"
"""Set where a member serves the store and waits for the others, so that the keys go with the store itself."""
_ETP_SOURCES = frozenset({"tp", "cp", "dp", "ep"})
"""Settings that etp follows from where it is left out: where they differ, it goes without saying."""
_SETTLE_S = 1.0
"""How long a difference between ranks waits for the others, so that the odd one can be told from the majority."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's entry in the roster.

    Attributes:
        rank: Position in the world.
        host: Name of its host.
        pid: Its process there.
        settings: What must be equal on all ranks: the config's, and the versions of this library and torch.
    """

    rank: int
    host: str
    pid: int
    settings: Mapping[str, object]

    @classmethod
    def of_this_process(cls, rank: int, settings: Mapping[str, object], host: str | None = None) -> "Member":
        """The entry of the calling process.

        Args:
            rank: Position in the world.
            settings: Of its config.
            host: Name of its host; by default what the system calls it.

        Returns:
            The entry, versions included.
        """
        versions = {"parallel_runtime": version("parallel-runtime"), "torch": torch.__version__}
        return cls(rank=rank, host=host or os.uname().nodename, pid=os.getpid(), settings={**settings, **versions})

    def to_json(self) -> str:
        """The entry as text for the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> "Member":
        """Read an entry back.

        Args:
            text: From ``to_json``.

        Returns:
            An equal entry.
        """
        return cls(**json.loads(text))

    @property
    def is_where(self) -> str:
        """Its process and host, for people."""
        return f"pid {self.pid} on {self.host}"


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
            _note_closed(self.scope, self.rank, self.number)
            self.room.set(f"left/{self.rank}", reason or "closed")
            staying = json.loads(self.room.get(_SURVIVORS)) if self.room.check([_SURVIVORS]) else self.ranks
            if self.room.check([f"left/{rank}" for rank in staying]) and not self.room.check([_KEPT]):
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
            raise RendezvousError(f"the store in which the ranks meet is gone: {_first_line(error)}") from error

    def note_opened(self, ranks: Sequence[int]) -> None:
        """Tell the other members of a group that this rank has it open.

        Args:
            ranks: Of the group.

        Raises:
            RendezvousError: The store is gone.
        """
        self.arrive(f"opened/{_name_ranks(ranks)}")

    def wait_until_opened(self, groups: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Stay until every member has its groups open, or has left: one that is still connecting needs this rank's end.

        Args:
            groups: Ranks of each.
            timeout_s: Longest wait in seconds. A store that is gone ends it, too.
        """
        deadline = time.monotonic() + timeout_s
        keys = {f"opened/{_name_ranks(ranks)}/{rank}": rank for ranks in groups for rank in ranks}
        with suppress(RuntimeError):
            while keys and not wait_for_keys(self.room, list(keys), min(_SLICE_S, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    return
                left = {rank for rank in set(keys.values()) if self.room.check([f"left/{rank}"])}
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
                elif member and member.host == roster[self.rank].host and has_ended(member.pid):
                    found[rank] = f"({member.is_where}) has ended"
                elif not self.room.check([f"{topic}/{rank}"]):
                    found[rank] = "never came to open it"
        return found

    def announce_survivor(self) -> None:
        """Say that this rank means to go on, before its connections go and others take it for lost."""
        with suppress(RuntimeError):
            self.room.set(f"survivor/{self.rank}", "here")

    def survivors(self, is_gone: Callable[[int], bool], timeout_s: float) -> tuple[Rank, ...]:
        """Find out with the others who is still there. Once in the life of a meeting, after ``announce_survivor``.

        Args:
            is_gone: Whether a rank is known to be unable to answer, besides those that have left.
            timeout_s: Longest wait for a rank that neither answers nor has left, in seconds.

        Returns:
            Those that answered, in order; equal on all of them.

        Raises:
            RendezvousError: The others have gone on without this rank, or the store is gone.

        Collective: every rank that is still there.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                here = [rank for rank in self.ranks if self.room.check([f"survivor/{rank}"])]
                silent = [rank for rank in self.ranks if rank not in here and not self.room.check([f"left/{rank}"])]
                silent = [rank for rank in silent if not is_gone(rank)]
                if not silent or time.monotonic() >= deadline or self.room.check([_SURVIVORS]):
                    break
                wait_for_keys(self.room, [f"survivor/{silent[0]}"], min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            found: list[int] = json.loads(self.room.compare_set(_SURVIVORS, "", json.dumps(here)))
        except RuntimeError as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(f"the store in which the ranks meet is gone: {_first_line(error)}") from error
        if self.rank not in found:
            raise RendezvousError(f"ranks {found} have gone on without rank {self.rank}, which spoke up too late")
        return tuple(Rank(rank) for rank in found)

    def roster(self) -> dict[int, "Member"]:
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
        while not wait_for_keys(self.room, list(keys.values()), min(_SLICE_S, deadline - time.monotonic())):
            late = [rank for rank, key in keys.items() if not self.room.check([key])]
            for rank in late:
                if self.room.check([f"left/{rank}"]):
                    raise RendezvousError(f"{topic}: rank {rank} has left ({self.room.get(f'left/{rank}').decode()})")
            if late and time.monotonic() >= deadline:
                raise RendezvousError(
                    f"{topic}: {len(keys) - len(late)} of {len(keys)} ranks came within {timeout_s:g} s (deadlines.join_s); "
                    f"missing: {', '.join(map(str, late))}"
                )
        return {rank: self.room.get(key).decode() for rank, key in keys.items()}

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


def new_uid() -> str:
    """An identity that no context has had.

    Returns:
        12 hexadecimal digits.
    """
    return uuid.uuid4().hex[:12]


def join_world(
    store: Store,
    member: Member,
    ranks: Sequence[int],
    *,
    timeout_s: float,
    is_whole: bool = True,
    attempt: str = "0",
    linger_s: float = 0.0,
) -> Meeting:
    """Meet the other ranks and agree that all mean the same world.

    Args:
        store: Reached by every rank.
        member: This rank's entry.
        ranks: Of the world, equal on every rank.
        timeout_s: Longest wait for the others, in seconds.
        is_whole: Whether these are all ranks that were started. Such worlds meet in one place whatever their size, so that ranks
            which were told different sizes find out.
        attempt: Separates the tries of a launcher that restarts its ranks and keeps its store.
        linger_s: How long a rank that serves the store keeps it, after a failure, until the others have heard of it, in seconds.

    Returns:
        The meeting, equal on every rank.

    Raises:
        RendezvousError: A rank is missing, differs or joined twice: the same text on every rank. Or the store is gone.

    Collective: all ranks; they only meet in the store.
    """
    deadline = time.monotonic() + timeout_s
    scope = prefix_store(store, f"parallel_runtime/{attempt}/{'all' if is_whole else _name_ranks(ranks)}")
    try:
        number = scope.add(f"opened/{member.rank}", 1)
        room = prefix_store(scope, str(number))
        if linger_s:
            room.set(_KEPT, "by a member")
        room.set(f"member/{member.rank}", member.to_json())
        if number > 1 and _last_closed(scope, member.rank) < number - 1:
            _refuse_second_process(prefix_store(scope, str(number - 1)), member)
        verdict = _wait_for_verdict(room, member, ranks, deadline, timeout_s)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(f"rank {member.rank} lost the store in which the ranks meet: {_first_line(error)}") from error
    if problem := verdict.get("error"):
        _await_hearing(room, member, ranks, linger_s)
        raise RendezvousError(problem)
    hosts = tuple(name for name, count in json.loads(verdict["hosts"]) for _ in range(count))
    return Meeting(uid=verdict["uid"], room=room, ranks=ranks, rank=Rank(member.rank), scope=scope, number=number, hosts=hosts)


def compare_members(members: Sequence[Member]) -> str:
    """Say which members were told something else than the others.

    Args:
        members: In rank order.

    Returns:
        ``""`` if all agree, else one clause per odd rank with the settings that differ.
    """
    texts = [json.dumps(dict(member.settings), sort_keys=True) for member in members]
    if len(set(texts)) < 2:
        return ""
    common, count = Counter(texts).most_common(1)[0]
    usual = members[texts.index(common)]
    reference = "the others have" if count > 1 else f"rank {usual.rank} on host {usual.host} has"
    odd = [member for member, text in zip(members, texts, strict=True) if text != common]
    return "; ".join(_describe_odd(member, usual, reference) for member in odd)


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
        raise RendezvousError(f"the store in which the ranks meet is gone: {_first_line(error)}") from error
    return True


def _wait_for_verdict(room: Store, member: Member, ranks: Sequence[int], deadline: float, timeout_s: float) -> dict[str, str]:
    if member.rank == ranks[0]:
        return _settle(room, _judge(room, ranks, deadline, timeout_s))
    if wait_for_keys(room, ["verdict"], deadline - time.monotonic()):
        return _read_verdict(room.get("verdict"))
    present = [rank for rank in ranks if room.check([f"member/{rank}"])]
    return _settle(room, {"error": _missing_text(present, ranks, timeout_s)})


def _judge(room: Store, ranks: Sequence[int], deadline: float, timeout_s: float) -> dict[str, str]:
    """What the first rank finds once all have come, or it cannot wait any longer, or somebody else has settled it."""
    members: dict[int, Member] = {}
    while True:
        missing = [rank for rank in ranks if rank not in members]
        for rank in missing:
            if room.check([f"member/{rank}"]):
                members[rank] = Member.from_json(room.get(f"member/{rank}"))
        missing = [rank for rank in missing if rank not in members]
        difference = compare_members([members[rank] for rank in ranks if rank in members])
        if difference:
            deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if not missing or time.monotonic() >= deadline:
            break
        if room.check(["verdict"]):
            return _read_verdict(room.get("verdict"))
        wait_for_keys(room, [f"member/{missing[0]}"], min(_SLICE_S, deadline - time.monotonic()))
    if difference:
        return {"error": difference}
    if missing:
        return {"error": _missing_text(list(members), ranks, timeout_s)}
    hosts = [(name, len(list(run))) for name, run in groupby(members[rank].host for rank in ranks)]
    return {"uid": new_uid(), "hosts": json.dumps(hosts)}


def _last_closed(scope: Store, rank: int) -> int:
    key = f"closed/{rank}"
    return int(scope.get(key)) if scope.check([key]) else 0


def _note_closed(scope: Store, rank: int, number: int) -> None:
    if number > _last_closed(scope, rank):
        scope.set(f"closed/{rank}", str(number))


def _await_hearing(room: Store, member: Member, ranks: Sequence[int], linger_s: float) -> None:
    with suppress(RuntimeError):
        room.set(f"left/{member.rank}", "refused")
        if linger_s:
            present = [rank for rank in ranks if room.check([f"member/{rank}"])]
            wait_for_keys(room, [f"left/{rank}" for rank in present], linger_s)


def _settle(room: Store, verdict: dict[str, str]) -> dict[str, str]:
    """Make it the verdict unless there is one already; the one that holds."""
    return _read_verdict(room.compare_set("verdict", "", json.dumps(verdict)))


def _read_verdict(text: bytes) -> dict[str, str]:
    verdict: dict[str, str] = json.loads(text)
    return verdict


def _refuse_second_process(previous_room: Store, member: Member) -> None:
    """A rank whose last context is held by another process is there twice."""
    if not wait_for_keys(previous_room, [f"member/{member.rank}"], _SETTLE_S):
        return
    previous = Member.from_json(previous_room.get(f"member/{member.rank}"))
    is_same = (previous.host, previous.pid) == (member.host, member.pid)
    if is_same or previous_room.check([f"left/{member.rank}"]):
        return
    problem = f"rank {member.rank} joined twice: {previous.is_where}, {member.is_where}"
    _settle(previous_room, {"error": problem})
    raise RendezvousError(problem)


def _describe_odd(member: Member, usual: Member, reference: str) -> str:
    names = sorted(name for name in {*member.settings, *usual.settings} if member.settings.get(name) != usual.settings.get(name))
    if "etp" in names and not _ETP_SOURCES.isdisjoint(names):
        names.remove("etp")
    has, others = (", ".join(f"{name}={who.settings.get(name)}" for name in names) for who in (member, usual))
    return f"rank {member.rank} on host {member.host} has {has} where {reference} {others}"


def _missing_text(present: Sequence[int], ranks: Sequence[int], timeout_s: float) -> str:
    missing = [str(rank) for rank in ranks if rank not in present]
    return f"{len(present)} of {len(ranks)} ranks joined within {timeout_s:g} s (deadlines.join_s); missing: {', '.join(missing)}"


def _name_ranks(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range) and ranks.step == 1:
        return f"{ranks.start}-{ranks.stop - 1}"
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
