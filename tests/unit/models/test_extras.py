"""Without an optional package the error names the extra to install."""

import sys
from pathlib import Path

import pytest

from parallel_runtime.errors import CheckpointError
from parallel_runtime.models import ChatTemplate, load_tokenizer, open_checkpoint
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_gguf_checkpoint, write_safetensors_checkpoint

EXTRA = r"pip install 'parallel-runtime\[demo\]'"


def test_only_some_quantised_gguf_needs_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_gguf_checkpoint(tmp_path / "plain.gguf", tiny_llama_config())
    simple = write_gguf_checkpoint(tmp_path / "simple.gguf", tiny_llama_config(), kind="Q8_0")
    quantised = write_gguf_checkpoint(tmp_path / "quantised.gguf", tiny_llama_config(), kind="Q5_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for path in (plain, simple):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.tensor("model.embed_tokens.weight")[:].shape == (101, 32)
    with pytest.raises(CheckpointError, match=rf"quantised\.gguf is quantised; reading it needs: {EXTRA}"):
        open_checkpoint(quantised)


def test_directories_need_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_llama_config())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=f"needs: {EXTRA}"):
        open_checkpoint(folder)


def test_tokenizers_and_templates_need_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with (
        open_checkpoint(write_gguf_checkpoint(tmp_path / "m.gguf", tiny_llama_config())) as checkpoint,
        pytest.raises(CheckpointError, match=f"tokenizers are built with: {EXTRA}"),
    ):
        load_tokenizer(checkpoint)
    with pytest.raises(CheckpointError, match=f"chat templates need: {EXTRA}"):
        ChatTemplate(source="").render([])
