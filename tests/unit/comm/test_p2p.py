"""Tensors from one member to another: a mismatch is an error on both sides, and the next message is fine."""

import logging

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


@KINDS
@pytest.mark.parametrize("room", [torch.ones(2), torch.ones(8), torch.ones(4, dtype=torch.float64), torch.ones(2, 2)])
def test_a_mismatch_is_an_error_on_both_sides(kind: str, room: torch.Tensor) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            with pytest.raises(
                CollectiveMismatchError, match=r"sent float32\[4\] with tag 3 to member 1: the receiver has room for"
            ):
                group.send(torch.zeros(4), tag=3)
            handle = group.isend(torch.zeros(4))
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match="the receiver has room for"):
                    handle.wait()
            group.send(torch.full((4,), 5.0), tag=3)
        else:
            kept = room.clone()
            with pytest.raises(
                CollectiveMismatchError, match=r"the sender sent float32\[4\], receiving from member 0 with tag 3"
            ):
                group.recv(tag=3, out=room)
            receiving = group.irecv(out=room)
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match="the sender sent"):
                    receiving.wait()
            assert torch.equal(room, kept)
            assert group.recv(tag=3).tolist() == [5.0] * 4

    World(kind)(2, body)


@KINDS
def test_a_failed_send_that_nobody_waits_for_is_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            group.isend(torch.zeros(4))
            group.barrier()
            group.isend(torch.zeros(1))
        else:
            with pytest.raises(CollectiveMismatchError):
                group.recv(out=torch.ones(2))
            group.barrier()
            group.recv()

    with caplog.at_level(logging.ERROR):
        World(kind)(2, body)
    assert "a send whose handle nobody waited for failed: sent float32[4]" in caplog.text


@KINDS
def test_receives_started_first_are_filled_first(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            for step in range(3):
                group.send(torch.tensor([step]))
        else:
            first, second, third = (group.irecv() for _ in range(3))
            assert third.wait().item() == 2
            assert first.wait().item() == 0
            assert second.wait().item() == 1
            assert second.wait().item() == 1

    World(kind)(2, body)


@KINDS
def test_an_output_must_be_writable(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        expanded = torch.zeros(1).expand(3)
        for call in (group.recv, group.irecv):
            with pytest.raises(ArgumentError, match="cannot write into an expanded tensor"):
                call(out=expanded)
        with pytest.raises(ArgumentError, match="cannot write into an expanded tensor"):
            group.exchange(torch.zeros(3), out=expanded)

    World(kind)(2, body)
