"""SmolLM2 on many layouts: greedy tokens identical to ``transformers``, which dequantises the same file with code of its own."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Batch, Engine, Request, SamplingParams, SchedulingPolicy, ServingConfig, TpModelWorker
from tests.references import NEW, TEXTS, Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SERVING = ServingConfig(kv_cache_tokens=1024)
ONE_BATCH = SERVING.replace(num_microbatches=1)  # reads the weights least often
LAYOUTS = {
    "tp=1": (ParallelConfig(), SERVING),
    "tp=2": (ParallelConfig(tp=2), SERVING),
    "tp=3": (ParallelConfig(tp=3), SERVING),
    "pp=2": (ParallelConfig(pp=2), SERVING),
    "pp=3": (ParallelConfig(pp=3), ONE_BATCH),
    "pp=3 of 11, 10 and 9 layers": (ParallelConfig(pp=3), ONE_BATCH.replace(stage_layers=(11, 10, 9))),
    "dp=2": (ParallelConfig(dp=2), SERVING),
    "cp=2": (ParallelConfig(cp=2), SERVING),
    "cp=2 dcp=2": (ParallelConfig(cp=2, dcp=2), SERVING),
}
"""And tp=2 pp=2 as processes, below."""
FEWER = {"cp=2": NEW // 2, "cp=2 dcp=2": NEW // 2}
"""New tokens of layouts that take long."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_equal_transformers(name: str, smollm2_reference: Reference) -> None:
    parallel, serving = LAYOUTS[name]
    new = FEWER.get(name, NEW)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    with Engine("smollm2", parallel=parallel, serving=serving, executor="threads") as engine:
        completions = engine.generate(smollm2_reference.prompts, sampling)
    for text, completion, tokens in zip(TEXTS, completions, smollm2_reference.tokens, strict=True):
        assert completion.token_ids == tokens[:new], text


@pytest.mark.processes
def test_greedy_tokens_equal_transformers_in_four_processes(smollm2_reference: Reference) -> None:
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with Engine("smollm2", parallel=ParallelConfig(tp=2, pp=2), serving=SERVING) as engine:
        completions = engine.generate(TEXTS, sampling)
        assert engine.generate(["The capital of France is"], SamplingParams(max_new_tokens=1))[0].text == " Paris"
    assert [completion.token_ids for completion in completions] == list(smollm2_reference.tokens)


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(tp=3), ParallelConfig(tp=2, pp=2)], ids=["1", "tp=3", "tp=2 pp=2"]
)
def test_logits_are_close_to_transformers(parallel: ParallelConfig, smollm2_reference: Reference) -> None:
    """Prompts go through in one batch; the largest difference of any logit is logged and stays under 1e-3."""

    def run(ctx: ParallelContext) -> list[Tensor] | None:
        worker = TpModelWorker(ctx, model="smollm2", config=SERVING)
        policy = SchedulingPolicy(replace(worker.limits, num_slots=1))  # everything in one batch
        for index, prompt in enumerate(smollm2_reference.prompts):
            policy.add(Request(request_id=str(index), prompt=prompt, sampling=SamplingParams()))
        batch: Batch = policy.schedule()
        hidden = worker.run_stages(batch)
        if not ctx.pp.is_last_rank:
            return None
        with torch.inference_mode():
            return list(torch.split(worker.runner.model.logits(hidden), [len(prompt) for prompt in smollm2_reference.prompts]))

    largest = 0.0
    for logits in run_threads(run, parallel):
        for ours, theirs in zip(logits or smollm2_reference.logits, smollm2_reference.logits, strict=True):
            largest = max(largest, float((ours - theirs).abs().max()))
    logging.getLogger(__name__).info("largest logit difference on %s: %.2e", parallel, largest)
    assert 0 < largest < 1e-3
