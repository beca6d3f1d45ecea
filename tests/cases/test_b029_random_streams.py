"""B029: tensor-parallel ranks that draw differently, data-parallel ranks that draw the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Engine, Request, SamplingParams, SchedulingPolicy, ServingConfig, TpModelWorker
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.mark.parametrize("disturbed", [False, True])
def test_b029_tp_ranks_draw_the_same(model: Path, disturbed: bool) -> None:
    def run(ctx: ParallelContext) -> list[int]:
        if disturbed and ctx.rank == 1:
            torch.rand(1)
        worker = TpModelWorker(ctx, model=model)
        policy = SchedulingPolicy(worker.limits)
        policy.add(Request(request_id="a", prompt=PROMPTS[1], sampling=SamplingParams(max_new_tokens=50, temperature=1.0)))
        drawn: list[int] = []
        while not policy.is_idle:
            batch = policy.schedule()
            sampled = worker.runner.sample(batch, worker.run_stages(batch), base_seed=worker.seed)
            policy.complete(sampled.token_ids)
            drawn.extend(sampled.token_ids)
        return drawn

    first, second = run_threads(run, ParallelConfig(tp=2))
    assert len(first) == 50
    assert first == second


def draw(model: Path, parallel: ParallelConfig, prompts: Sequence[Sequence[int]], seed: int | None) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)
    serving = ServingConfig(seed=7)
    with Engine(model, parallel=parallel, serving=serving, executor="threads") as engine:
        return [completion.token_ids for completion in engine.generate(prompts, sampling)]


def test_b029_dp_ranks_draw_differently_unless_a_seed_is_given(model: Path) -> None:
    twice = [PROMPTS[0], PROMPTS[0]]
    first, second = draw(model, ParallelConfig(dp=2), twice, None)
    assert first != second
    assert draw(model, ParallelConfig(dp=2), twice, None) == [first, second]
    (alone,) = draw(model, ParallelConfig(tp=1), twice[:1], 11)
    assert draw(model, ParallelConfig(dp=2), twice, 11) == [alone, alone]
    assert draw(model, ParallelConfig(tp=2), twice[:1], 11) == [alone]


def test_b029_requests_of_one_replica_draw_differently(model: Path) -> None:
    first, second = draw(model, ParallelConfig(tp=1), [PROMPTS[0], PROMPTS[0]], None)
    assert first != second


def test_b029_the_callers_random_state_is_left_alone(model: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw(model, ParallelConfig(tp=2), PROMPTS, None)
    assert torch.equal(torch.get_rng_state(), before)
