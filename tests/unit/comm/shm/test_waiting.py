"""Waiting: nobody misses a ring, an idle waiter burns next to nothing, fences where a processor needs them."""

import mmap
import threading
import time

import pytest
import torch

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.comm.shm.geometry import choose_geometries
from parallel_runtime.comm.shm.waiting import Bells, full_fence, needs_fence
from tests.unit.comm.shm.members import Threads

TIMEOUT_S = 20.0


def test_processors_that_reorder_stores_are_fenced() -> None:
    assert not needs_fence("x86_64")
    assert needs_fence("aarch64")
    lock = threading.Lock()
    full_fence(lock)
    assert not lock.locked()


def test_with_fences_everything_works_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for module in ("steps", "ring"):
        monkeypatch.setattr(f"parallel_runtime.comm.shm.{module}.needs_fence", lambda: True)
        monkeypatch.setattr(f"parallel_runtime.comm.shm.{module}.full_fence", calls.append)

    def body(comm: ShmCommunicator) -> list[float]:
        small, large = torch.ones(3), torch.ones(600_000)
        comm.all_reduce_(small, ReduceOp.SUM, TIMEOUT_S)
        comm.all_reduce_(large, ReduceOp.SUM, TIMEOUT_S)
        got = torch.zeros(5)
        if comm.rank_in_group == 0:
            comm.isend(torch.full((5,), 7.0), 1, 0).wait(TIMEOUT_S)
        else:
            comm.irecv(got, 0, 0).wait(TIMEOUT_S)
        for step in range(5):
            comm.broadcast_(got, 0, TIMEOUT_S) if step else None
        return [small.sum().item(), large.sum().item()]

    with Threads(2) as group:
        assert group.run(body) == [[6.0, 1_200_000.0]] * 2
    assert len({id(lock) for lock in calls}) >= 4
    assert len(calls) > 20


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_ring_ends_a_sleep_and_finds_only_sleepers(is_fenced: bool) -> None:
    geometry = choose_geometries(9)[-1]
    memory = mmap.mmap(-1, geometry.nbytes)
    sleeper, ringer = Bells(memory, geometry, 8), Bells(memory, geometry, 0)
    sleeper.is_fenced = is_fenced and sleeper.is_fenced
    news: list[int] = []
    rounds = 300

    def sleep() -> None:
        for number in range(rounds):
            while len(news) <= number:
                sleeper.sleep(lambda number=number: len(news) > number, 5.0)  # type: ignore[misc]

    thread = threading.Thread(target=sleep)
    thread.start()
    for number in range(rounds):
        while not any(ringer.words) and thread.is_alive() and number % 2:
            time.sleep(0)
        news.append(number)
        ringer.ring()
    thread.join(30)
    assert not thread.is_alive()
    assert not any(sleeper.words)


def test_a_waiter_sleeps_soon_and_wakes_for_good() -> None:
    released = threading.Event()

    def body(comm: ShmCommunicator) -> float:
        if comm.rank_in_group == 1:
            released.wait(TIMEOUT_S)
            comm.barrier(TIMEOUT_S)
            return 0.0
        timer = threading.Timer(0.4, released.set)
        timer.start()
        start = time.thread_time()
        comm.barrier(TIMEOUT_S)
        burned = time.thread_time() - start
        timer.join()
        return burned

    with Threads(2) as group:
        burned, _ = group.run(body)
    assert burned < 0.06
