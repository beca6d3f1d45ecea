"""The groups of one context: opened by their members only, each set of ranks once."""

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import final

import torch

from parallel_runtime.comm.coordinator import GroupCoordinator, open_coordinator
from parallel_runtime.comm.diagnosis import Diagnostician
from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.context.connectors import Connection, Connector
from parallel_runtime.terms import Rank
from parallel_runtime.topology.layout import Layout

__all__ = ["GroupTable"]


@final
class GroupTable:
    """Opens groups and remembers which sets of ranks are connected already.

    Args:
        layout: Of the world.
        rank: This one.
        uid: Of the context; part of every key.
        local_rank: Position of this rank on its host.
        device: Where tensors live.
        deadlines: Of every group.
        checked: Whether groups compare operations before they run.
        connect: Opens what a group of two or more moves its data with.
        name: Of the context, in front of its groups' names; ``""`` for none.
        shared: Connections of another table that this one uses, too, where ranks are equal.
        diagnostician: Explains what the groups' operations fail of.
        watch: Told of each connection that groups use, with the world ranks of its members, and whether it is new.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        rank: Rank,
        uid: str,
        local_rank: int,
        device: torch.device,
        deadlines: Deadlines,
        checked: bool,
        connect: Connector,
        name: str = "",
        shared: Mapping[tuple[Rank, ...], Connection] = MappingProxyType({}),
        diagnostician: Diagnostician | None = None,
        watch: Callable[[tuple[Rank, ...], Connection, bool], None] = lambda ranks, connection, is_new: None,
    ) -> None:
        self._prefix = f"{name}." if name else ""
        self._layout = layout
        self._rank = rank
        self._uid = uid
        self._local_rank = local_rank
        self._device = device
        self._timeouts = GroupTimeouts(collective_s=deadlines.collective_s, control_s=deadlines.control_s, p2p_s=deadlines.p2p_s)
        self._checked = checked
        self._connect = connect
        self._connections = dict(shared)
        self._diagnostician = diagnostician
        self._watch = watch
        self._watched: set[tuple[Rank, ...]] = set()

    @property
    def connections(self) -> Mapping[tuple[Rank, ...], Connection]:
        """What is connected so far, by world ranks in group order."""
        return MappingProxyType(self._connections)

    def open(self, *axes: str) -> GroupCoordinator:
        """Open this rank's group along some axes. One that is alone needs no connection; equal sets of ranks share theirs.

        Args:
            axes: A name, or several axes together.

        Returns:
            The open group; whoever asked closes it.

        Collective: the members of the group.
        """
        ranks = self._layout.group_of(self._rank, *axes)
        spec = GroupSpec(
            name=f"{self._prefix}{'+'.join(axes)}#{self._layout.group_index(self._rank, *axes)}",
            key=f"{self._uid}/{'+'.join(axes)}/{_digest(ranks)}",
            ranks=ranks,
            rank=self._rank,
            local_rank=self._local_rank,
            device=self._device,
            timeouts=self._timeouts,
            checked=self._checked,
        )
        if len(ranks) == 1:
            return _traceable(open_coordinator(spec))
        is_new = ranks not in self._connections
        if is_new:
            self._connections[ranks] = self._connect(f"{self._uid}/{_digest(ranks)}", ranks, spec.rank_in_group)
        connection = self._connections[ranks]
        if ranks not in self._watched:
            self._watched.add(ranks)
            self._watch(ranks, connection, is_new)
        group = open_coordinator(spec, connection.data, control=connection.control, diagnostician=self._diagnostician)
        return _traceable(group)


def _traceable(group: GroupCoordinator) -> GroupCoordinator:
    group.make_traceable()
    return group


def _digest(ranks: tuple[Rank, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
