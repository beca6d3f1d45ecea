"""Members that are late, leave, or are in another operation."""

import pytest
import torch

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.shm import ShmCommunicator, Unavailable
from parallel_runtime.errors import (
    ArgumentError,
    CollectiveMismatchError,
    ContextStateError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RendezvousError,
)
from tests.unit.comm.shm.members import MemoryStore, Threads

TIMEOUT_S = 20.0


def test_a_late_member_is_named_and_the_group_is_done_with() -> None:
    with Threads(3) as group:

        def body(comm: ShmCommunicator) -> None:
            if comm.rank_in_group != 2:
                comm.all_reduce_(torch.ones(4), ReduceOp.SUM, 0.05)

        first, second, _ = group.outcomes(body)
        for error in (first, second):
            assert isinstance(error, PeerTimeoutError | PeerLostError)
        assert any("member 2 did not take part within 0.05 s" in str(error) for error in (first, second))
        with pytest.raises(PeerLostError, match=r"member 0 gave up after an error of its own, member 1 gave up"):
            group.members[2].barrier(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="since an operation failed: Peer"):
            group.members[0].irecv(torch.ones(1), 1, 0)


def test_a_member_that_left_ends_the_wait_of_the_others() -> None:
    with Threads(3) as group:

        def body(comm: ShmCommunicator) -> None:
            comm.barrier(TIMEOUT_S)
            if comm.rank_in_group == 1:
                comm.close()
            else:
                comm.all_reduce_(torch.ones(4), ReduceOp.SUM, TIMEOUT_S)

        first, left, third = group.outcomes(body)
        assert left is None
        assert "member 1 left" in str(first) + str(third)
        assert isinstance(first, PeerLostError)
        assert isinstance(third, PeerLostError)


def test_what_a_member_did_before_it_left_counts() -> None:
    with Threads(2) as group:
        leaver, other = group.members
        leaver.broadcast_(torch.full((9,), 3.0), 0, TIMEOUT_S)
        leaver.close()
        target = torch.zeros(9)
        other.broadcast_(target, 0, TIMEOUT_S)
        assert target.tolist() == [3.0] * 9


def test_members_in_different_operations_all_learn_who_entered_what() -> None:
    with Threads(3) as group:

        def body(comm: ShmCommunicator) -> None:
            if comm.rank_in_group == 1:
                comm.all_gather(torch.empty(3, 5, dtype=torch.int64), torch.ones(5, dtype=torch.int64), TIMEOUT_S)
            else:
                comm.all_reduce_(torch.ones(4), ReduceOp.SUM, TIMEOUT_S)

        for error in group.outcomes(body):
            assert isinstance(error, CollectiveMismatchError)
            assert "member 0 entered all_reduce(sum, float32 x 4); member 1 entered all_gather(int64 x 5)" in str(error)
            assert "member 2 entered all_reduce(sum, float32 x 4)" in str(error)


@pytest.mark.parametrize("sizes", [(4, 5), (4, 1_000_000), (3_000_000, 2_000_000)])
def test_members_with_different_sizes_all_raise(sizes: tuple[int, int]) -> None:
    with Threads(2) as group:

        def body(comm: ShmCommunicator) -> None:
            comm.all_reduce_(torch.ones(sizes[comm.rank_in_group]), ReduceOp.SUM, TIMEOUT_S)

        for error in group.outcomes(body):
            assert isinstance(error, CollectiveMismatchError)


def test_symmetric_memory_on_one_member_only_is_a_mismatch() -> None:
    with Threads(2) as group:

        def body(comm: ShmCommunicator) -> None:
            tensor = comm.symmetric_empty((100_000,), torch.float32, TIMEOUT_S).fill_(1.0)
            comm.all_reduce_(tensor if comm.rank_in_group == 0 else tensor.clone(), ReduceOp.SUM, TIMEOUT_S)

        for error in group.outcomes(body):
            assert isinstance(error, CollectiveMismatchError)
            assert "on symmetric buffer 1+0" in str(error)


def test_symmetric_memory_that_cannot_be_had_is_an_error_on_all_members() -> None:
    with Threads(2) as group:

        def body(comm: ShmCommunicator) -> float:
            with pytest.raises(PeerFailedError, match="no symmetric memory of 2 x 4611686018427387904 bytes: member 0 cannot"):
                comm.symmetric_empty((1 << 60,), torch.float32, TIMEOUT_S)
            total = torch.ones(1)
            comm.all_reduce_(total, ReduceOp.SUM, TIMEOUT_S)
            return total.item()

        assert group.run(body) == [2.0, 2.0]


def test_nothing_works_after_close_and_closing_twice_is_nothing() -> None:
    with Threads(2) as group:
        shared = group.run(lambda comm: comm.symmetric_empty((10,), torch.int64, TIMEOUT_S).fill_(comm.rank_in_group))
        comm = group.members[0]
        comm.barrier  # noqa: B018  # a bound method keeps nothing open
        for _ in range(2):
            comm.close()
        for call in (
            lambda: comm.barrier(1.0),
            lambda: comm.all_reduce_(torch.ones(1), ReduceOp.SUM, 1.0),
            lambda: comm.isend(torch.ones(1), 1, 0),
            lambda: comm.broadcast_bytes(b"", 0, 1.0),
            comm.describe,
        ):
            with pytest.raises(ContextStateError, match="shared memory of this group is closed"):
                call()
        assert shared[0].tolist() == [0] * 10


def test_a_source_without_bytes_is_told_before_anything_is_sent() -> None:
    with Threads(2) as group:
        with pytest.raises(ArgumentError, match="this member, 0, is the source and has nothing to send"):
            group.members[0].broadcast_bytes(None, 0, TIMEOUT_S)
        group.run(lambda comm: comm.barrier(TIMEOUT_S))


def test_more_members_than_a_segment_is_made_for_are_refused_alike() -> None:
    for rank in (0, 200):
        refused = ShmCommunicator.create(MemoryStore(), "group", rank, 300, 1.0)
        assert refused == Unavailable(reason="300 members; a group that shares memory has at most 128")


def test_a_symmetric_tensor_without_elements() -> None:
    with Threads(2) as group:
        shapes = group.run(lambda comm: tuple(comm.symmetric_empty((0, 3), torch.float32, TIMEOUT_S).shape))
        assert shapes == [(0, 3), (0, 3)]


def test_an_interrupted_operation_breaks_the_group_for_its_peer_too() -> None:
    class Interrupted(BaseException):
        pass

    with Threads(2) as group:
        comm = group.members[0]
        assert comm._parts is not None

        def interrupt() -> bool:
            raise Interrupted

        comm._parts.steps._waiter.errands.add("test", interrupt)
        with pytest.raises(Interrupted):
            comm.barrier(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="since an operation failed: Interrupted"):
            comm.barrier(TIMEOUT_S)
        group.members[1].barrier(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="member 0 gave up after an error of its own"):
            group.members[1].barrier(TIMEOUT_S)


def test_a_member_that_never_comes_to_the_opening_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"member 1 of 2 did not publish 'joined/1' in time; this is member 0"):
        ShmCommunicator.create(MemoryStore(), "group", 0, 2, 0.05)
    with pytest.raises(RendezvousError, match=r"member 0 of 2 did not publish 'offer' in time; this is member 1"):
        ShmCommunicator.create(MemoryStore(), "group", 1, 2, 0.05)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("sent", "awaited"), [(3, 2), (2, 3), (0, 2), (2, 0), (40_000, 39_999), (1, 400_000), (400_000, 1)])
def test_parts_of_another_size_than_awaited_are_an_error(sent: int, awaited: int, direct: bool) -> None:
    with Threads(3, direct=direct) as group:

        def body(comm: ShmCommunicator) -> None:
            rank = comm.rank_in_group
            inputs, outputs = ([torch.full((5,), rank) for _ in range(3)] for _ in range(2))
            if rank == 0:
                inputs[2] = torch.zeros(sent, dtype=torch.int64)
            if rank == 2:
                outputs[0] = torch.zeros(awaited, dtype=torch.int64)
            comm.all_to_allv(outputs, inputs, TIMEOUT_S)
            comm.barrier(TIMEOUT_S)

        errors = group.outcomes(body)
    assert isinstance(errors[2], CollectiveMismatchError)
    assert f"member 0 has {sent * 8} bytes where {awaited * 8} were to be received" in str(errors[2])
    assert all(isinstance(error, PeerLostError) for error in errors[:2])
