"""Tiny models for tests of the engine, and what they say according to a loop that shares nothing with it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import SlotKvCache, load_model, open_checkpoint
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint
from tests.unit.layers.ranks import alone

__all__ = ["PROMPTS", "greedy_reference", "write_tiny_model"]

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple((7 * index + 3 * position) % 90 + 3 for position in range(length)) for index, length in enumerate((1, 3, 17, 6))
)


def write_tiny_model(folder: Path, **changes: object) -> Path:
    """A random-weight Llama that never stops by itself: 4 layers, 4 query and 2 key/value heads."""
    return write_safetensors_checkpoint(folder, tiny_llama_config(num_layers=4, eos_ids=(), **changes))


@torch.inference_mode()
def greedy_reference(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """``count`` greedy tokens after each prompt: one rank, one prompt at a time, everything computed again for every token."""
    one = alone()
    with open_checkpoint(model) as checkpoint:
        lone = load_model(checkpoint, tp=one, experts=ExpertGroups(tp=one, ep=one, etp=one))
    results = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            cache = SlotKvCache(
                num_layers=len(lone.layers),
                num_kv_heads=lone.num_kv_heads,
                head_dim=lone.head_dim,
                num_slots=1,
                max_length=len(tokens),
            )
            hidden = lone(torch.tensor(tokens), torch.arange(len(tokens)), cache.step([0], [len(tokens)]))
            tokens.append(int(lone.greedy(hidden[-1:])))
        results.append(tuple(tokens[len(prompt) :]))
    return results
