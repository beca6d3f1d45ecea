"""Llama, Qwen3, Qwen3-MoE and Qwen2-MoE give the logits of ``transformers`` where sequences are cut over up to eight ranks."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.launch import run_threads
from parallel_runtime.models import ModelConfig
from parallel_runtime.terms import DenseAxis
from parallel_runtime.testing.checkpoints import (
    tiny_llama_config,
    tiny_moe_config,
    tiny_qwen3_config,
    write_safetensors_checkpoint,
)
from tests.spmd.context_splits import context_logits, context_splits, prompts_of
from tests.spmd.model_splits import PROMPTS, reference_logits

pytestmark = pytest.mark.timeout(100)

PLAIN: tuple[DenseAxis, ...] = ("tp", "cp", "dp", "pp")
ORDERS: tuple[tuple[DenseAxis, ...], ...] = (PLAIN, ("cp", "dp", "tp", "pp"), ("pp", "dp", "cp", "tp"))
MODELS: dict[str, ModelConfig] = {
    "llama": tiny_llama_config(num_query_heads=8, num_kv_heads=2),
    "qwen3": tiny_qwen3_config(num_query_heads=8, num_kv_heads=1, tie_word_embeddings=True),
    "qwen3_moe": tiny_moe_config(num_query_heads=8, num_kv_heads=2),
    "qwen2_moe": tiny_moe_config(shared=True, num_query_heads=8, num_kv_heads=1, mixture={"dense_layers": frozenset({0})}),
}
EVERY = {"llama": 9, "qwen3": 5, "qwen3_moe": 17, "qwen2_moe": 31}
"""One of so many layouts is run, which keeps the test short. All of them were, when this was written."""


def layouts_of(name: str) -> list[ParallelConfig]:
    shape = MODELS[name].shape
    every = [context_splits(size, shape=shape, orders=ORDERS if name == "llama" else (PLAIN,)) for size in range(2, 9)]
    return list(chain.from_iterable(every))[:: EVERY[name]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_safetensors_checkpoint(folder / name, config) for name, config in MODELS.items()}


def run(parallel: ParallelConfig, folder: Path, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    """The logits of every prompt that is computed, put together from the cp ranks; members of a tp group agree bit for bit."""
    first: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
    for rank, logits in enumerate(run_threads(context_logits, parallel, folder, dtype)):
        place = parallel.layout.coordinate(rank)
        for (prompt, at), row in logits.items():
            cp, known = first.setdefault((place.dp, prompt, at), (place.cp, row))
            assert cp == place.cp, f"{parallel}: two cp ranks computed token {at} of prompt {prompt}"
            assert torch.equal(row, known), f"{parallel}: rank {rank} differs from its tp group"
    found: dict[int, Tensor] = {}
    for dp in range(parallel.dp):
        for prompt in prompts_of(dp):
            rows = torch.stack([first[dp, prompt, at][1] for at in range(len(PROMPTS[prompt]))])
            torch.testing.assert_close(rows, found.setdefault(prompt, rows), atol=0.05, rtol=0.05)
    return found


def test_the_matrix_is_large_enough() -> None:
    layouts = {name: layouts_of(name) for name in MODELS}
    every = list(chain.from_iterable(layouts.values()))
    assert len(every) >= 60, {name: len(found) for name, found in layouts.items()}
    assert sum(parallel.dcp > parallel.cp for parallel in every) >= 15
    assert sum(parallel.cp > 1 and parallel.dcp == 1 for parallel in every) >= 15
    assert sum(parallel.ep > 1 for parallel in every) >= 15


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_logits_of_transformers(name: str, models: dict[str, Path]) -> None:
    expected = reference_logits(models[name])
    for parallel in layouts_of(name):
        for prompt, logits in run(parallel, models[name]).items():
            assert logits.shape == expected[prompt].shape
            assert logits.sub(expected[prompt]).abs().le(1e-4).all(), f"{parallel}, prompt {prompt}"


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, models: dict[str, Path]) -> None:
    exact, theirs = reference_logits(models[name]), reference_logits(models[name], torch.bfloat16)
    for parallel in layouts_of(name)[::5]:
        found = run(parallel, models[name], torch.bfloat16)
        assert all(logits.dtype == torch.bfloat16 for logits in found.values())
        ours = torch.cat([logits.float() - exact[prompt] for prompt, logits in found.items()])
        other = torch.cat([theirs[prompt].float() - exact[prompt] for prompt in found])
        assert float(ours.norm()) < 1.5 * float(other.norm()), parallel
