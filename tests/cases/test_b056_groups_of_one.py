"""B056: axes of size 1 exist, cost nothing and need no network."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError
from parallel_runtime.launch import launch, run_threads
from parallel_runtime.terms import GROUP_NAMES
from tests.spmd import scripts

BODY = """
import socket

class NoSocket(socket.socket):
    def bind(self, *args):
        raise OSError("no network")
    connect = bind

socket.socket = NoSocket

assert not [name for name in os.environ if name.startswith("MASTER_")]
start = time.monotonic()
with ParallelContext(ParallelConfig()) as ctx:
    assert time.monotonic() - start < 2
    for name, group in ctx.groups().items():
        assert (group.world_size, group.rank_in_group) == (1, 0), name
    descriptors = len(os.listdir("/proc/self/fd"))
    assert ctx.tp.broadcast_object("hello", src=0) == "hello"
    ctx.world.barrier()
    threads = len(os.listdir("/proc/self/task"))
print("threads", threads, "torch.distributed", torch.distributed.is_initialized())
"""


def test_b056_one_process_needs_no_network(tmp_path: Path) -> None:
    status, out, err = scripts.run(scripts.write_script(tmp_path, BODY))
    assert (status, err) == (0, "")
    assert out == "threads 1 torch.distributed False\n"


def look(ctx: ParallelContext) -> None:
    for name in GROUP_NAMES:
        size = 2 if name in ("world", "stage", "tp", "etp") else 1
        group = ctx.group(name)
        assert group.world_size == size, name
        assert group.all_reduce(torch.ones(1)).item() == float(size)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_b056_every_axis_exists_in_a_bigger_world() -> None:
    launch(look, ParallelConfig(tp=2), timeout_s=30)


def test_b056_a_group_of_one_gives_back_what_it_got() -> None:
    def use(ctx: ParallelContext) -> None:
        x = torch.arange(6.0).view(2, 3)
        for name in GROUP_NAMES:
            group = ctx.group(name)
            results = [
                call(x) for call in (group.all_reduce, group.all_gather, group.reduce_scatter, group.all_to_all, group.broadcast)
            ]
            results += [group.all_gatherv(x), group.reduce_scatterv(x, [2]), group.all_to_allv(x, [2]), group.scatter(x)]
            results += [got for got in (group.gather(x), group.reduce(x)) if got is not None]
            assert len(results) == 11
            for got in results:
                assert torch.equal(got, x)
                assert got.data_ptr() != x.data_ptr()
            for in_place in (group.all_reduce_, group.broadcast_):
                assert in_place(x) is x
            group.barrier()
            assert group.broadcast_object({"a": [1]}) == {"a": [1]}
            assert group.all_gather_object("x") == ["x"]
            assert torch.equal(group.broadcast_tensor_dict({"x": x})["x"], x)
            for refused in (lambda: group.send(x), group.recv, lambda: group.send_object(1), lambda: group.isend(x, 0)):  # noqa: B023  # called at once
                with pytest.raises(ArgumentError, match="a rank cannot send to itself"):
                    refused()

    run_threads(use, ParallelConfig())
