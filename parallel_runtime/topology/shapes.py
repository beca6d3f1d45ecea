"""The shape that all groups of one name share: enough to compare names, and to find a group's ends, without listing a member."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from parallel_runtime.terms import GroupName, Rank
from parallel_runtime.topology.layout import Layout

__all__ = ["GroupShape", "group_ends", "group_shape"]


class GroupShape(NamedTuple):
    """How every group of one name lies in the world. Names with equal shapes have equal groups on every rank.

    Attributes:
        steps: ``(stride, size)`` pairs in the numbering of a stage, smallest stride first, merged where they join.
        num_stages: Stages a group spans: 1, or all of them.
        is_reordered: Whether members do not ascend (decode context parallel groups over tp and cp).
    """

    steps: tuple[tuple[int, int], ...]
    num_stages: int = 1
    is_reordered: bool = False

    @property
    def world_size(self) -> int:
        """Number of members of each group."""
        return self.num_stages * prod(size for _, size in self.steps)


def group_shape(layout: Layout, name: GroupName) -> GroupShape:
    """Work out the shape of the groups of one name.

    Args:
        layout: The world.
        name: Name of the groups.

    Returns:
        Their shape. The cost does not depend on the world size.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp}
    dense = _strides([(axis, sizes[axis]) for axis in layout.order if axis != "pp"])
    expert = _strides([("etp", layout.etp), ("ep", layout.ep), ("edp", layout.edp)])
    match name:
        case "world" | "stage":
            return GroupShape(_merge(dense.values()), layout.pp if name == "world" else 1)
        case "pp":
            return GroupShape((), layout.pp)
        case "tp" | "cp" | "dp":
            return GroupShape(_merge([dense[name]]))
        case "ep" | "etp" | "edp":
            return GroupShape(_merge([expert[name]]))
        case _ if layout.dcp == 1:
            return GroupShape(())
        case _:
            width = layout.dcp // layout.cp
            is_reordered = width > 1 and layout.cp > 1 and layout.order.index("tp") < layout.order.index("cp")
            return GroupShape(_merge([(dense["tp"][0], width), dense["cp"]]), is_reordered=is_reordered)


def group_ends(layout: Layout, rank: int, shape: GroupShape) -> tuple[Rank, Rank]:
    """Find the members of a rank's group that come first and last in the layout's order, without listing the group.

    Args:
        layout: The world.
        rank: A rank of it.
        shape: Shape of the group.

    Returns:
        The two ends, equal in a group of one.

    Raises:
        ArgumentError: No such rank.
    """
    here = layout.coordinate(rank)
    first = here.stage_rank - sum(here.stage_rank // stride % size * stride for stride, size in shape.steps)
    last = first + sum((size - 1) * stride for stride, size in shape.steps)
    first_stage, last_stage = (here.pp, here.pp) if shape.num_stages == 1 else (0, layout.pp - 1)
    return _rank_at(layout, first, first_stage), _rank_at(layout, last, last_stage)


def _strides(axes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    stride, found = 1, {}
    for axis, size in axes:
        found[axis] = (stride, size)
        stride *= size
    return found


def _merge(steps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return tuple(merged)


def _rank_at(layout: Layout, cell: int, stage: int) -> Rank:
    rest, etp = divmod(cell, layout.etp)
    edp, ep = divmod(rest, layout.ep)
    return layout.rank(etp=etp, ep=ep, edp=edp, pp=stage)
