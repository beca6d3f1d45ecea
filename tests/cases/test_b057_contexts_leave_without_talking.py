"""B057: an error inside a context or a graph capture surfaces as it is, at once; no exit talks to peers that will not answer."""

import time
from collections.abc import Callable

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError
from parallel_runtime.launch import run_threads
from parallel_runtime.testing.graphs import FakeGraphs

pytestmark = pytest.mark.timeout(60)

KINDS = pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])


def config_of(backend: str, shm: str) -> ParallelConfig:
    patient = Deadlines(collective_s=50, exit_s=50)
    return ParallelConfig.model_validate({"tp": 2, "backend": backend, "shm": shm, "deadlines": patient.model_dump()})


def raise_inside(context: ParallelContext, *, fails: bool) -> None:
    with context, context.derive(context.config) as child, child.duplicate("deep") as deep:
        deep.tp.isend(torch.ones(3), 1 - deep.rank)  # nobody receives it
        deep.world.barrier()
        if fails:
            raise ValueError("x")


@KINDS
@pytest.mark.parametrize("who", ["both", "one"])
def test_b057_an_error_inside_nested_contexts_surfaces_unmasked(backend: str, shm: str, who: str) -> None:
    def work(ctx: ParallelContext) -> tuple[str, float]:
        start = time.monotonic()
        inner = ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub)
        try:
            raise_inside(inner, fails=who == "both" or ctx.rank == 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}, because of {error.__cause__}", time.monotonic() - start
        return "", time.monotonic() - start

    told = run_threads(work, config_of(backend, shm), timeout_s=30)
    assert told[0][0] == "ValueError: x, because of None"
    assert told[1][0] == (told[0][0] if who == "both" else "")
    assert all(seconds < 10 for _, seconds in told), told


@KINDS
def test_b057_the_context_around_it_goes_on(backend: str, shm: str) -> None:
    def work(ctx: ParallelContext) -> float:
        with pytest.raises(ValueError, match="x"):
            raise_inside(ctx.duplicate("inner"), fails=True)
        return ctx.tp.all_reduce(torch.ones(1)).item()

    assert run_threads(work, config_of(backend, shm), timeout_s=30) == [2.0, 2.0]


@KINDS
def test_b057_what_was_kept_of_a_closed_context_says_so(backend: str, shm: str) -> None:
    def work(ctx: ParallelContext) -> None:
        with ctx.derive(ctx.config) as child:
            group, extra = child.tp, child.open_group("tp", "pp")
            handle = group.irecv(1 - child.rank)
            with pytest.raises(ContextStateError, match="entered once"):
                child.__enter__()
        for use in (group.barrier, extra.barrier, handle.wait, lambda: group.send(torch.ones(1), 1 - ctx.rank)):
            with pytest.raises(ContextStateError, match="the group is closed"):
                use()
        with pytest.raises(ContextStateError, match="make a new one"):
            child.open_group("tp", "dp")
        assert ctx.tp.all_reduce(torch.ones(1)).item() == 2.0

    run_threads(work, config_of(backend, shm), timeout_s=30)


def capture_and(ctx: ParallelContext, action: Callable[[], object]) -> None:
    with ctx.graph_capture(graphs=FakeGraphs()) as capture:
        capture.graph(lambda: None)
        action()


def raise_x() -> None:
    raise ValueError("x")


@KINDS
@pytest.mark.parametrize("who", ["both", "one", "one of which the other waits for"])
def test_b057_an_error_inside_a_capture_surfaces_unmasked(backend: str, shm: str, who: str) -> None:
    def work(ctx: ParallelContext) -> tuple[str, float]:
        start = time.monotonic()
        with ctx.duplicate("inner") as inner:
            waits = who == "one of which the other waits for"
            fails = who == "both" or ctx.rank == 0
            action = raise_x if fails else inner.tp.barrier if waits else time.monotonic
            try:
                capture_and(inner, action)
            except Exception as error:
                told = f"{type(error).__name__}: {error}, because of {error.__cause__}"
                return told if not waits or fails else type(error).__name__, time.monotonic() - start
        return "", time.monotonic() - start

    told = run_threads(work, config_of(backend, shm), timeout_s=30)
    mine, peer = "ValueError: x, because of None", "PeerFailedError: rank 0 failed: ValueError: x, because of None"
    assert told[0][0] == mine
    assert told[1][0] == {"both": mine, "one": peer}.get(who, "PeerFailedError")
    assert all(seconds < 5 for _, seconds in told), told


@KINDS
def test_b057_a_group_works_as_before_once_its_capture_failed(backend: str, shm: str) -> None:
    def work(ctx: ParallelContext) -> float:
        with pytest.raises(ValueError, match="x"):
            capture_and(ctx, raise_x)
        with pytest.raises(ContextStateError, match="is in a graph capture already"):
            capture_and(ctx, lambda: capture_and(ctx, lambda: None))
        return ctx.tp.all_reduce(torch.ones(1)).item()

    assert run_threads(work, config_of(backend, shm), timeout_s=30) == [2.0, 2.0]
