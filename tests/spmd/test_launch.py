"""The life of launched processes, seen from their parent."""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError, LaunchError, RankFailedError
from parallel_runtime.launch import LocalRanks, launch, processes
from tests.spmd.scripts import still_alive

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

TWO = ParallelConfig(tp=2)


def stay(ctx: ParallelContext) -> None:
    threading.Event().wait(60)


def rank_of(ctx: ParallelContext) -> int:
    return ctx.rank


def fail_on_one(ctx: ParallelContext) -> None:
    if ctx.rank == 1:
        raise ValueError("boom-42")
    threading.Event().wait(60)


def test_a_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(
        LaunchError, match=r"2 of 2 ranks had not finished .*within 3 s: .*rank 1 \(pid \d+\) is running the function"
    ):
        launch(stay, TWO, timeout_s=3.0)


def test_a_stopped_rank_is_ended_too() -> None:
    with LocalRanks(stay, TWO) as ranks:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGSTOP)
    assert still_alive(list(ranks.pids)) == []


def test_leaving_the_block_ends_the_ranks() -> None:
    with LocalRanks(stay, TWO) as ranks:
        pids = ranks.pids
        assert len(set(pids)) == 2
        assert not ranks.check()
    assert still_alive(list(pids)) == []
    with pytest.raises(ContextStateError, match="inside its `with` block"):
        ranks.check()
    with pytest.raises(ContextStateError, match="entered once"):
        ranks.__enter__()


def test_ranks_that_have_returned_are_waited_for() -> None:
    with LocalRanks(rank_of, TWO) as ranks:
        assert ranks.wait(timeout_s=30) == [0, 1]
        assert ranks.check()


def check_until_done(ranks: LocalRanks[None]) -> None:
    while not ranks.check():
        threading.Event().wait(0.01)


def test_a_failure_is_seen_without_waiting() -> None:
    with LocalRanks(fail_on_one, TWO) as ranks, pytest.raises(RankFailedError, match="boom-42"):
        check_until_done(ranks)


def test_ranks_that_do_not_start_in_time_are_named() -> None:
    with pytest.raises(
        LaunchError, match=r"ranks did not start within 0.001 s \(deadlines.join_s\): .*is importing the main module"
    ):
        launch(rank_of, TWO.replace(deadlines=Deadlines(join_s=0.001)))


def test_a_single_rank_is_a_process_too() -> None:
    assert launch(rank_of, ParallelConfig(), timeout_s=30) == [0]


def speak(ctx: ParallelContext) -> None:
    sys.stdout.write(f"one of {ctx.rank}\ntwo\n")
    sys.stdout.flush()
    os.write(2, b"err")
    ctx.tp.barrier()  # both have spoken
    if ctx.rank == 1:
        raise ValueError("boom-44")
    ctx.tp.barrier()


def test_each_rank_has_a_log_and_an_error_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError, match="boom-44") as caught:
        launch(speak, TWO, log_dir=tmp_path / "logs")
    assert caught.value.__notes__ == [f"output of rank 1: {tmp_path}/logs/rank-1.log"]
    assert (tmp_path / "logs" / "rank-1.log").read_text().startswith("one of 1\ntwo\nerr")
    assert (tmp_path / "logs" / "rank-0.log").read_text().startswith("one of 0\ntwo\nerr")
    assert capfd.readouterr() == ("", "")


def test_lines_on_the_terminal_begin_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError, match="boom-44") as caught:
        launch(speak, TWO, prefix_output=True)
    assert not hasattr(caught.value, "__notes__")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] one of 0", "[rank 0] two", "[rank 1] one of 1", "[rank 1] two"]
    assert "[rank 1] err\n" in err
    assert all(line.startswith("[rank ") for line in err.splitlines())


def cores(ctx: ParallelContext) -> set[int]:
    return os.sched_getaffinity(0)


def test_ranks_keep_to_the_cores_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(processes, "core_shares", lambda available, nodes, parts: ((available[0],), (available[-1],)))
    assert launch(cores, TWO, pin="auto", timeout_s=30) == [{mine[0]}, {mine[-1]}]
    assert launch(cores, TWO, timeout_s=30) == [set(mine)] * 2
    assert sorted(os.sched_getaffinity(0)) == mine


def nothing(ctx: ParallelContext) -> None:
    pass


def settings() -> tuple[object, ...]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    threads = torch.get_num_threads(), torch.get_num_interop_threads()
    return dict(os.environ), multiprocessing.get_start_method(allow_none=True), threads, handlers, torch.get_default_dtype()


def test_the_caller_is_as_before() -> None:
    before = settings()
    torch.set_default_dtype(torch.float64)
    try:
        launch(nothing, TWO, timeout_s=30)
        with pytest.raises(RankFailedError):
            launch(fail_on_one, TWO, timeout_s=30)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert settings() == before
