"""A model file as its loader sees it: a configuration, and named tensors that are read in parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from parallel_runtime.errors import CheckpointError, ContextStateError
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.tensor_shapes import tensor_shapes

__all__ = ["Checkpoint", "bounds"]


class Checkpoint(ABC):
    """An open model file or directory. Tensor names are those of ``transformers``, whatever the format.

    Attributes:
        path: The file or directory.
        config: What the model looks like.
        names: Of every tensor in it.
        is_open: Whether tensors can be read.
    """

    is_open = True
    path: Path
    config: ModelConfig
    names: frozenset[str]

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> TensorSource:
        """Look a tensor up; nothing of it is read until it is indexed.

        Args:
            name: Such as ``model.layers.0.self_attn.q_proj.weight``.
            shape: What it must have, where the caller knows.

        Returns:
            The tensor; ``source[rows, columns]`` reads that part alone.

        Raises:
            CheckpointError: There is none of that name, or it has another shape.
            ContextStateError: The checkpoint is closed.
        """
        return self._find(name, shape)

    def check(self) -> None:
        """Compare every tensor that the config asks for with what the file says it has; no values are read.

        Raises:
            CheckpointError: One is missing, or has another shape.
            ContextStateError: The checkpoint is closed.
        """
        for name, shape in tensor_shapes(self.config):
            self._find(name, shape)

    def _find(self, name: str, shape: Sequence[int] | None) -> TensorSource:
        if not self.is_open:
            raise ContextStateError(f"{self.path} is closed; read its tensors inside the with statement")
        if name not in self.names:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among the {len(self.names)} it has")
        source = self._open(name)
        if shape is not None and tuple(source.shape) != tuple(shape):
            raise CheckpointError(f"{self.path}: tensor {name!r} has shape {tuple(source.shape)}; expected {tuple(shape)}")
        return source

    @abstractmethod
    def _open(self, name: str) -> TensorSource:
        """The tensor of that name, which is there."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Tensors that were read stay good; twice is nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def bounds(index: slice | tuple[slice, ...], shape: Sequence[int]) -> tuple[range, ...]:
    """What an index of plain slices covers.

    Args:
        index: One slice per dim; missing ones cover their dim.
        shape: Of the tensor.

    Returns:
        One range with step 1 per dim.
    """
    slices = index if isinstance(index, tuple) else (index,)
    slices += (slice(None),) * (len(shape) - len(slices))
    return tuple(range(size)[part] for part, size in zip(slices, shape, strict=True))
