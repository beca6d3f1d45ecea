"""``config.json``: what is read, what is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from parallel_runtime.errors import CheckpointError, ConfigError
from parallel_runtime.layers import RotaryPositions
from parallel_runtime.models import ModelConfig
from parallel_runtime.models.hf_config import model_config_from_hf
from parallel_runtime.models.tensor_shapes import tensor_shapes
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config, tiny_moe_config, tiny_qwen3_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    from transformers import LlamaConfig

    config, theirs = model_config_from_hf(LLAMA, where="config.json"), LlamaConfig(**LLAMA)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.max_positions == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.attention_bias == theirs.attention_bias
    assert config.rope_factors is None


def test_what_transformers_writes_is_read() -> None:
    from transformers import LlamaConfig

    written = LlamaConfig(
        **LLAMA, num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    config = model_config_from_hf(json.loads(written.to_json_string()), where="config.json")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (2, 16, 500.0)


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_one_or_several_tokens_may_end_a_text(eos: object, expected: tuple[int, ...]) -> None:
    assert model_config_from_hf(LLAMA | {"eos_token_id": eos}, where="").eos_ids == expected


@pytest.mark.parametrize(
    "place", [{"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0}, {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0}}]
)
def test_the_frequencies_of_llama3_equal_those_of_transformers(place: Mapping[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = model_config_from_hf(LLAMA | dict(place) | {"head_dim": 16}, where="")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, head_dim=16, rope_parameters=LLAMA3_ROPE | {"rope_theta": 500.0}))
    angles = RotaryPositions(16, theta=config.rope_theta, factors=config.rope_factors).angles(torch.arange(200), torch.float32)
    cos, sin = theirs(torch.zeros(1), torch.arange(200).unsqueeze(0))
    assert config.rope_factors is not None
    torch.testing.assert_close(angles.cos.squeeze(1), cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(angles.sin.squeeze(1)[:, 8:], sin[0, :, 8:], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma"},
            r"model_type is 'gemma' \(known: llama, mistral, qwen3, qwen2_moe, qwen3_moe\), which is not implemented",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is set \(method 'gptq'\)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "the rope type is 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": None}, "vocab_size: Input should be a valid integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: Input should be greater than or equal to 1"),
        ({"num_key_value_heads": 3}, "num_query_heads=4 is not a multiple of num_kv_heads=3"),
        ({"hidden_size": 12}, "head_dim=3 is odd"),
        ({"num_key_value_heads": 0}, "num_kv_heads=0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim: Input should be greater than or equal to 1"),
        ({"head_dim": 2**40}, "head_dim: Input should be less than or equal to 65536"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: Input should be less than or equal to 65536"),
        ({"rope_theta": 0}, "rope_theta: Input should be greater than 0"),
        ({"rope_theta": math.inf}, "rope_theta: Input should be a finite number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: Input should be a finite number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0; it must be a finite number of at least 0"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_parameters.rope_theta: Input should be greater than 0"),
        ({"rope_parameters": LLAMA3_ROPE | {"factor": 0}}, "rope_parameters.factor: Input should be greater than 0"),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4}}, "low_freq_factor=4.0 is not below high_freq_factor=4.0"),
        (
            {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"rope_theta": 600.0}},
            "different bases: rope_parameters.rope_theta=500.0, rope_scaling.rope_theta=600.0",
        ),
        ({"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 10000.0}, "different bases: .*, rope_theta=10000.0"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3_ROPE},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE, "rope_scaling": LLAMA3_ROPE | {"factor": 2.0}},
            "rope_parameters and rope_scaling contradict each other",
        ),
    ],
)
def test_what_is_not_implemented_or_broken_is_refused(changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}"):
        model_config_from_hf(LLAMA | dict(changes), where="config.json")


def test_keys_that_say_the_same_twice_are_read() -> None:
    twice = {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0}, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0}
    once = {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0}
    assert model_config_from_hf(LLAMA | twice, where="") == model_config_from_hf(LLAMA | once, where="")


@pytest.mark.parametrize(
    "config",
    [
        tiny_llama_config(),
        tiny_llama_config(tie_word_embeddings=True, attention_bias=True, attention_output_bias=True, mlp_bias=True),
        tiny_qwen3_config(),
        tiny_moe_config(),
        tiny_moe_config(mixture={"dense_layers": frozenset({1})}),
        tiny_moe_config(shared=True),
    ],
)
def test_the_tensors_of_a_model_are_known_before_it_is_read(config: ModelConfig) -> None:
    assert dict(tensor_shapes(config)) == {name: tuple(tensor.shape) for name, tensor in random_state(config).items()}


def test_the_shape_is_what_a_layout_is_checked_against() -> None:
    shape = tiny_llama_config(num_kv_heads=1).shape
    assert (shape.num_layers, shape.num_query_heads, shape.num_kv_heads) == (2, 4, 1)
    assert (shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_experts) == (101, 32, 64, 0)


def test_a_file_without_its_keys_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size: Field required"):
        model_config_from_hf({"model_type": "llama"}, where="config.json")
    with pytest.raises(CheckpointError, match="the file: Input should be"):
        model_config_from_hf([1], where="config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0; it must be at least 1"),
        ({"num_kv_heads": 3}, "num_query_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_theta": 0.0}, "rope_theta=0.0; it must be a finite number above 0"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan; it must be a finite number of at least 0"),
        ({"rope_factors": (1.0, 0.0, 1.0, 1.0)}, "each must be a finite number above 0"),
        ({"rope_factors": (1.0,)}, "1 rope_factors for head_dim=8; expected 4"),
    ],
)
def test_impossible_sizes_are_refused(changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llama_config(**changes)
