"""B023: a time-out that does not reach sub-groups and their control plane."""

import threading
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator, GroupTimeouts
from parallel_runtime.errors import ArgumentError, PeerTimeoutError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))
OPERATIONS: dict[str, Callable[[GroupCoordinator], object]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "barrier": lambda group: group.barrier(),
    "broadcast_object": lambda group: group.broadcast_object(1, 1),
    "all_gather_object": lambda group: group.all_gather_object(1),
    "recv": lambda group: group.recv(1),
    "recv_object": lambda group: group.recv_object(1),
    "send": lambda group: group.send(torch.ones(2), 1),
    "all_to_all": lambda group: group.all_to_all(torch.ones(2)),
    "all_gather": lambda group: group.all_gather(torch.ones(2)),
}


@KINDS
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_b023_the_groups_deadline_ends_every_operation(kind: str, operation: str) -> None:
    over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        assert group.timeouts == short
        if group.is_last_rank:
            assert over.wait(30)
            return
        try:
            with pytest.raises(PeerTimeoutError, match=rf"g0-1 seq 1 {operation}.*(waited|within) 0\.[45]\d* s"):
                OPERATIONS[operation](group)
        finally:
            over.set()

    short = GroupTimeouts(collective_s=0.5, control_s=0.5, p2p_s=0.5)
    World(kind)(2, body, timeouts=short)


@KINDS
def test_b023_one_operation_may_have_its_own(kind: str) -> None:
    over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            assert over.wait(30)
            return
        for wrong in (0.0, -1.0, float("nan")):
            with pytest.raises(ArgumentError, match="must be a number of seconds above 0"):
                group.all_reduce(torch.ones(1), timeout_s=wrong)
        try:
            with pytest.raises(PeerTimeoutError, match=r"(waited|within) 0\.25 s"):
                group.all_reduce_(torch.ones(1), timeout_s=0.25)
        finally:
            over.set()

    World(kind)(2, body)
