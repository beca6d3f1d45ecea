"""B044: a pipeline whose receiver is slow gets what was sent; a context that leaves waits for its sends, but not for long."""

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Batch
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

KINDS = pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])


@KINDS
def test_b044_a_slow_stage_gets_every_micro_batch_intact(backend: str, shm: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    expected = greedy_reference(model, PROMPTS[:2], 25)

    def slow(rank: int, batch: Batch) -> None:
        if rank == 1:
            time.sleep(0.02)

    parallel = ParallelConfig.model_validate({"pp": 2, "backend": backend, "shm": shm})
    with Replicas(model, parallel, at_batch=slow) as replicas:
        assert replicas.generate(*PROMPTS[:2], new=25) == expected
    assert replicas.failure is None
    assert len(replicas.batches[1]) >= 50


@KINDS
def test_b044_a_context_delivers_what_it_sent_before_it_has_left(backend: str, shm: str) -> None:
    def body(ctx: ParallelContext) -> list[float]:
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
            if inner.rank == 0:
                for number in range(5):
                    inner.tp.isend(torch.full((300_000,), float(number)))
                return []
            assert not threading.Event().wait(0.3)  # the other one is leaving by now
            return [inner.tp.recv()[-1].item() for _ in range(5)]

    config = ParallelConfig.model_validate({"tp": 2, "backend": backend, "shm": shm})
    assert run_threads(body, config, timeout_s=40)[1] == [0, 1, 2, 3, 4]


@KINDS
def test_b044_a_context_drops_what_nobody_takes_and_says_how_much(
    backend: str, shm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All groups together wait no longer than ``exit_s``."""
    is_over = threading.Event()

    def body(ctx: ParallelContext) -> float:
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as inner:
            if inner.rank > 0:
                assert is_over.wait(30)
                return 0.0
            for group in (inner.tp, inner.pp, inner.world, inner.stage):
                group.isend(torch.ones(3))
                group.isend_tensor_dict({"x": torch.ones(3)})
            start = time.monotonic()
            inner.close()
            is_over.set()
            return time.monotonic() - start

    config = ParallelConfig.model_validate({"tp": 2, "pp": 2, "backend": backend, "shm": shm})
    config = config.replace(deadlines=Deadlines(exit_s=1.0))
    with caplog.at_level(logging.WARNING):
        waited_s = run_threads(body, config, timeout_s=40)[0]
    assert 0.9 < waited_s < 2.5
    assert sorted(record.getMessage().split(" that")[0] for record in caplog.records) == [
        f"group {name}#0 dropped 2 sends" for name in ("pp", "stage", "tp", "world")
    ]
