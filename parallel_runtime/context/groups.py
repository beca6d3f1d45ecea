"""The groups of one context: opened by their members only, each set of ranks once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from parallel_runtime.comm.c10d import C10dCommunicator, Store
from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.comm.coordinator import GroupCoordinator, open_coordinator
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
from parallel_runtime.comm.local import LocalCommunicator, LocalHub
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.terms import Rank
from parallel_runtime.topology.layout import Layout

__all__ = ["C10dConnector", "Connection", "Connector", "GroupTable", "connect_fake", "local_connector"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What one group moves its data with.

    Attributes:
        data: Moves tensors.
        control: Moves messages between CPUs; the same object where tensors live on the CPU.
    """

    data: Communicator
    control: Communicator


Connector: TypeAlias = Callable[[str, tuple[Rank, ...], int], Connection]
"""From (key, world ranks in group order, this member's position) to the group's connection."""


def connect_fake(key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
    """Connect to members that only seem to be there.

    Args:
        key: Of the group.
        ranks: World ranks in group order.
        rank_in_group: This member.

    Returns:
        The connection.
    """
    del key
    communicator = FakeCommunicator(rank_in_group, len(ranks))
    return Connection(data=communicator, control=communicator)


def local_connector(hub: LocalHub) -> Connector:
    """Connect ranks that are threads of this process.

    Args:
        hub: Shared by all of them.

    Returns:
        The connector.
    """

    def connect(key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        communicator = LocalCommunicator(hub, key, rank_in_group, len(ranks), ranks=ranks)
        return Connection(data=communicator, control=communicator)

    return connect


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class C10dConnector:
    """Connects processes (or threads) through torch's backends: gloo for messages, gloo or nccl for tensors.

    Attributes:
        store: Where the members of a group meet.
        backend: ``"gloo"`` or ``"nccl"``, of the tensors.
        device: Where tensors live.
        transport: gloo's listening end, shared by all groups of a context.
        timeout_s: How long a group may take to connect, in seconds.
    """

    store: Store
    backend: str
    device: torch.device
    transport: object
    timeout_s: float

    def __call__(self, key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        """Connect to the other members.

        Args:
            key: Of the group; never reused.
            ranks: World ranks in group order.
            rank_in_group: This member.

        Returns:
            The connection.

        Collective: the members of the group, and nobody else.
        """
        control = self._open(f"{key}/control", ranks, rank_in_group, "gloo", torch.device("cpu"))
        if self.backend == "gloo":
            return Connection(data=control, control=control)
        return Connection(data=self._open(f"{key}/data", ranks, rank_in_group, self.backend, self.device), control=control)

    def _open(self, key: str, ranks: tuple[Rank, ...], rank_in_group: int, backend: str, device: torch.device) -> Communicator:
        return C10dCommunicator(
            self.store,
            key,
            rank_in_group,
            len(ranks),
            backend=backend,
            timeout_s=self.timeout_s,
            device=device,
            ranks=ranks,
            transport=self.transport,
        )


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
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._uid = uid
        self._local_rank = local_rank
        self._device = device
        self._timeouts = GroupTimeouts(collective_s=deadlines.collective_s, control_s=deadlines.control_s, p2p_s=deadlines.p2p_s)
        self._checked = checked
        self._connect = connect
        self._connections: dict[tuple[Rank, ...], Connection] = {}

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
            name=f"{'+'.join(axes)}#{self._layout.group_index(self._rank, *axes)}",
            key=f"{self._uid}/{'+'.join(axes)}/{_digest(ranks)}",
            ranks=ranks,
            rank=self._rank,
            local_rank=self._local_rank,
            device=self._device,
            timeouts=self._timeouts,
            checked=self._checked,
        )
        if len(ranks) == 1:
            return open_coordinator(spec)
        if ranks not in self._connections:
            self._connections[ranks] = self._connect(f"{self._uid}/{_digest(ranks)}", ranks, spec.rank_in_group)
        connection = self._connections[ranks]
        return open_coordinator(spec, connection.data, control=connection.control)


def _digest(ranks: tuple[Rank, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
