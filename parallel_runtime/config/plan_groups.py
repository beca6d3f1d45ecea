"""What a plan says about groups: which exist, which share a communicator, and which communicators are opened for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from parallel_runtime.comm.select import PlannedCommunicator
from parallel_runtime.config.budget import Budget, communicator_cost, gloo_device_cost
from parallel_runtime.terms import GROUP_NAMES, GroupName, Rank
from parallel_runtime.topology.layout import Coordinate, Layout
from parallel_runtime.topology.shapes import GroupShape, group_shape

__all__ = ["GroupFamily", "PlannedGroup", "RankPlan", "group_families", "rank_budget"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFamily:
    """All groups of one name, and the other names that mean the same groups on every rank.

    Attributes:
        name: The first of its names in the usual order; its communicators carry this one.
        aliases: The other names.
        shape: How the groups lie in the world.
        num_groups: How many there are.
    """

    name: GroupName
    aliases: tuple[GroupName, ...]
    shape: GroupShape
    num_groups: int

    @property
    def names(self) -> tuple[GroupName, ...]:
        """All names."""
        return (self.name, *self.aliases)

    @property
    def group_size(self) -> int:
        """Members of each group."""
        return self.shape.world_size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One group as it will be.

    Attributes:
        name: Its name, such as ``"ep"``.
        index: Its place among the groups of that name.
        world_size: Number of members.
        ends: Its first and last member; ``layout.group_of(ends[0], name)`` lists all.
        shares_with: The name whose communicators it uses; its own where it is the first.
        crosses_hosts: Whether its members are on more than one host.
        communicators: What is opened for it; empty in a group of one.
    """

    name: GroupName
    index: int
    world_size: int
    ends: tuple[Rank, Rank]
    shares_with: GroupName
    crosses_hosts: bool
    communicators: tuple[PlannedCommunicator, ...]

    @property
    def label(self) -> str:
        """Name and index, such as ``"tp#3"``: what the group's coordinator is called."""
        return f"{self.name}#{self.index}"

    @property
    def opens(self) -> tuple[PlannedCommunicator, ...]:
        """The communicators that this name, and not an alias of it, opens."""
        return self.communicators if self.shares_with == self.name else ()

    @property
    def reason(self) -> str:
        """Why these communicators, or why none."""
        if not self.communicators:
            return "a group of one opens nothing"
        if self.shares_with != self.name:
            return f"same ranks as {self.shares_with}, whose communicators it shares"
        return "; ".join(communicator.reason for communicator in self.communicators)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Everything the plan says about one rank.

    Attributes:
        rank: The rank.
        coordinate: Its index on every axis.
        host: Name of its host.
        local_rank: Its position there.
        groups: One group for each name, aliases and groups of one included.
        budget: What its communicators cost it.
    """

    rank: Rank
    coordinate: Coordinate
    host: str
    local_rank: int
    groups: tuple[PlannedGroup, ...]
    budget: Budget


def group_families(layout: Layout) -> tuple[GroupFamily, ...]:
    """Sort the names of a layout by the groups they mean.

    Args:
        layout: The world.

    Returns:
        One family for each distinct shape, in the usual order of names. Groups of one form a family as well.
    """
    names: dict[GroupShape, list[GroupName]] = {}
    for name in GROUP_NAMES:
        names.setdefault(group_shape(layout, name), []).append(name)
    return tuple(
        GroupFamily(name=first, aliases=tuple(others), shape=shape, num_groups=layout.world_size // shape.world_size)
        for shape, (first, *others) in names.items()
    )


def rank_budget(groups: Iterable[PlannedGroup]) -> Budget:
    """Add up what a rank's groups cost it.

    Args:
        groups: Its groups, aliases included; each communicator is counted once.

    Returns:
        The cost.
    """
    opened = [communicator for group in groups for communicator in group.opens]
    return sum(map(communicator_cost, opened), gloo_device_cost(opened))
