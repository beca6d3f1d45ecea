"""B025: a context beside, and on top of, a world of torch that somebody else owns; and worlds of those that are left."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.comm.c10d import prefix_store
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError
from parallel_runtime.launch import launch
from parallel_runtime.terms import Rank
from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def total(context: ParallelContext) -> float:
    return context.world.all_reduce(torch.tensor(10.0**context.rank)).item()


def torch_total() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def beside_and_on_top(ctx: ParallelContext) -> list[float]:
    assert ctx.store is not None
    dist.init_process_group("gloo", store=prefix_store(ctx.store, "of torch"), rank=ctx.rank, world_size=2)
    sums = [total(ctx), torch_total()]
    with ParallelContext.adopt(dist.group.WORLD, ParallelConfig(tp=-1)) as adopted:
        assert (adopted.rank, adopted.world_size) == (ctx.rank, 2)
        sums += [total(adopted), torch_total()]
        with adopted.derive(ParallelConfig(pp=2)) as child:
            sums.append(total(child))
    assert dist.is_initialized(), "what is adopted is never destroyed"
    sums += [torch_total(), total(ctx)]
    stranger = Identity(rank=Rank(0), world_size=7)
    with pytest.raises(
        ConfigError, match=rf"identity is rank 0 of 7, but the process group has this process as rank {ctx.rank} of 2"
    ):
        ParallelContext.adopt(dist.group.WORLD, ParallelConfig(tp=2), identity=stranger)
    dist.destroy_process_group()
    return [*sums, total(ctx)]


def test_b025_beside_and_on_top_of_a_world_of_torch() -> None:
    assert launch(beside_and_on_top, ParallelConfig(tp=2), timeout_s=45) == [[11.0, 2.0, 11.0, 2.0, 11.0, 2.0, 11.0, 11.0]] * 2


BODY = """
import signal
from parallel_runtime.comm.c10d import file_store
from parallel_runtime.config import Deadlines
from parallel_runtime.config.environment import Identity
from parallel_runtime.errors import PeerError

def go_on(rank, ranks, store):
    if len(ranks) == 1:
        return ranks
    config = ParallelConfig(tp=len(ranks), ranks=ranks, deadlines=Deadlines(join_s=60, collective_s=60))
    who = Identity(rank=rank, world_size=4, local_rank=rank, local_world_size=4)
    with ParallelContext(config, identity=who, store=store) as ctx:
        assert ctx.tp.all_reduce(torch.ones(1)).item() == len(ranks)
        if rank == ranks[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                ctx.tp.barrier()
        except PeerError as error:
            assert error.ranks == (ranks[-1],), error
        left = ctx.survivors()
        print(*left, flush=True)
        return go_on(rank, left, store)

go_on(int(sys.argv[1]), (0, 1, 2, 3), file_store(sys.argv[2], 4))
"""


@pytest.mark.timeout(240)
def test_b025_killed_ranks_are_left_behind_three_times_in_a_row(tmp_path: Path) -> None:
    script = scripts.write_script(tmp_path, BODY)
    started = [scripts.start([str(script), str(rank), str(tmp_path / "store")]) for rank in range(4)]
    ends = [scripts.finish(process, timeout_s=200) for process in started]
    assert [status for status, _, _ in ends] == [0, *[-signal.SIGKILL] * 3], ends
    assert [out for _, out, _ in ends] == ["0 1 2\n0 1\n0\n", "0 1 2\n0 1\n", "0 1 2\n", ""]
