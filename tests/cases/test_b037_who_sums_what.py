"""B037: experts, their columns and the shared expert are each summed once, over the right ranks."""

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from tests.unit.layers.ranks import sizes_of
from tests.unit.layers.test_moe import Weights, build, tokens_of

pytestmark = pytest.mark.timeout(30)

SPLITS = (
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, etp=1),
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(dp=2, ep=2),
    ParallelConfig(dp=2, etp=2),
    ParallelConfig(tp=4, ep=2, etp=2),
    ParallelConfig(tp=2, dp=2, ep=2, etp=2),
    ParallelConfig(dp=4, ep=2, etp=2),
    ParallelConfig(tp=2, dp=2, ep=4),
)


def outputs(parallel: ParallelConfig, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    def run(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        x_TD = tokens_of(ctx.coordinate.dp, counts=(5, 2, 3, 1))
        with torch.inference_mode():
            return x_TD, build(ctx, weights)(x_TD)

    return run_threads(run, parallel)


@pytest.mark.parametrize("parallel", SPLITS, ids=sizes_of)
def test_b037_every_rank_has_the_output_of_one_process(parallel: ParallelConfig) -> None:
    weights = Weights()
    for x_TD, found in outputs(parallel, weights):
        ((_, whole),) = run_threads(lambda ctx, x: (x, build(ctx, weights)(x)), ParallelConfig(), x_TD)
        assert (found - whole).abs().max() <= 1e-5


@pytest.mark.parametrize("parallel", SPLITS, ids=sizes_of)
def test_b037_each_part_alone(parallel: ParallelConfig) -> None:
    weights = Weights()
    no_experts, no_shared = Weights(), Weights()
    no_experts.experts = [(gate, up, torch.zeros_like(down)) for gate, up, down in weights.experts]
    no_shared.shared = (weights.shared[0], weights.shared[1], torch.zeros_like(weights.shared[2]))
    for x_TD, found in outputs(parallel, no_experts):
        torch.testing.assert_close(found, weights.shared_part(x_TD), atol=1e-5, rtol=0)
    for x_TD, found in outputs(parallel, no_shared):
        torch.testing.assert_close(found, weights.routed(x_TD), atol=1e-5, rtol=0)
