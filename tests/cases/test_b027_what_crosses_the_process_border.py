"""B027: what cannot cross the process border is refused before any process exists, by name."""

import copy
import multiprocessing
import pickle
import threading

import psutil
import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LaunchError
from parallel_runtime.launch import launch, run_threads


class Worker:
    """Holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def work(self, ctx: ParallelContext) -> int:
        return ctx.rank


def test_b027_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    def nested(ctx: ParallelContext) -> int:
        return ctx.rank

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for fn, named in ((lambda ctx: ctx.rank, "<lambda>"), (nested, "nested"), (Worker().work, "bound to a Worker")):
        with pytest.raises(LaunchError, match=named):
            launch(fn, ParallelConfig(tp=2))
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_b027_contexts_and_groups_stay_in_their_process() -> None:
    def refuse(ctx: ParallelContext) -> None:
        for live in (ctx, ctx.tp):
            for copier in (pickle.dumps, copy.deepcopy):
                with pytest.raises(Exception, match="stay in their process"):
                    copier(live)
        with pytest.raises(LaunchError, match=r"argument 1, a ParallelContext.*contexts stay in their process"):
            launch(print, ParallelConfig(), ctx)

    refuse_all = run_threads(refuse, ParallelConfig(tp=2), timeout_s=60)
    assert refuse_all == [None, None]


def receive(ctx: ParallelContext, connections: "list[multiprocessing.connection.Connection]") -> str:
    return str(connections[ctx.rank].recv())


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_b027_connections_are_handed_to_ranks() -> None:
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    for rank, (mine, _) in enumerate(pairs):
        mine.send(f"for {rank}")
    assert launch(receive, ParallelConfig(tp=2), [theirs for _, theirs in pairs], timeout_s=30) == ["for 0", "for 1"]
    for ends in pairs:
        for end in ends:
            end.close()
