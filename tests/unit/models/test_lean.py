"""The lean loop over a stage's layers does what their modules do, bit for bit, and sees every change of their weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import CausalLM, SlotKvCache, load_model, open_checkpoint
from parallel_runtime.models.decoder import DecoderLayer
from parallel_runtime.models.lean import LeanLayers
from parallel_runtime.testing.checkpoints import (
    tiny_llama_config,
    tiny_moe_config,
    tiny_qwen3_config,
    write_safetensors_checkpoint,
)
from tests.unit.layers.ranks import alone, on_ranks

CONFIGS = {
    "plain": tiny_llama_config(),
    "biases": tiny_llama_config(attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "norms of heads": tiny_qwen3_config(),
}


def run(model: CausalLM, *, by_modules: bool) -> list[Tensor]:
    """What a prompt of five tokens and one more token give."""
    model._lean, lean = (None if by_modules else model._lean), model._lean
    try:
        cache = SlotKvCache(
            num_layers=len(model.layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_slots=1,
            max_length=16,
            dtype=model.dtype,
        )
        with torch.inference_mode():
            prompt = model(torch.tensor([1, 50, 100, 7, 51]), torch.arange(5), cache.step([0], [5]))
            return [prompt, model(torch.tensor([9]), torch.tensor([5]), cache.step([0], [1]))]
    finally:
        model._lean = lean


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_the_modules(tmp_path: Path, name: str, world_size: int, dtype: torch.dtype, pack: bool) -> None:
    write_safetensors_checkpoint(tmp_path, CONFIGS[name])

    def both(tp: GroupCoordinator) -> tuple[list[Tensor], list[Tensor]]:
        with open_checkpoint(tmp_path) as checkpoint:
            model = load_model(checkpoint, tp=tp, dtype=dtype, pack=pack)
        return run(model, by_modules=False), run(model, by_modules=True)

    for lean, modules in on_ranks(world_size, both):
        assert all(map(torch.equal, lean, modules))


def test_new_weights_are_seen(tmp_path: Path) -> None:
    config = CONFIGS["plain"]
    for seed in (0, 1):
        write_safetensors_checkpoint(tmp_path / str(seed), config, seed=seed)
    with open_checkpoint(tmp_path / "0") as first, open_checkpoint(tmp_path / "1") as second:
        model, other = load_model(first, tp=alone(), pack=True), load_model(second, tp=alone(), pack=True)
        model.load(second)
    assert all(map(torch.equal, run(model, by_modules=False), run(other, by_modules=False)))
    model.unpack()
    assert all(map(torch.equal, run(model, by_modules=False), run(model, by_modules=True)))


def test_it_is_what_runs_in_inference_mode_alone(tmp_path: Path) -> None:
    write_safetensors_checkpoint(tmp_path, CONFIGS["plain"])
    with open_checkpoint(tmp_path) as checkpoint:
        model = load_model(checkpoint, tp=alone())
    called: list[str] = []
    model.decoder[0].register_forward_hook(lambda *_: called.append("module"))
    run(model, by_modules=False)
    assert not called
    cache = SlotKvCache(num_layers=2, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, num_slots=1, max_length=8)
    with torch.no_grad():
        model(torch.tensor([1, 2]), torch.arange(2), cache.step([0], [2]))
    assert called == ["module"]


def test_experts_have_no_lean_form() -> None:
    group = alone()
    model = CausalLM(tiny_moe_config(), tp=group, experts=ExpertGroups(tp=group, ep=group, etp=group))
    layers = [layer for layer in model.decoder if isinstance(layer, DecoderLayer)]
    with pytest.raises(ArgumentError, match="a layer with experts has no lean form"):
        LeanLayers(layers, model.norm, group)
