"""SmolLM2 on many layouts: greedy tokens identical to ``transformers`` on the same dequantised float32 weights."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.models import load_tokenizer, open_checkpoint
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

    with open_checkpoint("smollm2") as checkpoint:
        tokenizer, config = load_tokenizer(checkpoint), checkpoint.config
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_query_heads,
                    num_key_value_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    rms_norm_eps=config.rms_norm_eps,
                    rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                    max_position_embeddings=config.max_positions,
                    tie_word_embeddings=config.tie_word_embeddings,
                )
            )
        names = [name for name in model.state_dict() if name != "lm_head.weight"]
        state = {name: checkpoint.tensor(name)[:] for name in names}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are in no state
    model.eval()
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


SERVING = ServingConfig(kv_cache_tokens=1024)
ONE_BATCH = SERVING.replace(num_microbatches=1)  # reads the weights least often
LAYOUTS = {
    "tp=1": (ParallelConfig(), SERVING),
    "tp=2": (ParallelConfig(tp=2), SERVING),
    "tp=3": (ParallelConfig(tp=3), SERVING),
    "pp=2": (ParallelConfig(pp=2), SERVING),
    "pp=3": (ParallelConfig(pp=3), ONE_BATCH),
    "pp=3 of 11, 10 and 9 layers": (ParallelConfig(pp=3), ONE_BATCH.replace(stage_layers=(11, 10, 9))),
    "pp=4": (ParallelConfig(pp=4), ONE_BATCH),
    "dp=2": (ParallelConfig(dp=2), SERVING),
    "tp=2 pp=2": (ParallelConfig(tp=2, pp=2), ONE_BATCH),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_equal_transformers(name: str, reference: Reference) -> None:
    parallel, serving = LAYOUTS[name]
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with Engine("smollm2", parallel=parallel, serving=serving, executor="threads") as engine:
        completions = engine.generate(reference.prompts, sampling)
    for text, completion, tokens in zip(TEXTS, completions, reference.tokens, strict=True):
        assert completion.token_ids == tokens, text


@pytest.mark.processes
def test_greedy_tokens_equal_transformers_in_four_processes(reference: Reference) -> None:
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with Engine("smollm2", parallel=ParallelConfig(tp=2, pp=2), serving=SERVING) as engine:
        completions = engine.generate(TEXTS, sampling)
        assert engine.generate(["The capital of France is"], SamplingParams(max_new_tokens=1))[0].text == " Paris"
    assert [completion.token_ids for completion in completions] == list(reference.tokens)


@pytest.mark.parametrize("name", ["tp=1", "tp=3", "tp=2 pp=2"])
def test_logits_are_close_to_transformers(name: str, reference: Reference) -> None:
    """Prompts go through in one batch; the largest difference of any logit is logged and stays under 1e-3."""

    def run(ctx: ParallelContext) -> list[Tensor] | None:
        worker = TpModelWorker(ctx, model="smollm2", config=SERVING)
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
    logging.getLogger(__name__).info("largest logit difference on %s: %.2e", name, largest)
    assert 0 < largest < 1e-3
