"""What the others say of a process that was killed, or stopped, in the middle of work."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerTimeoutError
from parallel_runtime.launch import launch
from tests.spmd.scripts import clean_environ, finish, start, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

KILLED = """
import signal
from parallel_runtime.errors import PeerLostError
shm, victim = sys.argv[1], int(sys.argv[2])
start = time.monotonic()
try:
    with ParallelContext(ParallelConfig(tp=2, backend="gloo", shm=shm)) as ctx:
        ctx.tp.barrier()
        if ctx.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        ctx.tp.all_reduce(torch.ones(3))
except PeerLostError as error:
    print("within 5 s" if time.monotonic() - start < 5 else "late", error.ranks, error)
"""


@pytest.mark.parametrize(("shm", "victim"), [("auto", 1), ("off", 0)])
def test_a_killed_process_is_named(tmp_path: Path, shm: str, victim: int) -> None:
    """Rank 0 serves the store; where it is the victim, the store dies with it."""
    script = write_script(tmp_path, KILLED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        start(
            [str(script), shm, str(victim)],
            clean_environ(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]
    outcomes = [finish(rank) for rank in ranks]
    assert outcomes[victim][0] == -signal.SIGKILL
    status, out, err = outcomes[1 - victim]
    assert status == 0, err
    assert out.startswith(f"within 5 s ({victim},) tp#0 seq 2 all_reduce(float32[3]) lost "), out
    assert f"rank {victim} " in out
    assert ("has ended without a word" if victim == 1 else "ended") in out


def stop_one(ctx: ParallelContext) -> str:
    pids = ctx.tp.all_gather_object(os.getpid())
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        ctx.tp.all_reduce(torch.ones(3))
    except PeerTimeoutError as error:
        return str(error)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    return "it took part"


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_a_stopped_process_is_named_as_stopped(shm: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "shm": shm, "deadlines": Deadlines(collective_s=1).model_dump()})
    text = launch(stop_one, config, timeout_s=50)[0]
    assert text.startswith("tp#0 seq 2 all_reduce(float32[3]) waited "), text
    assert "is stopped (SIGSTOP, or a debugger)" in text


def stand_still(ctx: ParallelContext) -> float:
    """Rank 0 is stopped for longer than its deadline while it waits for rank 1, which comes within the deadline of the awake."""
    pids = ctx.tp.all_gather_object(os.getpid())
    if ctx.rank == 1:
        time.sleep(0.3)  # rank 0 is in its wait
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pids[0], signal.SIGCONT)
        time.sleep(0.3)
    return ctx.tp.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_a_process_does_not_blame_others_for_its_own_standstill(shm: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "shm": shm, "deadlines": Deadlines(collective_s=1.5).model_dump()})
    assert launch(stand_still, config, timeout_s=50) == [2.0, 2.0]
