"""B020: different answers for tp=1 and tp>1."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Engine, Request, SamplingParams, SchedulingPolicy, TpModelWorker
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

pytestmark = pytest.mark.timeout(60)

ONE = ParallelConfig()
OTHERS = (ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(dp=2))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def prompt_logits(model: Path, parallel: ParallelConfig) -> Tensor:
    """Logits of every token of every prompt, from one batch on the last stage's first rank."""

    def run(ctx: ParallelContext) -> Tensor | None:
        worker = TpModelWorker(ctx, model=model)
        policy = SchedulingPolicy(replace(worker.limits, num_slots=1))  # everything in one batch
        for index, prompt in enumerate(PROMPTS):
            policy.add(Request(request_id=str(index), prompt=prompt, sampling=SamplingParams()))
        hidden = worker.run_stages(policy.schedule())
        with torch.inference_mode():
            return worker.runner.model.logits(hidden) if ctx.pp.is_last_rank else None

    results = [logits for logits in run_threads(run, parallel) if logits is not None]
    assert all(torch.equal(logits, results[0]) for logits in results)
    return results[0]


def tokens(model: Path, parallel: ParallelConfig, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    with Engine(model, parallel=parallel, executor="threads") as engine:
        return [completion.token_ids for completion in engine.generate(prompts, SamplingParams(max_new_tokens=32))]


def test_b020_tokens_and_logits_are_those_of_one_rank(model: Path) -> None:
    reference, logits = tokens(model, ONE, PROMPTS), prompt_logits(model, ONE)
    for parallel in OTHERS:
        assert tokens(model, parallel, PROMPTS) == reference, parallel
        assert (prompt_logits(model, parallel) - logits).abs().max() <= 1e-4, parallel


def test_b020_the_same_config_twice_is_bit_identical(model: Path) -> None:
    for parallel in (ONE, *OTHERS):
        assert torch.equal(prompt_logits(model, parallel), prompt_logits(model, parallel)), parallel


def test_b020_a_request_alone_or_among_others(model: Path) -> None:
    together = tokens(model, ParallelConfig(tp=2), PROMPTS)
    with Engine(model, parallel=ParallelConfig(tp=2), executor="threads") as engine:
        alone = [engine.generate([prompt], SamplingParams(max_new_tokens=32))[0].token_ids for prompt in PROMPTS]
    assert alone == together
