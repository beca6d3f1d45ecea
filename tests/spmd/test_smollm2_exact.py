"""SmolLM2 on many layouts: greedy tokens identical to ``transformers`` on the same dequantised float32 weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.models import load_tokenizer, open_checkpoint, resolve_model
from parallel_runtime.serving import Batch, Engine, Request, SamplingParams, SchedulingPolicy, ServingConfig, TpModelWorker

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

NEW = 32
TEXTS = (
    "The",
    "Once upon a time, there was",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at 100 degrees Celsius because the",
    "List three colours:\n1.",
    "In the beginning of the twentieth century, physicists believed that light travelled through a medium which they called the",
    "Question: What do a tensor, a pipeline and a data parallel rank have in common? Explain it in your own words, slowly and "
    "with an example that a child would understand.\nAnswer:",
)


@dataclass(frozen=True)
class Reference:
    """What ``transformers`` says: the prompts' ids, the logits of every prompt token, and the greedy tokens that follow."""

    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    tokens: tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def reference() -> Reference:
    import transformers

    path = resolve_model("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with open_checkpoint("smollm2") as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    prompts = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
    logits, tokens = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits.append(model(ids).logits[0])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                eos_token_id=None,
                pad_token_id=0,
            )
            tokens.append(tuple(out[0, len(prompt) :].tolist()))
    return Reference(prompts=prompts, logits=tuple(logits), tokens=tuple(tokens))


LAYOUTS = {
    "tp=1": (ParallelConfig(), None),
    "tp=2": (ParallelConfig(tp=2), None),
    "tp=3": (ParallelConfig(tp=3), None),
    "pp=2": (ParallelConfig(pp=2), None),
    "pp=3": (ParallelConfig(pp=3), None),
    "pp=3 of 11, 10 and 9 layers": (ParallelConfig(pp=3), (11, 10, 9)),
    "pp=4": (ParallelConfig(pp=4), None),
    "dp=2": (ParallelConfig(dp=2), None),
    "tp=2 pp=2": (ParallelConfig(tp=2, pp=2), None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_equal_transformers(name: str, reference: Reference) -> None:
    parallel, stage_layers = LAYOUTS[name]
    serving = ServingConfig(stage_layers=stage_layers, kv_cache_tokens=1024)
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with Engine("smollm2", parallel=parallel, serving=serving, executor="threads") as engine:
        completions = engine.generate(reference.prompts, sampling)
    for text, completion, tokens in zip(TEXTS, completions, reference.tokens, strict=True):
        assert completion.token_ids == tokens, text


@pytest.mark.processes
def test_greedy_tokens_equal_transformers_in_four_processes(reference: Reference) -> None:
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with Engine("smollm2", parallel=ParallelConfig(tp=2, pp=2), serving=ServingConfig(kv_cache_tokens=1024)) as engine:
        completions = engine.generate(TEXTS, sampling)
        assert engine.generate(["The capital of France is"], SamplingParams(max_new_tokens=1))[0].text == " Paris"
    assert [completion.token_ids for completion in completions] == list(reference.tokens)


@pytest.mark.parametrize("name", ["tp=1", "tp=3", "tp=2 pp=2"])
def test_logits_are_close_to_transformers(
    name: str, reference: Reference, record_property: Callable[[str, object], None]
) -> None:
    """Prompts go through in one batch; the largest difference of any logit is reported and stays under 1e-3."""

    def run(ctx: ParallelContext) -> list[Tensor] | None:
        worker = TpModelWorker(ctx, model="smollm2", config=ServingConfig(kv_cache_tokens=1024))
        policy = SchedulingPolicy(replace(worker.limits, num_slots=1))  # everything in one batch
        for index, prompt in enumerate(reference.prompts):
            policy.add(Request(request_id=str(index), prompt=prompt, sampling=SamplingParams()))
        batch: Batch = policy.schedule()
        hidden = worker.run_stages(batch)
        if not ctx.pp.is_last_rank:
            return None
        with torch.inference_mode():
            return list(torch.split(worker.runner.model.logits(hidden), [len(prompt) for prompt in reference.prompts]))

    largest = 0.0
    for logits in run_threads(run, LAYOUTS[name][0]):
        for ours, theirs in zip(logits or reference.logits, reference.logits, strict=True):
            largest = max(largest, float((ours - theirs).abs().max()))
    record_property("largest_logit_difference", largest)
    assert 0 < largest < 1e-3
