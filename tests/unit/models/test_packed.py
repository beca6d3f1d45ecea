"""A model with packed weights is the same model: its logits, its parameters, loaded again, and unpacked."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.layers import PackableLayer
from parallel_runtime.layers.packing import can_pack
from parallel_runtime.models import CausalLM, load_model, open_checkpoint
from parallel_runtime.testing.checkpoints import write_safetensors_checkpoint
from parallel_runtime.topology.shards import split_layers
from tests.unit.layers.ranks import alone
from tests.unit.models.test_llama import CONFIGS, logits_of

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(2, 2)), reason="this machine has no packed products")


def stages_of(folder: Path, *, pack: bool, num_stages: int = 1) -> list[CausalLM]:
    with open_checkpoint(folder) as checkpoint:
        parts = split_layers(checkpoint.config.num_layers, num_stages=num_stages)
        return [load_model(checkpoint, tp=alone(), layers=part, pack=pack) for part in parts]


def num_packed(model: CausalLM) -> int:
    return sum(module.weight.is_mkldnn for module in model.modules() if isinstance(module, PackableLayer))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", ["plain", "tied", "biases", "odd widths"])
def test_logits_and_parameters_stay(tmp_path: Path, name: str, num_stages: int) -> None:
    folder = write_safetensors_checkpoint(tmp_path, CONFIGS[name])
    plain = stages_of(folder, pack=False, num_stages=num_stages)
    packed = stages_of(folder, pack=True, num_stages=num_stages)
    assert sum(map(num_packed, packed)) == 4 * CONFIGS[name].num_layers + 1
    torch.testing.assert_close(logits_of(packed), logits_of(plain))
    for one, other in zip(plain, packed, strict=True):
        assert not any(parameter.requires_grad for parameter in other.parameters())
        expected, found = one.full_state(), other.full_state()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_loading_again_and_unpacking(tmp_path: Path, name: str) -> None:
    first = write_safetensors_checkpoint(tmp_path / "first", CONFIGS[name])
    second = write_safetensors_checkpoint(tmp_path / "second", CONFIGS[name], seed=1)
    (model,) = stages_of(first, pack=True)
    expected = logits_of(stages_of(second, pack=False))
    with open_checkpoint(second) as checkpoint:
        model.load(checkpoint)
    assert num_packed(model) == 4 * CONFIGS[name].num_layers + 1
    torch.testing.assert_close(logits_of([model]), expected)
    model.unpack()
    assert num_packed(model) == 0
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    assert (model.lm_head.weight is model.embed_tokens.weight) == (name == "tied")
    torch.testing.assert_close(logits_of([model]), expected)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.pack()
    assert (logits_of([model]) - expected).abs().max() > 0.01
