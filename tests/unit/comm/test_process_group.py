"""A group as torch's process group, over every communicator."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, ContextStateError
from tests.spmd.worlds import World

funcol: Any = functional
resolve: Any = c10d._resolve_process_group
pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::FutureWarning")]  # torch renames its functions


@pytest.fixture(params=["local", "gloo", "shm"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def row(rank: int) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32) + 10 * rank


def test_the_functions_of_torch_distributed(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        pg, rank = group.process_group, group.rank_in_group
        assert group.process_group is pg
        x = row(rank)
        dist.all_reduce(x, group=pg)
        assert torch.equal(x, row(0) + row(1))
        for op, expected in ((dist.ReduceOp.AVG, (row(0) + row(1)) / 2), (dist.ReduceOp.MAX, row(1))):
            x = row(rank)
            dist.all_reduce(x, op=op, group=pg)
            assert torch.equal(x, expected)
        out = torch.empty(8)
        dist.all_gather_into_tensor(out, row(rank), group=pg)
        assert torch.equal(out, torch.cat([row(0), row(1)]))
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, row(rank), group=pg)
        assert torch.equal(part, (row(0) + row(1))[2 * rank : 2 * rank + 2])
        rows = [torch.empty(4), torch.empty(4)]
        dist.all_gather(rows, row(rank), group=pg)
        assert torch.equal(rows[1], row(1))
        dist.all_to_all_single(out[:4], row(rank), group=pg)
        assert torch.equal(out[:4], torch.cat([row(0)[2 * rank : 2 * rank + 2], row(1)[2 * rank : 2 * rank + 2]]))
        x = row(rank)
        dist.broadcast(x, group_src=1, group=pg)
        assert torch.equal(x, row(1))
        work = dist.all_reduce(x, group=pg, async_op=True)
        assert work is not None
        assert work.wait()
        dist.barrier(group=pg)
        with pytest.raises(ArgumentError, match=r"has no reduction .*; use SUM, AVG, MAX"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BAND, group=pg)

    world(2, body)


def test_functional_collectives_by_group_and_by_name(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        pg, rank = group.process_group, group.rank_in_group
        total = funcol.all_reduce(row(rank), "sum", pg)
        assert torch.equal(funcol.wait_tensor(total), row(0) + row(1))
        by_name = torch.ops._c10d_functional.all_reduce(row(rank), "sum", pg.group_name)
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(by_name), row(0) + row(1))
        joined = funcol.wait_tensor(funcol.all_gather_tensor(row(rank), 0, pg))
        part = funcol.wait_tensor(funcol.reduce_scatter_tensor(row(rank), "sum", 0, pg))
        assert torch.equal(joined, torch.cat([row(0), row(1)]))
        assert torch.equal(part, (row(0) + row(1))[2 * rank : 2 * rank + 2])

    world(2, body)


def test_its_name_goes_with_the_group() -> None:
    def body(group: GroupCoordinator) -> None:
        name = group.process_group.group_name
        assert resolve(name) is not None
        group.close()
        gc.collect()
        with pytest.raises(RuntimeError, match="Could not resolve"):
            resolve(name)
        with pytest.raises(ContextStateError, match=r"process_group on group .*: the group is closed"):
            group.process_group  # noqa: B018  # raises

    World("local")(2, body)


def test_what_it_does_is_recorded_with_the_group(world: World) -> None:
    def body(group: GroupCoordinator) -> str:
        dist.all_reduce(torch.ones(2), group=group.process_group)
        return group.recent(1)[0].operation

    assert world(2, body) == ["all_reduce_", "all_reduce_"]


def test_symmetric_tensors_give_the_same_results_everywhere(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        mine = group.symmetric_empty((2, 8192)).fill_(group.rank_in_group + 1)
        assert (mine.shape, mine.dtype, mine.device) == ((2, 8192), torch.float32, group.device)
        assert torch.equal(group.all_gather(mine), torch.cat([torch.full((2, 8192), 1.0), torch.full((2, 8192), 2.0)]))
        assert torch.equal(group.all_reduce_(mine), torch.full((2, 8192), 3.0))

    world(2, body)
