"""B007: one rank raises, or leaves, in the middle of work, and its peers hang in a collective."""

import time

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerLostError, RankFailedError
from parallel_runtime.launch import launch, run_threads

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

LONG = Deadlines(collective_s=300, control_s=300, p2p_s=300)
WAYS = pytest.mark.parametrize("shm", ["auto", "off"])


def loop(ctx: ParallelContext) -> None:
    for round_ in range(100):
        if ctx.rank == 1 and round_ == 5:
            raise ValueError("boom-42")
        ctx.world.all_reduce(torch.ones(4))


@WAYS
def test_b007_an_exception_in_round_five_ends_the_launch(shm: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed in .*loop.*ValueError: boom-42") as caught:
        launch(loop, ParallelConfig.model_validate({"tp": 2, "shm": shm, "deadlines": LONG.model_dump()}))
    assert caught.value.rank == 1
    assert time.monotonic() - start < 20


def one_leaves(ctx: ParallelContext, how: str) -> tuple[str, float]:
    start = time.monotonic()
    try:
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
            for round_ in range(10):
                if inner.rank == 1 and round_ == 5:
                    if how == "raise":
                        raise ValueError("boom-42")
                    start = time.monotonic()
                    break
                inner.world.all_reduce(torch.ones(4))
    except PeerLostError as error:
        return str(error), time.monotonic() - start
    except ValueError:
        pass
    return "", time.monotonic() - start


@WAYS
@pytest.mark.parametrize("how", ["raise", "leave"])
def test_b007_those_that_stay_learn_who_left_and_why(shm: str, how: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "shm": shm, "deadlines": LONG.model_dump()})
    (text, _), (_, leaving_s) = launch(one_leaves, config, how, timeout_s=40)
    assert text.startswith("world#0 seq 6 all_reduce(float32[4]) lost rank 1 of [0, 1] after"), text
    assert ("by an exception: ValueError: boom-42" if how == "raise" else "has left the context normally") in text
    assert leaving_s < 10


@pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])
def test_b007_a_barrier_ends_when_a_member_has_left(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> tuple[str, float]:
        start = time.monotonic()
        try:
            with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
                inner.world.barrier()
                start = time.monotonic()
                if inner.rank == 0:
                    inner.world.barrier()
        except PeerLostError as error:
            return str(error), time.monotonic() - start
        return "", time.monotonic() - start

    config = ParallelConfig.model_validate({"tp": 2, "backend": backend, "shm": shm, "deadlines": LONG.model_dump()})
    (text, waited_s), (_, leaving_s) = run_threads(body, config, timeout_s=40)
    assert text.startswith("world#0 seq 2 barrier() lost rank 1 of [0, 1] after"), text
    assert "has left the context normally" in text
    assert max(waited_s, leaving_s) < 10


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_b007_threads_learn_it_too(backend: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "backend": backend, "deadlines": LONG.model_dump()})
    (text, _), _ = run_threads(one_leaves, config, "raise", timeout_s=40)
    assert "lost rank 1 of [0, 1]" in text
    assert "ValueError: boom-42" in text
