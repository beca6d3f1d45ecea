"""How the ranks of a world find each other: a roster in a store, and one verdict that holds for all of them.

Every rank writes who it is and what it was told. The first rank of the world compares what all of them wrote and settles the
verdict: the identity of the new context, or the text of an error that names the odd one. Whoever sees first that the world cannot
come together (a deadline, a rank that is there twice) may settle it too; the first word counts, and every rank that is there
gets it.

Nothing here knows about groups. Keys are never reused: the n-th time that this set of ranks opens a context on this store is room
n of that set, on every rank.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

from parallel_runtime.comm.c10d import Store, prefix_store
from parallel_runtime.context.meeting import (
    KEPT,
    SLICE_S,
    Meeting,
    blaming,
    first_line,
    last_closed,
    name_ranks,
    note_closed,
    wait_for_keys,
)
from parallel_runtime.context.member import Member, compare_members, odd_ranks
from parallel_runtime.errors import RendezvousError
from parallel_runtime.terms import Rank

__all__ = ["join_world", "new_uid", "refuse_world"]

_SETTLE_S = 1.0
"""How long a difference between ranks waits for the others, so that the odd one can be told from the majority."""


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
    why_gone: Callable[[int], str] = lambda rank: "",
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
        why_gone: Why a rank that has not come never will, as a clause that follows "rank N"; ``""`` where nobody knows.

    Returns:
        The meeting, equal on every rank.

    Raises:
        RendezvousError: A rank is missing, differs or joined twice: the same text on every rank. Or the store is gone.

    Collective: all ranks; they only meet in the store.
    """
    deadline = time.monotonic() + timeout_s
    scope = prefix_store(store, f"parallel_runtime/{attempt}/{'all' if is_whole else name_ranks(ranks)}")
    try:
        number = scope.add(f"opened/{member.rank}", 1)
        room = prefix_store(scope, str(number))
        if linger_s:
            room.set(KEPT, "by a member")
        room.set(f"member/{member.rank}", member.to_json())
        if number > 1 and last_closed(scope, member.rank) < number - 1:
            _refuse_second_process(prefix_store(scope, str(number - 1)), member)
        verdict = _wait_for_verdict(room, member, ranks, deadline, timeout_s, why_gone)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(f"rank {member.rank} lost the store in which the ranks meet: {first_line(error)}") from error
    if "error" in verdict:
        _await_hearing(room, member, ranks, linger_s)
        raise _error(verdict)
    hosts = tuple(name for name, count in json.loads(verdict["hosts"]) for _ in range(count))
    return Meeting(uid=verdict["uid"], room=room, ranks=ranks, rank=Rank(member.rank), scope=scope, number=number, hosts=hosts)


def refuse_world(store: Store, member: Member, problem: str, *, attempt: str = "0", linger_s: float = 0.0) -> None:
    """Tell the other ranks of the whole world that this one cannot take part, so that they end at once. A dead store is no error.

    Args:
        store: Reached by every rank.
        member: This rank's entry.
        problem: Why not.
        attempt: As for ``join_world``.
        linger_s: How long a rank that serves the store keeps it until the others have heard of it, in seconds.
    """
    with suppress(RuntimeError):
        scope = prefix_store(store, f"parallel_runtime/{attempt}/all")
        number = scope.add(f"opened/{member.rank}", 1)
        room = prefix_store(scope, str(number))
        _settle(room, _refusal(f"rank {member.rank} ({member.is_where}) cannot take part: {problem}", [member.rank]))
        note_closed(scope, member.rank, number)
        room.set(f"left/{member.rank}", "refused")
        if linger_s:
            wait_for_keys(room, [f"left/{rank}" for rank in range(member.world_size)], linger_s)


def _wait_for_verdict(
    room: Store, member: Member, ranks: Sequence[int], deadline: float, timeout_s: float, why_gone: Callable[[int], str]
) -> dict[str, str]:
    if member.rank == ranks[0]:
        return _settle(room, _judge(room, ranks, deadline, timeout_s, why_gone))
    while not wait_for_keys(room, ["verdict"], min(SLICE_S, deadline - time.monotonic())):
        if room.check([f"member/{ranks[0]}"]) and (dead := _dead([Member.from_json(room.get(f"member/{ranks[0]}"))])):
            return _settle(room, dead)
        present = [rank for rank in ranks if room.check([f"member/{rank}"])]
        missing = [rank for rank in ranks if rank not in present]
        if gone := _gone(missing, why_gone):
            return _settle(room, gone)
        if time.monotonic() >= deadline:
            return _settle(room, _refusal(_missing_text(present, ranks, timeout_s), missing))
    return _read_verdict(room.get("verdict"))


def _judge(
    room: Store, ranks: Sequence[int], deadline: float, timeout_s: float, why_gone: Callable[[int], str]
) -> dict[str, str]:
    """What the first rank finds once all have come, or it cannot wait any longer, or somebody else has settled it."""
    members: dict[int, Member] = {}
    gone: dict[str, str] = {}
    while True:
        missing = [rank for rank in ranks if rank not in members]
        for rank in missing:
            if room.check([f"member/{rank}"]):
                members[rank] = Member.from_json(room.get(f"member/{rank}"))
        missing = [rank for rank in missing if rank not in members]
        present = [members[rank] for rank in ranks if rank in members]
        difference = compare_members(present) if present else ""
        if difference:
            deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if not missing or time.monotonic() >= deadline or (gone := gone or _gone(missing, why_gone)):
            break
        if room.check(["verdict"]):
            return _read_verdict(room.get("verdict"))
        gone = _wait_for_more(room, missing[0], present, deadline)
    if difference:
        return _refusal(difference, odd_ranks(present))
    if gone:
        return gone
    if missing:
        return _refusal(_missing_text(list(members), ranks, timeout_s), missing)
    hosts = [(name, len(list(run))) for name, run in groupby(members[rank].host for rank in ranks)]
    return {"uid": new_uid(), "hosts": json.dumps(hosts)}


def _wait_for_more(room: Store, rank: int, present: Sequence[Member], deadline: float) -> dict[str, str]:
    """Wait a while for one more rank; the verdict where one that had come has ended meanwhile."""
    has_come = wait_for_keys(room, [f"member/{rank}"], min(SLICE_S, deadline - time.monotonic()))
    return {} if has_come else _dead(present)


def _await_hearing(room: Store, member: Member, ranks: Sequence[int], linger_s: float) -> None:
    with suppress(RuntimeError):
        room.set(f"left/{member.rank}", "refused")
        if linger_s:
            present = [Member.from_json(room.get(f"member/{rank}")) for rank in ranks if room.check([f"member/{rank}"])]
            wait_for_keys(room, [f"left/{other.rank}" for other in present if not other.is_ended], linger_s)


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
    refusal = _refusal(f"rank {member.rank} joined twice: {previous.is_where}, {member.is_where}", [member.rank])
    verdict = _settle(previous_room, refusal)
    raise _error(verdict if "error" in verdict else refusal)  # a world that is open already stays so


def _missing_text(present: Sequence[int], ranks: Sequence[int], timeout_s: float) -> str:
    missing = [str(rank) for rank in ranks if rank not in present]
    return f"{len(present)} of {len(ranks)} ranks joined within {timeout_s:g} s (deadlines.join_s); missing: {', '.join(missing)}"


def _gone(missing: Sequence[int], why_gone: Callable[[int], str]) -> dict[str, str]:
    """The verdict where some never come, empty where nobody knows that."""
    why = {rank: text for rank in missing if (text := why_gone(rank))}
    return _refusal("; ".join(f"rank {rank} {text}" for rank, text in why.items()), list(why)) if why else {}


def _dead(members: Sequence[Member]) -> dict[str, str]:
    """The verdict where some have joined and ended since, as far as this machine can tell."""
    ended = [member for member in members if member.is_ended]
    text = "; ".join(f"rank {member.rank} ({member.is_where}) has ended while the ranks met" for member in ended)
    return _refusal(text, [member.rank for member in ended]) if ended else {}


def _refusal(problem: str, ranks: Sequence[int]) -> dict[str, str]:
    return {"error": problem, "ranks": json.dumps(list(ranks))}


def _error(verdict: dict[str, str]) -> RendezvousError:
    return blaming(json.loads(verdict["ranks"]), verdict["error"])
