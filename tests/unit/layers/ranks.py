"""Runs a function on the ranks of one group, as threads."""

import threading
from collections.abc import Callable
from typing import TypeVar

from parallel_runtime.comm import GroupCoordinator, GroupSpec, LocalCommunicator, LocalHub, open_coordinator
from parallel_runtime.terms import Rank

T = TypeVar("T")

__all__ = ["alone", "on_ranks", "outcomes"]


def outcomes(world_size: int, work: Callable[[GroupCoordinator], T]) -> list[T | BaseException]:
    """What ``work(tp)`` returned or raised on every rank."""
    hub = LocalHub(world_size)
    results: list[T | BaseException] = [RuntimeError("did not finish")] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(_group(hub, rank, world_size))
        except BaseException as error:
            results[rank] = error
            hub.leave(rank, f"it raised {error!r}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_ranks(world_size: int, work: Callable[[GroupCoordinator], T]) -> list[T]:
    """What ``work(tp)`` returned on every rank; raises what the first failing one raised."""
    results: list[T] = []
    for outcome in outcomes(world_size, work):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def alone() -> GroupCoordinator:
    """A group of one."""
    return _group(LocalHub(1), 0, 1)


def _group(hub: LocalHub, rank: int, world_size: int) -> GroupCoordinator:
    ranks = tuple(Rank(member) for member in range(world_size))
    communicator = LocalCommunicator(hub, "test", rank, world_size) if world_size > 1 else None
    return open_coordinator(GroupSpec(name="tp#0", key="test", ranks=ranks, rank=Rank(rank)), communicator)
