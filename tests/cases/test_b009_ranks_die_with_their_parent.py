"""B009: however the launching process ends, no rank outlives it; and nothing less than its end ends them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

BODY = """
import signal

def work(ctx, how):
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", os.getpid(), flush=True)
    if how == "barrier" and ctx.rank == 0:
        ctx.tp.barrier(timeout_s=60)
    while how == "loop":
        pass
    time.sleep(60)

def controller(ctx, how):
    print("up", os.getpid(), flush=True)
    launch(work, ParallelConfig(tp=2), how)

def survive(ctx):
    time.sleep(1)
    return ctx.tp.all_reduce(torch.ones(1)).item()

if __name__ == "__main__":
    if sys.argv[1] == "two levels":
        launch(controller, ParallelConfig(), "idle")
    elif sys.argv[1] == "quiet":
        os.close(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        assert launch(survive, ParallelConfig(tp=2)) == [2.0, 2.0]
    else:
        launch(work, ParallelConfig(tp=2), sys.argv[1])
"""


@pytest.mark.parametrize(("how", "ranks"), [("idle", 2), ("barrier", 2), ("loop", 2), ("two levels", 3)])
def test_b009_a_killed_parent_takes_its_ranks_along(tmp_path: Path, how: str, ranks: int) -> None:
    process = scripts.start([str(scripts.write_script(tmp_path, BODY)), how])
    pids = scripts.signal_when_up(process, signal.SIGKILL, lines=ranks)
    assert scripts.finish(process)[0] == -signal.SIGKILL
    assert scripts.still_alive(pids) == []


def test_b009_closing_the_streams_of_the_parent_ends_nobody(tmp_path: Path) -> None:
    status, _, err = scripts.run(scripts.write_script(tmp_path, BODY), "quiet")
    assert (status, err) == (0, "")


def test_b009_ctrl_c_reaches_the_whole_terminal_group(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(scripts.write_script(tmp_path, BODY)), "idle"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=scripts.clean_environ(),
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = scripts.finish(process)
    assert status == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, "ranks leave it to their parent"
    assert scripts.still_alive(pids) == []


def test_b009_a_second_ctrl_c_does_not_leave_ranks_behind(tmp_path: Path) -> None:
    process = scripts.start([str(scripts.write_script(tmp_path, BODY)), "deaf"])
    pids = scripts.signal_when_up(process, signal.SIGINT, lines=2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # it waits for ranks that do not listen
    process.send_signal(signal.SIGINT)
    assert scripts.finish(process)[0] == -signal.SIGINT
    assert scripts.still_alive(pids) == []
