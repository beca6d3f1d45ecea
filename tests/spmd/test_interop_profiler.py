"""Ranges of torch's profiler carry the names of groups."""

import torch
from torch.profiler import ProfilerActivity, profile

from parallel_runtime import ParallelConfig, ParallelContext, run_threads


def test_ranges_name_group_operation_and_shape() -> None:
    def body(ctx: ParallelContext) -> list[str]:
        if ctx.rank == 1:
            ctx.tp.all_reduce_(torch.ones(8, 3))
            return []
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            ctx.tp.all_reduce_(torch.ones(8, 3))
            ctx.pp.barrier()
        return [event.name for event in seen.events()]

    names = run_threads(body, ParallelConfig(tp=2), timeout_s=60)[0]
    assert "tp#0 all_reduce_(float32[8, 3])" in names
    assert "pp#0 barrier()" in names
