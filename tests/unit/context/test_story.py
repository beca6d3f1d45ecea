"""The error that is told from what the ranks say, rank by rank."""

import pytest

from parallel_runtime.comm.diagnosis import Failure
from parallel_runtime.context.reports import Connected, Done, Report
from parallel_runtime.context.story import Departure, Evidence, tell
from parallel_runtime.errors import CollectiveMismatchError, PeerError, PeerLostError, PeerTimeoutError

RANKS = (0, 1, 2)


def failure(error: PeerError, operation: str = "all_reduce", what: str = "all_reduce(float32[4])") -> Failure:
    return Failure(group="tp#0", ranks=RANKS, rank=0, sequence=7, operation=operation, what=what, seconds=30.0, error=error)


def report(rank: int, *entries: tuple[int, str, str, bool], inside: str = "", failures: tuple[str, ...] = ()) -> Report:
    tail = tuple(Done("tp#0", sequence, operation, what, 0.5, is_over) for sequence, operation, what, is_over in entries)
    connections = (Connected(ranks=RANKS, tail=tail),)
    return Report(
        rank=rank,
        pid=4711,
        host="host-a",
        inside=inside,
        stack=("serve.py:88 in step",),
        connections=connections,
        failures=failures,
    )


SAME = (7, "all_reduce", "all_reduce(float32[4])", False)
EARLIER = (6, "barrier", "barrier()", True)


def told(error: PeerError, reports: dict[int, Report], departures: dict[int, Departure] | None = None) -> PeerError:
    return tell(failure(error), (1, 2), Evidence(departures=departures or {}, reports=reports, silent={}))


def test_the_one_that_is_missing_is_blamed_and_the_one_that_waits_is_not() -> None:
    error = told(PeerTimeoutError("?"), {1: report(1, EARLIER), 2: report(2, EARLIER, SAME)})
    assert isinstance(error, PeerTimeoutError)
    assert error.ranks == (1,)
    assert str(error).splitlines()[0] == "tp#0 seq 7 all_reduce(float32[4]) waited 30.0 s for rank 1 of [0, 1, 2]."
    assert "rank 1 (pid 4711 on host-a) is alive and is in no operation of a group:\n    serve.py:88 in step" in str(error)
    assert "last operations of rank 1: tp#0 seq 6 barrier() took 500.0 ms" in str(error)
    assert "rank 2 (pid 4711 on host-a) waits in the same operation" in str(error)


@pytest.mark.parametrize(
    ("other", "is_odd"),
    [
        ((7, "all_gather", "all_gather(float32[4])", False), True),
        ((7, "all_reduce", "all_reduce(float32[5])", False), True),
        ((7, "all_reduce", "all_reduce(float32[5])", True), True),
        ((8, "all_reduce", "all_reduce(float32[5])", False), False),
        ((7, "recv", "recv()", False), False),
    ],
)
def test_another_operation_in_its_place_is_a_mismatch(other: tuple[int, str, str, bool], is_odd: bool) -> None:
    error = told(PeerLostError("?"), {1: report(1, EARLIER, other), 2: report(2, EARLIER, SAME)})
    assert isinstance(error, CollectiveMismatchError) == is_odd, error
    assert 1 in error.ranks or not is_odd


def test_messages_are_not_compared_by_number() -> None:
    reports = {1: report(1, (5, "send", "send(float32[4])", True), (7, "all_gather", "all_gather(float32[4])", False))}
    assert isinstance(told(PeerTimeoutError("?"), reports), PeerTimeoutError)


def test_the_cause_comes_before_what_followed() -> None:
    departures = {
        1: Departure(text="left the context by an exception: PeerLostError: tp#0 ...", follows=True),
        2: Departure(text="left the context by an exception: ValueError: boom-42"),
    }
    error = told(PeerLostError("?"), {}, departures)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (2,)
    assert "lost rank 2 of [0, 1, 2] after 30.0 s.\n  rank 2 left the context by an exception: ValueError: boom-42" in str(error)
    departures[2] = Departure(text="has left the context normally", is_normal=True)
    departures[1] = Departure(text="(pid 1 on a) has ended without a word: killed, or crashed")
    assert told(PeerLostError("?"), {}, departures).ranks == (1,)


def test_a_lost_connection_without_a_reason_names_whom_it_was_to() -> None:
    error = told(PeerLostError("?"), {2: report(2, SAME)})
    assert isinstance(error, PeerLostError)
    assert str(error).startswith("tp#0 seq 7 all_reduce(float32[4]) lost the connection to rank 1 of [0, 1, 2]")
    assert "rank 1 did not answer" in str(error)


def test_another_failure_keeps_its_text() -> None:
    error = told(PeerError("the backend is unwell"), {})
    assert type(error) is PeerError
    assert "the backend is unwell; it waited 30.0 s for ranks 1, 2" in str(error)


def test_notes_of_the_communicator_are_told() -> None:
    original = PeerTimeoutError("?")
    original.add_note("this process itself stood still for 9.0 s of that")
    assert "\n  this process itself stood still for 9.0 s" in str(told(original, {}))


def test_a_big_group_is_not_told_about_in_full() -> None:
    ranks = tuple(range(30))
    big = Failure(
        group="tp#0",
        ranks=ranks,
        rank=0,
        sequence=1,
        operation="barrier",
        what="barrier()",
        seconds=1.0,
        error=PeerTimeoutError("?"),
    )
    text = str(tell(big, ranks[1:], Evidence(departures={}, reports={}, silent={})))
    assert text.endswith("and 21 more ranks")
