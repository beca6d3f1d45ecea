"""B012: no files, no processes, no complaints, however a launch ends."""

import os
import signal
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch
from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

BODY = """
def work(ctx, how):
    print("up", os.getpid(), flush=True)
    ctx.tp.barrier()
    if how == "raise":
        raise ValueError("boom")
    if how in ("SIGTERM", "SIGINT", "SIGKILL"):
        time.sleep(60)

if __name__ == "__main__":
    launch(work, ParallelConfig(tp=2), sys.argv[1])
"""


@pytest.mark.parametrize(("how", "status"), [("normal", 0), ("raise", 1), ("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_b012_a_launch_leaves_nothing(tmp_path: Path, how: str, status: int) -> None:
    script = scripts.write_script(tmp_path, BODY)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    process = scripts.start([str(script), how], scripts.clean_environ(TMPDIR=str(temporary)))
    if how in ("normal", "raise"):
        ended, out, err = scripts.finish(process)
        pids = [int(line.split()[-1]) for line in out.splitlines()]
    else:
        pids = scripts.signal_when_up(process, signal.Signals[how], lines=2)
        ended, _, err = scripts.finish(process)
    assert ended == status
    assert len(pids) == 2
    assert scripts.still_alive(pids) == []
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared
    assert "leaked" not in err
    if how in ("normal", "SIGTERM"):
        assert err == ""


def test_b012_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    process = scripts.start([str(scripts.write_script(tmp_path, BODY)), "SIGKILL"])
    pids = scripts.signal_when_up(process, signal.SIGKILL, lines=2)
    assert scripts.finish(process)[0] == -signal.SIGKILL
    assert scripts.still_alive(pids) == []


def go_on_without_a_reader(ctx: ParallelContext) -> list[float]:
    with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store) as other:
        assert "over shm" in other.world.describe()
        assert other.world.broadcast(torch.tensor([5.0]), 0).item() == 5.0
        if ctx.rank == 2:
            other.close()
        ctx.world.barrier()
        got = []
        for number in range(10 if ctx.rank < 2 else 0):
            if ctx.rank == 0:
                other.world.send(torch.full((50_000,), float(number)), 1)
            else:
                got.append(other.world.recv(0)[-1].item())
        return got


def test_b012_a_reader_that_leaves_takes_no_memory_along() -> None:
    config = ParallelConfig(tp=3, shm="on")
    assert launch(go_on_without_a_reader, config, timeout_s=30) == [[], [float(number) for number in range(10)], []]
