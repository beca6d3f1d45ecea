"""Peers of a rank that fails are released at once, in every kind of operation, also where its connections stay whole."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.attach import attach
from parallel_runtime.errors import LaunchError, PeerError, PeerFailedError, PeerLostError, RankFailedError
from parallel_runtime.launch import LocalRanks, launch, run_threads

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

PATIENT = Deadlines(collective_s=60, control_s=60, p2p_s=60)
WAITS: dict[str, Callable[[GroupCoordinator], object]] = {
    "recv": lambda group: group.recv(1),
    "recv_object": lambda group: group.recv_object(1),
    "send": lambda group: group.send(torch.ones(1 << 22), 1),
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "broadcast_object": lambda group: group.broadcast_object(None, 1),
    "barrier": lambda group: group.barrier(),
}
OVER_GLOO = ParallelConfig(tp=2, backend="gloo", shm="off", deadlines=PATIENT)


def wait_in_guard(ctx: ParallelContext, operation: str, over: threading.Event) -> float:
    """Rank 1 fails in a guarded block and stays; rank 0 waits for it there."""
    ctx.tp.barrier()
    start = time.monotonic()
    with pytest.raises(PeerFailedError, match="rank 1 failed: KeyError: 'boom-42'"):
        guarded(ctx, operation)
    seconds = time.monotonic() - start
    if ctx.rank == 0:
        over.set()
    assert over.wait(25)  # no connection closes before
    return seconds


def guarded(ctx: ParallelContext, operation: str) -> None:
    with ctx.guard():
        if ctx.rank == 1:
            raise KeyError("boom-42")
        WAITS[operation](ctx.tp)


@pytest.mark.parametrize("operation", sorted(WAITS))
def test_gloo_lets_go_of_every_wait_when_a_guarded_peer_fails(operation: str) -> None:
    for seconds in run_threads(wait_in_guard, OVER_GLOO, operation, threading.Event(), timeout_s=30):
        assert seconds < 10


def wait_for_a_dead_peer(ctx: ParallelContext, operation: str) -> str:
    """Rank 1 leaves a forked process behind, which keeps its connections open, and is killed."""
    ctx.tp.barrier()
    if ctx.rank == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        WAITS[operation](ctx.tp)
    except PeerLostError as error:
        return f"{'in time' if time.monotonic() - start < 6 else 'late'}: {error.ranks} {error}"
    return "it went well"


def of_the_survivor(tmp_path: Path, operation: str) -> str:
    """What rank 0 was told, which goes on until its launcher has been told, too."""
    told = tmp_path / "told"
    with LocalRanks(write_down, OVER_GLOO, args=(operation, str(told))) as ranks:
        with pytest.raises(RankFailedError, match=r"rank 1 of 2 was killed by SIGKILL \(9\)"):
            ranks.wait(40)
        until = time.monotonic() + 20
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.01)
    return told.read_text()


def write_down(ctx: ParallelContext, operation: str, told: str) -> None:
    said = wait_for_a_dead_peer(ctx, operation)
    Path(f"{told}.new").write_text(said)
    Path(f"{told}.new").rename(told)


@pytest.mark.parametrize("operation", ["recv", "all_reduce"])
def test_a_killed_peer_is_named_with_its_signal_though_its_connections_stay(tmp_path: Path, operation: str) -> None:
    said = of_the_survivor(tmp_path, operation)
    assert said.startswith("in time: (1,) tp#0 seq 2 "), said
    assert " was killed by SIGKILL (9), while running the function" not in said, "the stage is of the launcher's own report"
    assert "rank 1 (pid " in said
    assert " was killed by SIGKILL (9)" in said, said


def look_on(ctx: ParallelContext, over: str) -> int:
    ctx.tp.barrier()
    while not Path(over).exists():
        time.sleep(0.01)
    return ctx.rank


def test_a_launched_job_tells_where_to_attach(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with LocalRanks(look_on, ParallelConfig(tp=2), args=(str(over),)) as ranks:
        assert ranks.address is not None
        host, port = ranks.address.rsplit(":", 1)
        until = time.monotonic() + 40
        lines: list[str] = []
        pause = threading.Event()
        while time.monotonic() < until and not any("test_releases.py" in line for line in lines):
            pause.wait(0.2)
            lines = [line for context in attach(host, int(port)) for line in context.lines()]
        over.touch()
        assert ranks.wait(30) == [0, 1]
    assert lines[0].endswith("2 ranks joined"), lines
    assert any(f"rank 1 (pid {ranks.pids[1]} on " in line for line in lines), lines
    assert ranks.address is None


def sleep(ctx: ParallelContext) -> None:
    time.sleep(60)


def test_the_limit_of_a_launch_counts_from_the_call() -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"had not finished tests.spmd.test_releases.sleep within 0.001 s"):
        launch(sleep, ParallelConfig(tp=2), timeout_s=0.001)
    assert time.monotonic() - start < 30


def use(ctx: ParallelContext) -> str:
    """After a broken wait the group says so, at once."""
    with pytest.raises(PeerFailedError):
        guarded(ctx, "recv")
    try:
        ctx.tp.barrier()
    except PeerError as error:
        return str(error)
    return ""


def test_a_group_whose_wait_was_broken_off_cannot_be_used() -> None:
    first, second = run_threads(use, OVER_GLOO, timeout_s=30)
    assert first.startswith("tp#0 seq 2 barrier(): this group can no longer be used: rank 1 failed: KeyError"), first
    assert second.startswith("tp#0 seq 1 barrier() lost "), second
