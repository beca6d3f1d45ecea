"""B064: descriptors and threads are back where they were after any number of contexts."""

import gc
import os

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch

CONFIG = ParallelConfig(tp=2, pp=2)


def usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def open_and_close(ctx: ParallelContext, *, how: str, rounds: int = 20) -> list[tuple[int, int]]:
    seen = []
    gc.collect()
    for _ in range(rounds):
        try:
            with ParallelContext(CONFIG) as other:
                other.world.all_reduce(torch.ones(1))
                other.open_group("tp", "pp").barrier()
                if how == "raise":
                    other.world.barrier()
                    raise KeyError("out")
        except KeyError:
            pass
        ctx.world.barrier()
        seen.append(usage())
    return seen


def both_ways(ctx: ParallelContext) -> list[list[tuple[int, int]]]:
    return [open_and_close(ctx, how=how) for how in ("normal", "raise")]


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_b064_twenty_contexts_leave_nothing() -> None:
    for rank, ways in enumerate(launch(both_ways, CONFIG, timeout_s=220)):
        for seen in ways:
            for what, first, last in zip(("descriptors", "threads"), seen[0], seen[-1], strict=True):
                assert last <= first + 2, f"rank {rank}: {what} {seen}"
