"""B056: axes of size 1 exist, cost nothing and need no network."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch
from parallel_runtime.terms import GROUP_NAMES
from tests.spmd import scripts

BODY = """
import socket

class NoSocket(socket.socket):
    def bind(self, *args):
        raise OSError("no network")
    connect = bind

socket.socket = NoSocket

with ParallelContext(ParallelConfig()) as ctx:
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
