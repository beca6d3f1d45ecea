"""Capture of graphs on a pretended device: which groups take part, what is made known, what is refused, and when graphs run."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import Communicator, GroupCoordinator, ReduceOp
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.capture import CapturedGraph, CudaGraphs, GraphCapture
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.probe import Stage
from parallel_runtime.errors import ArgumentError, ContextStateError, PeerFailedError, StaleContextError
from parallel_runtime.launch import run_threads
from parallel_runtime.terms import Rank
from parallel_runtime.testing.graphs import FakeGraphs

pytestmark = pytest.mark.timeout(60)


class Noting:
    """A communicator that may be captured, like nccl's, and notes what a capture asks of it."""

    is_capturable = True

    def __init__(self, inner: Communicator, ranks: tuple[Rank, ...], events: list[tuple[str, tuple[int, ...]]]) -> None:
        self.inner = inner
        self.ranks = ranks
        self.events = events
        self.fault: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        self.inner.all_reduce_(tensor, op, timeout_s)

    def enter_capture(self) -> None:
        self.events.append(("enter", self.ranks))

    def leave_capture(self) -> None:
        self.events.append(("leave", self.ranks))

    def register_captured(self, timeout_s: float) -> None:
        self.events.append(("register", self.ranks))
        if self.fault is not None:
            raise self.fault
        self.inner.barrier(timeout_s)


class NotingProbe:
    """Puts a ``Noting`` on top of every connection; messages go beneath it, as they go over gloo beneath nccl."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.made: dict[tuple[int, ...], Noting] = {}

    def at(self, stage: Stage) -> None:
        """Nothing."""

    def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
        self.made[ranks] = Noting(connection.data, ranks, self.events)
        return Connection(data=cast(Communicator, self.made[ranks]), control=connection.control)


def on_ranks(config: ParallelConfig, work: Callable[[ParallelContext, NotingProbe], object]) -> list[Any]:
    """Run ``work(ctx, probe)`` on every rank, in a context whose communicators note."""

    def run(outer: ParallelContext) -> object:
        probe = NotingProbe()
        with ParallelContext(config, identity=outer.identity, store=outer.store, hub=outer.hub, probe=probe) as ctx:
            return work(ctx, probe)

    return run_threads(run, config)


def sums(ctx: ParallelContext) -> Callable[[], Tensor]:
    x = torch.full((2,), ctx.rank + 1.0)
    return lambda: ctx.tp.all_reduce(x)


def test_distinct_groups_once_in_one_order_and_known_after_all_left() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> list[tuple[str, tuple[int, ...]]]:
        ctx.open_group("tp", "pp")  # the world again
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            assert [event for event, _ in probe.events] == ["enter"] * 3
            capture.graph(sums(ctx))
        assert [group.ranks for group in capture.groups] == [ranks for event, ranks in probe.events if event == "enter"]
        return probe.events

    told = on_ranks(ParallelConfig(tp=2, pp=2), work)
    for rank, events in enumerate(told):
        tp = (rank // 2 * 2, rank // 2 * 2 + 1)
        pp = (rank % 2, rank % 2 + 2)
        order = sorted([(0, 1, 2, 3), tp, pp])
        assert events == [
            (event, ranks) for event in ("enter", "leave", "register") for ranks in order[:: -1 if event == "leave" else 1]
        ]


def test_a_graph_computes_again_with_what_its_inputs_hold() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> list[float]:
        x, device = torch.ones(1), FakeGraphs()
        with ctx.graph_capture("side", graphs=device) as capture:
            graph = capture.graph(lambda: ctx.tp.all_reduce(x * 2), num_warmups=2)
            with pytest.raises(ContextStateError, match="replayed once its graph_capture block has ended"):
                graph.replay()
        x.fill_(ctx.rank)
        assert graph.replay() is graph.output
        first = graph.output.item()
        x.fill_(5)
        assert device.events == ["stream side", "record", "stream left", "replay 0"]
        return [first, graph.replay().item()]

    assert on_ranks(ParallelConfig(tp=2), work) == [[2.0, 20.0]] * 2


@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_nothing_is_made_known_after_a_failed_body(who: tuple[int, ...]) -> None:
    def fail_within(ctx: ParallelContext, graphs: list[CapturedGraph[Tensor]], device: FakeGraphs) -> None:
        with ctx.graph_capture(graphs=device) as capture:
            graphs.append(capture.graph(sums(ctx)))
            if ctx.rank in who:
                raise KeyError("mine")

    def work(ctx: ParallelContext, probe: NotingProbe) -> str:
        graphs: list[CapturedGraph[Tensor]] = []
        device = FakeGraphs()
        with pytest.raises((KeyError, PeerFailedError)) as caught:
            fail_within(ctx, graphs, device)
        assert device.events[-1] == "reset 0"
        assert [event for event, _ in probe.events] == ["enter", "leave"]
        with pytest.raises(ContextStateError, match="failed on a rank, so it runs on none"):
            graphs[0].replay()
        assert ctx.tp.all_gather_object(ctx.rank) == [0, 1]
        with ctx.graph_capture(graphs=device) as capture:  # and the next one goes well
            again = capture.graph(sums(ctx))
        return f"{type(caught.value).__name__}: {caught.value}; {again.replay().tolist()}"

    mine, peer = "KeyError: 'mine'; [3.0, 3.0]", "PeerFailedError: rank 0 failed: KeyError: 'mine'; [3.0, 3.0]"
    assert on_ranks(ParallelConfig(tp=2), work) == [mine, mine if 1 in who else peer]


def test_what_cannot_be_made_known_fails_on_all() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> None:
        if ctx.rank == 1:
            probe.made[ctx.pp.ranks].fault = MemoryError("no handle")
        with pytest.raises(MemoryError if ctx.rank == 1 else PeerFailedError, match="no handle"):
            capture_one(ctx)

    def capture_one(ctx: ParallelContext) -> None:
        with ctx.graph_capture(graphs=FakeGraphs(), timeout_s=20) as capture:
            capture.graph(sums(ctx))

    on_ranks(ParallelConfig(pp=2), work)


def test_a_capture_in_a_capture_is_refused() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> None:
        with ctx.derive(ctx.config) as child, ctx.duplicate("twin") as twin:
            with ctx.graph_capture(graphs=FakeGraphs()):
                with pytest.raises(ContextStateError, match="is in a graph capture already; capture as many"):
                    ctx.graph_capture(graphs=FakeGraphs()).__enter__()
                with twin.graph_capture(graphs=FakeGraphs()) as capture:
                    assert capture.groups == (twin.world,)
            with ctx.graph_capture(graphs=FakeGraphs()) as outer:
                shared = pytest.raises(ContextStateError, match="of this context or of one that shares its connection")
                with shared, child.graph_capture(graphs=FakeGraphs()):
                    pass
            with child.graph_capture(graphs=FakeGraphs()) as own:
                assert own.groups == (child.world,)
                assert outer.groups == (ctx.world,)
        assert probe.events.count(("register", (0, 1))) == 3

    on_ranks(ParallelConfig(tp=2), work)


def test_graphs_that_outlive_their_context_are_stale() -> None:
    def run(ctx: ParallelContext) -> None:
        device = FakeGraphs()
        with ExitStack() as parents:
            child = parents.enter_context(ctx.duplicate("child"))
            with child.graph_capture(graphs=device) as capture:
                graph = capture.graph(lambda: None)
            graph.replay()
        with pytest.raises(StaleContextError, match=rf"this graph of context {child.uid} was given back when the context closed"):
            graph.replay()
        assert device.events[-2:] == ["replay 0", "reset 0"]
        with pytest.raises(ContextStateError, match="this graph capture is over"):
            capture.graph(lambda: None)
        with pytest.raises(ContextStateError, match="is closed, so it has no groups"):
            child.graph_capture(graphs=device).__enter__()

    run_threads(run, ParallelConfig(tp=2))


def test_a_part_of_the_world_captures_its_own_groups() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> None:
        if ctx.coordinate.dp == 0:
            with ctx.graph_capture(group=ctx.tp, graphs=FakeGraphs()) as capture:
                assert capture.groups == (ctx.tp,)
        ctx.world.barrier()
        assert probe.events == [(event, ctx.tp.ranks) for event in ("enter", "leave", "register") if ctx.coordinate.dp == 0]

    on_ranks(ParallelConfig(tp=2, dp=2), work)


REFUSED: dict[str, Callable[[GroupCoordinator], object]] = {
    "barrier": lambda tp: tp.barrier(),
    "all_gather_object": lambda tp: tp.all_gather_object(1),
    "broadcast_object": lambda tp: tp.broadcast_object(1),
    "send": lambda tp: tp.send(torch.ones(1), 1 - tp.rank_in_group),
    "irecv": lambda tp: tp.irecv(1 - tp.rank_in_group),
    "symmetric_empty": lambda tp: tp.symmetric_empty((2,)),
    "all_gatherv sizes": lambda tp: tp.all_gatherv(torch.ones(1)),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_goes_through_the_cpu_is_refused_by_name(operation: str) -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> None:
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            match = f"{operation} on group tp#0 cannot become part of a graph: it goes through the CPU"
            with pytest.raises(ContextStateError, match=match):
                capture.graph(lambda: REFUSED[operation](ctx.tp), num_warmups=0)
            ctx.tp.barrier()  # in the block, but not recorded
            capture.graph(lambda: ctx.tp.all_reduce(torch.empty(0)))

    on_ranks(ParallelConfig(tp=2), work)


@pytest.mark.parametrize(("backend", "shm", "kind"), [("local", "auto", "local"), ("gloo", "on", "shm"), ("gloo", "off", "c10d")])
def test_groups_that_work_on_the_cpu_are_refused_by_name(backend: str, shm: str, kind: str) -> None:
    def run(ctx: ParallelContext) -> None:
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            match = f"all_reduce on group tp#0 cannot become part of a graph: it goes over {kind}, which works on the CPU"
            with pytest.raises(ContextStateError, match=match):
                capture.graph(sums(ctx))

    run_threads(run, ParallelConfig.model_validate({"tp": 2, "backend": backend, "shm": shm}))


def test_checked_groups_are_refused() -> None:
    def work(ctx: ParallelContext, probe: NotingProbe) -> None:
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            match = "all_reduce on group tp#0 cannot become part of a graph: it is checked over the CPU first"
            with pytest.raises(ContextStateError, match=match):
                capture.graph(sums(ctx))

    on_ranks(ParallelConfig(tp=2, checked=True), work)


def test_misuse() -> None:
    def run(ctx: ParallelContext) -> None:
        with pytest.raises(
            ArgumentError, match="graphs are captured on CUDA devices, and the tensors of this context live on cpu"
        ):
            ctx.graph_capture().__enter__()
        with pytest.raises(ArgumentError, match="timeout_s"):
            ctx.graph_capture(timeout_s=0, graphs=FakeGraphs()).__enter__()
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            assert isinstance(capture, GraphCapture)
            assert capture.groups == ()
            with pytest.raises(ContextStateError, match="a graph is being recorded already"):
                capture.graph(lambda: capture.graph(lambda: None), num_warmups=0)
            with pytest.raises(ArgumentError, match="returns tensors or nothing, got str"):
                capture.graph(lambda: "text")

    run_threads(run, ParallelConfig())


def test_cuda_graphs_want_cuda() -> None:
    with pytest.raises(ArgumentError, match="live on cpu"):
        CudaGraphs(torch.device("cpu"))
