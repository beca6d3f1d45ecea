"""B051, B069: groups opened by their members alone are never mixed up, and wait for nobody else."""

import random
import threading
import time

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import CollectiveMismatchError
from parallel_runtime.launch import launch, run_threads

FOUR, EIGHT = ParallelConfig(tp=2, dp=2), ParallelConfig(tp=2, pp=2, dp=2)


def expected(ranks: tuple[int, ...]) -> float:
    return float(sum(10**rank for rank in ranks))


def open_often(ctx: ParallelContext, rounds: int, longest_s: float) -> set[str]:
    delays = random.Random(ctx.rank)
    keys = set()
    for _ in range(rounds):
        time.sleep(delays.uniform(0.0, longest_s))
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as other:
            for group in (other.tp, other.dp):
                assert group.all_reduce(torch.tensor(10.0**ctx.rank)).item() == expected(group.ranks)
                keys.add(group.key)
    return keys


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_b051_twenty_opens_with_random_delays_in_processes() -> None:
    keys = launch(open_often, FOUR, 20, 0.1, timeout_s=60)
    assert [len(mine) for mine in keys] == [40] * 4
    assert len(set.union(*keys)) == 20 * 4


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_b051_twenty_opens_with_random_delays_in_threads(backend: str) -> None:
    run_threads(open_often, FOUR.replace(backend=backend), 20, 0.02, timeout_s=60)


@pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])
def test_b051_extra_groups_in_another_order_are_refused_everywhere(backend: str, shm: str) -> None:
    def cross(ctx: ParallelContext) -> float:
        axes = ("tp", "pp") if ctx.rank == 1 else ("tp", "dp")
        with pytest.raises(CollectiveMismatchError, match=r"as no\. 1, .*rank 1 opens tp\+pp"):
            ctx.open_group(*axes)
        return ctx.tp.all_reduce(torch.tensor(10.0**ctx.rank)).item()

    config = ParallelConfig.model_validate({"tp": 2, "dp": 2, "backend": backend, "shm": shm})
    assert run_threads(cross, config, timeout_s=40) == [11.0, 11.0, 1100.0, 1100.0]


def count_groups(ctx: ParallelContext) -> tuple[int, float]:
    connected = {group.ranks for group in ctx.groups().values() if group.world_size > 1}
    return len(connected), ctx.world.all_reduce(torch.tensor(1.0)).item()


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_b069_eight_processes_open_three_axes() -> None:
    """world, stage, tp, dp, pp: five sets of ranks, opened once each; everything else is one of them or alone."""
    assert launch(count_groups, EIGHT, timeout_s=30) == [(5, 8.0)] * 8


@pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])
def test_b069_a_group_waits_for_its_members_only(backend: str, shm: str) -> None:
    """Those of the first group have opened and used it before anybody else begins."""
    is_used = threading.Event()

    def one_after_another(ctx: ParallelContext) -> float:
        is_first = 0 in ctx.layout.group_of(ctx.rank, "tp", "pp")
        assert is_first or is_used.wait(30)
        group = ctx.open_group("tp", "pp")
        total = group.all_reduce(torch.tensor(10.0**ctx.rank)).item()
        if is_first:
            is_used.set()
        return total - expected(group.ranks)

    config = EIGHT.model_validate({**EIGHT.model_dump(), "backend": backend, "shm": shm})
    assert run_threads(one_after_another, config, timeout_s=50) == [0.0] * 8


def test_b069_twice_the_ranks_and_groups_leave_twice_the_keys() -> None:
    """What a rank writes into the store depends on its own groups alone, so that no rank writes for groups it is not in."""

    def count(ctx: ParallelContext) -> int:
        assert ctx.store is not None
        ctx.world.barrier()
        num_keys = ctx.store.num_keys()
        ctx.world.barrier()
        return num_keys

    eight = run_threads(count, EIGHT.replace(backend="gloo"), timeout_s=60)
    sixteen = run_threads(count, EIGHT.replace(backend="gloo", dp=4), timeout_s=60)
    assert max(sixteen) <= 2 * min(eight)
