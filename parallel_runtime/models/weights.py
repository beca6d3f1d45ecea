"""Names and shapes of a model's parameters, as parts of the model look them up and give them back."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.checkpoint import Checkpoint

__all__ = ["Weights", "under"]


@final
class Weights:
    """The tensors of a checkpoint under one prefix, each looked up with the shape that the config asks for.

    Args:
        checkpoint: Open. Borrowed.
        prefix: Such as ``"model.layers.3."``.

    Raises:
        CheckpointError: Every look-up raises it where the tensor is missing or has another shape.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def below(self, prefix: str) -> "Weights":
        """The tensors of a part, whose names go on with ``prefix``."""
        return Weights(self._checkpoint, self._prefix + prefix)

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        """One tensor."""
        return self._checkpoint.tensor(self._prefix + name, shape)

    def one(self, module: str, shape: tuple[int, int], *, bias: bool) -> tuple[TensorSource, TensorSource | None]:
        """The weight of a projection and, where it has one, its bias."""
        return self.tensor(f"{module}.weight", shape), self.tensor(f"{module}.bias", shape[:1]) if bias else None

    def all(self, shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> tuple[list[TensorSource], list[TensorSource] | None]:
        """The weights of several projections and, where they have them, their biases."""
        weights = [self.tensor(f"{module}.weight", shape) for module, shape in shapes.items()]
        biases = [self.tensor(f"{module}.bias", shape[:1]) for module, shape in shapes.items()] if bias else None
        return weights, biases


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with ``prefix`` before every name."""
    return {prefix + name: tensor for name, tensor in state.items()}
