"""A context that is left normally delivers what it sent; one that is left by an exception waits for nobody."""

import threading
from typing import Any, Literal

import pytest

from parallel_runtime import ParallelConfig, ParallelContext, run_threads


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_leaving_normally_delivers_what_was_sent(backend: Literal["local", "gloo"]) -> None:
    def body(ctx: ParallelContext) -> object:
        if ctx.pp.is_first_rank:
            ctx.pp.send_object(list(range(1000)))
            return None
        assert not threading.Event().wait(0.2)
        return ctx.pp.recv_object()

    assert run_threads(body, ParallelConfig(pp=2, backend=backend))[1] == list(range(1000))


def test_leaving_by_an_exception_waits_for_nobody() -> None:
    def body(ctx: ParallelContext) -> Any:
        if ctx.pp.is_first_rank:
            ctx.pp.send_object("never read")
            raise KeyError("boom")
        return ctx.pp.recv()

    with pytest.raises(Exception, match="boom"):
        run_threads(body, ParallelConfig(pp=2))
