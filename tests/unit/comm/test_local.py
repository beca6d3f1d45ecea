"""Ranks as threads: what could only hang is an error with a table."""

import threading

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator, LocalCommunicator, LocalHub
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerLostError
from tests.spmd.worlds import World


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least one rank"):
        LocalHub(0)
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


def test_sizes_that_differ_are_found_where_they_arrive() -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(CollectiveMismatchError, match=r"all_gatherv into float32\[\d\] got float32\[\d\]"):
            group.all_gatherv(torch.ones(2), [2, 3] if group.is_first_rank else [3, 2])

    World("local")(2, body)
