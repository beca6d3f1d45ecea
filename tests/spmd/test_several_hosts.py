"""Groups on several hosts, which are pretended: the roster says where each rank is."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from parallel_runtime.comm.c10d import hash_store
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerError
from parallel_runtime.terms import Rank

pytestmark = pytest.mark.timeout(60)

HOSTS = ("aabb", "abab", "aaab", "abca")


def on_hosts(hosts: Sequence[str], work: Callable[[ParallelContext], object], config: ParallelConfig) -> list[object]:
    """Run ``work`` on a thread per rank, rank i on host ``hosts[i]``; what each returned or raised."""
    store, results = hash_store(), [object()] * len(hosts)

    def rank_main(rank: int) -> None:
        identity = Identity(rank=Rank(rank), world_size=len(hosts), host=hosts[rank], master_host="127.0.0.1", master_port=1)
        try:
            with ParallelContext(config, identity=identity, store=store) as ctx:
                results[rank] = work(ctx)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, PeerError):
            raise result
    return results


def everything(ctx: ParallelContext) -> None:
    group, rank, size = ctx.world, ctx.rank, ctx.world_size
    x = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank
    all_x = [torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * other for other in range(size)]
    for op, expected in (("sum", sum(all_x)), ("avg", sum(all_x) / size), ("max", all_x[-1])):
        assert torch.equal(group.all_reduce(x, op), torch.as_tensor(expected))
    for dtype in (torch.bfloat16, torch.int16):
        assert torch.equal(group.all_reduce(torch.ones(5, dtype=dtype)), torch.full((5,), size, dtype=dtype))
    assert torch.equal(group.all_reduce(torch.tensor([rank == 2, False])), torch.tensor([True, False]))
    for dim in (0, 1):
        assert torch.equal(group.all_gather(x, dim), torch.cat(all_x, dim))
    rows = torch.arange(size * 2, dtype=torch.float32).view(size, 2) + rank
    total = torch.arange(size * 2, dtype=torch.float32).view(size, 2) * size + sum(range(size))
    assert torch.equal(group.reduce_scatter(rows), total[rank : rank + 1])
    for src in range(size):
        assert torch.equal(group.broadcast(x, src), all_x[src])
        value = {"from": src, "big": list(range(3000))}
        assert group.broadcast_object(value if rank == src else None, src) == value
    assert group.all_gather_object(rank) == list(range(size))
    group.barrier()
    after, before = (group.rank_in_group + 1) % size, (group.rank_in_group - 1) % size
    sent = group.isend(x, after)
    assert torch.equal(group.recv(src=before), all_x[before])
    sent.wait()
    assert torch.equal(
        group.all_to_all(rows), torch.stack([torch.arange(size * 2).view(size, 2)[rank] + other for other in range(size)]).float()
    )


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_operation_across_hosts(hosts: str) -> None:
    on_hosts(hosts, everything, ParallelConfig(tp=4))


def test_plan_and_group_say_how() -> None:
    def look(ctx: ParallelContext) -> tuple[str, list[str]]:
        planned = ctx.plan.group("world", ctx.rank).communicators
        return ctx.world.describe(), [str(communicator) for communicator in planned]

    for said in on_hosts("aabb", look, ParallelConfig(tp=4)):
        assert "tensors over shm in hosts, c10d between (memory inside a host at any size; all_reduce" in str(said)
        assert str(said).endswith("['c10d:gloo', 'shm'])")
    for said in on_hosts("abcd", look, ParallelConfig(tp=4)):
        assert "tensors over c10d (several hosts), messages over c10d" in str(said)
        assert str(said).endswith("['c10d:gloo'])")


def test_a_rank_that_leaves_is_noticed_on_every_host() -> None:
    def leave(ctx: ParallelContext) -> None:
        ctx.world.barrier()
        if ctx.rank != 3:
            ctx.world.all_reduce(torch.ones(3))

    results = on_hosts("aabb", leave, ParallelConfig(tp=4))
    assert results[3] is None
    assert all(isinstance(result, PeerError) for result in results[:3])
