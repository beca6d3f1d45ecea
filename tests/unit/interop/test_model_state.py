"""A model's parameters by name, and where a layout puts them."""

import pytest
import torch
from torch import nn

from parallel_runtime import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.interop import local_state, model_placement
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import CausalLM, ModelConfig
from parallel_runtime.terms import Rank
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config, tiny_moe_config, tiny_qwen3_config
from tests.unit.layers.ranks import alone

CONFIGS = (
    tiny_llama_config(attention_bias=True, attention_output_bias=True, mlp_bias=True),
    tiny_qwen3_config(),
    tiny_moe_config(shared=True),
)


def _model(config: ModelConfig) -> CausalLM:
    one = alone()
    return CausalLM(config, tp=one, experts=ExpertGroups(tp=one, ep=one, etp=one))


@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "qwen3", "moe"])
def test_the_names_and_shapes_are_those_of_a_checkpoint(config: ModelConfig) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in random_state(config).items()}
    assert {name: tuple(tensor.shape) for name, tensor in local_state(_model(config)).items()} == wanted
    placement = model_placement(config, ParallelConfig(tp=2, pp=2).layout)
    assert {name: tensor.shape for name, tensor in placement.items()} == wanted


@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "qwen3", "moe"])
def test_writing_to_the_views_changes_the_whole_model(config: ModelConfig) -> None:
    model = _model(config)
    for tensor in local_state(model).values():
        tensor.fill_(7)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    assert all(bool((tensor == 7).all()) for tensor in model.full_state().values())


def test_kv_heads_are_on_several_ranks_and_bytes_follow_the_dtype() -> None:
    placement = model_placement(tiny_llama_config(), ParallelConfig(tp=4).layout, dtype=torch.bfloat16)
    key = placement["model.layers.0.self_attn.k_proj.weight"]
    assert key.itemsize == 2
    assert key.boxes[Rank(0)] == key.boxes[Rank(1)] != key.boxes[Rank(2)]


def test_a_model_that_cannot_be_split_that_far_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the 4 query heads"):
        model_placement(tiny_llama_config(), ParallelConfig(tp=5).layout)


def test_packed_weights_are_refused() -> None:
    model = _model(tiny_llama_config())
    layer = model.get_submodule("decoder.0.self_attn.o_proj")
    layer.weight = nn.Parameter(torch.ones(4, 4).to_mkldnn(), requires_grad=False)
    with pytest.raises(ValueError, match=r"^packed weights cannot be written in place; call unpack\(\) on the model first"):
        local_state(model)
