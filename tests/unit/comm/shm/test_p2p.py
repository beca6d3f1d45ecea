"""Messages: tags, order, sizes, both sides sending first, progress inside every wait."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.errors import CollectiveMismatchError, ContextStateError, PeerLostError, PeerTimeoutError
from tests.unit.comm.shm.members import Threads

TIMEOUT_S = 20.0


@pytest.fixture(scope="module", params=[True, False], ids=["in place", "in pieces"])
def pair(request: pytest.FixtureRequest) -> Iterator[Threads]:
    """Two members, kept for the whole module; large messages are read in place, or not."""
    with Threads(2, direct=request.param) as group:
        yield group


def pattern(nbytes: int, salt: int) -> Tensor:
    """Bytes that differ from message to message and from place to place."""
    return ((torch.arange(nbytes) * 7 + salt * 13) % 251).to(torch.uint8)


@settings(max_examples=30)
@given(
    messages=st.lists(st.tuples(st.integers(0, 2), st.sampled_from((1, 7, 16, 1000, 65_537, 1_500_001))), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_messages_match_by_tag_and_keep_their_order(pair: Threads, messages: list[tuple[int, int]], order: Any) -> None:
    """Received in any order of tags, each tag's messages come in the order they were sent."""
    per_tag: dict[int, list[int]] = {}
    for number, (tag, _) in enumerate(messages):
        per_tag.setdefault(tag, []).append(number)
    tags = [tag for tag, _ in messages]
    order.shuffle(tags)
    plan = [(tag, per_tag[tag].pop(0)) for tag in tags]

    def body(comm: ShmCommunicator) -> bool:
        if comm.rank_in_group == 0:
            works = [comm.isend(pattern(nbytes, number), 1, tag) for number, (tag, nbytes) in enumerate(messages)]
            for work in works:
                work.wait(TIMEOUT_S)
            return True
        right = True
        for tag, number in plan:
            nbytes = messages[number][1]
            target = torch.zeros(nbytes, dtype=torch.uint8)
            comm.irecv(target, 0, tag).wait(TIMEOUT_S)
            right = right and torch.equal(target, pattern(nbytes, number))
        return right

    assert pair.run(body) == [True, True]


def test_both_send_first_and_wait_for_it(pair: Threads) -> None:
    def body(comm: ShmCommunicator) -> bool:
        peer = 1 - comm.rank_in_group
        comm.isend(pattern(3 << 20, comm.rank_in_group), peer, 0).wait(TIMEOUT_S)
        target = torch.empty(3 << 20, dtype=torch.uint8)
        comm.irecv(target, peer, 0).wait(TIMEOUT_S)
        return torch.equal(target, pattern(3 << 20, peer))

    assert pair.run(body) == [True, True]


def test_a_message_moves_on_while_a_collective_waits(pair: Threads) -> None:
    def body(comm: ShmCommunicator) -> bool:
        data = pattern(3 << 20, 5)
        work = comm.isend(data, 1, 3) if comm.rank_in_group == 0 else None
        target = torch.empty_like(data)
        if comm.rank_in_group == 1:
            comm.irecv(target, 0, 3).wait(TIMEOUT_S)
        total = torch.ones(3)
        comm.all_reduce_(total, ReduceOp.SUM, TIMEOUT_S)
        if work is not None:
            work.wait(TIMEOUT_S)
            return True
        return torch.equal(target, data)

    assert pair.run(body) == [True, True]


def test_a_dropped_handle_still_delivers(pair: Threads) -> None:
    def body(comm: ShmCommunicator) -> bool:
        if comm.rank_in_group == 0:
            comm.isend(pattern(3 << 20, 1), 1, 0)
            junk = [torch.full((1 << 20,), 255, dtype=torch.uint8) for _ in range(8)]
            comm.barrier(TIMEOUT_S)
            return len(junk) == 8
        target = torch.empty(3 << 20, dtype=torch.uint8)
        comm.irecv(target, 0, 0).wait(TIMEOUT_S)
        comm.barrier(TIMEOUT_S)
        return torch.equal(target, pattern(3 << 20, 1))

    assert pair.run(body) == [True, True]


def test_a_small_send_is_done_at_once_and_its_tensor_free(pair: Threads) -> None:
    """Also where its memory is used again at once, by a send of the same size from the same place."""

    def body(comm: ShmCommunicator) -> bool:
        if comm.rank_in_group == 0:
            source = torch.empty(1000, dtype=torch.uint8)
            for number in range(5):
                work = comm.isend(source.copy_(pattern(1000, number)), 1, number)
                assert work.is_done()
                work.wait(TIMEOUT_S)
            return True
        targets = [torch.empty(1000, dtype=torch.uint8) for _ in range(5)]
        for number in (4, 0, 3, 1, 2):
            comm.irecv(targets[number], 0, number).wait(TIMEOUT_S)
        return all(torch.equal(target, pattern(1000, number)) for number, target in enumerate(targets))

    assert pair.run(body) == [True, True]


def test_another_size_is_an_error_of_that_receive_alone(pair: Threads) -> None:
    def body(comm: ShmCommunicator) -> bool:
        if comm.rank_in_group == 0:
            for nbytes in (8, 4, 16):
                comm.isend(pattern(nbytes, nbytes), 1, 0).wait(TIMEOUT_S)
            return True
        short, late, right = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (4, 8, 16))
        posted = comm.irecv(short, 0, 0)
        for work, text in ((posted, "sent 8 bytes with tag 0 where 4"), (comm.irecv(late, 0, 0), "sent 4 bytes .* where 8")):
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match=text):
                    work.wait(TIMEOUT_S)
        comm.irecv(right, 0, 0).wait(TIMEOUT_S)
        return torch.equal(right, pattern(16, 16)) and not bool(short.any()) and not bool(late.any())

    assert pair.run(body) == [True, True]


def test_a_receive_that_timed_out_is_withdrawn(pair: Threads) -> None:
    def body(comm: ShmCommunicator) -> bool:
        if comm.rank_in_group == 1:
            given_up = torch.zeros(4, dtype=torch.uint8)
            work = comm.irecv(given_up, 0, 9)
            assert not work.is_done()
            for _ in range(2):
                with pytest.raises(PeerTimeoutError, match=r"member 0 did not take part within 0\.01 s"):
                    work.wait(0.01)
            comm.barrier(TIMEOUT_S)
            target = torch.empty(4, dtype=torch.uint8)
            comm.irecv(target, 0, 9).wait(TIMEOUT_S)
            return torch.equal(target, pattern(4, 2)) and not bool(given_up.any())
        comm.barrier(TIMEOUT_S)
        comm.isend(pattern(4, 2), 1, 9).wait(TIMEOUT_S)
        return True

    assert pair.run(body) == [True, True]


def test_a_send_cut_short_breaks_the_group() -> None:
    with Threads(2, direct=False) as group:
        sender = group.members[0]
        work = sender.isend(pattern(4 << 20, 0), 1, 0)
        queued = sender.isend(pattern(8, 0), 1, 0)
        with pytest.raises(PeerTimeoutError, match="member 1 did not take part"):
            queued.wait(0.01)
        with pytest.raises(PeerTimeoutError, match="member 1 did not take part"):
            work.wait(0.01)
        with pytest.raises(PeerLostError, match="takes part in nothing since an operation failed"):
            sender.barrier(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="member 0 gave up"):
            group.members[1].barrier(TIMEOUT_S)


def test_an_offer_that_was_withdrawn_is_not_read() -> None:
    """The sender gave up and may use its memory for something else; the receiver hears that instead."""
    with Threads(2) as group:
        sender, receiver = group.members
        work = sender.isend(pattern(2 << 20, 0), 1, 0)
        sender.isend(pattern(8, 0), 1, 1).wait(TIMEOUT_S)
        with pytest.raises(PeerTimeoutError, match="member 1 did not take part"):
            work.wait(0.01)
        target = torch.zeros(2 << 20, dtype=torch.uint8)
        with pytest.raises(PeerLostError, match="while its memory was read, member 0 gave up"):
            receiver.irecv(target, 0, 0).wait(TIMEOUT_S)


@pytest.mark.parametrize("direct", [True, False])
def test_what_came_before_a_peer_left_is_delivered_and_nothing_else(direct: bool) -> None:
    with Threads(2, direct=direct) as group:
        sender, receiver = group.members
        sender.isend(pattern(100, 1), 1, 0).wait(TIMEOUT_S)
        unsent = sender.isend(pattern(4 << 20, 1), 1, 1)
        sender.close()
        with pytest.raises(ContextStateError, match="closed before this message was done"):
            unsent.wait(TIMEOUT_S)
        target = torch.empty(100, dtype=torch.uint8)
        receiver.irecv(target, 0, 0).wait(TIMEOUT_S)
        assert torch.equal(target, pattern(100, 1))
        with pytest.raises(PeerLostError, match="member 0 left"):
            receiver.irecv(torch.empty(4 << 20, dtype=torch.uint8), 0, 1).wait(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="member 0 left"):
            receiver.isend(pattern(4 << 20, 1), 0, 0).wait(TIMEOUT_S)
