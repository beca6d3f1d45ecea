"""The plan: everything a layout on its hosts implies, as data, before a socket opens.

A plan holds the layout and the placement and works the rest out when asked. A question about one rank costs as much as its
answer, whatever the world size; a question about the world costs as much as there are groups.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from os import PathLike
from typing import final, get_args

from parallel_runtime.comm.select import GroupFacts, PlannedBackend, PlannedCommunicator, choose_communicators
from parallel_runtime.config.budget import Budget, Budgets, communicator_cost, gloo_device_cost, most_of_each
from parallel_runtime.config.picture import Picture, write_png
from parallel_runtime.config.plan_diff import Difference, compare_facts, compare_seats
from parallel_runtime.config.plan_groups import (
    GroupFamily,
    PlannedGroup,
    RankPlan,
    group_families,
    rank_budget,
)
from parallel_runtime.config.plan_json import layout_as_dict, layout_from_dict
from parallel_runtime.config.plan_picture import draw_world
from parallel_runtime.config.plan_scene import picture_hosts, picture_legend, picture_notes
from parallel_runtime.config.plan_tables import SHOWN_GROUPS, GroupRow, budget_table, group_table, headline, host_table
from parallel_runtime.config.plan_text import Table, render_tables
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.terms import GROUP_NAMES, GroupName, Rank
from parallel_runtime.topology.hosts import HostMap, Hosts, place_ranks
from parallel_runtime.topology.layout import Layout
from parallel_runtime.topology.shapes import group_ends
from parallel_runtime.topology.spread import Spread, group_spread, spreads

__all__ = ["Plan", "make_plan"]

_MOST_LISTED = 16_384
"""Largest world whose groups are listed member by member in JSON and whose moved ranks are counted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a layout on its hosts implies. Made by ``make_plan`` or ``ParallelConfig.plan``.

    Attributes:
        layout: Who sits where.
        hosts: Which rank runs on which host.
        backend: What carries the tensors.
        uses_shm: Whether ranks of one host talk through shared memory.
        families: The distinct groups, each with all names that mean it.
    """

    layout: Layout
    hosts: HostMap
    backend: PlannedBackend
    uses_shm: bool
    families: tuple[GroupFamily, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    def family(self, name: GroupName) -> GroupFamily:
        """The family that a name belongs to.

        Args:
            name: Name of a group.

        Returns:
            The family.

        Raises:
            ArgumentError: No group has this name.
        """
        for family in self.families:
            if name in family.names:
                return family
        raise ArgumentError(f"no group is called {name!r}; the names are {', '.join(GROUP_NAMES)}")

    def group(self, name: GroupName, rank: int) -> PlannedGroup:
        """The group of one name that holds a rank.

        Args:
            name: Name of the group.
            rank: A rank of the world.

        Returns:
            The group.

        Raises:
            ArgumentError: No group has this name, or there is no such rank.
        """
        family = self.family(name)
        ends = group_ends(self.layout, rank, family.shape)
        return self._planned(family, name, self.layout.group_index(rank, name), ends)

    def groups(self, name: GroupName) -> tuple[PlannedGroup, ...]:
        """All groups of one name, in the layout's order.

        Args:
            name: Name of the groups.

        Returns:
            As many as the family says.

        Raises:
            ArgumentError: No group has this name.
        """
        family = self.family(name)
        members = enumerate(self.layout.groups(name))
        return tuple(self._planned(family, name, index, (ranks[0], ranks[-1])) for index, ranks in members)

    def some_groups(self, name: GroupName, *, most: int) -> tuple[PlannedGroup, ...]:
        """The first groups of one name, for a look at a world of any size.

        Args:
            name: Name of the groups.
            most: How many at most.

        Returns:
            The first ones, in the layout's order.

        Raises:
            ArgumentError: No group has this name.
        """
        family = self.family(name)
        if family.num_groups <= _MOST_LISTED:
            return self.groups(name)[:most]
        firsts = (rank for rank in self.layout.ranks if group_ends(self.layout, rank, family.shape)[0] == rank)
        return tuple(self.group(name, rank) for rank in islice(firsts, most))

    def for_rank(self, rank: int) -> RankPlan:
        """Everything about one rank, without looking at any other.

        Args:
            rank: A rank of the world.

        Returns:
            Its coordinate, host, groups and budget.

        Raises:
            ArgumentError: No such rank.
        """
        groups = tuple(self.group(name, rank) for name in GROUP_NAMES)
        return RankPlan(
            rank=Rank(rank),
            coordinate=self.layout.coordinate(rank),
            host=self.hosts.name(self.hosts.host_of(rank)),
            local_rank=self.hosts.local_rank(rank),
            groups=groups,
            budget=rank_budget(groups),
        )

    def crossing(self, name: GroupName) -> tuple[PlannedGroup, ...]:
        """The groups of one name that are on more than one host.

        Args:
            name: Name of the groups.

        Returns:
            Those groups, in the layout's order.

        Raises:
            ArgumentError: No group has this name.
        """
        return tuple(group for group in self.groups(name) if group.crosses_hosts)

    def count_crossing(self, name: GroupName) -> int:
        """How many groups of one name are on more than one host.

        Args:
            name: Name of the groups.

        Returns:
            Their number.

        Raises:
            ArgumentError: No group has this name.
        """
        family = self.family(name)
        if self.hosts.num_hosts == 1 or family.group_size == 1:
            return 0
        return sum(count for spread, count in spreads(self.layout, self.hosts, family.name).items() if spread.num_hosts > 1)

    def budgets(self) -> Budgets:
        """What the communicators cost: one rank at most, and the world.

        Returns:
            Both, by the formula of ``config/budget.py``. A rank pays at most the costliest group of each family.
        """
        rank = world = Budget()
        opened: list[PlannedCommunicator] = []
        for family in self.families:
            costs = []
            for facts, count in self._spreads(family).items():
                communicators = choose_communicators(facts)
                opened += communicators
                costs.append(sum(map(communicator_cost, communicators), Budget()))
                for communicator in communicators:
                    world += communicator_cost(communicator) * (communicator.users * count)
            rank += most_of_each(costs)
        device = gloo_device_cost(opened)
        return Budgets(largest_rank=rank + device, world=world + device * self.world_size)

    def diff(self, other: "Plan") -> tuple[Difference, ...]:
        """What changes from this plan to another one.

        Args:
            other: The plan to compare with.

        Returns:
            The differences, sizes first; empty where the plans are equal.
        """
        return (*compare_facts(self._facts(), other._facts()), *self._moves(other))

    def tables(self) -> tuple[Table, ...]:
        """The plan as tables: groups, hosts, budget."""
        rows = tuple(self._row(family) for family in self.families)
        return (group_table(rows), host_table(self.hosts), budget_table(self.budgets()))

    @property
    def headline(self) -> str:
        """One line that says what the world is."""
        return headline(self.layout, self.hosts)

    def to_text(self) -> str:
        """The plan as plain text.

        Returns:
            Tables of groups, hosts and budget; ends with a newline.
        """
        return f"{self.headline}\n\n{render_tables(self.tables())}"

    def to_json(self) -> str:
        """The plan as JSON, from which ``Plan.from_json`` makes an equal one.

        Returns:
            An object with ``layout``, ``hosts``, ``backend``, ``uses_shm`` (what the plan is made of) and ``groups``, ``budget``
            (what follows). Groups list their members in worlds of up to 16,384 ranks.
        """
        data = {
            "layout": layout_as_dict(self.layout),
            "hosts": self.hosts.as_table(),
            "backend": self.backend,
            "uses_shm": self.uses_shm,
            "groups": {name: self._family_as_dict(name) for name in GROUP_NAMES},
            "budget": asdict(self.budgets()),
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Make a plan from what ``to_json`` wrote. Only what the plan is made of is read; the rest follows.

        Args:
            text: The JSON text.

        Returns:
            The plan.

        Raises:
            ConfigError: The text is no plan, or its layout or hosts are impossible.
        """
        try:
            data = json.loads(text)
            layout = layout_from_dict(data["layout"])
            return make_plan(layout, hosts=data["hosts"], backend=data["backend"], uses_shm=data["uses_shm"])
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"not the JSON of a plan ({type(error).__name__}: {error}); plan.to_json() writes it") from error

    def to_svg(self) -> str:
        """The plan as a picture: ranks on their hosts, a colour for each group, a legend.

        Returns:
            An SVG document. Worlds of more than 64 ranks are abbreviated, and the picture says so.
        """
        return self._picture().to_svg()

    def to_png(self, path: str | PathLike[str]) -> None:
        """Write the picture of ``to_svg`` as PNG.

        Args:
            path: File to write.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        write_png(self._picture(), path)

    def _picture(self) -> Picture:
        return draw_world(
            title=self.headline,
            notes=picture_notes(self.hosts, world_size=self.world_size),
            hosts=picture_hosts(self.hosts, self.families, self.group, layout=self.layout),
            legend=picture_legend(self.families, self.some_groups, layout=self.layout),
        )

    def _planned(self, family: GroupFamily, name: GroupName, index: int, ends: tuple[Rank, Rank]) -> PlannedGroup:
        facts = self._facts_of(family, group_spread(self.layout, self.hosts, family.name, ends))
        return PlannedGroup(
            name=name,
            index=index,
            world_size=family.group_size,
            ends=ends,
            shares_with=family.name,
            crosses_hosts=facts.num_hosts > 1,
            communicators=choose_communicators(facts),
        )

    def _facts_of(self, family: GroupFamily, spread: Spread) -> GroupFacts:
        """What the choice of a group's communicators depends on."""
        size, (num_hosts, most) = family.group_size, spread
        return GroupFacts(world_size=size, num_hosts=num_hosts, most_on_host=most, backend=self.backend, uses_shm=self.uses_shm)

    def _spreads(self, family: GroupFamily) -> Mapping[GroupFacts, int]:
        """The different facts among a family's groups, those of fewest hosts first, and how many groups have them."""
        found = spreads(self.layout, self.hosts, family.name)
        return {self._facts_of(family, spread): count for spread, count in found.items()}

    def _row(self, family: GroupFamily) -> GroupRow:
        opened = {
            tuple((str(communicator), communicator.reason) for communicator in communicators): communicators
            for communicators in map(choose_communicators, self._spreads(family))
        }
        return GroupRow(
            family=family,
            first_members=tuple(
                self.layout.group_of(group.ends[0], family.name) for group in self.some_groups(family.name, most=SHOWN_GROUPS)
            ),
            num_crossing=self.count_crossing(family.name),
            communicators=tuple(opened.values()),
        )

    def _family_as_dict(self, name: GroupName) -> dict[str, object]:
        family, groups = self.family(name), self.groups(name)
        found: dict[str, object] = {
            "group_size": family.group_size,
            "num_groups": family.num_groups,
            "shares_with": family.name,
            "opens": sorted({str(communicator) for group in groups for communicator in group.opens}),
            "crossing_hosts": [group.index for group in groups if group.crosses_hosts],
        }
        if self.world_size <= _MOST_LISTED and family.group_size > 1:
            found["ranks"] = self.layout.groups(name)
        return found

    def _facts(self) -> Mapping[str, str]:
        layout = self.layout
        sizes = {name: str(getattr(layout, name)) for name in ("world_size", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "dcp")}
        facts = {**sizes, "order": " ".join(layout.order), "hosts": str(self.hosts.num_hosts), "backend": self.backend}
        for family in self.families:
            crossing = self.count_crossing(family.name)
            said = f"{family.num_groups:,} x {family.group_size:,}" + (f", {crossing:,} cross hosts" if crossing else "")
            alias = f", same as {family.name}" if family.group_size > 1 else ""
            facts |= {f"{name} groups": said + (alias if name != family.name else "") for name in family.names}
        budgets = self.budgets()
        return {**facts, "one rank pays at most": str(budgets.largest_rank), "the world pays": str(budgets.world)}

    def _moves(self, other: "Plan") -> tuple[Difference, ...]:
        if max(self.world_size, other.world_size) > _MOST_LISTED:
            return ()
        common = sorted(set(self.layout.ranks) & set(other.layout.ranks))
        return compare_seats({rank: self._seat(rank) for rank in common}, {rank: other._seat(rank) for rank in common})

    def _seat(self, rank: int) -> str:
        here = self.layout.coordinate(rank)
        return f"{here} on {self.hosts.name(self.hosts.host_of(rank))}"


def make_plan(layout: Layout, *, hosts: Hosts | None = None, backend: PlannedBackend = "gloo", uses_shm: bool = False) -> Plan:
    """Plan a layout on its hosts.

    Args:
        layout: Who sits where.
        hosts: Number of hosts, or where the ranks run, as ``place_ranks`` takes it. By default one host holds all.
        backend: What carries the tensors.
        uses_shm: Whether ranks of one host talk through shared memory.

    Returns:
        The plan. Nothing is opened, and nothing is listed before it is asked for.

    Raises:
        ConfigError: The ranks cannot be placed on these hosts, or the backend is unknown.
    """
    if backend not in get_args(PlannedBackend):
        raise ConfigError(f"backend={backend!r} is unknown; use one of {', '.join(get_args(PlannedBackend))}")
    return Plan(
        layout=layout,
        hosts=place_ranks(layout.ranks, hosts),
        backend=backend,
        uses_shm=uses_shm,
        families=group_families(layout),
    )
