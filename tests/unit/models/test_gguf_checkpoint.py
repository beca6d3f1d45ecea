"""GGUF files of the llama architecture: names, shards of permuted rows, and what is refused."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from parallel_runtime.errors import CheckpointError
from parallel_runtime.models.gguf_checkpoint import GgufCheckpoint, gguf_tensor_name
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config, write_gguf_checkpoint

GOOD: dict[str, object] = {
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write_metadata(path: Path, changes: Mapping[str, object], *, architecture: str = "llama", embedding: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (GOOD | dict(changes)).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    if embedding:
        writer.add_tensor("token_embd.weight", np.zeros((10, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_config_is_read_with_its_defaults(tmp_path: Path) -> None:
    config = GgufCheckpoint(write_metadata(tmp_path / "m.gguf", {})).config
    assert (config.vocab_size, config.num_kv_heads, config.head_dim, config.rope_theta) == (10, 4, 8, 10000.0)
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert config.eos_ids == ()


def test_a_written_config_comes_back(tmp_path: Path) -> None:
    config = tiny_llama_config(attention_bias=True, attention_output_bias=True, rope_theta=5000.0, rms_norm_eps=2.0**-20)
    assert GgufCheckpoint(write_gguf_checkpoint(tmp_path / "m.gguf", config)).config == config


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_parts_of_permuted_rows_equal_the_parts_of_the_whole(kind: str, tmp_path: Path) -> None:
    config = tiny_llama_config(attention_bias=True, attention_output_bias=True)
    checkpoint = GgufCheckpoint(write_gguf_checkpoint(tmp_path / "m.gguf", config, kind=kind))
    written = random_state(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = checkpoint.tensor(f"model.layers.1.self_attn.{name}.weight")
        whole = weight[:]
        torch.testing.assert_close(
            whole, written[f"model.layers.1.self_attn.{name}.weight"], atol=0 if kind == "F32" else 2e-2, rtol=0
        )
        for rows in (slice(8, 16), slice(3, 13), slice(0, 1)):
            assert torch.equal(weight[rows], whole[rows])
            assert torch.equal(weight[rows, 5:30], whole[rows, 5:30])
        bias = checkpoint.tensor(f"model.layers.1.self_attn.{name}.bias")
        assert torch.equal(bias[3:13], written[f"model.layers.1.self_attn.{name}.bias"][3:13])


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_metadata(tmp_path / "m.gguf", {}))
    with pytest.raises(CheckpointError, match=r"m\.gguf: no tensor 'model\.norm\.weight' among the 1 it has"):
        checkpoint.tensor("model.norm.weight")
    with pytest.raises(
        CheckpointError,
        match=r"m\.gguf: tensor 'model\.embed_tokens\.weight' has shape \(10, 32\); expected \(9, 32\)",
    ):
        checkpoint.tensor("model.embed_tokens.weight", (9, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length is missing; expected an integer"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "llama.attention.layer_norm_rms_epsilon is missing; expected a number",
        ),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'; expected an integer"),
        ({"llama.attention.head_count_kv": 3}, "num_query_heads=4 is not a multiple of num_kv_heads=3"),
        ({"llama.attention.head_count": 0}, "num_query_heads=0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"split.count": 3}, "one of 3 files; join them first"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4 and heads have 8"),
    ],
)
def test_what_is_not_implemented_or_broken_is_refused(changes: Mapping[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {message}"):
        GgufCheckpoint(write_metadata(tmp_path / "m.gguf", changes))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"general\.architecture is 'qwen2', which is not implemented \(known: llama, qwen3\)"
    ):
        GgufCheckpoint(write_metadata(tmp_path / "m.gguf", {}, architecture="qwen2"))


def test_a_file_may_claim_any_number_of_layers(tmp_path: Path) -> None:
    with GgufCheckpoint(write_metadata(tmp_path / "m.gguf", {"llama.block_count": 2**31})) as checkpoint:
        assert len(checkpoint.names) == 1
        with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.input_layernorm\.weight' among the 1 it has"):
            checkpoint.check()


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight', the embedding"):
        GgufCheckpoint(write_metadata(tmp_path / "m.gguf", {}, embedding=False))


def test_names_of_no_llama_tensor_are_refused() -> None:
    assert gguf_tensor_name("model.layers.12.mlp.down_proj.weight") == "blk.12.ffn_down.weight"
    for name in ("model.layers.0.mlp.experts.weight", "model.layers.x.mlp.down_proj.weight", "weight"):
        with pytest.raises(CheckpointError, match="a Llama or Qwen3 model has no tensor"):
            gguf_tensor_name(name)
