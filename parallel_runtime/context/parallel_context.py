"""ParallelContext: one world, from meeting its ranks to leaving them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import NoReturn, Self, final

import torch

from parallel_runtime.comm.c10d import Store, adopted, wrap
from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.comm.groups import check_seconds
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.comm.shm import Errands
from parallel_runtime.config.environment import Identity, current_environ, detect
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.config.plan import Plan
from parallel_runtime.context.agreement import Agreement
from parallel_runtime.context.choices import choose_backend, choose_device, fit_child, fit_config, identity_within
from parallel_runtime.context.connectors import (
    Connection,
    Connector,
    ProcessConnector,
    connect_fake,
    local_connector,
    telling_connector,
)
from parallel_runtime.context.groups import GroupTable
from parallel_runtime.context.liveness import has_ended
from parallel_runtime.context.meeting_point import MeetingPoint, find_meeting_point, own_address
from parallel_runtime.context.monitor import Monitor
from parallel_runtime.context.probe import Probe, Stage
from parallel_runtime.context.rendezvous import Meeting, Member, join_world, new_uid
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ConfigError, ContextStateError
from parallel_runtime.terms import GROUP_NAMES, Rank
from parallel_runtime.topology.hosts import Hosts
from parallel_runtime.topology.layout import Coordinate, Layout
from parallel_runtime.values import error_text, type_problem

__all__ = ["ContextState", "ParallelContext"]

_LAST_WORD_S = 2.0
"""How long a rank that fails keeps the store it serves, so that the others can read why."""


class ContextState(StrEnum):
    """Where a context is in its life. It goes forward only."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


@final
class ParallelContext:
    """One world of ranks, for as long as a ``with`` block lasts.

    Entering finds out who this rank is, meets the other ranks, makes sure that all of them mean the same world, and opens this
    rank's groups: its members alone open a group, equal groups share one connection, and a group of one opens nothing. No default
    process group of torch is made or used, so any number of contexts live side by side.

    Leaving normally waits, up to ``deadlines.exit_s``, until the members of its groups have opened them, what this rank sent
    has been received and, if it serves the world's store, the others have left; it waits for nothing else. Leaving by an
    exception closes everything at once.

    Args:
        config: Sizes and settings; a size of -1 is filled in from the number of ranks.
        identity: Who this rank is; by default as its launcher says (``detect``).
        store: Where the ranks meet, any ``torch.distributed.Store``; by default as the launcher says. Borrowed.
        hub: Connects ranks that are threads of this process; needs ``store`` and ``identity`` too. ``run_threads`` does it.
        probe: Told of every stage, and may wrap what groups move their data with; for tests.

    Raises:
        ArgumentError: ``config``, ``identity``, ``store`` or ``hub`` is something else.
        ConfigError: The config, identity, store and hub do not fit together.
        ContextStateError: Entered twice, used before or after, or in another process than the one that opened it.

    Collective: entering; all ranks of the world, in the same order where they enter several contexts.
    """

    def __init__(
        self,
        config: ParallelConfig,
        *,
        identity: Identity | None = None,
        store: Store | None = None,
        hub: LocalHub | None = None,
        probe: Probe | None = None,
    ) -> None:
        _check_arguments(config, identity, hub)
        self._config = config
        self._identity = identity
        self._store = None if store is None else wrap(store)
        self._hub = hub
        self._probe = probe
        self._parent: ParallelContext | None = None
        self._children: list[ParallelContext] = []
        self._errands = Errands()
        self._name = ""
        self._is_isolated = False
        self._state = ContextState.NEW
        self._pid = os.getpid()
        self._uid = ""
        self._backend = ""
        self._device = torch.device("cpu")
        self._hosts: Hosts | None = None
        self._groups: dict[str, GroupCoordinator] = {}
        self._extra_groups: dict[tuple[str, ...], GroupCoordinator] = {}
        self._table: GroupTable | None = None
        self._meeting: Meeting | None = None
        self._monitor: Monitor | None = None
        self._agreements: dict[tuple[Rank, ...], Agreement] = {}
        self._opened: list[tuple[Rank, ...]] = []
        self._serves_store = False
        self._stack = ExitStack()

    @classmethod
    def adopt(cls, process_group: object, config: ParallelConfig, *, identity: Identity | None = None) -> Self:
        """Stand on a world that somebody else owns: its ranks, and its store. It is never used to communicate, nor destroyed.

        Args:
            process_group: A ``torch.distributed.ProcessGroup``, such as ``torch.distributed.group.WORLD``.
            config: Sizes and settings; a size of -1 is filled in from the group's size.
            identity: Who this rank is; by default as its launcher says if that fits the group, else ranks of one host.

        Returns:
            A new context, to be entered.

        Raises:
            ArgumentError: It is not a process group.
            ConfigError: ``identity`` is of another rank or size than the group.
        """
        store, rank, world_size = adopted(process_group)
        identity = identity or identity_within(current_environ(), rank=rank, world_size=world_size)
        if (identity.rank, identity.world_size) != (rank, world_size):
            raise ConfigError(
                f"the identity is rank {identity.rank} of {identity.world_size}, but the process group has this process as "
                f"rank {rank} of {world_size}"
            )
        return cls(config, identity=identity, store=store)

    def __enter__(self) -> Self:
        """Meet the other ranks and open this rank's groups; undo what was done if a step fails.

        Raises:
            ContextStateError: It was entered before.
            ConfigError: The config does not fit the world.
            LauncherEnvironmentError: The launcher's variables do not say who this rank is.
            RendezvousError: A rank is missing, differs or is there twice.
            PeerTimeoutError: The store does not answer, or a group does not come together in time.
        """
        if self._state is not ContextState.NEW:
            raise ContextStateError(f"a ParallelContext is entered once; this one is {self._state}. Make a new one")
        if self._parent is not None:
            self._inherit(self._parent)
        self._pid = os.getpid()
        self._state = ContextState.CLOSED  # stays so if a step below raises
        try:
            with ExitStack() as stack:
                self._open(stack)
                self._stack = stack.pop_all()
        except BaseException as error:
            try:
                self._say_why(error)
            finally:
                self._forget()
            raise
        self._state = ContextState.OPEN
        if self._parent is not None:
            self._parent._children.append(self)
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close children, then groups, and leave the world. After an exception nothing waits, and no peer is spoken to."""
        if self._state is not ContextState.OPEN:
            return
        self._state = ContextState.CLOSED
        if self._pid != os.getpid():
            return  # a forked copy: the sockets belong to the parent
        with ExitStack() as ending:  # from last to first, each also where another fails
            ending.callback(self._forget)
            if self._parent is not None:
                ending.callback(self._parent._disown, self)
            try:
                self._leave_children(error_type, error, trace)
                if error is None:
                    self._depart()
            except BaseException as failure:
                error = failure
                raise
            finally:
                with self._stack:
                    self._say_why(error)
            if self._serves_store and self._meeting is not None:
                exit_s = self._config.deadlines.exit_s
                self._meeting.wait_until_all_left(exit_s if error is None else min(exit_s, _LAST_WORD_S))

    def close(self) -> None:
        """Leave normally, for owners that do not use ``with``. Twice is nothing."""
        self.__exit__(None, None, None)

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
    def parent(self) -> "ParallelContext | None":
        """The context that this one was derived from, or is a duplicate of."""
        return self._parent

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

    def open_group(self, *axes: str) -> GroupCoordinator:
        """Open this rank's group along several axes together, such as ``("tp", "cp")``. It closes with the context.

        Args:
            axes: Dense axes, or expert axes and ``pp``.

        Returns:
            The group. Asking for the same axes again gives the same one.

        Raises:
            ArgumentError: The axes do not go together.
            CollectiveMismatchError: Another member opens a different group at this point; raised on all of them.
            ContextStateError: The context is not open, or was opened by another process.
            RendezvousError: A member left, or did not ask within ``deadlines.join_s``.

        Collective: all ranks, in the same order where they open several; a rank waits for the members of its own group only.
        """
        self._check_open()
        self._check_not_given_up()
        ranks = self.layout.group_of(self.rank, *axes)
        if axes not in self._extra_groups:
            if self._meeting is not None:
                self._agree_on_extra_group(self._meeting, axes, ranks)
            assert self._table is not None
            self._extra_groups[axes] = self._table.open(*axes)
            self._stack.callback(self._extra_groups[axes].close)
        return self._extra_groups[axes]

    def derive(self, config: ParallelConfig, *, ranks: Sequence[int] | None = None, name: str = "") -> "ParallelContext":
        """Make a child: another topology over this world, or over a part of it. Enter it with ``with``.

        It meets in this context's store and shares every connection of equal ranks, backend and device, so parent and child are
        used by one thread at a time. It closes before its parent: at the latest, and newest first, when the parent does.

        Args:
            config: Of the child; a size of -1 is filled in.
            ranks: World ranks of the child, which keep their numbers; by default those the config names, or all of the parent's.
            name: In front of its groups' names in errors and records, like ``"draft.tp#0"``.

        Returns:
            A new context, to be entered.

        Raises:
            ConfigError: The sizes do not fit, or a rank is not one of the parent's.
            ContextStateError: The context is not open, or has given up its groups.

        Collective: entering; the ranks of the child, in the same order where they enter several.
        """
        self._check_open()
        self._check_not_given_up()
        fitted = fit_child(config, ranks, self._config, world_size=self.identity.world_size)
        return self._make_child(fitted, name, is_isolated=False)

    def duplicate(self, name: str) -> "ParallelContext":
        """Make a child of the same topology whose groups share nothing with this context's: for a second stream or thread.

        Args:
            name: In front of its groups' names; equal on all ranks.

        Returns:
            A new context, to be entered.

        Raises:
            ContextStateError: The context is not open, or has given up its groups.

        Collective: entering; all ranks.
        """
        self._check_open()
        self._check_not_given_up()
        return self._make_child(self._config, name, is_isolated=True)

    def survivors(self, timeout_s: float | None = None) -> tuple[Rank, ...]:
        """After a failure: give up this context's groups, and agree on who is left to go on.

        Ranks that left the context, or whose process has ended, do not count; nor does one that stays silent. Then leave the
        block, or open a new context inside it:
        ``ParallelContext(config.replace(ranks=ranks), identity=ctx.identity, store=ctx.store, hub=ctx.hub)``.

        Args:
            timeout_s: Longest wait for a rank that is neither here nor known to be gone; ``deadlines.join_s`` by default.

        Returns:
            World ranks, in order, equal on all of them.

        Raises:
            ContextStateError: The context is not open, or has given up its groups.
            RendezvousError: The others have gone on without this rank, or the store went with the rank that served it.

        Collective: every rank that is left. Peers that still wait in an operation of this context are released.
        """
        self._check_open()
        self._check_not_given_up()
        self._table = None
        if self._meeting is None:
            self._stack.close()
            return tuple(Rank(rank) for rank in self.layout.ranks)
        roster = self._meeting.roster()
        self._meeting.announce_survivor()
        for child in reversed(tuple(self._children)):
            child._give_up()
        self._stack.close()

        def is_gone(rank: int) -> bool:
            member = roster.get(rank)
            return member is not None and member.host == self.host and has_ended(member.pid)

        return self._meeting.survivors(is_gone, self._config.deadlines.join_s if timeout_s is None else timeout_s)

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

    def __reduce__(self) -> NoReturn:
        raise ContextStateError(
            "contexts stay in their process, so a ParallelContext cannot be pickled or copied; "
            "send its config, and open a context of its own in the other process"
        )

    def __repr__(self) -> str:
        where = f"rank={self._identity.rank}, " if self._identity is not None else ""
        return f"ParallelContext({where}{self._state}, uid={self._uid!r}, {self._config!r})"

    def _open(self, stack: ExitStack) -> None:
        needs_master = self._store is None and self._hub is None
        if self._identity is None:
            self._identity = detect(current_environ(), needs_master=needs_master)
        identity = self._identity
        self._config = fit_config(self._config, identity)
        self._device = choose_device(self._config, identity, is_thread=self._hub is not None)
        backend = choose_backend(self._config, self._device, has_hub=self._hub is not None)
        self._backend = backend
        self._reach(Stage.JOINING)
        if self._config.world_size == 1 or backend == "fake":
            self._uid = new_uid()
            connect: Connector = connect_fake
        else:
            self._meeting = self._meet()
            self._uid = self._meeting.uid
            if len(set(self._meeting.hosts)) > 1:
                self._hosts = [name for _, name in sorted(zip(self._meeting.ranks, self._meeting.hosts, strict=True))]
            connect = telling_connector(self._connector(backend, self._meeting), self._meeting)
            self._monitor = Monitor(self._meeting, host=self.host, address=own_address(identity), hub=self._hub)
            stack.callback(self._monitor.close)
        self._reach(Stage.OPENING)
        self._table = GroupTable(
            layout=self.layout,
            rank=identity.rank,
            uid=self._uid,
            local_rank=identity.local_rank,
            device=self._device,
            deadlines=self._config.deadlines,
            checked=self._config.checked,
            connect=connect if self._probe is None else _probed(connect, self._probe),
            name=self._name,
            shared=self._shared_connections(),
            watch=self._watch,
        )
        for name in GROUP_NAMES:
            self._groups[name] = self._table.open(name)
            stack.callback(self._groups[name].close)

    def _meet(self) -> Meeting:
        """Find the store and join the others there."""
        config, environ, ranks = self._config, current_environ(), self.layout.ranks
        join_s = config.deadlines.join_s
        if self._store is not None:
            point = MeetingPoint(self._store)
        else:
            point = find_meeting_point(self.identity, first_rank=Rank(ranks[0]), environ=environ, timeout_s=join_s)
            self._store = point.store
        settings = config.agreed_settings() | ({"context": self._name} if self._name else {})
        member = Member.of_this_process(self.rank, settings, self.host)
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_whole = len(ranks) == self.identity.world_size
        self._serves_store = point.server is not None
        linger_s = config.deadlines.exit_s if self._serves_store else 0.0
        return join_world(self._store, member, ranks, timeout_s=join_s, is_whole=is_whole, attempt=attempt, linger_s=linger_s)

    def _connector(self, backend: str, meeting: Meeting) -> Connector:
        if backend == "local":
            assert self._hub is not None
            return local_connector(self._hub)
        return ProcessConnector(
            store=meeting.room,
            backend=backend,
            device=self._device,
            hosts=dict(zip(meeting.ranks, meeting.hosts, strict=True)),
            shm=self._config.shm,
            address=own_address(self.identity),
            timeout_s=self._config.deadlines.join_s,
            errands=self._errands,
        )

    def _agree_on_extra_group(self, meeting: Meeting, axes: tuple[str, ...], ranks: tuple[Rank, ...]) -> None:
        """Members alone compare what they open as their n-th extra group: an order that differs is an error, never a hang."""
        number = len(self._extra_groups) + 1
        told = meeting.exchange(f"extra group {number}", "+".join(axes), ranks, self._config.deadlines.join_s)
        if len(set(told.values())) > 1:
            said = ", ".join(f"rank {rank} opens {what}" for rank, what in told.items())
            raise CollectiveMismatchError(f"extra groups are opened in the same order on every rank; as no. {number}, {said}")

    def _make_child(self, config: ParallelConfig, name: str, *, is_isolated: bool) -> "ParallelContext":
        store = None if self._meeting is None else self._meeting.room
        config = config.replace(backend="fake") if self._backend == "fake" else config
        child = ParallelContext(config, identity=self.identity, store=store, hub=self._hub)
        child._parent, child._name, child._is_isolated = self, name, is_isolated
        child._errands = self._errands
        return child

    def _inherit(self, parent: "ParallelContext") -> None:
        parent._check_process()
        if parent._state is not ContextState.OPEN or parent._table is None:
            raise ContextStateError("the context that this one was derived from is closed; derive from one that is open")

    def _shared_connections(self) -> Mapping[tuple[Rank, ...], Connection]:
        parent = self._parent
        if parent is None or parent._table is None or self._is_isolated:
            return {}
        mine, its = ((context._backend, context._device, context._config.shm) for context in (self, parent))
        return parent._table.connections if mine == its else {}

    def _control_s(self, timeout_s: float | None) -> float:
        return self._config.deadlines.control_s if timeout_s is None else check_seconds(timeout_s, "timeout_s")

    def _agreement(self, group: GroupCoordinator | None) -> Agreement:
        self._check_open()
        group = group or self.world
        if group.ranks not in self._agreements:
            self._agreements[group.ranks] = Agreement(self._meeting, self._monitor, group.name, group.ranks, self.rank)
        return self._agreements[group.ranks]

    def _watch(self, ranks: tuple[Rank, ...], connection: Connection) -> None:
        if self._monitor is not None:
            self._monitor.watch(ranks, connection.data, connection.control)
        if self._meeting is not None and self._hub is None:
            self._meeting.note_opened(ranks)
            self._opened.append(ranks)

    def _reach(self, stage: Stage) -> None:
        if self._probe is not None:
            self._probe.at(stage)

    def _check_not_given_up(self) -> None:
        if self._table is None:
            raise ContextStateError(
                "this context gave up its groups when its survivors were counted; open a new ParallelContext over them"
            )

    def _give_up(self) -> None:
        for child in reversed(tuple(self._children)):
            child._give_up()
        self._table = None
        self._stack.close()

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
            if self._parent is not None and self._parent._state is ContextState.CLOSED:
                hint = "it closed with its parent"
            raise ContextStateError(f"this ParallelContext is {self._state}, so it has no groups; {hint}")

    def _leave_children(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every child, newest first, also where one of them fails."""
        children = ExitStack()
        for child in self._children:
            children.push(child)
        children.__exit__(error_type, error, trace)

    def _disown(self, child: "ParallelContext") -> None:
        if child in self._children:
            self._children.remove(child)

    def _depart(self) -> None:
        """Let members that are still opening a group finish, and receivers confirm what was sent to them."""
        self._reach(Stage.CLOSING)
        if self._meeting is not None:
            self._meeting.wait_until_opened(self._opened, self._config.deadlines.exit_s)
        for group in (*self._groups.values(), *self._extra_groups.values()):
            group.flush(self._config.deadlines.exit_s)

    def _say_why(self, error: BaseException | None) -> None:
        """Note in the store that this rank leaves, before its connections go and peers look for the reason."""
        if self._monitor is not None:
            self._monitor.last_words()
        if self._meeting is not None:
            self._meeting.leave("" if error is None else error_text(error))

    def _forget(self) -> None:
        """Drop every reference, since torch frees sockets and threads with the last one."""
        self._groups, self._extra_groups, self._agreements = {}, {}, {}
        self._table = self._meeting = self._monitor = self._store = None
        self._stack = ExitStack()


def _check_arguments(config: object, identity: object, hub: object) -> None:
    problem = type_problem("config", config, ParallelConfig, "use one such as ParallelConfig(tp=2)")
    if identity is not None:
        problem = problem or type_problem("identity", identity, Identity, "use Identity(...), detect(...) or None")
    if hub is not None:
        problem = problem or type_problem("hub", hub, LocalHub, "use LocalHub(world_size) or None")
    if problem:
        raise ArgumentError(problem)


def _probed(connect: Connector, probe: Probe) -> Connector:
    def connect_and_tell(key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        return probe.connected(ranks, connect(key, ranks, rank_in_group))

    return connect_and_tell
