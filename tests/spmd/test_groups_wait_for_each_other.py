"""Messages larger than any ring move on while their sender waits in another group for members that wait for them."""

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads

BIG = 1 << 20


def around(ctx: ParallelContext) -> float:
    """0 waits for 1, 1 for 3, 3 for 2, and 2 for the end of what 0 sends."""
    received = 0.0
    if ctx.rank == 0:
        ctx.pp.send_object(torch.ones(BIG))
    if ctx.rank == 1:
        ctx.pp.recv_object()
    if ctx.rank == 2:
        value = ctx.pp.recv_object()
        assert isinstance(value, torch.Tensor)
        received = float(value.sum())
    ctx.tp.barrier()
    if ctx.rank == 3:
        ctx.pp.send_object(3)
    return received


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shm", ["on", "off"])
def test_a_wait_in_one_group_moves_the_messages_of_another(shm: str) -> None:
    config = ParallelConfig(tp=2, pp=2, backend="gloo", shm=shm, deadlines={"collective_s": 10, "control_s": 10, "p2p_s": 10})  # type: ignore[arg-type]  # as a user may write it
    assert run_threads(around, config, timeout_s=50) == [0.0, 0.0, float(BIG), 0.0]
