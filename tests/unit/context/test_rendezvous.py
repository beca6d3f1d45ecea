"""Ranks meeting in a store, with threads as ranks."""

import dataclasses
import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel_runtime.comm.c10d import Store, connect_store, file_store, hash_store, listen_store
from parallel_runtime.context.liveness import machine
from parallel_runtime.context.meeting import Meeting, wait_for_keys
from parallel_runtime.context.member import Member, compare_members
from parallel_runtime.context.rendezvous import join_world
from parallel_runtime.errors import RendezvousError

SETTINGS = {"tp": 2, "pp": 1}


def member(rank: int, *, host: str = "a", pid: int = 1, **settings: object) -> Member:
    return Member(rank=rank, host=host, pid=pid, settings={**SETTINGS, **settings})


def meet(
    store: Store | Callable[[], Store], members: Sequence[Member], *, world_size: int, timeout_s: float = 10.0
) -> list[Meeting | RendezvousError]:
    """Let every member join at once; what each of them got."""

    def join(one: Member) -> Meeting | RendezvousError:
        try:
            reached = store() if callable(store) else store
            return join_world(reached, one, range(world_size), timeout_s=timeout_s)
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(join, members))


def uids(outcomes: Sequence[Meeting | RendezvousError]) -> set[str]:
    assert all(isinstance(outcome, Meeting) for outcome in outcomes), outcomes
    return {outcome.uid for outcome in outcomes if isinstance(outcome, Meeting)}


def texts(outcomes: Sequence[Meeting | RendezvousError]) -> set[str]:
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    return {str(outcome) for outcome in outcomes}


def test_all_ranks_agree_and_no_identity_is_used_twice() -> None:
    store = hash_store()
    members = [member(rank) for rank in range(4)]
    rounds = [uids(meet(store, members, world_size=4)) for _ in range(3)]
    assert [len(found) for found in rounds] == [1, 1, 1]
    assert len(set.union(*rounds)) == 3


def ended(rank: int) -> Member:
    """A rank whose process has ended."""
    process = multiprocessing.get_context("spawn").Process()
    process.start()
    process.join()
    assert process.pid is not None
    return dataclasses.replace(member(rank, pid=process.pid), machine=machine())


def test_a_rank_that_ends_while_others_are_awaited_ends_it_for_all() -> None:
    outcomes = meet(hash_store(), [member(0), ended(1)], world_size=3, timeout_s=50.0)
    (text,) = texts(outcomes)
    assert re.fullmatch(r".*rank 1 \(pid \d+ on a\) has ended while the ranks met", text), text
    assert {outcome.ranks for outcome in outcomes if isinstance(outcome, RendezvousError)} == {(1,)}


def test_a_first_rank_that_ends_is_noticed_by_the_others() -> None:
    store = hash_store()
    store.set("parallel_runtime/0/all/1/member/0", ended(0).to_json())
    (text,) = texts(meet(store, [member(1)], world_size=2, timeout_s=50.0))
    assert re.fullmatch(r".*rank 0 \(pid \d+ on a\) has ended while the ranks met", text), text


def test_it_works_over_a_file(tmp_path: Path) -> None:
    members = [member(rank) for rank in range(2)]
    assert len(uids(meet(lambda: file_store(tmp_path / "store", 2), members, world_size=2))) == 1


def test_it_works_over_tcp() -> None:
    server = listen_store()
    members = [member(rank) for rank in range(3)]
    assert len(uids(meet(lambda: connect_store("127.0.0.1", server.port), members, world_size=3))) == 1


@pytest.mark.parametrize(("present", "missing"), [([0, 2], "1, 3"), ([1, 3], "0, 2")])
def test_missing_ranks_are_named_on_every_rank_that_is_there(present: list[int], missing: str) -> None:
    outcomes = meet(hash_store(), [member(rank) for rank in present], world_size=4, timeout_s=0.5)
    assert texts(outcomes) == {f"2 of 4 ranks joined within 0.5 s (deadlines.join_s); missing: {missing}"}


def test_the_first_deadline_ends_the_wait_of_all() -> None:
    store = hash_store()
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(join_world, store, member(rank), range(3), timeout_s=timeout_s)
            for rank, timeout_s in enumerate((1000.0, 0.3))
        ]
        errors = {str(join.exception()) for join in joins}
    assert errors == {"2 of 3 ranks joined within 0.3 s (deadlines.join_s); missing: 2"}


def test_a_rank_that_comes_too_late_learns_what_happened() -> None:
    store = hash_store()
    early = texts(meet(store, [member(0)], world_size=2, timeout_s=0.2))
    assert texts(meet(store, [member(1)], world_size=2)) == early


def test_the_odd_rank_is_named_on_every_rank() -> None:
    members = [member(rank) for rank in range(3)] + [member(3, host="b", pp=2)]
    outcomes = meet(hash_store(), members, world_size=4)
    assert texts(outcomes) == {"rank 3 on host b has pp=2 where the others have pp=1"}


def test_a_difference_does_not_wait_for_the_deadline() -> None:
    members = [member(0), member(1, pp=2)]
    outcomes = meet(hash_store(), members, world_size=3, timeout_s=1000.0)
    assert texts(outcomes) == {"rank 1 on host a has pp=2 where rank 0 on host a has pp=1"}


def test_ranks_that_were_told_different_sizes_find_out() -> None:
    store = hash_store()
    with ThreadPoolExecutor(2) as pool:
        told = [
            pool.submit(join_world, store, member(rank, dp=size), range(size), timeout_s=1000.0)
            for rank, size in enumerate((2, 4))
        ]
        errors = [str(future.exception()) for future in told]
    assert errors == ["rank 1 on host a has dp=4 where rank 0 on host a has dp=2"] * 2


def test_worlds_of_a_part_of_the_ranks_do_not_disturb_each_other() -> None:
    store = hash_store()

    def join_both(rank: int) -> list[str]:
        mine = range(2) if rank < 2 else range(2, 4)
        return [
            join_world(store, member(rank), ranks, timeout_s=10.0, is_whole=whole).uid
            for ranks, whole in ((mine, False), (range(4), True), (mine, False))
        ]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(join_both, range(4)))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len({uid for uids_of_rank in found for uid in uids_of_rank}) == 5


def test_every_setting_that_differs_is_named() -> None:
    odd = [member(0), member(1), member(2, tp=1, torch="2.12"), member(3, host="b", pp=3)]
    assert compare_members(odd) == (
        "rank 2 on host a has torch=2.12, tp=1 where the others have torch=None, tp=2; "
        "rank 3 on host b has pp=3 where the others have pp=1"
    )


def test_what_follows_from_other_settings_is_left_out() -> None:
    assert compare_members([member(0), member(1), member(2, tp=1, etp=1)]).endswith("has tp=1 where the others have tp=2")
    assert compare_members([member(0), member(1), member(2, etp=1)]).endswith("has etp=1 where the others have etp=None")


def test_a_rank_that_is_there_twice_is_named_on_every_rank() -> None:
    first, second = member(0, host="a", pid=812), member(0, host="b", pid=4711)
    outcomes = meet(hash_store(), [first, second, member(1)], world_size=3, timeout_s=30.0)
    found = texts(outcomes)
    assert found <= {
        "rank 0 joined twice: pid 812 on a, pid 4711 on b",
        "rank 0 joined twice: pid 4711 on b, pid 812 on a",
    }
    assert len(found) == 1


def test_a_second_process_is_refused_while_the_world_of_the_first_is_open() -> None:
    store = hash_store()
    meetings = meet(store, [member(0, pid=812), member(1)], world_size=2)
    with pytest.raises(RendezvousError, match="rank 0 joined twice: pid 812 on a, pid 4711 on a") as caught:
        join_world(store, member(0, pid=4711), range(2), timeout_s=30.0)
    assert caught.value.ranks == (0,)
    assert len(uids(meetings)) == 1


def test_a_new_process_may_take_the_place_of_one_that_left() -> None:
    store = hash_store()
    (meeting,) = meet(store, [member(0, pid=812)], world_size=1)
    assert isinstance(meeting, Meeting)
    meeting.leave("")
    assert uids(meet(store, [member(0, pid=4711)], world_size=1)) != {meeting.uid}


def test_a_store_that_goes_away_is_an_error_of_its_own() -> None:
    server = listen_store()
    store = connect_store("127.0.0.1", server.port)
    del server
    with pytest.raises(RendezvousError, match="store in which the ranks meet"):
        join_world(store, member(1), range(2), timeout_s=5.0)


def test_leaving_is_seen_and_a_dead_store_does_not_matter() -> None:
    servers = [listen_store()]
    port = servers[0].port
    meetings = meet(lambda: connect_store("127.0.0.1", port), [member(0), member(1)], world_size=2)
    first, second = (meeting for meeting in meetings if isinstance(meeting, Meeting))
    first.room.set("kept", "as by a member that serves the store")
    second.leave("")
    assert not first.wait_until_all_left(0.05)
    first.leave("ValueError: boom")
    assert first.wait_until_all_left(5.0)
    assert first.room.get("left/0") == b"ValueError: boom"
    servers.clear()
    first.leave("")


def test_the_last_to_leave_takes_the_keys_along() -> None:
    store = hash_store()
    for _ in range(3):
        meetings = meet(store, [member(0), member(1)], world_size=2)
        for meeting in meetings:
            assert isinstance(meeting, Meeting)
            meeting.leave("")
    assert len(store.list_keys()) == 4, "what stays is how often each rank opened and closed, as it does after one context"


def test_an_exchange_ends_when_a_rank_has_left() -> None:
    meetings = meet(hash_store(), [member(0), member(1)], world_size=2)
    first, second = (meeting for meeting in meetings if isinstance(meeting, Meeting))
    second.leave("KeyError: gone")
    with pytest.raises(RendezvousError, match=r"a topic: rank 1 has left \(KeyError: gone\)"):
        first.exchange("a topic", "x", [0, 1], timeout_s=1000.0)


def test_waiting_for_keys_ends_at_its_deadline() -> None:
    store = hash_store()
    assert not wait_for_keys(store, ["never"], 0.05)
    store.set("now", "1")
    assert wait_for_keys(store, ["now"], 0.0)
