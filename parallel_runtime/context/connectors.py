"""How the members of one group come to talk: the communicators that were chosen for it, opened by its members alone."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch

from parallel_runtime.comm.c10d import C10dCommunicator, Store, gloo_device, open_symm_mem
from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.comm.hierarchy import HierarchicalCommunicator, HostSplit
from parallel_runtime.comm.local import LocalCommunicator, LocalHub
from parallel_runtime.comm.select import WAY_INSIDE, GroupFacts, PlannedCommunicator, choose_communicators
from parallel_runtime.comm.shm import Errands, ShmCommunicator, Unavailable
from parallel_runtime.comm.shm.stores import StoreAdapter
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.errors import ConfigError, PeerError, RendezvousError
from parallel_runtime.terms import Rank

__all__ = [
    "Connection",
    "Connector",
    "ProcessConnector",
    "choose_connector",
    "connect_fake",
    "local_connector",
    "telling_connector",
]

_logger = logging.getLogger(__name__)


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


def choose_connector(
    meeting: Meeting,
    *,
    backend: str,
    device: torch.device,
    shm: Literal["auto", "on", "off"],
    address: str,
    timeout_s: float,
    checked: bool,
    errands: Errands,
    hub: LocalHub | None,
) -> Connector:
    """What opens the groups of a context.

    Args:
        meeting: Of its ranks.
        backend: ``"local"``, or as for ``ProcessConnector``, like the arguments that follow.
        device: Where tensors live.
        shm: Whether to share memory.
        address: Where gloo listens.
        timeout_s: How long a group may take to connect, in seconds.
        checked: Whether members compare what they enter where gloo would not.
        errands: What this rank moves on while it waits.
        hub: Connects ranks that are threads, for ``"local"``.

    Returns:
        The connector; its errors say which members never came.
    """
    if backend == "local" and hub is not None:
        return telling_connector(local_connector(hub), meeting)
    connector = ProcessConnector(
        store=meeting.room,
        backend=backend,
        device=device,
        hosts=dict(zip(meeting.ranks, meeting.hosts, strict=True)),
        shm=shm,
        address=address,
        timeout_s=timeout_s,
        checked=checked,
        errands=errands,
    )
    return telling_connector(connector, meeting)


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


def telling_connector(connect: Connector, meeting: Meeting) -> Connector:
    """Let an error of connecting say which members never came to do so.

    Args:
        connect: Opens a connection.
        meeting: Where the members note that they have come.

    Returns:
        The connector.
    """

    def connect_or_tell(key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        meeting.arrive(f"opening/{key}")
        try:
            return connect(key, ranks, rank_in_group)
        except PeerError as exc:
            absent = meeting.absent(f"opening/{key}", ranks)
            if not absent:
                raise
            names = "; ".join(f"rank {rank} {why}" for rank, why in absent.items())
            error = type(exc)(f"a group of ranks {list(ranks)} did not come together: {names} ({exc})")
            error.ranks = tuple(absent)
            raise error from exc

    return connect_or_tell


@final
class ProcessConnector:
    """Connects processes (or threads) through shared memory or torch's backends, as ``choose_communicators`` says.

    Args:
        store: Where the members of a group meet.
        backend: ``"gloo"`` or ``"nccl"``, of the world.
        device: Where tensors live.
        hosts: Name of every rank's host, equal on all ranks.
        shm: Whether to share memory: where it can be had, always, or never.
        address: Where gloo listens; it does once it is needed, at one place for all groups.
        timeout_s: How long a group may take to connect, in seconds.
        checked: Whether members compare what they enter where gloo would not; equal on all ranks.
        errands: What this rank moves on while it waits in whichever of its groups, also in those of other contexts of its family.
    """

    def __init__(
        self,
        *,
        store: Store,
        backend: str,
        device: torch.device,
        hosts: Mapping[int, str],
        shm: Literal["auto", "on", "off"],
        address: str,
        timeout_s: float,
        checked: bool,
        errands: Errands,
    ) -> None:
        self._store = store
        self._backend = backend
        self._device = device
        self._hosts = hosts
        self._shm = shm
        self._address = address
        self._timeout_s = timeout_s
        self._checked = checked
        self._transport: object | None = None
        self._errands = errands

    def __call__(self, key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        """Connect to the other members.

        Args:
            key: Of the group; never reused.
            ranks: World ranks in group order.
            rank_in_group: This member.

        Returns:
            The connection.

        Raises:
            ConfigError: Memory cannot be shared, and ``shm`` is ``"on"``.
            RendezvousError: A member did not take part in time.

        Collective: the members of the group, and nobody else.
        """
        counts = Counter(self._hosts[rank] for rank in ranks)
        facts = GroupFacts(
            world_size=len(ranks),
            num_hosts=len(counts),
            most_on_host=max(counts.values()),
            backend="nccl" if self._backend == "nccl" else "gloo",
            uses_shm=self._shm != "off",
        )
        chosen = choose_communicators(facts)
        if len({planned.kind for planned in chosen if planned.plane == "both"}) > 1:
            mixed = self._open_hierarchy(key, ranks, rank_in_group)
            return Connection(data=mixed, control=mixed)
        kinds = [planned.kind for planned in chosen]
        opened = {
            planned.plane: self._open(planned, key, ranks, rank_in_group) for planned in chosen if planned.kind != "symm_mem"
        }
        control = opened.get("both") or opened["control"]
        data = opened.get("data", control)
        return Connection(data=self._share_gpus(key, data) if "symm_mem" in kinds else data, control=control)

    def _share_gpus(self, key: str, data: Communicator) -> Communicator:
        """Symmetric memory on top of ``data``, where every member can have it."""
        made = open_symm_mem(data, self._store, f"{key}/data", self._device, self._timeout_s)
        if isinstance(made, str):
            data.reason += f"; no symmetric memory: {made}"
            return data
        made.reason = f"{data.reason}; nccl beneath"
        return made

    def _open(self, planned: PlannedCommunicator, key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Communicator:
        if planned.kind == "c10d":
            return self._open_c10d(f"{key}/{planned.plane}", ranks, rank_in_group, planned.backend, planned.reason)
        made = self._share(f"{key}/shm", len(ranks), rank_in_group)
        if isinstance(made, ShmCommunicator):
            made.reason = planned.reason
            return made
        assert made is not None
        self._fall_back(ranks, made.reason)
        return self._open_c10d(f"{key}/control", ranks, rank_in_group, "gloo", f"no shared memory: {made.reason}")

    def _open_hierarchy(self, key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Communicator:
        """Members on several hosts: all have shared memory inside their hosts, or none uses it."""
        split = HostSplit([self._hosts[rank] for rank in ranks], rank_in_group)
        flat = self._open_c10d(f"{key}/both", ranks, rank_in_group, "gloo", "several hosts")
        made = self._share(f"{key}/shm {split.host}", len(split.local), split.spot_of(rank_in_group))
        why_not = self._compare(key, split, rank_in_group, made.reason if isinstance(made, Unavailable) else "")
        if isinstance(made, Unavailable) or why_not:
            if isinstance(made, ShmCommunicator):
                made.close()
            self._fall_back(ranks, why_not)
            flat.reason = f"no shared memory: {why_not}"
            return flat
        mixed = HierarchicalCommunicator(split, rank_in_group, flat=flat, inside=made, ranks=ranks, checked=self._checked)
        mixed.key = flat.key
        mixed.reason = f"memory {WAY_INSIDE} at any size; all_reduce, reduce_scatter, all_gather, broadcast cross once per host"
        return mixed

    def _share(self, key: str, world_size: int, rank_in_group: int) -> ShmCommunicator | Unavailable | None:
        """Shared memory of some ranks of this host; ``None`` where this one is alone."""
        if world_size == 1:
            return None
        store = StoreAdapter(self._store)
        return ShmCommunicator.create(store, key, rank_in_group, world_size, self._timeout_s, errands=self._errands)

    def _compare(self, key: str, split: HostSplit, rank_in_group: int, reason: str) -> str:
        """Why some host cannot share memory, equal on all members; ``""`` where all can."""
        store = StoreAdapter(self._store)
        if rank_in_group == split.local[0]:
            store.set(f"{key}/inside/{split.host}", reason.encode() or b"-")
        try:
            told = [store.get(f"{key}/inside/{host}", self._timeout_s).decode() for host in range(len(split.members))]
        except TimeoutError as exc:
            raise RendezvousError(f"a host of the group did not say whether its ranks share memory: {exc}") from exc
        return "; ".join(f"host no. {host}: {text}" for host, text in enumerate(told) if text != "-")

    def _fall_back(self, ranks: tuple[Rank, ...], reason: str) -> None:
        if self._shm == "on":
            raise ConfigError(f'shm="on", but ranks {ranks} cannot share memory: {reason}; shm="auto" falls back to gloo')
        _logger.warning("ranks %s cannot share memory and talk over gloo: %s", ranks, reason)

    def _open_c10d(self, key: str, ranks: tuple[Rank, ...], rank_in_group: int, backend: str, reason: str) -> Communicator:
        is_gloo = backend == "gloo"
        if is_gloo and self._transport is None:
            self._transport = gloo_device(self._address)
        made = C10dCommunicator(
            self._store,
            key,
            rank_in_group,
            len(ranks),
            backend=backend,
            timeout_s=self._timeout_s,
            device=torch.device("cpu") if is_gloo else self._device,
            ranks=ranks,
            transport=self._transport,
            checked=self._checked,
        )
        made.reason = reason
        return made
