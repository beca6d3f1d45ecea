"""What a context tells of itself and of its rank, and how its ranks agree; its subclass opens and closes it."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from types import MappingProxyType
from typing import NoReturn

import torch

from parallel_runtime.comm.c10d import Store
from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.comm.groups import check_seconds
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.config.environment import Identity
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.config.plan import Plan
from parallel_runtime.context.agreement import Agreement
from parallel_runtime.context.capture import CudaGraphs, GraphCapture, GraphDevice, capture_members
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.groups import GroupTable
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.monitor import Monitor
from parallel_runtime.context.seeing import Seeing
from parallel_runtime.context.statistics import Statistics
from parallel_runtime.errors import ArgumentError, ContextStateError
from parallel_runtime.terms import GROUP_NAMES, Rank
from parallel_runtime.topology.hosts import Hosts
from parallel_runtime.topology.layout import Coordinate, Layout
from parallel_runtime.values import error_text

__all__ = ["ContextBase", "ContextState"]


class ContextState(StrEnum):
    """Where a context is in its life. It goes forward only."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class ContextBase(Seeing):
    """The part of a ``ParallelContext`` that opens and closes nothing."""

    def __init__(self, config: ParallelConfig, identity: Identity | None, store: Store | None, hub: LocalHub | None) -> None:
        super().__init__()
        self._config = config
        self._identity = identity
        self._store = store
        self._hub = hub
        self._state = ContextState.NEW
        self._pid = os.getpid()
        self._uid = ""
        self._device = torch.device("cpu")
        self._hosts: Hosts | None = None
        self._groups: dict[str, GroupCoordinator] = {}
        self._extra_groups: dict[tuple[str, ...], GroupCoordinator] = {}
        self._table: GroupTable | None = None
        self._meeting: Meeting | None = None
        self._monitor: Monitor | None = None
        self._agreements: dict[tuple[Rank, ...], Agreement] = {}
        self._capture: GraphCapture | None = None
        self._stack = ExitStack()

    @property
    def state(self) -> ContextState:
        """Where it is in its life."""
        return self._state

    @property
    def config(self) -> ParallelConfig:
        """The config, with every size known once the context was entered."""
        return self._config

    @property
    def layout(self) -> Layout:
        """The arrangement of the world's ranks."""
        return self._config.layout

    @property
    def plan(self) -> Plan:
        """Everything the layout implies, as data; worked out at the call. In an open context, on the hosts its ranks are on.

        Raises:
            ConfigError: A size is still -1.
        """
        return self._config.plan(hosts=self._hosts)

    @property
    def identity(self) -> Identity:
        """Who this rank is. Hand it on, with ``store`` and ``hub``, to open a second context in the same rank.

        Raises:
            ContextStateError: Not entered yet.
        """
        if self._identity is None:
            raise ContextStateError("this ParallelContext does not know its rank yet; enter it with `with context:`")
        return self._identity

    @property
    def store(self) -> Store | None:
        """Where the ranks meet; ``None`` for a world of one or of pretended ranks, and after closing."""
        return self._store

    @property
    def hub(self) -> LocalHub | None:
        """What connects ranks that are threads; ``None`` for processes."""
        return self._hub

    @property
    def rank(self) -> Rank:
        """Position in the world.

        Raises:
            ContextStateError: Not entered yet.
        """
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of this context's world."""
        return self._config.world_size

    @property
    def local_rank(self) -> int:
        """Position of this rank on its host.

        Raises:
            ContextStateError: Not entered yet.
        """
        return self.identity.local_rank

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        named = None if self._identity is None else self._identity.host
        return named or os.uname().nodename

    @property
    def coordinate(self) -> Coordinate:
        """This rank's index on every axis.

        Raises:
            ContextStateError: Not entered yet.
        """
        return self.layout.coordinate(self.rank)

    @property
    def uid(self) -> str:
        """Equal on all ranks and never used by another context; ``""`` before it is known."""
        return self._uid

    @property
    def device(self) -> torch.device:
        """Where this rank keeps its tensors."""
        return self._device

    @property
    def world(self) -> GroupCoordinator:
        """All ranks."""
        return self.group("world")

    @property
    def stage(self) -> GroupCoordinator:
        """All ranks of this rank's pipeline stage."""
        return self.group("stage")

    @property
    def tp(self) -> GroupCoordinator:
        """This rank's tensor-parallel group."""
        return self.group("tp")

    @property
    def cp(self) -> GroupCoordinator:
        """This rank's context-parallel group."""
        return self.group("cp")

    @property
    def dp(self) -> GroupCoordinator:
        """This rank's data-parallel group."""
        return self.group("dp")

    @property
    def pp(self) -> GroupCoordinator:
        """The ranks that hold this rank's pipeline."""
        return self.group("pp")

    @property
    def ep(self) -> GroupCoordinator:
        """This rank's expert-parallel group."""
        return self.group("ep")

    @property
    def etp(self) -> GroupCoordinator:
        """The ranks that share this rank's experts tensor-wise."""
        return self.group("etp")

    @property
    def edp(self) -> GroupCoordinator:
        """The ranks that hold copies of this rank's experts."""
        return self.group("edp")

    @property
    def dcp(self) -> GroupCoordinator:
        """This rank's decode-context-parallel group."""
        return self.group("dcp")

    def group(self, name: str) -> GroupCoordinator:
        """One of the groups that were opened on entering.

        Args:
            name: ``world``, ``stage``, or an axis.

        Returns:
            The group; of one rank where the axis has size 1.

        Raises:
            ArgumentError: There is no group of that name.
            ContextStateError: The context is not open, or was opened by another process.
        """
        self._check_open()
        if not isinstance(name, str) or name not in self._groups:
            raise ArgumentError(f"no group is called {name!r}; there are {', '.join(GROUP_NAMES)}, and open_group for others")
        return self._groups[name]

    def groups(self) -> Mapping[str, GroupCoordinator]:
        """Every group that was opened on entering, by name.

        Raises:
            ContextStateError: The context is not open, or was opened by another process.
        """
        self._check_open()
        return MappingProxyType(self._groups)

    def agree(self, ok: bool, why: str = "", *, group: GroupCoordinator | None = None, timeout_s: float | None = None) -> None:
        """Go on only if all is well on every rank. Over the store, so also where a group cannot be used; not for hot loops.

        Args:
            ok: Whether all is well here.
            why: What is not, for the error.
            group: Whose members agree, a group of this context; the world by default.
            timeout_s: Longest wait for the others in seconds; ``deadlines.control_s`` by default. A rank that is not well
                waits for nobody.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.
            ContextStateError: The context is not open, or was opened by another process.
            PeerFailedError: A rank is not well; raised on all of them.
            PeerLostError: A rank is gone.
            PeerTimeoutError: A rank did not come in time.
            RendezvousError: The store is gone.

        Collective: all ranks of the group, in the same order.
        """
        self._agreement(group).settle("" if ok else why or "it did not say why", self._control_s(timeout_s))

    def guard(self, *, group: GroupCoordinator | None = None, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """A block that ends alike on every rank: well, or with the same error on all because it raised on one.

        Operations of groups inside the block that wait for a rank that failed end within seconds. Their group cannot be used
        afterwards, so keep what may fail apart from what communicates if you mean to go on.

        Args:
            group: Whose members agree, a group of this context; the world by default.
            timeout_s: Longest wait for the others at its end, in seconds; ``deadlines.control_s`` by default.

        Returns:
            For ``with``. Leaving it raises ``PeerFailedError`` on every rank if the block raised on one.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.
            ContextStateError: The context is not open, or was opened by another process.

        Collective: all ranks of the group; they meet at the end of the block.
        """
        return self._agreement(group).guard(self._control_s(timeout_s))

    @contextmanager
    def graph_capture(
        self,
        stream: object | None = None,
        *,
        group: GroupCoordinator | None = None,
        timeout_s: float | None = None,
        graphs: GraphDevice | None = None,
    ) -> Iterator[GraphCapture]:
        """A block in which device graphs with this context's collectives are captured; see ``GraphCapture.graph``.

        It enters this context's groups, those of equal ranks once, in an order that is equal on every rank; children and
        duplicates capture their own. It ends alike on every rank: where the block raised on one of them, that rank raises what it
        raised, the others ``PeerFailedError``, and no graph of the block can be replayed. Only after a clean end everywhere do
        communicators make the captured buffers known to each other.

        Args:
            stream: To capture on, a ``torch.cuda.Stream``; a new one by default. It is the current one inside the block.
            group: Whose members capture, a group of this context, and whose groups inside it take part; the world by default.
            timeout_s: Longest wait for the others at the end, in seconds; ``deadlines.control_s`` by default.
            graphs: What captures; torch's CUDA graphs by default. For other devices, and tests.

        Returns:
            For ``with``.

        Raises:
            ArgumentError: ``timeout_s`` is not positive, or this context is not on CUDA and ``graphs`` is not given.
            ContextStateError: The context is not open, was opened by another process, or captures already.
            PeerFailedError: The block, or making the buffers known, failed on another rank.
            PeerLostError: A rank is gone.
            PeerTimeoutError: A rank did not come in time.
            RendezvousError: The store is gone.

        Collective: all ranks of the group; they meet at the end of the block.
        """
        agreement, limit_s = self._agreement(group), self._control_s(timeout_s)
        self._check_not_given_up()
        if self._capture is not None:
            raise ContextStateError(
                "this context is in a graph capture already; capture as many graphs as you need in one block, with capture.graph"
            )
        within = self.world if group is None else group
        opened = (*self._groups.values(), *self._extra_groups.values())
        capture = GraphCapture(capture_members(opened, within), graphs or CudaGraphs(self._device), self._uid)
        self._stack.callback(capture.close)
        self._capture = capture
        try:
            with capture.run(agreement, stream, limit_s):
                yield capture
        finally:
            self._capture = None

    def __reduce__(self) -> NoReturn:
        raise ContextStateError(
            "contexts stay in their process, so a ParallelContext cannot be pickled or copied; "
            "send its config, and open a context of its own in the other process"
        )

    def __repr__(self) -> str:
        where = f"rank={self._identity.rank}, " if self._identity is not None else ""
        return f"ParallelContext({where}{self._state}, uid={self._uid!r}, {self._config!r})"

    @abstractmethod
    def _is_under_closed_parent(self) -> bool:
        """Whether it closed with the context that it is a child of."""

    def _place(self) -> str:
        axes = (axis for axis in ("tp", "cp", "dp", "pp") if getattr(self._config, axis) > 1)
        return " ".join((*(f"{axis}={getattr(self.coordinate, axis)}" for axis in axes), f"on {self.host}"))

    def _answer_address(self) -> str:
        return "" if self._monitor is None else self._monitor.address.to_json()

    def _tell_counts(self, read: Callable[[], Statistics]) -> None:
        if self._monitor is not None:
            self._monitor.counted = read

    def _connections(self) -> Mapping[tuple[Rank, ...], Connection]:
        return {} if self._table is None else self._table.connections

    def _control_s(self, timeout_s: float | None) -> float:
        return self._config.deadlines.control_s if timeout_s is None else check_seconds(timeout_s, "timeout_s")

    def _agreement(self, group: GroupCoordinator | None) -> Agreement:
        self._check_open()
        group = group or self.world
        if group.ranks not in self._agreements:
            self._agreements[group.ranks] = Agreement(self._meeting, self._monitor, group.name, group.ranks, self.rank)
        return self._agreements[group.ranks]

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ContextStateError(
                f"this context belongs to another process: opened by pid {self._pid}, used by pid {os.getpid()}, which was "
                f"forked from it. Contexts stay in their process; open one of its own in the child"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._state is not ContextState.OPEN:
            hint = "enter it with `with context:`" if self._state is ContextState.NEW else "make a new one"
            if self._is_under_closed_parent():
                hint = "it closed with its parent"
            raise ContextStateError(f"this ParallelContext is {self._state}, so it has no groups; {hint}")

    def _check_not_given_up(self) -> None:
        if self._table is None:
            raise ContextStateError(
                "this context gave up its groups when its survivors were counted; open a new ParallelContext over them"
            )

    def _say_why(self, error: BaseException | None) -> None:
        """Note in the store that this rank leaves, before its connections go and peers look for the reason."""
        if self._monitor is not None:
            self._monitor.last_words()
        if self._meeting is not None:
            self._meeting.leave("" if error is None else error_text(error))
