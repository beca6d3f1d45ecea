"""B058: compiled code calls the group it is handed, of whichever context, and never a dead one.

vllm#8526, vllm#4754, sglang#9564, pytorch#189330: operators registered per group or per import, names that outlive their group.
"""

import importlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from parallel_runtime import ParallelConfig, ParallelContext, launch, run_threads
from parallel_runtime.comm import GroupCoordinator, traced

Compiled = Callable[[Tensor, GroupCoordinator, GroupCoordinator], Tensor]

_CONFIGS: Final = (ParallelConfig(tp=2), ParallelConfig(dp=2), ParallelConfig(tp=2, dp=2), ParallelConfig(tp=2))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def _both_sums(x: Tensor, tp: GroupCoordinator, dp: GroupCoordinator) -> Tensor:
    return tp.all_reduce(x) * 2 + dp.all_reduce(x.sin(), "max")


def _every_kind(x: Tensor, tp: GroupCoordinator, dp: GroupCoordinator) -> Tensor:
    joined = tp.all_gather(x, dim=1)
    mine = tp.reduce_scatter(joined, dim=1)
    dealt = tp.all_to_all(mine, 1, 0)
    sizes = [dealt.shape[0]] * tp.world_size
    shares = tp.reduce_scatterv(tp.all_gatherv(dealt, sizes), sizes)
    splits = [shares.shape[0] // tp.world_size] * tp.world_size
    back = tp.all_to_allv(shares, splits, output_splits=splits)
    total = dp.all_reduce_(tp.broadcast(back, 0).sum(0))
    return dp.broadcast_(total, dp.world_size - 1)


def _use(ctx: ParallelContext, plain: Compiled, compiled: Compiled) -> bool:
    equal = True
    for rows in (2, 4, 6):
        x = torch.arange(rows * 4.0).view(rows, 4) + ctx.rank
        equal &= torch.equal(compiled(x, ctx.tp, ctx.dp), plain(x, ctx.tp, ctx.dp))
    return equal


@pytest.mark.parametrize("plain", [_both_sums, _every_kind])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b058_each_call_uses_the_group_it_is_handed(plain: Compiled, backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(plain, backend=backend, fullgraph=True, dynamic=True)
    graphs: list[int] = []
    for config in _CONFIGS if plain is _both_sums else (_CONFIGS[0], _CONFIGS[0]):
        assert all(run_threads(_use, config, plain, compiled, timeout_s=100))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0]  # neither a new context nor a new size made a graph
    assert not counters["graph_break"]


def test_b058_a_closed_group_is_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_both_sums, backend="aot_eager", fullgraph=True)

    def keep(ctx: ParallelContext) -> tuple[GroupCoordinator, GroupCoordinator]:
        compiled(torch.ones(3), ctx.tp, ctx.dp)
        return ctx.tp, ctx.dp

    ((tp, dp), _) = run_threads(keep, ParallelConfig(tp=2), timeout_s=60)
    text = rf"compiled code calls group {re.escape(tp.key)}@0: the group is closed; call it with an open one"
    with pytest.raises(RuntimeError, match=text):
        compiled(torch.ones(3), tp, dp)


def test_b058_loading_the_module_twice_registers_nothing_twice() -> None:
    importlib.reload(traced)
    importlib.reload(traced)
    assert all(run_threads(_use, ParallelConfig(tp=2), _both_sums, torch.compile(_both_sums, fullgraph=True, backend="eager")))


@pytest.mark.parametrize("dim", [0, 1])
def test_b058_shapes_are_known_without_running(dim: int) -> None:
    def shapes(ctx: ParallelContext) -> None:
        foreseen: list[tuple[int, ...]] = []

        def look(graph: Any, _: object) -> Any:
            foreseen.append(tuple(graph.graph.output_node().args[0][0].meta["example_value"].shape))
            return graph.forward

        for collective in (ctx.tp.all_gather, ctx.tp.reduce_scatter):
            compiled = torch.compile(lambda x, collective=collective: collective(x, dim=dim), backend=look, fullgraph=True)
            result = compiled(torch.ones(4, 6))
            assert tuple(result.shape) == foreseen[-1] == tuple(collective(torch.ones(4, 6), dim=dim).shape)

    torch._dynamo.reset()
    run_threads(shapes, ParallelConfig(tp=2), timeout_s=60)


def _with_shape(x: Tensor) -> tuple[Tensor, torch.Size]:
    """``x``, and the shape that a graph foresees for it."""
    return x, x.shape


@pytest.mark.parametrize("dim", [0, -1])
def test_b058_uneven_shards(dim: int) -> None:
    def join(ctx: ParallelContext) -> bool:
        mine = torch.arange(6.0 * (1 + ctx.rank)).view(-1, 2)[: 1 + ctx.rank] + ctx.rank
        mine = mine if dim == 0 else mine.T.contiguous()
        tp = ctx.tp
        joined = torch.compile(lambda x: tp.all_gatherv(x, [1, 2], dim=dim), backend="aot_eager", fullgraph=True)(mine)
        share = torch.compile(lambda x: _with_shape(tp.reduce_scatterv(x, [1, 2], dim=dim)), backend="aot_eager", fullgraph=True)
        parts, shape = share(joined)
        return torch.equal(joined, tp.all_gatherv(mine, [1, 2], dim=dim)) and torch.equal(parts, 2 * mine) and shape == mine.shape

    torch._dynamo.reset()
    assert all(run_threads(join, ParallelConfig(tp=2), timeout_s=60))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda group, x: group.all_gatherv(x), "all_gatherv under torch.compile: give sizes"),
        (lambda group, x: group.all_to_allv(x, [1, 1]), "all_to_allv under torch.compile: give output_splits"),
    ],
)
def test_b058_sizes_cannot_be_asked_for_in_a_graph(call: Callable[[GroupCoordinator, Tensor], Tensor], text: str) -> None:
    def trace(ctx: ParallelContext) -> None:
        tp = ctx.tp
        with pytest.raises(Exception, match=text):
            torch.compile(lambda x: call(tp, x), backend="eager", fullgraph=True)(torch.ones(2))

    run_threads(trace, ParallelConfig(tp=2), timeout_s=60)


def _compile_in(ctx: ParallelContext, folder: str) -> tuple[int, int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    compiled = torch.compile(_both_sums, fullgraph=True, dynamic=True)
    for config in (ctx.config, ParallelConfig(dp=2)):
        with ctx.derive(config) as child:
            for size in (5, 7):
                x = torch.arange(float(size)) + ctx.rank
                assert torch.equal(compiled(x, child.tp, child.dp), _both_sums(x, child.tp, child.dp))
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


@needs_compiler
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_b058_later_processes_find_the_compiled_code_on_disk(tmp_path: Path) -> None:
    first = launch(_compile_in, ParallelConfig(tp=2), str(tmp_path), timeout_s=200)
    later = launch(_compile_in, ParallelConfig(tp=2), str(tmp_path), timeout_s=200)  # another context, other processes
    assert sum(misses for _, misses in first) >= 1
    assert later == [(1, 0), (1, 0)]
