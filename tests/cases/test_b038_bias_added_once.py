"""B038: the bias of a row-split layer is added once, and its gradient is whole."""

import pytest
import torch
from torch import nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.layers import RowParallelLinear
from parallel_runtime.layers.sources import span
from tests.unit.layers.ranks import on_ranks


@pytest.mark.parametrize("tp", [2, 3])
def test_b038_output_and_gradient_of_the_bias_equal_the_plain_layer(tp: int) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 4, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    nn.init.constant_(plain.bias, 100.0)
    expected = plain(x)
    expected.square().mean().backward()

    def run(group: GroupCoordinator) -> None:
        layer = RowParallelLinear(8, 4, tp=group, bias=True, dtype=torch.float64)
        layer.load(plain.weight, plain.bias)
        mine = x[:, span(layer.shards[group.rank_in_group])]
        with torch.inference_mode():
            assert (layer(mine) - expected).abs().max() <= 1e-6
        out = layer(mine)
        assert (out - expected).abs().max() <= 1e-6
        out.square().mean().backward()
        assert layer.bias is not None
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)

    on_ranks(tp, run)


def test_b038_loading_the_bias_does_not_slice_it() -> None:
    bias = torch.arange(4.0)

    def run(group: GroupCoordinator) -> None:
        layer = RowParallelLinear(8, 4, tp=group, bias=True)
        layer.load(torch.zeros(4, 8), bias)
        assert layer.bias is not None
        assert torch.equal(layer.bias, bias)

    on_ranks(2, run)
