"""Every operation that waits for a peer ends at its own deadline; what was started first is done first."""

import threading
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import PeerTimeoutError
from tests.spmd.worlds import MAKERS, World

pytestmark = pytest.mark.timeout(60)

SHORT_S = 0.05
Call = Callable[[GroupCoordinator, torch.Tensor], object]
CALLS: dict[str, Call] = {
    "all_reduce": lambda group, x: group.all_reduce(x, timeout_s=SHORT_S),
    "all_reduce_": lambda group, x: group.all_reduce_(x, timeout_s=SHORT_S),
    "all_gather": lambda group, x: group.all_gather(x, timeout_s=SHORT_S),
    "all_gatherv": lambda group, x: group.all_gatherv(x, [4, 4], timeout_s=SHORT_S),
    "all_gatherv of unknown sizes": lambda group, x: group.all_gatherv(x, timeout_s=SHORT_S),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x, timeout_s=SHORT_S),
    "reduce_scatterv": lambda group, x: group.reduce_scatterv(x, [1, 3], timeout_s=SHORT_S),
    "all_to_all": lambda group, x: group.all_to_all(x, timeout_s=SHORT_S),
    "all_to_allv": lambda group, x: group.all_to_allv(x, [1, 3], output_splits=[1, 3], timeout_s=SHORT_S),
    "broadcast": lambda group, x: group.broadcast(x, 1, timeout_s=SHORT_S),
    "broadcast_": lambda group, x: group.broadcast_(x, 1, timeout_s=SHORT_S),
    "reduce": lambda group, x: group.reduce(x, 0, timeout_s=SHORT_S),
    "gather": lambda group, x: group.gather(x, 0, timeout_s=SHORT_S),
    "scatter": lambda group, x: group.scatter(None, 1, timeout_s=SHORT_S),
    "barrier": lambda group, x: group.barrier(timeout_s=SHORT_S),
    "send": lambda group, x: group.send(x, timeout_s=SHORT_S),
    "isend": lambda group, x: group.isend(x).wait(SHORT_S),
    "recv": lambda group, x: group.recv(timeout_s=SHORT_S),
    "irecv": lambda group, x: group.irecv().wait(SHORT_S),
    "exchange": lambda group, x: group.exchange(x, timeout_s=SHORT_S),
    "recv_object": lambda group, x: group.recv_object(timeout_s=SHORT_S),
    "broadcast_object": lambda group, x: group.broadcast_object(None, 1, timeout_s=SHORT_S),
    "all_gather_object": lambda group, x: group.all_gather_object(1, timeout_s=SHORT_S),
    "recv_tensor_dict": lambda group, x: group.recv_tensor_dict(timeout_s=SHORT_S),
    "broadcast_tensor_dict": lambda group, x: group.broadcast_tensor_dict(None, 1, timeout_s=SHORT_S),
}


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_keeps_its_deadline(kind: str, name: str) -> None:
    is_over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            assert is_over.wait(20)
            return
        try:
            with pytest.raises(PeerTimeoutError, match=r"0\.0(5|[34]\d*) s"):
                CALLS[name](group, torch.ones(4))
        finally:
            is_over.set()

    World(kind)(2, body)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_what_was_started_first_arrives_first(kind: str) -> None:
    """Whatever order the handles are waited for in, and whatever runs in between."""

    def body(group: GroupCoordinator) -> None:
        sends, receives = [], []
        for step in range(12):
            receives.append(group.irecv(tag=step % 2))
            sends.append(group.isend(torch.full((1 + step * 500,), step), tag=step % 2))
            assert group.all_reduce(torch.tensor([step])).item() == 2 * step
        group.send_object("last", tag=1)
        for step in (7, 11, 0, 10, 3, 9, 1, 2, 4, 5, 6, 8):
            assert torch.equal(receives[step].wait(), torch.full((1 + step * 500,), step))
        for handle in reversed(sends):
            handle.wait()
        assert group.recv_object(tag=1) == "last"

    World(kind)(2, body)
