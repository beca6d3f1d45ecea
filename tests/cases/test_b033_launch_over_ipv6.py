"""B033: ranks meet over IPv6 where the host has it."""

import socket

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def meet(ctx: ParallelContext) -> tuple[str | None, float]:
    return ctx.identity.master_host, ctx.tp.all_reduce(torch.ones(1)).item()


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")
def test_b033_two_ranks_meet_over_ipv6() -> None:
    assert launch(meet, ParallelConfig(tp=2), host="::1", timeout_s=30) == [("::1", 2.0)] * 2
