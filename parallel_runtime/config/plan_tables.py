"""The tables of a plan: its groups, its hosts, what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from parallel_runtime.comm.select import PlannedCommunicator
from parallel_runtime.config.budget import Budget, Budgets
from parallel_runtime.config.plan_groups import GroupFamily
from parallel_runtime.config.plan_text import Table, format_bytes, format_count, format_ranks
from parallel_runtime.terms import GroupName, Rank
from parallel_runtime.topology.hosts import HostMap
from parallel_runtime.topology.layout import Layout

__all__ = ["MEANINGS", "SHOWN_GROUPS", "GroupRow", "budget_table", "group_table", "headline", "host_table"]

MEANINGS: Mapping[GroupName, str] = MappingProxyType(
    {
        "world": "all ranks",
        "stage": "one pipeline stage",
        "tp": "tensor parallel",
        "cp": "context parallel",
        "dp": "data parallel",
        "pp": "pipeline parallel",
        "ep": "expert parallel",
        "etp": "tensor parallel in an expert",
        "edp": "copies of an expert",
        "dcp": "decode context parallel",
    }
)
"""What each name of a group means, in a few words."""

SHOWN_GROUPS = 4
"""How many groups of a family are listed by their members."""

_SHOWN_HOSTS = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """What the table says about a family.

    Attributes:
        family: The groups.
        first_members: The members of its first groups.
        num_crossing: How many of its groups cross hosts.
        communicators: What its groups open: one entry, or two where those that cross hosts differ from the others.
    """

    family: GroupFamily
    first_members: tuple[tuple[Rank, ...], ...]
    num_crossing: int
    communicators: tuple[tuple[PlannedCommunicator, ...], ...]


def headline(layout: Layout, hosts: HostMap) -> str:
    """One line that says what the world is.

    Args:
        layout: Who sits where.
        hosts: Which rank runs where.

    Returns:
        Such as ``"8 ranks on 2 hosts: tp=2 dp=2 pp=2"``; axes of size 1 are left out.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp, "ep": layout.ep, "dcp": layout.dcp}
    if layout.ep > 1:
        sizes |= {"etp": layout.etp, "edp": layout.edp}
    said = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "no parallel axis"
    return f"{format_count(layout.world_size, 'rank')} on {format_count(hosts.num_hosts, 'host')}: {said}"


def group_table(rows: Sequence[GroupRow]) -> Table:
    """The groups that open something, one row for each family.

    Args:
        rows: All families of the plan.

    Returns:
        The table; families of one rank are named in its note.
    """
    ones = [name for row in rows if row.family.group_size == 1 for name in row.family.names]
    return Table(
        title="Groups",
        header=("name", "groups x ranks", "members", "cross hosts", "opens", "why"),
        rows=tuple(_group_cells(row) for row in rows if row.family.group_size > 1),
        note=f"Groups of one, which open nothing: {', '.join(ones)}." if ones else "",
    )


def host_table(hosts: HostMap) -> Table:
    """The ranks of every host, in local order.

    Args:
        hosts: Which rank runs where.

    Returns:
        The table, cut after 16 hosts; its note says so.
    """
    shown = range(min(hosts.num_hosts, _SHOWN_HOSTS))
    rows = tuple((hosts.name(host), str(len(hosts.ranks_on(host))), format_ranks(hosts.ranks_on(host))) for host in shown)
    left = hosts.num_hosts - len(shown)
    note = f"{format_count(left, 'more host')}, not shown." if left else ""
    return Table(title="Hosts", header=("host", "ranks", "in local order"), rows=rows, note=note)


def budget_table(budgets: Budgets) -> Table:
    """What the communicators cost.

    Args:
        budgets: One rank's and the world's.

    Returns:
        The table.
    """
    return Table(
        title="Budget",
        header=("", "communicators", "sockets", "threads", "descriptors", "memory"),
        rows=(_budget_cells("one rank, at most", budgets.largest_rank), _budget_cells("the world", budgets.world)),
    )


def _group_cells(row: GroupRow) -> tuple[str, ...]:
    family = row.family
    members = "; ".join(map(format_ranks, row.first_members))
    left = family.num_groups - len(row.first_members)
    return (
        " = ".join(family.names),
        f"{family.num_groups:,} x {family.group_size:,}",
        f"{members}; ... {left:,} more" if left else members,
        f"{row.num_crossing:,} of {family.num_groups:,}" if row.num_crossing else "none",
        " / ".join(" + ".join(map(str, communicators)) for communicators in row.communicators),
        " / ".join("; ".join(communicator.reason for communicator in communicators) for communicators in row.communicators),
    )


def _budget_cells(name: str, cost: Budget) -> tuple[str, ...]:
    counts = (cost.communicators, cost.sockets, cost.threads, cost.descriptors)
    return (name, *(f"{count:,}" for count in counts), format_bytes(cost.bytes))
