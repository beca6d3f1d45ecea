"""Ranks as threads: what could only hang is an error with a table."""

import threading
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.comm import (
    GroupCoordinator,
    GroupSpec,
    LocalCommunicator,
    LocalHub,
    Operation,
    ReduceOp,
    open_coordinator,
)
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, DtypeError, PeerLostError
from parallel_runtime.terms import Rank
from tests.spmd.worlds import World


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least one rank"):
        LocalHub(0)
    with pytest.raises(ArgumentError, match="seed=True must be an int"):
        LocalHub(2, seed=True)
    with pytest.raises(ArgumentError, match=r"member 2 of 2 with ranks \(0, 1\)"):
        LocalCommunicator(LocalHub(2), "k", 2, 2)
    with pytest.raises(ArgumentError, match=r"with ranks \(0, 1, 2\)"):
        LocalCommunicator(LocalHub(3), "k", 1, 2, ranks=(0, 1, 2))


def test_different_operations_are_an_error_on_all_and_the_group_goes_on() -> None:
    def body(group: GroupCoordinator) -> float:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 entered all_reduce sum float32\[2\]|rank 1 entered barrier"):
            group.all_reduce(torch.ones(2)) if group.is_first_rank else group.barrier()
        with pytest.raises(CollectiveMismatchError, match=r"float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]"):
            group.all_reduce(torch.ones(2 if group.is_first_rank else 3))
        return group.all_reduce(torch.ones(1)).item()

    assert World("local")(3, body) == [3.0] * 3


def test_a_ring_of_receives_is_a_deadlock_with_a_table() -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(CollectiveMismatchError, match="every rank waits and none can go on") as caught:
            group.recv(tag=4, timeout_s=60)
        for member in range(3):
            prev = (member - 1) % 3
            assert f"rank {member} in recv from member {prev} with tag 4 of {group.name} waits for rank {prev}" in str(
                caught.value
            )

    World("local")(3, body)


def test_a_deadlock_is_told_in_the_words_of_the_caller() -> None:
    def body(group: GroupCoordinator) -> None:
        line = group.channel("work", int)
        calls = (
            (group.barrier, lambda: group.recv(0), "0 in barrier of g0-1", "1 in recv from member 0 with tag 0 of g0-1"),
            (
                lambda: group.send(torch.ones(1), 1, 7),
                line.recv,
                "0 in send to member 1 with tag 7",
                "recv from member 0 on channel 'work'",
            ),
            (group.barrier, lambda: group.recv_object(tag=5), "0 in barrier", "1 in recv from member 0 with tag 5 of g0-1"),
        )
        for first, last, *told in calls:
            with pytest.raises(CollectiveMismatchError, match="every rank waits and none can go on") as caught:
                (first if group.is_first_rank else last)()
            for text in told:
                assert text in str(caught.value)
            assert group.key not in str(caught.value)

    World("local")(2, body)


def test_groups_entered_in_different_order_are_a_deadlock() -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> None:
        first = groups[rank]
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 in barrier.*rank 1 in barrier"):
            first.barrier()

    World("local").many(2, lambda rank: [(0, 1), (1, 0)], body)


def test_a_rank_that_is_busy_elsewhere_is_no_deadlock() -> None:
    waiting = threading.Event()

    def body(group: GroupCoordinator) -> float:
        if group.is_last_rank:
            assert waiting.wait(30)
            assert not threading.Event().wait(0.2)
            group.send(torch.ones(1), 0)
            return 1.0
        waiting.set()
        return group.recv(1).item()

    assert World("local")(2, body) == [1.0, 1.0]


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            return
        with pytest.raises(PeerLostError, match="waited for rank 1, but it has"):
            group.barrier(timeout_s=60)
        with pytest.raises(PeerLostError, match=r"waited for rank 1, but it has|cannot send to rank 1"):
            group.send(torch.ones(1), timeout_s=60)

    World("local")(2, body)


def test_why_a_rank_left_is_told() -> None:
    hub = LocalHub(2)
    communicator = LocalCommunicator(hub, "k", 0, 2)
    hub.leave(1, "it raised ValueError: boom")
    hub.leave(1, "later news")
    with pytest.raises(PeerLostError, match="waited for rank 1, but it raised ValueError: boom"):
        communicator.barrier(60)


def test_a_message_of_another_shape_or_dtype_is_an_error() -> None:
    hub = LocalHub(2)
    sender, receiver = (LocalCommunicator(hub, "k", rank, 2) for rank in range(2))
    for room in (torch.empty(3), torch.empty(2, dtype=torch.int32)):
        sender.isend(torch.ones(2), 1, 0)
        with pytest.raises(CollectiveMismatchError, match=r"recv into (float32\[3\]|int32\[2\]) got float32\[2\]"):
            receiver.irecv(room, 0, 0).wait(30)
    sender.isend(torch.ones(2), 1, 0)
    box = torch.empty(2)
    receiver.irecv(box, 0, 0).wait(30)
    assert box.tolist() == [1.0, 1.0]


def test_sizes_that_differ_are_told_to_all_members() -> None:
    def body(group: GroupCoordinator) -> float:
        me = group.rank_in_group
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 1 entered all_gatherv float32 of shapes \[\[3\], \[2\], \[2\]\]"
        ):
            group.all_gatherv(torch.ones(2), [3, 2, 2] if me == 1 else [2, 2, 2])
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 takes \[2\] from rank 0, which sends \[1\]"):
            group.all_to_allv(torch.ones(3), [1, 1, 1], output_splits=[2, 1, 1] if me == 1 else [1, 1, 1])
        return group.all_reduce(torch.ones(1)).item()

    assert World("local")(3, body) == [3.0] * 3


def test_a_deadlock_of_some_ranks_is_an_error_while_others_run_on() -> None:
    told = threading.Event()

    def body(rank: int, groups: list[GroupCoordinator]) -> None:
        if rank == 3:
            assert told.wait(60)  # runs all the while
            return
        a, b = groups  # three groups of two, each rank waits in the one that the next rank comes to second
        with pytest.raises(CollectiveMismatchError) as caught:
            (a if rank in (0, 2) else b).barrier(timeout_s=60)
        text = str(caught.value)
        assert "ranks 0, 1, 2 wait and none can go on" in text
        for line in ("rank 0 in barrier of g0-1 waits for rank 1", "rank 1 in barrier of g1-2 waits for rank 2", "rank 3 runs"):
            assert line in text
        told.set()

    mine = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 2), (1, 2)], 3: []}
    World("local").many(4, lambda rank: mine[rank], body)


def test_who_waits_for_a_deadlock_is_told_too_and_a_helping_thread_is_waited_for() -> None:
    def body(group: GroupCoordinator) -> None:
        peer = {0: 1, 1: 0, 2: 0}[group.rank_in_group]
        with pytest.raises(CollectiveMismatchError, match=r"every rank waits.*rank 2 in recv from member 0 .* waits for rank 0"):
            group.recv(peer, timeout_s=60)

    World("local")(3, body)


def in_threads(hub: LocalHub, rank_main: Callable[[LocalCommunicator], None]) -> None:
    """Run every rank of the hub in a thread, until all have left."""
    communicators = [LocalCommunicator(hub, "k", rank, hub.world_size) for rank in range(hub.world_size)]

    def run(communicator: LocalCommunicator) -> None:
        try:
            rank_main(communicator)
        finally:
            hub.leave(communicator.rank_in_group)

    threads = [threading.Thread(target=run, args=(communicator,)) for communicator in communicators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def log_of(seed: int | None) -> list[str]:
    """What three ranks that compete say, in the order in which they say it."""
    said = list[str]()

    def rank_main(mine: LocalCommunicator) -> None:
        rank, box = mine.rank_in_group, torch.empty(1)
        for turn in range(6):
            mine.isend(torch.full((1,), float(turn)), (rank + 1) % 3, 0)
            said.append(f"{rank} sent {turn}")
            arriving = mine.irecv(box, (rank - 1) % 3, 0)
            said.append(f"{rank} sees {arriving.is_done()}")
            arriving.wait(30)
            said.append(f"{rank} has {box.item()}")
        mine.barrier(30)

    in_threads(LocalHub(3, seed=seed), rank_main)
    return said


def test_a_seed_makes_runs_repeatable() -> None:
    first, other = log_of(7), log_of(8)
    assert len(first) == 54
    assert log_of(7) == first
    assert log_of(7) == first
    assert log_of(8) == other != first


def test_with_a_seed_one_rank_runs_at_a_time_and_a_deadlock_is_an_error_still() -> None:
    inside = threading.Lock()
    errors: list[Exception] = []

    def rank_main(mine: LocalCommunicator) -> None:
        try:
            mine.barrier(30)
            for _ in range(20):
                assert inside.acquire(False), "two ranks run at once"
                inside.release()
                mine.all_reduce_(torch.ones(2), ReduceOp.SUM, 30)
            mine.irecv(torch.empty(1), 1 - mine.rank_in_group, 0).wait(30)
        except Exception as error:
            errors.append(error)

    in_threads(LocalHub(2, seed=1), rank_main)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
    assert "every rank waits and none can go on" in str(errors[0])


def test_a_rank_that_stays_away_is_not_waited_for() -> None:
    other_is_done = threading.Event()
    results: list[str] = []

    def rank_main(mine: LocalCommunicator) -> None:
        mine.barrier(30)
        if mine.rank_in_group == 0:
            assert other_is_done.wait(30)  # by other means than the hub
        else:
            mine.isend(torch.ones(1), 0, 0)
            other_is_done.set()
        mine.barrier(30)
        results.append("done")

    in_threads(LocalHub(2, seed=3), rank_main)
    assert results == ["done", "done"]


class _Mover(LocalCommunicator):  # type: ignore[misc]  # final for users
    """Sums nothing."""

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        return operation is not Operation.ALL_REDUCE


def test_what_cannot_sum_is_not_asked_to() -> None:
    spec = GroupSpec(name="tp#0", key="k", ranks=(Rank(0), Rank(1)), rank=Rank(0))
    group = open_coordinator(spec, _Mover(LocalHub(2), "k", 0, 2))
    for call in (group.all_reduce, group.all_reduce_, group.reduce, group.reduce_scatter):
        with pytest.raises(DtypeError, match=f"{call.__name__}: local has no arithmetic on torch.float32; convert it first"):
            call(torch.ones(2))
    group.close(grace_s=0.0)
