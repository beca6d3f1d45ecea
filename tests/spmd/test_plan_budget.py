"""A context opens what its plan says: descriptors counted on real gloo groups, ranks as threads of one process."""

import gc
import os
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.launch.threads import run_threads

DESCRIPTORS = Path("/proc/self/fd")

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /proc")]


def count_descriptors(ctx: ParallelContext) -> int:
    """Descriptors of the process while every rank has used every group and none has left."""
    for group in ctx.groups().values():
        group.barrier()
    count = len(os.listdir(DESCRIPTORS))
    ctx.world.barrier()
    return count


@pytest.mark.parametrize("config", [ParallelConfig(tp=2), ParallelConfig(tp=2, pp=2), ParallelConfig(tp=2, dp=2, ep=2)])
def test_descriptors_are_as_planned(config: ParallelConfig) -> None:
    config = config.replace(backend="gloo")
    run_threads(count_descriptors, config)
    gc.collect()
    before = len(os.listdir(DESCRIPTORS))
    assert set(run_threads(count_descriptors, config)) == {before + config.plan().budgets().world.descriptors}
