"""Tensors from one member to another: a mismatch is an error on both sides, and the next message is fine."""

import logging
import threading
from typing import NoReturn

import pytest
import torch

from parallel_runtime.comm import (
    C10dCommunicator,
    GroupCoordinator,
    GroupSpec,
    LocalCommunicator,
    LocalHub,
    Operation,
    open_coordinator,
)
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerLostError, PeerTimeoutError
from parallel_runtime.terms import Rank
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


@KINDS
def test_a_message_out_of_sequence_is_an_error_on_both_sides(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            group._core.traffic.streams.sent[1, 0] = 5
            with pytest.raises(CollectiveMismatchError, match=r"to member 1: expected message no. 1, got no. 6"):
                group.send(torch.ones(1))
            group._core.traffic.streams.sent[1, 3] = 5
            group.send_object("lost one")
        else:
            with pytest.raises(
                CollectiveMismatchError, match=r"expected message no. 1, got no. 6, receiving from member 0 with tag 0"
            ):
                group.recv()
            with pytest.raises(CollectiveMismatchError, match=r"from member 0: expected message no. 1 of the stream, got no. 6"):
                group.recv_object()

    World(kind)(2, body)


@KINDS
def test_a_message_is_received_as_what_it_was_sent(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            for _ in range(2):
                group.send_object([1], tag=2)
                with pytest.raises(CollectiveMismatchError, match="the sender sent a tensor dict, the receiver takes an object"):
                    group.send_tensor_dict({"x": torch.ones(2), "big": torch.ones(100_000)}, tag=2)
                assert group.broadcast_object({"x": torch.ones(100_000)}) is not None
                assert group.broadcast_tensor_dict({"x": torch.ones(2)}) is not None
                group.broadcast_object(1)
                assert group.broadcast_object((torch.float32, (2,))) is not None
            return
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError, match="the sender sent an object, the receiver takes a tensor dict"):
                group.recv_tensor_dict(tag=2)
            with pytest.raises(
                CollectiveMismatchError, match="member 0: the sender sent a tensor dict, the receiver takes an obj"
            ):
                group.recv_object(tag=2)
            with pytest.raises(CollectiveMismatchError, match="the sender sent an object, the receiver takes a tensor dict"):
                group.broadcast_tensor_dict(None)
            with pytest.raises(CollectiveMismatchError, match="the sender sent a tensor dict, the receiver takes an object"):
                group.broadcast_object(None)
            assert group.broadcast_object(None) == 1
            with pytest.raises(CollectiveMismatchError, match="an object, the receiver takes the shape of a scatter"):
                group.scatter(None)

    World(kind)(2, body)


def test_after_a_failed_receive_the_stream_is_over() -> None:
    over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            assert over.wait(30)
            return
        first, second = group.irecv(), group.irecv()
        with pytest.raises(PeerTimeoutError, match=r"irecv.*waited 0.1 s for rank 0"):
            first.wait(0.1)
        with pytest.raises(PeerTimeoutError, match=r"waited 0.1 s for rank 0"):
            first.wait(0.1)
        with pytest.raises(PeerLostError, match=r"nothing more can be received from member 0: waited 0.1 s"):
            second.wait()
        with pytest.raises(PeerLostError, match=r"nothing more can be received from member 0, tag 0: waited 0.1 s"):
            group.recv()
        with pytest.raises(PeerTimeoutError, match=r"recv_object from member 0 tag 0.*waited 0.1 s"):
            group.recv_object(timeout_s=0.1)
        with pytest.raises(PeerLostError, match=r"nothing more can be received from member 0: waited 0.1 s"):
            group.recv_object()
        with pytest.raises(ArgumentError, match=r"must be a number of seconds above 0"):
            first.wait(-1)
        over.set()

    World("local")(2, body)


class _Tagless(LocalCommunicator):  # type: ignore[misc]  # final for users
    """Like nccl, matches sends with receives in their order, whatever the tags."""

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        return operation not in (Operation.SEND, Operation.RECV)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> NoReturn:
        raise AssertionError("asked to send")

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> NoReturn:
        raise AssertionError("asked to receive")


def test_what_cannot_tell_tags_apart_is_not_asked_to_send() -> None:
    hub = LocalHub(2)
    ends = []
    for rank in range(2):
        spec = GroupSpec(name="pp#0", key=f"k{rank}", ranks=(Rank(0), Rank(1)), rank=Rank(rank))
        ends.append(open_coordinator(spec, _Tagless(hub, "d", rank, 2), control=LocalCommunicator(hub, "c", rank, 2)))
    first, second = ends
    sent = [first.isend(torch.full((3,), float(tag)), tag=tag) for tag in (1, 2)]
    first.send_object({"big": torch.ones(20_000)})
    assert second.recv(tag=2).tolist() == [2.0] * 3
    assert second.recv(tag=1).tolist() == [1.0] * 3
    assert second.recv_object()["big"].sum() == 20_000
    for handle in sent:
        handle.wait()


def test_nccl_is_such_a_backend() -> None:
    backends = {}
    for backend in ("gloo", "nccl"):
        communicator = C10dCommunicator.__new__(C10dCommunicator)
        communicator.backend = backend
        backends[backend] = [communicator.supports(op, torch.uint8, 8) for op in (Operation.SEND, Operation.ALL_REDUCE)]
    assert backends == {"gloo": [True, True], "nccl": [False, True]}
