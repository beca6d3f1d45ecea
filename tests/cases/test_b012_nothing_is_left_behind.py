"""B012: no files, no processes, no complaints, however a launch ends."""

import signal
from pathlib import Path

import pytest

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
    assert "leaked" not in err
    if how in ("normal", "SIGTERM"):
        assert err == ""


def test_b012_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    process = scripts.start([str(scripts.write_script(tmp_path, BODY)), "SIGKILL"])
    pids = scripts.signal_when_up(process, signal.SIGKILL, lines=2)
    assert scripts.finish(process)[0] == -signal.SIGKILL
    assert scripts.still_alive(pids) == []
