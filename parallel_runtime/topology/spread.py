"""How the groups of one name lie on hosts, with as few members listed as the placement allows."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from parallel_runtime.terms import GroupName, Rank
from parallel_runtime.topology.hosts import HostMap
from parallel_runtime.topology.layout import Layout
from parallel_runtime.topology.shapes import GroupShape, group_ends, group_shape

__all__ = ["Spread", "group_spread", "spreads"]


class Spread(NamedTuple):
    """How one group lies on hosts.

    Attributes:
        num_hosts: Hosts that its members are on.
        most_on_host: Members on the host that has most of them.
    """

    num_hosts: int
    most_on_host: int


def group_spread(layout: Layout, hosts: HostMap, name: GroupName, ends: tuple[Rank, Rank]) -> Spread:
    """Work out how one group lies on hosts. Members are listed only where the hosts cut groups unevenly.

    Args:
        layout: The world.
        hosts: Where its ranks run.
        name: Name of the group.
        ends: Its first and last member.

    Returns:
        Its spread.
    """
    if hosts.is_contiguous:
        shape = group_shape(layout, name)
        first, last = map(hosts.host_of, ends)
        spread = Spread(1, shape.world_size) if first == last else _common_spread(layout, hosts, shape)
        if spread is not None:
            return spread
    counts = Counter(map(hosts.host_of, layout.group_of(ends[0], name)))
    return Spread(len(counts), max(counts.values()))


def spreads(layout: Layout, hosts: HostMap, name: GroupName) -> Mapping[Spread, int]:
    """Count how many groups of one name lie on hosts in the same way.

    Args:
        layout: The world.
        hosts: Where its ranks run.
        name: Name of the groups.

    Returns:
        The different spreads, those of fewest hosts first, and how many groups have them.
    """
    shape = group_shape(layout, name)
    if hosts.is_contiguous and _common_spread(layout, hosts, shape) is not None:
        ends = group_ends(layout, layout.ranks[0], shape)
        return {group_spread(layout, hosts, name, ends): layout.world_size // shape.world_size}
    found = Counter(group_spread(layout, hosts, name, (group[0], group[-1])) for group in layout.groups(name))
    return {spread: found[spread] for spread in sorted(found)}


def _common_spread(layout: Layout, hosts: HostMap, shape: GroupShape) -> Spread | None:
    """How every group of a shape lies on hosts of equal consecutive blocks; ``None`` where groups differ.

    They are alike where the strides of the layout and the blocks divide each other.
    """
    if layout.order[-1] != "pp":
        return None
    block = hosts.largest
    steps = [*shape.steps, *([(layout.stage_size, shape.num_stages)] if shape.num_stages > 1 else [])]
    on_host = 1
    for stride, size in steps:
        if not (_divide(block, stride) and _divide(block, stride * size)):
            return None
        on_host *= min(size, max(block // stride, 1))
    return Spread(shape.world_size // on_host, on_host)


def _divide(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0
