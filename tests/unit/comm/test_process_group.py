"""A group as torch's process group, over every communicator."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ContextStateError
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


def test_published_parts_of_symmetric_tensors_are_read_in_place(world: World) -> None:
    def body(group: GroupCoordinator) -> bool:
        turns = [group.symmetric_empty((6, 5)), group.symmetric_empty((6, 5))]
        views = [group.symmetric_views(turn[2:4]) for turn in turns]
        for step in range(20):
            mine, theirs = turns[step % 2][2:4], views[step % 2]
            if theirs is None:
                continue
            mine.fill_(step + 100 * group.rank_in_group)
            group.publish(mine)
            assert [part.tolist() for part in theirs] == [[[step + 100.0 * member] * 5] * 2 for member in range(2)]
        assert group.symmetric_views(torch.empty(4)) is None
        return views[0] is not None

    can_read = world(2, body)
    assert can_read == [world.kind != "gloo"] * 2


def test_different_parts_are_not_published_together() -> None:
    def body(group: GroupCoordinator) -> None:
        mine = group.symmetric_empty((4, 4))
        with pytest.raises(CollectiveMismatchError, match="publish"):
            group.publish(mine[: 1 + group.rank_in_group])

    for kind in ("local", "shm"):
        World(kind)(2, body)


def test_lists_and_roots(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        pg, rank = group.process_group, group.rank_in_group
        part = torch.empty(2, 4).t()
        dist.scatter(part, [torch.full((4, 2), 5.0), torch.full((4, 2), 6.0)] if rank == 1 else None, group_src=1, group=pg)
        assert torch.equal(part, torch.full((4, 2), 5.0 + rank))
        rows = [torch.empty(4), torch.empty(4)] if rank == 0 else None
        dist.gather(row(rank), rows, group_dst=0, group=pg)
        assert rows is None or torch.equal(rows[1], row(1))
        x = row(rank)
        dist.reduce(x, group_dst=1, group=pg)
        assert torch.equal(x, row(0) + row(1) if rank == 1 else row(0))
        parts = [torch.empty(2), torch.empty(2)]
        dist.all_to_all(parts, [row(rank)[:2], row(rank)[2:]], group=pg)
        assert torch.equal(torch.stack(parts), torch.stack([row(0), row(1)]).view(2, 2, 2)[:, rank])
        dist.reduce_scatter(parts[0], [row(rank)[:2], row(rank)[2:]], group=pg)
        assert torch.equal(parts[0], (row(0) + row(1)).view(2, 2)[rank])
        found: list[object] = [None, None]
        dist.all_gather_object(found, {"rank": rank}, group=pg)
        assert found == [{"rank": 0}, {"rank": 1}]
        with pytest.raises(ArgumentError, match=r"scatter: the source hands over one part per member"):
            pg.scatter([torch.empty(2)], [[torch.empty(3), torch.empty(3)]], _root(rank))

    world(2, body)


def _root(rank: int) -> object:
    options = c10d.ScatterOptions()
    options.rootRank = rank
    return options


def test_receives_may_be_started_before_sends(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        pg, peer = group.process_group, 1 - group.rank_in_group
        x = torch.empty(4)
        receiving: Any = dist.irecv(x, group_src=peer, group=pg)
        sending: Any = dist.isend(row(group.rank_in_group), group_dst=peer, group=pg)
        for work in (receiving, sending, receiving):
            assert work.wait()
        assert receiving.is_completed()
        assert receiving.is_success()
        assert torch.equal(receiving.result()[0], row(peer))
        wrong: Any = dist.irecv(torch.empty(3), group_src=peer, group=pg)
        sending = dist.isend(row(0), group_dst=peer, group=pg)
        for work in (wrong, sending):
            with pytest.raises(
                CollectiveMismatchError, match=r"the receiver has room for float32\[3\], the sender sent float32\[4\]"
            ):
                work.wait()

    world(2, body)


def test_functional_collectives_of_several_tensors(world: World) -> None:
    def body(group: GroupCoordinator) -> None:
        pg, rank = group.process_group, group.rank_in_group
        tensors = [row(rank), row(rank)[:2]]
        totals = [funcol.wait_tensor(x) for x in funcol.all_reduce_coalesced(tensors, "sum", pg)]
        assert torch.equal(totals[1], (row(0) + row(1))[:2])
        joined = [funcol.wait_tensor(x) for x in funcol.all_gather_into_tensor_coalesced(tensors, pg)]
        assert torch.equal(joined[0], torch.cat([row(0), row(1)]))
        parts = [funcol.wait_tensor(x) for x in funcol.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 0], pg)]
        assert torch.equal(parts[1], (row(0) + row(1))[rank : rank + 1])
        swapped = funcol.wait_tensor(funcol.all_to_all_single(row(rank), None, None, pg))
        assert torch.equal(swapped, torch.cat([row(0)[2 * rank : 2 * rank + 2], row(1)[2 * rank : 2 * rank + 2]]))
        assert torch.equal(funcol.wait_tensor(funcol.broadcast(row(rank), 1, pg)), row(1))

    world(2, body)


class _Mesh(DeviceMesh):
    """One row of ranks without a default group, which torch's own class asks for the position."""

    def __init__(self, group: GroupCoordinator) -> None:
        pg = group.process_group
        ranks = list(range(group.world_size))
        super().__init__("cpu", ranks, mesh_dim_names=(group.key,), _init_backend=False, _rank=group.rank_in_group)
        self._dim_group_names: Any = [pg.group_name]
        self._pg_registry = {pg.group_name: pg}
        self._position = group.rank_in_group

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._position


@pytest.mark.filterwarnings("ignore:CPU process group does not support alltoall")
def test_dtensor_is_distributed_and_redistributed(world: World) -> None:
    full = torch.arange(15.0).view(5, 3)

    def body(group: GroupCoordinator) -> None:
        mesh = _Mesh(group)
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(sharded.to_local(), full.chunk(2)[group.rank_in_group])
        assert torch.equal(sharded.full_tensor(), full)
        columns = sharded.redistribute(mesh, [Shard(1)])
        assert torch.equal(columns.to_local(), full.chunk(2, 1)[group.rank_in_group])
        partial = DTensor.from_local(full, mesh, [Partial()])
        assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), 2 * full)
        assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), 2 * full)
        mine = full if group.is_first_rank else torch.zeros(5, 3)
        assert torch.equal(distribute_tensor(mine, mesh, [Replicate()]).to_local(), full)
        weight: Any = distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal((distribute_tensor(full, mesh, [Replicate()]) @ weight).full_tensor(), full @ torch.ones(3, 4))

    world(2, body)
