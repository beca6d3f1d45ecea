"""Where the weights that serve came from, for replicas that start later."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

__all__ = ["TENSORS", "WeightSources"]

TENSORS = ".pt"
"""How a file of some tensors ends."""


@final
class WeightSources:
    """Files that give the weights that serve, when they are loaded in order; tensors that were handed over are files too.

    Attributes:
        paths: What was loaded since the last whole model, in order.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Make a file of tensors, which is there until ``forget``.

        Args:
            tensors: Full tensors under their names, on any device.

        Returns:
            Its path.
        """
        folder = tempfile.TemporaryDirectory(prefix="parallel-runtime-weights-")
        self._folders.append(folder)
        path = Path(folder.name) / f"tensors{TENSORS}"
        torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)
        return str(path)

    def forget(self) -> None:
        """Begin anew; files that were written here are gone."""
        self.paths.clear()
        for folder in self._folders:
            folder.cleanup()
        self._folders.clear()
