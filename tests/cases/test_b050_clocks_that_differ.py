"""B050: a rank whose clock runs ahead takes the same decisions as the others, under more load than runs at once."""

import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import pytest

from parallel_runtime import launch
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.serving import Batch, Request, SamplingParams, Scheduler, ServingConfig, TpModelWorker
from parallel_runtime.serving.messages import Shutdown, Submit, encode
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

AHEAD_S = 60.0
CLOCKS = ("time", "monotonic", "perf_counter")


def ahead(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() + AHEAD_S


def serve(ctx: ParallelContext, model: Path) -> list[list[tuple[str, int, int]]]:
    """Six requests, two at a time; on rank 1 every clock jumps ahead in the middle. What each batch held."""
    front, link = Pipe()
    batches: list[list[tuple[str, int, int]]] = []
    worker = TpModelWorker(ctx, model=model, config=ServingConfig(max_batch_requests=2, max_batch_tokens=8))

    def observe(batch: Batch) -> None:
        batches.append([(chunk.request_id, chunk.start, chunk.length) for chunk in batch.chunks])
        if ctx.rank == 1 and len(batches) == 4:
            for name in CLOCKS:
                setattr(time, name, ahead(getattr(time, name)))
        if worker.is_leader and len(batches) == 15:
            front.send_bytes(encode(Shutdown()))

    for index in range(6):
        request = Request(request_id=f"r{index}", prompt=PROMPTS[index % 4], sampling=SamplingParams(max_new_tokens=7))
        front.send_bytes(encode(Submit(request)))
    with front, link:
        Scheduler(ctx, worker, link=link if worker.is_leader else None, observer=observe).run()
    return batches


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_b050_a_clock_that_runs_ahead_changes_nothing(tmp_path: Path) -> None:
    first, second = launch(serve, ParallelConfig(tp=2), write_tiny_model(tmp_path / "model"))
    assert first == second
    assert len(first) == 15
    assert all(len(batch) <= 2 for batch in first)
