"""Named tensors in the place of a model file, some of which may be missing here."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from parallel_runtime.errors import CheckpointError
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.tensor_shapes import tensor_shapes

__all__ = ["WeightSet", "is_of_stage"]


def is_of_stage(name: str, config: ModelConfig, layers: range) -> bool:
    """Whether a pipeline stage reads a tensor.

    Args:
        name: As ``transformers`` calls it.
        config: Of the whole model.
        layers: Of the stage.
    """
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return len(parts) > 2 and parts[2].isdecimal() and int(parts[2]) in layers
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    if name.startswith("model.embed_tokens."):
        return is_first or (is_last and config.tie_word_embeddings)
    return is_last


@final
class WeightSet(Checkpoint):
    """The tensors of an update, with those of another place where it has none.

    Args:
        config: Of the model.
        tensors: Full tensors that are here, under the names of ``transformers``.
        shapes: Of all tensors of the update; those that are not here belong to other stages, and cannot be read.

    Attributes:
        missing: Names of the model that the update leaves out.

    Raises:
        CheckpointError: The update has a tensor that the model has not, or one of another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, TensorSource],
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} if shapes is None else shapes
        self.path = Path("the update")
        self.config = config
        self._tensors = dict(tensors)
        self._shapes = dict(tensor_shapes(config))
        self.names = frozenset(self._shapes)
        self.missing = self.names - shapes.keys()
        for name, shape in shapes.items():
            if name not in self._shapes:
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                raise CheckpointError(
                    f"the update has a tensor {name!r}, which the model has not; it has {len(self.names)} others"
                )
            if tuple(shape) != self._shapes[name]:
                raise CheckpointError(f"the update's {name!r} has shape {tuple(shape)}; the model's has {self._shapes[name]}")

    def over(self, base: Mapping[str, TensorSource]) -> "WeightSet":
        """These tensors, and others where there are none.

        Args:
            base: Full tensors.
        """
        tensors = {**base, **self._tensors}
        return WeightSet(self.config, tensors)

    def _open(self, name: str) -> TensorSource:
        tensor = self._tensors.get(name)
        return _Elsewhere(name, self._shapes[name]) if tensor is None else tensor

    def close(self) -> None:
        self.is_open = False


@final
class _Elsewhere:
    """A tensor of another stage: its shape is known."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name = name
        self.shape = shape

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor:
        raise CheckpointError(f"tensor {self._name!r} is not on this rank")
