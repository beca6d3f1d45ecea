"""Typed lines between two members."""

import threading
from functools import partial

import msgspec
import pytest
import torch

from parallel_runtime.comm import Channel, GroupCoordinator
from parallel_runtime.errors import (
    ArgumentError,
    CollectiveMismatchError,
    ContextStateError,
    EarlierFailureError,
    PeerEncodingError,
    PeerTimeoutError,
    SerializationError,
)
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


class Work(msgspec.Struct):
    """What a scheduler might send."""

    step: int
    hidden: torch.Tensor | None = None
    ids: tuple[int, ...] = ()


@KINDS
def test_messages_arrive_in_order_and_typed(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        line: Channel[Work] = group.channel("work", Work)
        other = group.channel("other", dict[str, int])
        assert (line.name, line.peer) == ("work", 1 - group.rank_in_group)
        for step in range(30):
            line.send(Work(step, torch.full((3, step * 1000), float(step)), (1, 2)))
            other.send({"step": step})
        for step in range(30):
            work = line.recv()
            assert (work.step, work.ids) == (step, (1, 2))
            assert work.hidden is not None
            assert work.hidden.shape == (3, step * 1000)
            assert bool((work.hidden == step).all())
        assert [other.recv()["step"] for _ in range(30)] == list(range(30))

    World(kind)(2, body)


@KINDS
def test_is_ready_never_waits(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        line = group.channel("line", int)
        if group.is_first_rank:
            assert not line.is_ready()
            group.barrier()
            while not line.is_ready():
                pass
            assert line.recv() == 7
            assert not line.is_ready()
        else:
            group.barrier()
            line.send(7)

    World(kind)(2, body)


@KINDS
def test_a_full_line_waits_for_its_reader(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        line = group.channel("line", int)
        if group.is_first_rank:
            for number in range(200):
                line.send(number)
                assert len(group._outbox) <= 64
        else:
            assert [line.recv() for _ in range(200)] == list(range(200))

    World(kind)(2, body)


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("is_channel", [True, False])
def test_a_line_without_room_is_over_and_says_so(kind: str, is_channel: bool) -> None:
    is_full, is_over = threading.Event(), threading.Event()

    def body(group: GroupCoordinator) -> None:
        line = group.channel("line", int)
        peer = 1 - group.rank_in_group
        if group.is_last_rank:
            assert is_full.wait(30)
            got = [line.recv() if is_channel else group.recv_object(peer) for _ in range(64)]
            assert got == list(range(64))
            is_over.set()
            assert group.recv_object(peer, tag=7) == "another line"
            return
        send = line.send if is_channel else partial(group.send_object, dst=peer)
        for number in range(64):
            send(number)
        with pytest.raises(PeerTimeoutError, match=r"waited 0.\d+ s for|did not take part within 0.\d+ s"):
            send(64, timeout_s=0.1)
        with pytest.raises(EarlierFailureError, match=r"seq \d+ .*nothing more can be sent to member 1: .* 0.\d+ s"):
            send(65)
        is_full.set()
        assert is_over.wait(30)
        with pytest.raises(EarlierFailureError, match="nothing more can be sent to member 1"):
            send(66)
        group.send_object("another line", dst=peer, tag=7)

    World(kind)(2, body)


@KINDS
def test_different_schemas_are_an_error_at_both_ends(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            line = group.channel("line", int)
            line.send(1)
            group.barrier()
            with pytest.raises(CollectiveMismatchError, match="different schemas"):
                line.send(2)
        else:
            other = group.channel("line", str)
            with pytest.raises(CollectiveMismatchError, match="different schemas"):
                other.recv()
            group.barrier()

    World(kind)(2, body)


@KINDS
def test_values_that_are_not_of_the_schema(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        line = group.channel("line", Work)
        if group.is_first_rank:
            with pytest.raises(SerializationError, match=r"channel 'line' carries .*Work.*, got str"):
                line.send("x")  # type: ignore[arg-type]
            with pytest.raises(SerializationError, match="cannot encode an object of type"):
                line.send(Work(1, object()))  # type: ignore[arg-type]
            line.send(Work("no int"))  # type: ignore[arg-type]
            line.send(Work(5))
        else:
            for text in ("carries", "cannot encode"):
                with pytest.raises(PeerEncodingError, match=rf"member 0 could not encode its message.*{text}"):
                    line.recv()
            with pytest.raises(SerializationError, match=r"what arrived is no .*Expected `int`, got `str`"):
                line.recv()
            assert line.recv() == Work(5)

    World(kind)(2, body)


def test_names_peers_and_closing() -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(ArgumentError, match="say which of the 3 members"):
            group.channel("line", int)
        peer = (group.rank_in_group + 1) % 3
        line = group.channel("line", int, peer)
        with pytest.raises(ArgumentError, match="is open already"):
            group.channel("line", int, peer)
        group._core.traffic.streams.channels[line._stream] = "its double"
        with pytest.raises(ArgumentError, match="has the same number as 'its double'; rename one of them"):
            group.channel("line", int, peer)
        with pytest.raises(ArgumentError, match=r"name must be a str, got 5 \(int\)"):
            group.channel(5, int, peer)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="cannot use"):
            group.channel("bad", list[int, int, int], peer)  # type: ignore[misc]
        line.close()
        line.close()
        for call in (lambda: line.send(1), line.recv, line.is_ready):
            with pytest.raises(ContextStateError, match=r"channel 'line' of group .* is closed"):
                call()
        group.channel("line", int, peer).close()

    World("local")(3, body)
