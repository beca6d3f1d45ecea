"""Runs a function on the ranks of one group, as threads."""

from collections.abc import Callable
from typing import TypeVar

from parallel_runtime.comm import GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.terms import Rank

__all__ = ["alone", "on_ranks", "outcomes", "sizes_of"]

_T = TypeVar("_T")


def sizes_of(parallel: ParallelConfig) -> str:
    """A short name for a test's parameter."""
    axes = ("tp", "pp", "dp", "ep", "etp")
    order = "" if parallel.order == ("tp", "cp", "dp", "pp") else " order " + "-".join(parallel.order)
    return " ".join(f"{axis}={getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1) + order or "one rank"


def on_ranks(world_size: int, work: Callable[[GroupCoordinator], _T]) -> list[_T]:
    """What ``work(tp)`` returned on every rank."""

    def run(ctx: ParallelContext) -> _T:
        return work(ctx.tp)

    return run_threads(run, ParallelConfig(tp=world_size))


def outcomes(world_size: int, work: Callable[[GroupCoordinator], _T]) -> list[_T | Exception]:
    """What ``work(tp)`` returned or raised on every rank."""

    def run(tp: GroupCoordinator) -> _T | Exception:
        try:
            return work(tp)
        except Exception as error:
            return error

    return on_ranks(world_size, run)


def alone() -> GroupCoordinator:
    """A group of one, without a context."""
    return open_coordinator(GroupSpec(name="tp#0", key="test", ranks=(Rank(0),), rank=Rank(0)), None)
