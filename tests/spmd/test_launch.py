"""The life of launched processes, seen from their parent."""

import os
import signal
import threading

import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError, LaunchError, RankFailedError
from parallel_runtime.launch import LocalRanks, launch
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
        LaunchError, match=r"2 of 2 ranks had not finished .*within 1 s: .*rank 1 \(pid \d+\) is running the function"
    ):
        launch(stay, TWO, timeout_s=1.0)


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
