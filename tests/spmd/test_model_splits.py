"""Llama, Qwen3, Qwen3-MoE and Qwen2-MoE give the logits of ``transformers`` on the splits that fit eight ranks."""

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
from tests.spmd.model_splits import logits_on_rank, reference_logits, splits

pytestmark = pytest.mark.timeout(100)

PLAIN: tuple[DenseAxis, ...] = ("tp", "cp", "dp", "pp")
MODELS: dict[str, ModelConfig] = {
    "llama": tiny_llama_config(num_query_heads=8, num_kv_heads=2),
    "qwen3": tiny_qwen3_config(num_query_heads=8, num_kv_heads=2, tie_word_embeddings=True),
    "qwen3_moe": tiny_moe_config(num_query_heads=8, num_kv_heads=2),
    "qwen2_moe": tiny_moe_config(shared=True, num_query_heads=8, num_kv_heads=2, mixture={"dense_layers": frozenset({0})}),
}
ORDERS: dict[str, tuple[tuple[DenseAxis, ...], ...]] = {
    "qwen3_moe": (PLAIN,),
    "qwen2_moe": (("dp", "tp", "cp", "pp"), ("pp", "tp", "cp", "dp")),
}
EVERY = {"llama": 1, "qwen3": 1, "qwen3_moe": 2, "qwen2_moe": 4}
"""One of so many layouts is run, which keeps the test short. All of them were, when this was written."""


def layouts_of(name: str) -> list[ParallelConfig]:
    num_experts = MODELS[name].shape.num_experts
    sizes = (2, 4, 6, 8) if name == "qwen2_moe" else range(1, 9)
    every = [splits(size, num_experts=num_experts, orders=ORDERS.get(name, (PLAIN,))) for size in sizes]
    return list(chain.from_iterable(every))[:: EVERY[name]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_safetensors_checkpoint(folder / name, config) for name, config in MODELS.items()}


def run(parallel: ParallelConfig, folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The logits of each data-parallel rank, which the members of its tp group agree on bit for bit."""
    found = run_threads(logits_on_rank, parallel, folder, dtype)
    first: dict[int, Tensor] = {}
    for rank, logits in enumerate(found):
        place = parallel.layout.coordinate(rank)
        assert (logits is None) == (place.pp < parallel.pp - 1)
        if logits is not None:
            assert torch.equal(logits, first.setdefault(place.dp, logits)), f"{parallel}: rank {rank} differs from its tp group"
    return [first[dp] for dp in range(parallel.dp)]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative to the size of the exact ones, over all ranks that have any."""
    off = torch.cat([one.float() - other for one, other in zip(found, exact, strict=False)])
    return float(off.norm() / torch.cat(exact[: len(found)]).norm())


def test_the_matrix_is_large_enough() -> None:
    counts = {name: len(layouts_of(name)) for name in MODELS}
    assert counts["qwen3_moe"] + counts["qwen2_moe"] >= 40, counts
    assert sum(counts.values()) >= 60, counts


@pytest.mark.parametrize("name", MODELS)
def test_every_split_gives_the_logits_of_transformers(name: str, models: dict[str, Path]) -> None:
    expected = reference_logits(models[name])
    for parallel in layouts_of(name):
        for logits, exact in zip(run(parallel, models[name]), expected, strict=False):
            assert logits.shape == exact.shape
            assert logits.sub(exact).abs().le(1e-4).all(), parallel


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, models: dict[str, Path]) -> None:
    exact, theirs = reference_logits(models[name]), reference_logits(models[name], torch.bfloat16)
    for parallel in layouts_of(name)[::7]:
        found = run(parallel, models[name], torch.bfloat16)
        assert all(logits.dtype == torch.bfloat16 for logits in found)
        assert distance(found, exact) < 1.5 * distance(theirs[: parallel.dp], exact), parallel
