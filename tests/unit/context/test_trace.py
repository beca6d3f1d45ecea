"""The trace of all ranks: a valid document, on one clock, with arrows between the members of collectives."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext, trace
from parallel_runtime.context.trace_document import Clock, Message, Operation, RankTrace, Stretch, trace_document
from parallel_runtime.errors import ContextStateError, RankFailedError
from parallel_runtime.launch import launch, run_threads


def check_document(document: dict[str, Any], num_ranks: int, num_worlds: int = 1) -> list[tuple[int, int]]:
    """What every trace must hold; sender and receiver of each arrow between two ranks."""
    world_size = num_ranks // num_worlds
    events = [event for event in document["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events)
    assert {event["pid"] for event in document["traceEvents"]} <= set(range(num_ranks))
    named = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} <= named
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    messages = [flows.pop(number) for number, flow in list(flows.items()) if flow[0]["cat"] == "message"]
    slices = {(event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]
        joined = [slices[event["pid"], event["tid"], event["ts"]] for event in flow]  # an arrow ends where a slice begins
        first = joined[0]["pid"] // world_size * world_size
        assert {event["pid"] - first for event in joined} == set(joined[0]["args"]["ranks"])
        assert len({event["name"].removesuffix("_") for event in joined}) == 1
    met = Counter(
        (event["pid"] // world_size, tuple(event["args"]["ranks"]), event["args"]["collective"])
        for event in slices.values()
        if event["cat"] == "collective"
    )
    assert all(count == len(ranks) for (_, ranks, _), count in met.items())
    assert len(flows) == len(met)
    for begin, end in messages:
        assert (begin["ph"], end["ph"], begin["name"], end["name"]) == ("s", "f", "message", "message")
        sent = slices[begin["pid"], begin["tid"], begin["ts"]]
        under_way = slices[end["pid"], end["tid"], end["ts"]]
        assert (sent["cat"], under_way["name"], under_way["args"]["from rank"]) == ("message", "message", begin["pid"])
        assert begin["ts"] < end["ts"]
    return [(begin["pid"], end["pid"]) for begin, end in messages]


def _work(ctx: ParallelContext, path: Path) -> None:
    x = torch.ones(64)
    ctx.world.barrier()
    with ctx.trace(path) as recording:
        for number in range(3):
            with recording.span("forward", number=number):
                ctx.tp.all_reduce_(x)
            if ctx.pp.is_first_rank:
                ctx.pp.send(x, dst=1)
            else:
                ctx.pp.recv(src=0)
            ctx.world.barrier()
    ctx.world.barrier()


@pytest.mark.parametrize("start", [run_threads, pytest.param(launch, marks=pytest.mark.processes)])
def test_a_trace_of_four_ranks_is_whole(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    start(_work, ParallelConfig(tp=2, pp=2), path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert Counter(check_document(document, 4)) == {(0, 2): 3, (1, 3): 3}
    counts = Counter((event["pid"], event["name"]) for event in document["traceEvents"] if event["ph"] == "X")
    for rank in range(4):
        assert counts[rank, "all_reduce_"] == counts[rank, "barrier"] == counts[rank, "forward"] == 3
        assert counts[rank, "send"] + counts[rank, "recv"] == 3
    clocks = document["metadata"]["clocks"]
    assert [clock["rank"] for clock in clocks] == [0, 1, 2, 3]
    assert clocks[0]["uncertainty_us"] == 0
    assert all(abs(clock["offset_us"] - clock["applied_us"]) <= clock["uncertainty_us"] for clock in clocks)


def _exchange_all(ctx: ParallelContext, path: Path) -> None:
    group, x = ctx.world, torch.ones(2)
    group.send_object("before", dst=(group.rank_in_group + 1) % 3)
    group.recv_object(src=(group.rank_in_group - 1) % 3)
    with ctx.trace(path):
        group.exchange(x, dst=(group.rank_in_group + 1) % 3, src=(group.rank_in_group - 1) % 3)
        if ctx.rank == 0:
            group.send_object("hello", dst=2)
            handle = group.irecv(src=1, tag=7)
            handle.wait()
        elif ctx.rank == 1:
            group.isend(x, dst=0, tag=7).wait()
        else:
            assert group.recv_object(src=0) == "hello"


def test_every_message_is_an_arrow_from_its_sender_to_whoever_took_it(tmp_path: Path) -> None:
    run_threads(_exchange_all, ParallelConfig(dp=3), tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert Counter(check_document(document, 3)) == {(0, 1): 1, (1, 2): 1, (2, 0): 1, (0, 2): 1, (1, 0): 1}


def _operation(start_s: float, name: str = "all_reduce", sequence: int = 1) -> Operation:
    return Operation("tp#0", (0, 1), sequence, name, "float32", (2,), start_s, 0.5, None)


def _part(rank: int, start_s: float, operations: list[Operation], stretches: list[Stretch]) -> RankTrace:
    return RankTrace(rank=rank, who="", pid=1, start_s=start_s, num_dropped=rank, operations=operations, stretches=stretches)


def test_other_clocks_are_set_right_and_members_count_collectives_alone() -> None:
    """Rank 1's clock is 100 s ahead, and it has sent a message before the collective, so that sequence numbers differ."""
    mine = _part(0, 10.0, [_operation(11.0)], [])
    theirs = _part(1, 110.0, [_operation(110.5, "send"), _operation(111.25, "all_reduce_", 2)], [])
    document = trace_document([mine, theirs], [Clock(0.0, 0.0), Clock(100.0, 0.001)])
    check_document(document, 2)
    begins = {(event["pid"], event["name"]): event["ts"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert begins == {(0, "all_reduce"): 1e6, (1, "send"): 0.5e6, (1, "all_reduce_"): 1.25e6}
    assert document["metadata"]["dropped"] == {"1": 1}


def test_the_arrow_of_a_message_that_was_long_waited_for_goes_forward() -> None:
    ends = [Message(src=0, dst=1, stream=0, number=4, is_sent=is_sent) for is_sent in (True, False)]
    sent = Operation("pp#0", (0, 1), 1, "send", "", (), 109.9999, 0.0002, None, (ends[0],))
    taken = Operation("pp#0", (0, 1), 1, "recv", "", (), 10.0, 99.99995, None, (ends[1],))
    document = trace_document([_part(0, 10.0, [sent], []), _part(1, 10.0, [taken], [])], [Clock(0.0, 0.0)] * 2)
    assert check_document(document, 2) == [(0, 1)]
    (under_way,) = (event for event in document["traceEvents"] if event["name"] == "message" and event["ph"] == "X")
    assert (under_way["ts"], under_way["dur"]) == pytest.approx((99.9999e6 + 0.1, 50 - 0.1), abs=0.01)


def test_a_difference_that_cannot_be_measured_counts_as_none() -> None:
    assert Clock(0.001, 0.002).applied_s == 0
    assert Clock(-0.003, 0.002).applied_s == -0.003


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        with (
            ctx.trace(tmp_path / "trace.json"),
            pytest.raises(ContextStateError, match="records a trace already"),
            ctx.trace(tmp_path / "other.json"),
        ):
            pass
        assert (tmp_path / "trace.json").exists()
        with ctx.trace(tmp_path / "again.json"):
            pass


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    def run(ctx: ParallelContext) -> None:
        with ctx.trace(tmp_path / "trace.json"):
            raise ValueError(f"rank {ctx.rank} has had enough")

    with pytest.raises(RankFailedError, match="has had enough"):
        run_threads(run, ParallelConfig(tp=2))
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_much_is_counted_and_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace, "MAX_OPERATIONS", 2)

    def run(ctx: ParallelContext) -> None:
        with ctx.trace(tmp_path / "trace.json"):
            for _ in range(5):
                ctx.world.barrier()

    run_threads(run, ParallelConfig(tp=2))
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    check_document(document, 2)
    assert document["metadata"]["dropped"] == {"0": 3, "1": 3}
