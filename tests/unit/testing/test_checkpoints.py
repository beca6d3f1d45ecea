"""The tiny checkpoints for tests are repeatable and say what they cannot hold."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.models import load_tokenizer, open_checkpoint
from parallel_runtime.testing.checkpoints import (
    random_state,
    tiny_llama_config,
    write_gguf_checkpoint,
    write_safetensors_checkpoint,
)


def test_equal_seeds_give_equal_weights_and_other_seeds_others() -> None:
    config = tiny_llama_config(attention_bias=True, attention_output_bias=True)
    first, again, other = (random_state(config, seed=seed) for seed in (0, 0, 1))
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_vocabulary_with_room_for_every_byte_comes_with_a_tokenizer(tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=259)
    found = []
    for path in (
        write_gguf_checkpoint(tmp_path / "m.gguf", config),
        write_safetensors_checkpoint(tmp_path / "model", config),
    ):
        with open_checkpoint(path) as checkpoint:
            found.append(load_tokenizer(checkpoint).encode("<|1|>é 1"))
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert not (write_safetensors_checkpoint(tmp_path / "small", tiny_llama_config()) / "tokenizer.json").exists()


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no place for rope_factors"):
        write_safetensors_checkpoint(tmp_path, tiny_llama_config(rope_factors=(1.0, 1.0, 2.0, 2.0)))
    with pytest.raises(ConfigError, match="head_dim=3 is odd"):
        tiny_llama_config(head_dim=3)
