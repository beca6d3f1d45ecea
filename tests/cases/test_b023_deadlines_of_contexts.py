"""B023, through contexts: the config's deadlines reach every group and its CPU twin; that of joining reaches none."""

import re
import threading
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerTimeoutError
from parallel_runtime.launch import run_threads

pytestmark = pytest.mark.timeout(60)

WAYS = pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "auto"), ("gloo", "off")])
WAITED = r"waited (0\.[5-9]\d*|[1-9]\.\d) s"
SHORT = Deadlines(join_s=40, collective_s=0.5, control_s=0.5, p2p_s=0.5)
OPERATIONS: tuple[tuple[str, str, Callable[[ParallelContext], object]], ...] = (
    ("tp", "all_reduce", lambda ctx: ctx.tp.all_reduce(torch.ones(2))),
    ("tp", "barrier", lambda ctx: ctx.tp.barrier()),
    ("tp", "broadcast_object", lambda ctx: ctx.tp.broadcast_object(1, 1)),
    ("pp", "recv", lambda ctx: ctx.pp.recv(1)),
    ("ep", "all_to_all", lambda ctx: ctx.ep.all_to_all(torch.ones(2))),
    ("world", "all_gather", lambda ctx: ctx.world.all_gather(torch.ones(2))),
    ("tp+pp", "all_reduce", lambda ctx: ctx.open_group("tp", "pp").all_reduce(torch.ones(2))),
)


@WAYS
@pytest.mark.parametrize(("group", "operation", "call"), OPERATIONS, ids=lambda part: part if isinstance(part, str) else "")
def test_b023_the_deadline_of_the_config_ends_it(
    backend: str, shm: str, group: str, operation: str, call: Callable[[ParallelContext], object]
) -> None:
    over = threading.Event()

    def body(ctx: ParallelContext) -> None:
        ctx.open_group("tp", "pp")
        if ctx.rank > 0:
            assert over.wait(30)
            return
        try:
            with pytest.raises(PeerTimeoutError, match=rf"^{re.escape(group)}#0 seq \d+ {operation}\(.*\) {WAITED} for rank"):
                call(ctx)
        finally:
            over.set()

    config = ParallelConfig.model_validate({"tp": 2, "backend": backend, "shm": shm, "deadlines": SHORT.model_dump()})
    run_threads(body, config.replace(pp=2, ep=2), timeout_s=50)


@WAYS
def test_b023_every_group_and_its_twin_says_so(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> None:
        groups = (*ctx.groups().values(), ctx.open_group("tp", "pp"), ctx.open_group("tp", "dp", "pp"))
        assert {(g.timeouts.collective_s, g.timeouts.control_s, g.timeouts.p2p_s) for g in groups} == {(3.0, 4.0, 5.0)}

    deadlines = Deadlines(join_s=40, collective_s=3, control_s=4, p2p_s=5)
    config = ParallelConfig.model_validate(
        {"tp": 2, "pp": 2, "backend": backend, "shm": shm, "deadlines": deadlines.model_dump()}
    )
    run_threads(body, config, timeout_s=50)
