"""What ranks learn of each other in the store once they have met, and of one whose process is gone."""

import dataclasses
import multiprocessing
import time

import pytest

from parallel_runtime.comm.c10d import hash_store
from parallel_runtime.context.liveness import machine
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.member import Member
from parallel_runtime.context.obituaries import announce_supervisor, obituary, post_obituary
from parallel_runtime.errors import RendezvousError
from parallel_runtime.terms import Rank

pytestmark = pytest.mark.timeout(60)


def pid_of_an_ended_process() -> int:
    process = multiprocessing.get_context("forkserver").Process(target=time.time)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


@pytest.fixture
def meeting() -> Meeting:
    """Of rank 0 with a rank whose process has ended, and that said nothing."""
    store = hash_store()
    mine = Member.of_this_process(0, {})
    store.set("member/0", mine.to_json())
    dead = Member(rank=1, host=mine.host, pid=pid_of_an_ended_process(), settings={}, machine=machine())
    store.set("member/1", dead.to_json())
    return Meeting(uid="u", room=store, ranks=range(2), rank=Rank(0), scope=store, number=1, hosts=(mine.host,) * 2)


def test_a_rank_that_was_killed_while_opening_holds_up_nobody(meeting: Meeting) -> None:
    start = time.monotonic()
    meeting.note_opened((0, 1))
    meeting.wait_until_opened([(0, 1)], 30.0)
    assert time.monotonic() - start < 10


def test_a_rank_that_was_killed_does_not_come_to_an_exchange(meeting: Meeting) -> None:
    with pytest.raises(RendezvousError, match=r"extra group 1: rank 1 \(pid \d+ on .*\) has ended"):
        meeting.agree_on_group(1, "tp+dp", (0, 1), 30.0)


def test_a_rank_that_was_killed_does_not_survive(meeting: Meeting) -> None:
    meeting.announce_survivor()
    assert meeting.survivors(30.0) == (0,)


def test_why_a_rank_is_gone(meeting: Meeting) -> None:
    assert meeting.why_gone(0) == ""
    assert meeting.why_gone(1).endswith(" has ended")
    meeting.room.set("left/1", "KeyError: 'boom'")
    assert meeting.why_gone(1) == "has left (KeyError: 'boom')"


def test_process_ids_of_another_machine_say_nothing() -> None:
    dead = Member(rank=1, host="a", pid=pid_of_an_ended_process(), settings={}, machine=machine())
    assert dead.is_ended
    assert not dataclasses.replace(dead, machine="another kernel or table of processes").is_ended
    assert not Member.of_this_process(0, {}).is_ended


def test_an_obituary_is_waited_for_only_where_one_was_promised() -> None:
    store = hash_store()
    start = time.monotonic()
    assert obituary(store, 12, 30.0) == ""
    assert time.monotonic() - start < 10
    announce_supervisor(store)
    assert obituary(store, 12, 0.01) == ""
    post_obituary(store, 12, "was killed by SIGKILL (9)")
    assert obituary(store, 12, 30.0) == "was killed by SIGKILL (9)"
