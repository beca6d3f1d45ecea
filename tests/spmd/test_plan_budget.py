"""A context opens what its plan says: descriptors counted on real groups, ranks as threads of one process or as processes."""

import gc
import os
import threading
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.launch import launch, run_threads

DESCRIPTORS = Path("/proc/self/fd")
COUNTING = threading.Lock()
"""Listing descriptors opens one, which another thread would count."""

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /proc")]


def count_descriptors(ctx: ParallelContext) -> int:
    """Descriptors of the process while every rank has used every group and none has left."""
    for group in ctx.groups().values():
        group.barrier()
    with COUNTING:
        count = len(os.listdir(DESCRIPTORS))
    ctx.world.barrier()
    return count


@pytest.mark.parametrize("config", [ParallelConfig(tp=2), ParallelConfig(tp=2, pp=2), ParallelConfig(tp=2, dp=2, ep=2)])
def test_descriptors_are_as_planned(config: ParallelConfig) -> None:
    config = config.replace(backend="gloo", shm="off")
    run_threads(count_descriptors, config)
    gc.collect()
    before = len(os.listdir(DESCRIPTORS))
    planned = config.plan().budgets().world.descriptors
    assert set(run_threads(count_descriptors, config)) == {before + planned + config.world_size}  # a monitor for each rank


def descriptors_of_a_second_context(ctx: ParallelContext, config: ParallelConfig) -> tuple[int, int]:
    before = len(os.listdir(DESCRIPTORS))
    with ParallelContext(config, identity=ctx.identity, store=ctx.store) as second:
        for group in second.groups().values():
            group.barrier()
        count = len(os.listdir(DESCRIPTORS)) - before
        ctx.world.barrier()
        return count, second.plan.for_rank(ctx.rank).budget.descriptors


@pytest.mark.processes
def test_descriptors_of_shared_memory_are_as_planned() -> None:
    config = ParallelConfig(tp=2, pp=2)
    for count, planned in launch(descriptors_of_a_second_context, config, config, timeout_s=50):
        assert count - 1 == planned == 4 + 2 + 2  # the monitor listens, too
