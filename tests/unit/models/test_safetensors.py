"""Directories with config.json and safetensors files."""

import json
from pathlib import Path

import pytest
import torch

from parallel_runtime.errors import CheckpointError
from parallel_runtime.models.safetensors import SafetensorsCheckpoint
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config, write_safetensors_checkpoint

CONFIG = tiny_llama_config()
NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("num_files", [1, 3])
def test_one_file_or_several_with_an_index_are_read_in_parts(num_files: int, tmp_path: Path) -> None:
    written = random_state(CONFIG, dtype=torch.bfloat16)
    with SafetensorsCheckpoint(
        write_safetensors_checkpoint(tmp_path, CONFIG, dtype=torch.bfloat16, num_files=num_files)
    ) as checkpoint:
        assert checkpoint.config == CONFIG
        assert checkpoint.names == written.keys()
        for name, tensor in written.items():
            assert torch.equal(checkpoint.tensor(name, tensor.shape)[:], tensor)
        assert torch.equal(checkpoint.tensor(NAME)[3:9, 4:8], written[NAME][3:9, 4:8])
        assert torch.equal(checkpoint.tensor(NAME)[:, 30:], written[NAME][:, 30:])


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON: .*No such file"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON: Expecting"):
        SafetensorsCheckpoint(tmp_path)


def test_missing_and_cut_weights_are_named(tmp_path: Path) -> None:
    file = write_safetensors_checkpoint(tmp_path, CONFIG) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be opened as a safetensors file"):
        SafetensorsCheckpoint(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be opened as a safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_that_is_wrong_is_named(tmp_path: Path) -> None:
    index = write_safetensors_checkpoint(tmp_path, CONFIG, num_files=2) / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.ghost.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no tensor 'model\.ghost\.weight'"):
        SafetensorsCheckpoint(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="no 'weight_map'"):
        SafetensorsCheckpoint(tmp_path)
