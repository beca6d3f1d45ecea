"""A source does not wait for its readers: what they read is compared with what it said, also once it has gone on."""

import threading

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import CollectiveMismatchError, PeerError, PeerLostError
from tests.spmd.worlds import World


@pytest.mark.parametrize("then", ["nothing", "broadcast", "broadcast_object", "barrier"])
@pytest.mark.parametrize("sizes", [(4, 7), (7, 4)])
def test_a_reader_that_expects_another_size_is_told(sizes: tuple[int, int], then: str) -> None:
    has_gone_on = threading.Event()

    def body(group: GroupCoordinator) -> str:
        if group.rank_in_group == 1:
            assert has_gone_on.wait(20)
        try:
            group.broadcast(torch.zeros(sizes[group.rank_in_group]), src=0)
            has_gone_on.set()
            if then == "broadcast":
                group.broadcast(torch.zeros(sizes[group.rank_in_group]), src=0)
            elif then == "broadcast_object":
                group.broadcast_object("x" if group.is_first_rank else None, src=0)
            elif then == "barrier":
                group.barrier()
        except PeerError as error:
            return type(error).__name__
        return "fine"

    results = World("shm")(2, body)
    assert results[1] in (CollectiveMismatchError.__name__, PeerLostError.__name__), "the source may have left by now"
