"""B050: tensor-parallel ranks that decide by state of their own. Here all that decides comes from the leader."""

import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.environment import current_environ
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Batch, Request, SamplingParams, Scheduler, ServingConfig, TpModelWorker
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    LeaderMessage,
    Shutdown,
    StepOutput,
    Submit,
    decode_leader,
    encode,
)
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NAMES = ("zeta", "alpha", "midway", "beta", "omega", "one")


def serve_and_record(ctx: ParallelContext, model: Path, abort_at: int) -> tuple[list[Batch], list[LeaderMessage]]:
    """Serve six requests, two at a time, with an abort between two steps; what ran, and what the front was told."""
    front, link = Pipe()
    batches: list[Batch] = []
    serving = ServingConfig(max_batch_requests=2, kv_cache_tokens=256)
    worker = TpModelWorker(ctx, model=model, config=serving)

    def observe(batch: Batch) -> None:
        batches.append(batch)
        if worker.is_leader and len(batches) == abort_at:
            front.send_bytes(encode(Abort("alpha")))
        if worker.is_leader and len(batches) == 25:
            front.send_bytes(encode(Shutdown()))

    for index, name in enumerate(NAMES):
        sampling = SamplingParams(max_new_tokens=6 + index, temperature=0.5 * (index % 2))
        front.send_bytes(encode(Submit(Request(request_id=name, prompt=PROMPTS[index % len(PROMPTS)], sampling=sampling))))
    with front, link:
        Scheduler(ctx, worker, link=link if worker.is_leader else None, observer=observe).run()
        told: list[LeaderMessage] = []
        while worker.is_leader and front.poll():
            told.append(decode_leader(front.recv_bytes()))
    return batches, told


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=3)], ids=["tp", "pp"])
def test_b050_an_abort_takes_effect_in_the_same_step(model: Path, parallel: ParallelConfig) -> None:
    results = run_threads(serve_and_record, parallel, model, 4)
    batches, told = results[0]
    assert all(other == batches for other, _ in results)
    with_alpha = [number for number, batch in enumerate(batches, 1) if any(c.request_id == "alpha" for c in batch.chunks)]
    assert with_alpha[-1] == 4
    assert StepOutput(request_id="alpha", finish_reason=FinishReason.ABORT) in told
    assert all(len(batch.chunks) <= 2 for batch in batches)


PLAY = """
from parallel_runtime.serving import PolicyLimits, Request, SamplingParams, SchedulingPolicy
policy = SchedulingPolicy(PolicyLimits(num_blocks=9, page_size=2, max_batch_requests=3, max_batch_tokens=7))
for name in ("zeta", "alpha", "midway", "beta", "omega", "one"):
    policy.add(Request(request_id=name, prompt=(1,) * (len(name) + 2), sampling=SamplingParams(max_new_tokens=6)))
for turn in range(60):
    batch = policy.schedule()
    print([(chunk.request_id, chunk.start, chunk.blocks) for chunk in batch.chunks])
    if batch.chunks:
        policy.complete([turn] * len(batch.sampled))
    if turn == 9:
        print([(name, policy.abort(name)) for name in policy.alive])
"""


@pytest.mark.processes
def test_b050_hash_seeds_change_nothing() -> None:
    heard = []
    for seed in ("1", "2"):
        environ = {**current_environ(), "PYTHONHASHSEED": seed}
        played = subprocess.run([sys.executable, "-c", PLAY], env=environ, capture_output=True, text=True, check=True)
        heard.append(played.stdout)
    assert heard[0] == heard[1]
    assert "'omega'" in heard[0]
