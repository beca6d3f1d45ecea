"""B019: ranks share the cores, and the caller keeps its own settings."""

import os
import signal
from multiprocessing import forkserver

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def threads(ctx: ParallelContext) -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def settings() -> tuple[object, ...]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    preloaded = vars(forkserver._forkserver)["_preload_modules"]
    return dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), handlers, preloaded


def test_b019_cores_are_shared_and_the_parent_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = settings()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(threads, ParallelConfig(tp=2), timeout_s=30) == [(share, str(share))] * 2
    assert settings() == before


def test_b019_the_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(threads, ParallelConfig(tp=2), timeout_s=30) == [(3, "3")] * 2


def test_b019_a_rank_that_is_alone_gets_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(threads, ParallelConfig(), timeout_s=30)[0][0] == len(os.sched_getaffinity(0))
