"""Layers and functional collectives of torch under ``torch.compile``: no graph break, forward and backward as in eager mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional

from parallel_runtime import GroupCoordinator, ParallelConfig, ParallelContext, run_threads
from parallel_runtime.layers import (
    ColumnParallelLinear,
    GatedFeedForward,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_group,
)
from parallel_runtime.topology.shards import split_even

WIDTH, VOCABULARY = 8, 11  # neither divides by 3


def _fill(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(shape)


class _Block(nn.Module):
    """One of each: embedding, gated part, column and row parallel with bias, a gathered part, head."""

    def __init__(self, tp: GroupCoordinator) -> None:
        super().__init__()
        self.tp = tp
        self.embedding, self.head = VocabParallelEmbedding(VOCABULARY, WIDTH, tp=tp), ParallelHead(VOCABULARY, WIDTH, tp=tp)
        self.gated = GatedFeedForward(WIDTH, 12, tp=tp)
        self.up, self.down = ColumnParallelLinear(WIDTH, 10, tp=tp, bias=True), RowParallelLinear(10, WIDTH, tp=tp, bias=True)
        self.embedding.load(_fill(VOCABULARY, WIDTH))
        self.head.load(_fill(VOCABULARY, WIDTH).cos())
        self.gated.gate_up_proj.load([_fill(12, WIDTH), _fill(12, WIDTH).cos()])
        self.gated.down_proj.load(_fill(WIDTH, 12))
        self.up.load([_fill(10, WIDTH)], [_fill(10)])
        self.down.load(_fill(WIDTH, 10), _fill(WIDTH))
        self.shards = split_even(10, parts=tp.world_size)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.gated(hidden)
        wide = self.up(hidden)
        hidden = hidden + self.down(torch.relu(wide)) + gather_from_group(wide, self.shards, self.tp)[..., :WIDTH]
        logits: Tensor = self.head(hidden)
        return logits


def _gradients(block: _Block, call: Callable[[Tensor], Tensor], ids: Tensor) -> list[Tensor]:
    block.zero_grad()
    torch.autograd.backward(call(ids).pow(2).mean())
    return [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize("tp", [3])
def test_layers_compile_whole_and_compute_as_in_eager_mode(tp: int) -> None:
    torch._dynamo.reset()
    counters.clear()

    def body(ctx: ParallelContext) -> None:
        block = _Block(ctx.tp)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (3, 5, 9):
            ids = torch.arange(length) * 4 % VOCABULARY
            with torch.no_grad():
                assert torch.allclose(compiled(ids), block(ids), atol=1e-6)
            got, wanted = _gradients(block, compiled, ids), _gradients(block, block, ids)
            assert len(got) == len(list(block.parameters()))
            assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(got, wanted, strict=True))

    run_threads(body, ParallelConfig(tp=tp), timeout_s=100)
    assert counters["stats"]["unique_graphs"] == 2 * tp  # with and without gradients, on each rank, for all lengths
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functional_collectives_of_torch_find_the_group_by_its_name(backend: str) -> None:
    torch._dynamo.reset()

    def reduce(x: Tensor, name: str) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x * 2, "sum", name))  # type: ignore[no-any-return]

    compiled = torch.compile(reduce, backend=backend, fullgraph=True)

    def body(ctx: ParallelContext) -> None:
        x = torch.arange(4.0) + ctx.rank
        for group in (ctx.tp, ctx.dp):
            wanted = group.all_reduce(x * 2)
            assert torch.equal(compiled(x, group.process_group.group_name), wanted)
            assert torch.equal(functional.all_reduce(x * 2, "sum", group.process_group), wanted)

    for config in (ParallelConfig(tp=2), ParallelConfig(dp=2)):
        run_threads(body, config, timeout_s=60)
