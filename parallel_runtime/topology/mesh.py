"""Numbers written with named digits: the arithmetic under every layout.

A mesh of axes ``a1, a2, ...`` with sizes ``s1, s2, ...``, fastest first, numbers its cells ``sum(index[a] * stride[a])``, where
the stride of an axis is the product of the sizes before it. A group over some axes holds the cells that agree on all the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import final

__all__ = ["Mesh", "shift"]


@final
@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, fastest first, and the cells they number.

    The caller vouches for the input: positive sizes, distinct names, and only names of this mesh in the questions.

    Attributes:
        axes: Names of the axes, fastest first.
        sizes: Their sizes, in the same order.
        strides: How far apart neighbours on each axis are, in the same order.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", tuple(accumulate((1, *self.sizes[:-1]), mul)))

    @property
    def size(self) -> int:
        """How many cells there are."""
        return prod(self.sizes)

    def index(self, cell: int, axis: str) -> int:
        """Return where a cell lies on one axis.

        Args:
            cell: Number of the cell.
            axis: Name of the axis.

        Returns:
            Its index on the axis, from 0.
        """
        at = self.axes.index(axis)
        return cell // self.strides[at] % self.sizes[at]

    def corner(self, cell: int, axes: Iterable[str]) -> int:
        """Return the lowest cell of the group that holds ``cell``.

        Args:
            cell: Number of the cell.
            axes: Axes of the group.

        Returns:
            The cell with index 0 on ``axes`` and the indices of ``cell`` on all others.
        """
        return cell - sum(self.index(cell, axis) * self.strides[self.axes.index(axis)] for axis in axes)

    def offsets(self, axes: Iterable[str]) -> Sequence[int]:
        """List the members of a group as distances from its corner.

        Args:
            axes: Axes of the group, in any order.

        Returns:
            Ascending distances; a ``range`` where they are evenly spaced.
        """
        wanted = frozenset(axes)
        offsets: Sequence[int] = range(1)
        for axis, size, stride in zip(self.axes, self.sizes, self.strides, strict=True):
            if axis in wanted and size > 1:
                offsets = _repeat(offsets, size, stride)
        return offsets

    def count_corners(self, axes: Iterable[str], *, below: int) -> int:
        """Count the groups over ``axes`` whose corner is below a cell.

        Args:
            axes: Axes of the group.
            below: A cell, or ``size`` to count all groups.

        Returns:
            How many corners are less than ``below``.
        """
        inner = frozenset(axes)
        free = prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis not in inner)
        count = 0
        for axis, size, stride in zip(reversed(self.axes), reversed(self.sizes), reversed(self.strides), strict=True):
            index, below = divmod(below, stride)
            if axis not in inner:
                free //= size
                count += index * free
            elif index > 0:  # every corner with 0 here lies below, and no corner shares this index
                return count + free
        return count

    def groups(self, axes: Iterable[str], *, outer: Sequence[str] | None = None) -> tuple[Sequence[int], ...]:
        """List all groups over some axes.

        Args:
            axes: Axes of the group.
            outer: All other axes, fastest first, if the groups are not wanted in ascending order of their corners.

        Returns:
            The cells of each group, ascending.
        """
        inner = frozenset(axes)
        offsets = self.offsets(inner)
        corners = [0]
        for axis in outer if outer is not None else (axis for axis in self.axes if axis not in inner):
            at = self.axes.index(axis)
            corners = [corner + step * self.strides[at] for step in range(self.sizes[at]) for corner in corners]
        return tuple(shift(offsets, corner) for corner in corners)


def _repeat(offsets: Sequence[int], size: int, stride: int) -> Sequence[int]:
    if len(offsets) == 1:
        return range(0, size * stride, stride)
    if isinstance(offsets, range) and offsets.step * len(offsets) == stride:
        return range(0, size * stride, offsets.step)
    return [step * stride + offset for step in range(size) for offset in offsets]


def shift(offsets: Sequence[int], by: int) -> Sequence[int]:
    """Move a sequence of integers.

    Args:
        offsets: Integers.
        by: How far to move them.

    Returns:
        A ``range`` if it was one, else a list.
    """
    if isinstance(offsets, range):
        return range(offsets.start + by, offsets.stop + by, offsets.step)
    return [by + offset for offset in offsets]
