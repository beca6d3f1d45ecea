"""Ranks as threads."""

import threading
import time

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError, LaunchError, PeerLostError, RankFailedError
from parallel_runtime.launch import run_threads

BACKENDS = ["local", "gloo"]


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_come_in_rank_order(backend: str) -> None:
    def who(ctx: ParallelContext, scale: int) -> tuple[int, float]:
        return ctx.rank * scale, ctx.tp.all_reduce(torch.full((3,), float(ctx.rank)))[0].item()

    config = ParallelConfig.model_validate({"tp": 2, "pp": 2, "backend": backend})
    assert run_threads(who, config, 10, timeout_s=30) == [(0, 1.0), (10, 1.0), (20, 5.0), (30, 5.0)]
    assert rank_threads() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_failure_is_raised_and_the_others_are_released(backend: str) -> None:
    seen: dict[int, BaseException] = {}

    def fail(ctx: ParallelContext) -> None:
        if ctx.rank == 2:
            raise ValueError("boom-42")
        try:
            ctx.world.barrier()
        except BaseException as error:
            seen[ctx.rank] = error
            raise

    config = ParallelConfig.model_validate({"tp": 2, "pp": 2, "backend": backend})
    with pytest.raises(RankFailedError, match=r"rank 2 of 4 failed in .*fail: ValueError: boom-42") as caught:
        run_threads(fail, config, timeout_s=30)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert sorted(seen) == [0, 1, 3]
    assert all(isinstance(error, PeerLostError) for error in seen.values())
    assert rank_threads() == []


def test_a_rank_that_returns_early_releases_those_that_wait_for_it() -> None:
    def leave(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            ctx.tp.barrier()

    with pytest.raises(RankFailedError, match="rank 0 of 2") as caught:
        run_threads(leave, ParallelConfig(tp=2), timeout_s=30)
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_a_deadlock_of_some_is_seen_once_the_others_have_returned() -> None:
    def cross(ctx: ParallelContext) -> None:
        if ctx.rank:
            ctx.tp.recv(src=3 - ctx.rank)

    with pytest.raises(RankFailedError, match="every rank waits and none can go on"):
        run_threads(cross, ParallelConfig(tp=3), timeout_s=30)


def test_a_run_that_takes_too_long_is_ended() -> None:
    released = threading.Event()

    def wait(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            try:
                ctx.tp.barrier()
            finally:
                released.set()
        else:
            released.wait(30)

    with pytest.raises(LaunchError, match=r"2 of 2 ranks had not finished .*wait within 0.3 s: rank 0, 1"):
        run_threads(wait, ParallelConfig(tp=2), timeout_s=0.3)
    assert released.is_set()


def test_a_context_that_cannot_open_fails_the_rank() -> None:
    config = ParallelConfig(tp=2, device="cuda", deadlines=Deadlines(join_s=2))
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has the devices")
    with pytest.raises(RankFailedError, match="ConfigError"):
        run_threads(time.sleep, config, timeout_s=30)


def test_backends_of_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend='nccl' does not fit here"):
        run_threads(print, ParallelConfig(tp=2, backend="nccl"))


def test_a_seed_orders_the_ranks() -> None:
    def work(ctx: ParallelContext, said: list[int]) -> None:
        for _ in range(5):
            said.append(ctx.rank)
            ctx.tp.all_reduce(torch.ones(2))
            ctx.world.barrier()

    def log(seed: int) -> list[int]:
        said: list[int] = []
        run_threads(work, ParallelConfig(tp=3), said, timeout_s=30, seed=seed)
        return said[3:]  # before its first communication a rank runs as it likes

    assert log(5) == log(5)
    assert len({tuple(log(seed)) for seed in range(4)}) > 1
    with pytest.raises(ConfigError, match=r'seed=5 orders ranks that talk through memory; backend="gloo" cannot be ordered'):
        run_threads(work, ParallelConfig(tp=3, backend="gloo"), [], seed=5)
