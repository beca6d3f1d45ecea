"""B034.3: a data-parallel rank that leaves by an exception is an error for the others, not a hang."""

import time

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import PeerLostError
from parallel_runtime.launch import run_threads

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "auto"), ("gloo", "off")])
def test_b034_the_rank_that_stays_gets_an_error(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> str:
        start = time.monotonic()
        try:
            with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
                for step in range(30):
                    if inner.rank == 0 and step == 2:
                        raise ValueError("no more prompts")
                    inner.ep.all_to_all(torch.ones(4))
        except (PeerLostError, ValueError) as error:
            assert time.monotonic() - start < 10
            return f"{type(error).__name__}: {error}"
        return "nothing"

    config = ParallelConfig.model_validate({"dp": 2, "ep": 2, "backend": backend, "shm": shm})
    left, stayed = run_threads(body, config, timeout_s=40)
    assert left == "ValueError: no more prompts"
    assert stayed.startswith("PeerLostError: ep#0 seq 3 all_to_all(float32[4]) lost rank 0 of [0, 1]"), stayed
    assert "ValueError: no more prompts" in stayed
