"""Sums through memory that GPUs share. Needs two of them, joined by NVLink; has not run yet."""

import pytest
import torch

from parallel_runtime.comm.select import ONE_SHOT_BYTES, SYMMETRIC_BYTES
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COUNTS = (1, 7, ONE_SHOT_BYTES // 4, ONE_SHOT_BYTES // 4 + 3, SYMMETRIC_BYTES // 4, SYMMETRIC_BYTES // 4 + 5)


def sums(ctx: ParallelContext) -> str:
    """Every path, on ordinary and symmetric tensors, against integers that every order of adding sums exactly."""
    group = ctx.tp
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for count in COUNTS:
            for x in (torch.empty(count, dtype=dtype, device=group.device), group.symmetric_empty((count,), dtype)):
                x.copy_(torch.arange(count, device=x.device) % 7 + group.rank_in_group)
                want = (torch.arange(count, device=x.device) % 7 * 2 + 1).to(dtype)
                assert group.all_reduce_(x) is x
                assert torch.equal(x, want), (dtype, count)
    x = torch.full((5,), float(group.rank_in_group), device=group.device)
    assert torch.equal(group.all_reduce(x, "avg"), torch.full_like(x, 0.5))
    assert torch.equal(group.all_reduce(x, "max"), torch.ones_like(x))
    return group.describe(paths=True)


def test_sums_equal_the_reference_and_the_group_says_what_served_them() -> None:
    for text in launch(sums, ParallelConfig(tp=2, device="cuda")):
        assert "tensors over symm_mem" in text or "no symmetric memory: " in text
