"""Counting what groups do."""

import json
import time
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.control import Address, ask
from parallel_runtime.context.statistics import OperationStatistics, Statistics
from parallel_runtime.errors import ContextStateError
from parallel_runtime.launch import launch, run_threads


def _count(ctx: ParallelContext) -> Statistics:
    x = torch.ones(8, 4)
    ctx.tp.all_reduce_(x)
    ctx.start_stats()
    for _ in range(3):
        ctx.tp.all_reduce_(x)
    ctx.tp.all_gather(x.to(torch.bfloat16))
    ctx.tp.all_gather_object({"a": 1})
    ctx.open_group("tp", "pp").barrier()
    return ctx.stats()


def test_calls_bytes_and_waiting_are_counted_from_the_start_on() -> None:
    both = run_threads(_count, ParallelConfig(tp=2, pp=2))
    for rank, stats in enumerate(both):
        assert stats.rank == rank
        found = {(each.group, each.operation): each for each in stats.operations}
        name = f"tp#{rank // 2}"
        assert found[name, "all_reduce_"].calls == 3
        assert found[name, "all_reduce_"].nbytes == 3 * 8 * 4 * 4
        assert found[name, "all_reduce_"].ranks == ((0, 1), (2, 3))[rank // 2]
        assert found[name, "all_gather"].nbytes == 8 * 4 * 2
        assert found[name, "all_gather_object"].nbytes == 0
        assert found["tp+pp#0", "barrier"].calls == 1
        for each in stats.operations:
            assert each.waited_s is not None
            assert 0 <= each.waited_s <= each.seconds <= stats.elapsed_s


def test_starting_again_forgets_what_was_counted() -> None:
    def run(ctx: ParallelContext) -> tuple[int, int]:
        ctx.start_stats()
        ctx.world.barrier()
        before = ctx.stats()
        ctx.start_stats()
        ctx.world.barrier()
        ctx.world.barrier()
        return before.operations[0].calls, ctx.stats().operations[0].calls

    assert run_threads(run, ParallelConfig(tp=2)) == [(1, 2), (1, 2)]


@pytest.mark.parametrize("start", [run_threads, pytest.param(launch, marks=pytest.mark.processes)])
def test_a_rank_tells_its_counts_and_its_operation_to_whoever_has_its_address(start: Any) -> None:
    for told in start(_ask_the_other, ParallelConfig(tp=2)):
        inside, calls = told
        assert inside.startswith("world#0 seq ")
        assert calls == 3


def _ask_the_other(ctx: ParallelContext) -> tuple[str, int]:
    ctx.start_stats()
    for _ in range(3):
        ctx.tp.all_reduce_(torch.ones(2))
    addresses = ctx.world.all_gather_object(ctx.answers_at())
    inside, calls = "", 0
    for turn in range(2):  # one asks while the other waits for it
        if turn == ctx.rank:
            until = time.monotonic() + 20
            while not inside and time.monotonic() < until:
                report = ask(Address.from_json(addresses[1 - turn]), 5.0)
                inside = report.inside
            assert report.counted is not None
            calls = sum(each.calls for each in report.counted.operations if each.operation == "all_reduce_")
        ctx.world.barrier()
    return inside, calls


def test_nothing_is_told_before_counting_has_begun() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        with pytest.raises(ContextStateError, match=r"nothing was counted: call `context.start_stats\(\)`"):
            ctx.stats()
        ctx.start_stats()
        assert ctx.stats().operations == ()
        assert ctx.answers_at() == ""
    with pytest.raises(ContextStateError, match="closed"):
        ctx.start_stats()


def test_a_communicator_that_cannot_tell_says_so() -> None:
    stats = Statistics(
        rank=1,
        elapsed_s=2.0,
        operations=(
            OperationStatistics(group='a"b#0', ranks=(0, 1), operation="barrier", calls=4, nbytes=0, seconds=0.5, waited_s=None),
            OperationStatistics(
                group="tp#0", ranks=(0, 1), operation="all_reduce", calls=2, nbytes=64, seconds=1.0, waited_s=0.25
            ),
        ),
    )
    assert [each.waiting_share for each in stats.operations] == [None, 0.25]
    assert json.loads(stats.to_json())["operations"][1]["waiting_share"] == 0.25
    assert str(stats).splitlines()[3:] == [
        'a"b#0  0 1    barrier     4      0 B    500.00   25.0%        -',
        "tp#0   0 1    all_reduce  2      64 B   1000.00  50.0%        25%",
        "waiting -: the communicator of this group cannot tell",
    ]
    text = stats.to_prometheus(labels={"job": "x"})
    assert 'parallel_runtime_operations_total{job="x",rank="1",group="a\\"b#0",operation="barrier"} 4' in text
    waited = [line for line in text.splitlines() if line.startswith("parallel_runtime_operation_waited_seconds_total")]
    assert waited == [
        'parallel_runtime_operation_waited_seconds_total{job="x",rank="1",group="tp#0",operation="all_reduce"} 0.25'
    ]
