"""What of a plan is drawn: all of a small world, a few hosts of a big one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from parallel_runtime.config.plan_groups import GroupFamily, PlannedGroup
from parallel_runtime.config.plan_picture import PictureCell, PictureHost, PictureLine, PictureTag
from parallel_runtime.config.plan_tables import MEANINGS
from parallel_runtime.config.plan_text import format_count, format_ranks
from parallel_runtime.terms import EXPERT_AXES, GroupName
from parallel_runtime.topology.hosts import HostMap
from parallel_runtime.topology.layout import Layout

__all__ = ["picture_hosts", "picture_legend", "picture_notes"]

_MOST_CELLS = 64
_SOME_HOSTS, _SOME_RANKS, _SOME_TAGS = 3, 16, 8

_GroupOf = Callable[[GroupName, int], PlannedGroup]


class _SomeGroups(Protocol):
    def __call__(self, name: GroupName, *, most: int) -> Sequence[PlannedGroup]: ...


def picture_notes(hosts: HostMap, *, world_size: int) -> tuple[str, ...]:
    """The lines under the title: how to read the picture, and what is left out.

    Args:
        hosts: Which rank runs where.
        world_size: Number of ranks.

    Returns:
        One or two lines.
    """
    read = "Ranks with the same colour in a line are one group."
    if hosts.num_hosts > 1:
        read += " ↔ and a dashed edge: the group crosses hosts."
    drawn = _drawn_hosts(hosts, world_size)
    cells = sum(len(_drawn_ranks(hosts, host, world_size)) for host in drawn)
    if cells == world_size:
        return (read,)
    return (read, f"Abbreviated: {cells} of {world_size:,} ranks are drawn, on {len(drawn)} of {hosts.num_hosts:,} hosts.")


def picture_hosts(
    hosts: HostMap, families: Sequence[GroupFamily], group_of: _GroupOf, *, layout: Layout
) -> tuple[PictureHost, ...]:
    """The hosts and cells that are drawn.

    Args:
        hosts: Which rank runs where.
        families: All families of the plan.
        group_of: From a name and a rank to its group.
        layout: Who sits where.

    Returns:
        All hosts and ranks of a world of up to 64 ranks; otherwise the first three hosts and the last, 16 ranks of each.
    """
    found: list[PictureHost] = []
    before = -1
    for host in _drawn_hosts(hosts, layout.world_size):
        if host > before + 1:
            skipped = host - before - 1
            found.append(PictureHost(title="", cells=(), note=f"... {format_count(skipped, 'more host')} ..."))
        before = host
        ranks = hosts.ranks_on(host)
        drawn = _drawn_ranks(hosts, host, layout.world_size)
        cells = tuple(PictureCell(title=f"rank {rank}", tags=_tags(rank, families, group_of, layout)) for rank in drawn)
        left = len(ranks) - len(drawn)
        title = f"{hosts.name(host)}: ranks {format_ranks(ranks, limit=4)}"
        note = f"... and {format_count(left, 'more rank')} on this host" if left else ""
        found.append(PictureHost(title=title, cells=cells, note=note))
    return tuple(found)


def picture_legend(families: Sequence[GroupFamily], some_groups: _SomeGroups, *, layout: Layout) -> tuple[PictureLine, ...]:
    """The legend: a line for each family with an axis, and its groups.

    Args:
        families: All families of the plan.
        some_groups: From a name to its first groups.
        layout: Who sits where.

    Returns:
        One line for each tag of a cell, in the same order.
    """
    lines = []
    most = _MOST_CELLS // 2 if layout.world_size <= _MOST_CELLS else _SOME_TAGS
    for family, names in _drawn_families(families, layout):
        name = names[0]
        left = family.num_groups - most
        lines.append(
            PictureLine(
                name=" = ".join(names),
                text=f"{MEANINGS[name]}: {format_count(family.num_groups, 'group')} of {family.group_size:,}",
                tags=tuple(_tag(group, layout) for group in some_groups(name, most=most)),
                note=f"... and {format_count(left, 'more group')}" if left > 0 else "",
            )
        )
    return tuple(lines)


def _drawn_hosts(hosts: HostMap, world_size: int) -> Sequence[int]:
    if world_size <= _MOST_CELLS or hosts.num_hosts <= _SOME_HOSTS + 1:
        return range(hosts.num_hosts)
    return (*range(_SOME_HOSTS), hosts.num_hosts - 1)


def _drawn_ranks(hosts: HostMap, host: int, world_size: int) -> Sequence[int]:
    ranks = hosts.ranks_on(host)
    return ranks if world_size <= _MOST_CELLS else ranks[:_SOME_RANKS]


def _drawn_families(families: Sequence[GroupFamily], layout: Layout) -> list[tuple[GroupFamily, list[GroupName]]]:
    """The families that show, with the axes they are named after; expert axes only where there are experts to spread."""
    hidden = {"world", "stage"} if layout.ep > 1 else {"world", "stage", *EXPERT_AXES}
    named = [(family, [name for name in family.names if name not in hidden]) for family in families if family.group_size > 1]
    return [(family, names) for family, names in named if names]


def _tags(rank: int, families: Sequence[GroupFamily], group_of: _GroupOf, layout: Layout) -> tuple[PictureTag, ...]:
    return tuple(_tag(group_of(names[0], rank), layout) for _, names in _drawn_families(families, layout))


def _tag(group: PlannedGroup, layout: Layout) -> PictureTag:
    ranks = format_ranks(layout.group_of(group.ends[0], group.name), limit=4)
    return PictureTag(label=group.label, ranks=ranks, crosses_hosts=group.crosses_hosts)
