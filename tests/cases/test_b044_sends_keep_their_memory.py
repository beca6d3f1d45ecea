"""B044: a buffer is reused or freed before its asynchronous send is done."""

import gc
import logging
import threading

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))
BIG = 4 << 20


@KINDS
def test_b044_a_dropped_handle_and_tensor_still_arrive(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            tensor = torch.full((BIG,), 3.0)
            handle = group.isend(tensor, copy=False)
            del handle, tensor
            gc.collect()
            torch.full((2 * BIG,), 9.0)
            group.barrier()
        else:
            group.barrier()
            assert bool((group.recv() == 3).all())

    World(kind)(2, body)


@KINDS
def test_b044_a_send_copies_unless_told_otherwise(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            tensor = torch.ones(BIG)
            handle = group.isend(tensor)
            later = group.isend_tensor_dict({"x": tensor})
            tensor.fill_(7)
            group.barrier()
            handle.wait()
            handle.wait()
            later.wait()
            assert handle.is_done()
        else:
            group.barrier()
            assert bool((group.recv() == 1).all())
            assert bool((group.recv_tensor_dict()["x"] == 1).all())

    World(kind)(2, body)


@KINDS
def test_b044_many_sends_back_to_back_arrive_intact(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            tensor = torch.empty(4096)
            for step in range(50):
                group.isend(tensor.fill_(step))
        else:
            handles = [group.irecv() for _ in range(50)]
            for step in reversed(range(50)):
                assert bool((handles[step].wait() == step).all())
                assert handles[step].is_done()

    World(kind)(2, body)


@KINDS
def test_b044_leaving_with_unfinished_sends_says_how_many(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    closed = threading.Event()

    def body(group: GroupCoordinator) -> int:
        if group.is_last_rank:
            assert closed.wait(30)
            return 0
        group.isend(torch.ones(3))
        group.isend(torch.ones(3))
        try:
            return group.close(grace_s=0.1)
        finally:
            closed.set()

    with caplog.at_level(logging.WARNING):
        assert World(kind)(2, body) == [2, 0]
    assert "dropped 2 sends that no receiver had confirmed" in caplog.text
