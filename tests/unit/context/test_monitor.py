"""What an operation that fails tells about the other ranks, over every way to connect threads."""

import errno
import gc
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch

from parallel_runtime.comm import LocalCommunicator, LocalHub, Store, hash_store
from parallel_runtime.comm.diagnosis import Failure
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.control import Answering, ask, ask_all
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.monitor import Monitor
from parallel_runtime.context.reports import Connected, Report, stack_of
from parallel_runtime.context.story import Evidence
from parallel_runtime.errors import CollectiveMismatchError, ConfigError, PeerError, PeerLostError, PeerTimeoutError
from parallel_runtime.launch import run_threads
from parallel_runtime.terms import Rank

pytestmark = pytest.mark.timeout(60)

WAYS = pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "auto"), ("gloo", "off")])
SHORT = Deadlines(collective_s=0.8, control_s=0.8, p2p_s=0.8)
Body = Callable[[ParallelContext], object]


def config_of(backend: str, shm: str, *, size: int = 2, deadlines: Deadlines = SHORT) -> ParallelConfig:
    return ParallelConfig.model_validate({"tp": size, "backend": backend, "shm": shm, "deadlines": deadlines.model_dump()})


def in_a_second_context(ctx: ParallelContext, body: Body) -> PeerError | None:
    """The error of ``body`` in a context of its own, which ``KeyError`` leaves silently."""
    try:
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
            body(inner)
    except PeerError as error:
        return error
    except KeyError:
        pass
    return None


def think_it_over(over: threading.Event) -> None:
    assert over.wait(30)


@WAYS
def test_a_late_rank_is_named_with_the_place_it_is_at(backend: str, shm: str) -> None:
    over = threading.Event()

    def body(ctx: ParallelContext) -> None:
        ctx.tp.barrier()
        if ctx.rank == 1:
            think_it_over(over)
            return
        with pytest.raises(PeerTimeoutError) as caught:
            ctx.tp.all_reduce(torch.ones(8, 576))
        over.set()
        text = str(caught.value)
        assert re.match(r"tp#0 seq 2 all_reduce\(float32\[8, 576\]\) waited [\d.]+ s for rank 1 of \[0, 1\]\.\n", text), text
        assert re.search(r"rank 1 \(pid \d+ on \S+\) is alive and is in no operation of a group:\n", text), text
        assert re.search(r"test_monitor\.py:\d+ in body -> test_monitor\.py:\d+ in think_it_over", text), text
        assert "last operations of rank 1: tp#0 seq 1 barrier() took" in text
        assert caught.value.ranks == (1,)

    run_threads(body, config_of(backend, shm), timeout_s=50)


@WAYS
def test_a_rank_in_another_group_is_named_with_that_operation(backend: str, shm: str) -> None:
    config = config_of(backend, shm).replace(pp=2, deadlines=Deadlines(collective_s=0.8, control_s=0.8, p2p_s=4))
    over = threading.Event()

    def body(ctx: ParallelContext) -> str:
        text = ""
        if ctx.rank == 0:
            try:
                ctx.tp.all_reduce(torch.ones(4))
            except PeerError as error:
                text = f"{type(error).__name__} {error}"
            over.set()
        elif ctx.rank == 1:
            ctx.pp.recv(1)
        elif ctx.rank == 3:
            think_it_over(over)
            ctx.pp.send(torch.ones(1), 0)
        return text

    text = run_threads(body, config, timeout_s=50)[0]
    assert text.startswith("PeerTimeoutError tp#0 seq 1 all_reduce(float32[4]) waited")
    assert re.search(r"rank 1 .* is alive and is in pp#1 seq 1 recv\(\), not in tp#0:\n.*in body", text), text


@WAYS
@pytest.mark.parametrize("how", ["normally", "by an exception"])
def test_a_rank_that_leaves_releases_those_that_wait(backend: str, shm: str, how: str) -> None:
    def body(ctx: ParallelContext) -> None:
        ctx.tp.barrier()
        if ctx.rank == 0:
            ctx.tp.barrier()
        elif how == "by an exception":
            raise KeyError("boom-42")

    def run(ctx: ParallelContext) -> str:
        start = time.monotonic()
        error = in_a_second_context(ctx, body)
        assert time.monotonic() - start < 10
        return f"{type(error).__name__} {getattr(error, 'ranks', ())} {error}"

    lost = run_threads(run, config_of(backend, shm, deadlines=Deadlines()), timeout_s=50)[0]
    assert lost.startswith("PeerLostError (1,) tp#0 seq 2 barrier() lost rank 1 of [0, 1] after"), lost
    reason = (
        "rank 1 has left the context normally" if how == "normally" else "left the context by an exception: KeyError: 'boom-42'"
    )
    assert reason in lost


@WAYS
def test_a_rank_learns_of_one_that_is_not_its_direct_partner(backend: str, shm: str) -> None:
    over = threading.Event()

    def body(ctx: ParallelContext) -> None:
        ctx.tp.barrier()  # all have opened it
        if ctx.rank == 3:
            raise KeyError("boom-42")
        if ctx.rank == 1:
            think_it_over(over)  # neither takes part nor leaves
        else:
            try:
                ctx.tp.barrier()
            finally:
                if ctx.rank == 0:
                    over.set()

    def run(ctx: ParallelContext) -> str:
        return str(in_a_second_context(ctx, body))

    told = run_threads(run, config_of(backend, shm, size=4, deadlines=Deadlines(collective_s=40, control_s=40)), timeout_s=30)
    for rank in (0, 2):
        assert "lost rank 3 of [0, 1, 2, 3]" in told[rank], told[rank]
        assert "KeyError: 'boom-42'" in told[rank], told[rank]


def meeting_of(store: Store, rank: int) -> Meeting:
    return Meeting(uid="u", room=store, ranks=range(2), rank=Rank(rank), scope=store, number=1, hosts=("here", "here"))


def test_a_rank_that_did_its_part_and_left_is_not_missed() -> None:
    hub, store = LocalHub(2), hash_store()
    mine, its = (Monitor(meeting_of(store, rank), host="here", address="", hub=hub) for rank in (0, 1))
    communicator = LocalCommunicator(hub, "key", 1, 2)
    communicator.key = "key"
    communicator.traffic.steps = 7
    its.watch((0, 1), communicator, communicator)
    its.last_words()
    meeting_of(store, 1).room.set("left/1", "closed")
    assert mine.interruption((0, 1), "key", 7) is None
    assert "which has left the context normally" in str(mine.interruption((0, 1), "key", 8))
    assert "which has left the context normally" in str(mine.interruption((0, 1), "another key", 1))
    assert mine.interruption((), "key", 8) is None


def test_different_operations_are_told_after_the_deadline_over_gloo_where_nothing_is_compared() -> None:
    def body(ctx: ParallelContext) -> PeerError | None:
        ctx.tp.barrier()
        try:
            if ctx.rank == 0:
                ctx.tp.all_reduce(torch.ones(4))
            else:
                ctx.tp.all_gather(torch.ones(4))
        except PeerError as error:
            return error
        return None

    errors = run_threads(body, config_of("gloo", "off").replace(checked=False), timeout_s=50)
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert "entered different operations: rank 0 entered all_reduce(float32[4]); rank 1 entered all_gather" in str(errors[0])
    assert [error.ranks for error in errors if error] == [(1,), (0,)]


@WAYS
def test_checked_groups_find_different_operations_before_data_moves(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> None:
        mine = torch.full((4,), float(ctx.rank))
        with pytest.raises(CollectiveMismatchError, match=r"tp#0 seq 1 .*members entered different operations"):
            ctx.tp.all_reduce_(mine, "sum" if ctx.rank == 0 else "max")
        assert mine.tolist() == [float(ctx.rank)] * 4

    run_threads(body, config_of(backend, shm, deadlines=Deadlines()).replace(checked=True), timeout_s=30)


def test_who_gave_up_is_not_blamed_for_the_one_that_was_late() -> None:
    """Two of three time out; whoever is second sees a closed connection, and still names the third."""
    over = threading.Event()

    def body(ctx: ParallelContext) -> tuple[str, tuple[int, ...]] | None:
        if ctx.rank == 1:
            think_it_over(over)
            return None
        try:
            ctx.tp.all_reduce(torch.ones(2), timeout_s=0.6 if ctx.rank == 0 else 20.0)
        except PeerError as error:
            return type(error).__name__, error.ranks
        finally:
            if ctx.rank == 2:
                over.set()
        return None

    told = run_threads(body, config_of("gloo", "off", size=3, deadlines=Deadlines()), timeout_s=50)
    assert told == [("PeerTimeoutError", (1,)), None, ("PeerTimeoutError", (1,))]


def test_a_monitor_answers_only_who_knows_the_token() -> None:
    report = Report(rank=3, pid=1, host="here", inside="", stack=(), connections=(), failures=())
    answering = Answering("127.0.0.1", "here")
    text = b'{"rank":3,"pid":1,"host":"here","inside":"","stack":[],"connections":[],"failures":[]}'
    known = answering.add(lambda: text, lambda: None)
    other = answering.add(lambda: text.replace(b"3", b"4"), lambda: None)
    try:
        assert ask(known, 5.0) == report
        assert ask(other, 5.0).rank == 4
        with socket.create_connection((known.address, known.port), timeout=5) as stranger:
            stranger.sendall(b"x" * 32)
            assert stranger.recv(100) == b""
        answering.drop(known)
        assert list(ask_all({3: known, 4: other}, 5.0)) == [4]
    finally:
        answering.close()
    with pytest.raises(ConnectionRefusedError):
        ask(known, 1.0)
    assert ask_all({3: known}, 1.0) == {}
    answering.close()


def test_an_answer_that_is_none_is_an_os_error() -> None:
    answering = Answering("127.0.0.1", "here")
    address = answering.add(lambda: b"what?", lambda: None)
    try:
        with pytest.raises(OSError, match="no report came back"):
            ask(address, 5.0)
    finally:
        answering.close()


def test_where_no_rank_can_answer_is_told() -> None:
    with pytest.raises(ConfigError, match=r"answers for itself at 192\.0\.2\.1, which is not possible here: .*address"):
        Answering("192.0.2.1", "here")


def test_a_monitor_outlives_a_moment_without_descriptors() -> None:
    answering = Answering("127.0.0.1", "here")
    looked = threading.Event()
    address = answering.add(lambda: b"{}", looked.set)

    class _Full:
        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.calls = 0

        def accept(self) -> tuple[socket.socket, object]:
            self.calls += 1
            if self.calls < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._listener, name)

    full = answering.__dict__["_listener"] = _Full(answering._listener)
    try:
        assert looked.wait(20)
        until = time.monotonic() + 20
        while full.calls < 4 and time.monotonic() < until:
            ask_all({0: address}, 1.0)
        assert full.calls >= 4
    finally:
        answering.close()
    assert not answering._thread.is_alive()


def test_blame_follows_one_that_went_while_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 blames rank 2 as it leaves: after the first look at who is gone, before it can be asked."""
    hub, store = LocalHub(3), hash_store()
    mine = Monitor(meeting_of(store, 0), host="here", address="", hub=hub)

    def leaves(ranks: Sequence[int], timeout_s: float = 1.0) -> dict[int, Report]:
        room = meeting_of(store, 1).room
        room.set("blamed/1", "[2]")
        room.set("left/1", "PeerTimeoutError: waited for rank 2")
        room.set("departed", "somebody")
        return {}

    monkeypatch.setattr(mine, "reports", leaves)
    assert mine._culprits([1]) == (2,)


@pytest.mark.parametrize(("found", "blamed"), [((3,), (3,)), ((0,), ())])
def test_blame_passes_over_one_that_gave_up(
    found: tuple[int, ...], blamed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 lost rank 3 and closed its connections; rank 1, which waited for rank 0, blames rank 3, or nobody."""
    ranks = (0, 1, 2, 3)
    mine = Monitor(meeting_of(hash_store(), 1), host="here", address="", hub=LocalHub(4))
    gave_up = Report(
        rank=0,
        pid=1,
        host="here",
        inside="",
        stack=(),
        connections=(Connected(ranks=ranks, tail=()),),
        failures=("world#0 seq 3 barrier() lost rank 3 of [0, 1, 2, 3]",),
    )
    monkeypatch.setattr(mine, "_evidence", lambda *args, **kw: Evidence(departures={}, reports={0: gave_up}, silent={}))
    monkeypatch.setattr(mine, "_culprits", lambda ranks: found if list(ranks) == [0] else ())
    lost = PeerLostError("lost the connection")
    lost.members = (0,)
    failure = Failure(
        group="world#0", ranks=ranks, rank=1, sequence=3, operation="barrier", what="barrier()", seconds=0.2, error=lost
    )
    assert mine.explain(failure).ranks == blamed


@pytest.mark.parametrize(
    ("reason", "follows", "is_normal", "blamed"),
    [
        ("closed", False, True, ()),
        ("KeyError: 'boom'", False, False, ()),
        ("PeerTimeoutError: waited for rank 2", True, False, (2,)),
        ("PeerEncodingError: rank 2 could not", True, False, (2,)),
    ],
)
def test_who_leaves_because_of_a_peer_is_not_the_cause(
    reason: str, follows: bool, is_normal: bool, blamed: tuple[int, ...]
) -> None:
    hub, store = LocalHub(2), hash_store()
    mine = Monitor(meeting_of(store, 0), host="here", address="", hub=hub)
    room = meeting_of(store, 1).room
    for key, value in (("blamed/1", "[2]"), ("left/1", reason), ("departed", "somebody")):
        room.set(key, value)
    gone = mine._departures([1])[1]
    assert (gone.follows, gone.is_normal, gone.blamed) == (follows, is_normal, blamed)


def test_a_monitor_frees_its_thread_and_its_socket() -> None:
    before = threading.active_count()
    monitor = Monitor(meeting_of(hash_store(), 0), host="here", address="127.0.0.1", hub=None)
    assert threading.active_count() == before + 1
    assert monitor.reports([0])[0].rank == 0
    monitor.close()
    monitor.close()
    assert threading.active_count() == before


def test_the_stack_of_plumbing_alone_is_shown_as_it_is() -> None:
    started = threading.Event()
    thread = threading.Thread(target=started.wait)
    thread.start()
    frames = sys._current_frames()
    assert any(" in wait" in place for place in stack_of(frames[thread.ident or 0]))
    started.set()
    thread.join()
    assert stack_of(None) == ()


def test_no_garbage_is_collected_while_other_threads_are_looked_at() -> None:
    """It might let them go on, and their frames would be gone while they are read."""
    collected: list[set[str]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append({frame.name for frame in traceback.extract_stack()})

    monitor = Monitor(meeting_of(hash_store(), 0), host="here", address="127.0.0.1", hub=None)
    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        monitor.report()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
        monitor.close()
    assert gc.isenabled()
    assert any("report" in names for names in collected)
    assert not any("_look_at" in names for names in collected)


def test_over_gloo_a_wait_for_one_ends_when_another_member_is_gone() -> None:
    """Nobody but the late source has anything for rank 0, whose connections are all whole."""
    over = threading.Event()

    def body(ctx: ParallelContext) -> None:
        if ctx.rank == 3:
            raise KeyError("boom-42")
        if ctx.rank in (1, 2):
            think_it_over(over)
            return
        if ctx.rank == 0:
            try:
                ctx.tp.broadcast(torch.ones(1), 1)
            finally:
                over.set()

    def run(ctx: ParallelContext) -> str:
        return str(in_a_second_context(ctx, body))

    config = config_of("gloo", "off", size=4, deadlines=Deadlines(collective_s=40)).replace(checked=False)  # no meeting of all
    text = run_threads(run, config, timeout_s=30)[0]
    assert "broadcast(float32[1]) lost rank 3 of [0, 1, 2, 3]" in text


def test_collectives_over_gloo_are_counted() -> None:
    def body(ctx: ParallelContext) -> int:
        for _ in range(3):
            ctx.tp.all_reduce(torch.ones(1))
        if ctx.rank == 0:
            ctx.tp.send(torch.ones(1), 1)
        else:
            ctx.tp.recv(0)
        return ctx.tp._core.traffic.steps

    assert run_threads(body, config_of("gloo", "off"), timeout_s=30) == [3, 3]
