"""What a layer loads its shard from."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from parallel_runtime.errors import ArgumentError

__all__ = ["TensorSource", "check_shape", "span"]


class TensorSource(Protocol):
    """A full tensor that can be read in parts: a ``Tensor``, or one of a checkpoint that reads only what is asked for."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the full tensor."""
        ...

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor:
        """Read the part that plain slices with step 1 name, in any dtype."""
        ...


def span(part: range) -> slice:
    """The slice that covers ``part``, a range with step 1."""
    return slice(part.start, part.stop)


def check_shape(what: str, source: TensorSource, shape: Sequence[int]) -> None:
    """Refuse a source of another shape.

    Args:
        what: Name of the parameter, for the message.
        source: Full tensor.
        shape: What it must have.

    Raises:
        ArgumentError: It has another.
    """
    if tuple(source.shape) != tuple(shape):
        raise ArgumentError(f"{what} has shape {tuple(source.shape)}; the full tensor of this layer has {tuple(shape)}")
