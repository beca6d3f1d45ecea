"""Models in directories with a ``config.json`` and safetensors files."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from torch import Tensor

from parallel_runtime.errors import CheckpointError
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.checkpoint import Checkpoint, bounds
from parallel_runtime.models.hf_config import model_config_from_hf

__all__ = ["SafetensorsCheckpoint", "read_json"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@final
class SafetensorsCheckpoint(Checkpoint):
    """A directory as ``transformers`` writes it: ``config.json`` and one ``model.safetensors``, or several with an index.

    Args:
        path: The directory.

    Raises:
        CheckpointError: Something is missing or damaged, safetensors is not installed, or the model needs what is not here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = model_config_from_hf(read_json(path / "config.json"), where=str(path / "config.json"))
        self._stack = ExitStack()
        try:
            self._handles = self._open_files()
        except BaseException:
            self.close()
            raise
        self.names = frozenset(self._handles)

    def _open_files(self) -> dict[str, Any]:
        """The open file of every tensor."""
        if not (self.path / _INDEX).exists():
            handle = self._open_file(_SINGLE)
            return dict.fromkeys(handle.keys(), handle)
        raw = read_json(self.path / _INDEX)
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{self.path / _INDEX}: no 'weight_map' that says which file has which tensor")
        files = {file: self._open_file(str(file)) for file in sorted(set(weight_map.values()))}
        held = {file: set(handle.keys()) for file, handle in files.items()}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise CheckpointError(f"{self.path / file}: no tensor {name!r}, which {_INDEX} says is there")
        return {name: files[file] for name, file in weight_map.items()}

    def _open_file(self, name: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as exc:
            raise CheckpointError(f"reading {self.path} needs: pip install 'parallel-runtime[demo]'") from exc
        try:
            return self._stack.enter_context(safe_open(self.path / name, framework="pt"))
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{self.path / name}: cannot be opened as a safetensors file: {exc}") from exc

    def _open(self, name: str) -> TensorSource:
        return _Slice(self._handles[name].get_slice(name))

    def close(self) -> None:
        self.is_open = False
        self._stack.close()


class _Slice:
    """A tensor of an open safetensors file."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.shape = tuple(handle.get_shape())

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor:
        part = tuple(slice(dim.start, dim.stop) for dim in bounds(index, self.shape))
        values: Tensor = self._handle[part]
        return values


def read_json(path: Path) -> object:
    """Parse a JSON file of a checkpoint.

    Raises:
        CheckpointError: It is missing, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path}: cannot be read as JSON: {exc}") from exc
