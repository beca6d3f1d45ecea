"""ParallelContext: one world, from meeting its ranks to leaving them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

from parallel_runtime.comm.c10d import Store, adopted, wrap
from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.comm.outbox import Clock
from parallel_runtime.comm.shm import Errands
from parallel_runtime.config.environment import Identity, current_environ, detect
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.base import ContextBase, ContextState
from parallel_runtime.context.choices import (
    check_arguments,
    choose_backend,
    choose_device,
    fit_child,
    fit_config,
    identity_within,
)
from parallel_runtime.context.connectors import Connection, Connector, choose_connector, connect_fake
from parallel_runtime.context.entrance import Entrance
from parallel_runtime.context.groups import GroupTable
from parallel_runtime.context.meeting_point import own_address
from parallel_runtime.context.monitor import Monitor
from parallel_runtime.context.probe import Probe, Stage, probed
from parallel_runtime.context.rendezvous import new_uid
from parallel_runtime.errors import ContextStateError
from parallel_runtime.terms import GROUP_NAMES, Rank

__all__ = ["ParallelContext"]


@final
class ParallelContext(ContextBase):
    """One world of ranks, for as long as a ``with`` block lasts.

    Entering finds out who this rank is, meets the other ranks, makes sure that all of them mean the same world, and opens this
    rank's groups: its members alone open a group, equal groups share one connection, and a group of one opens nothing. No default
    process group of torch is made or used, so any number of contexts live side by side.

    Leaving normally waits, up to ``deadlines.exit_s`` in all, until the members of its groups have opened them and what this rank
    sent has been received; and, if it serves the world's store, once more as long for the others to leave. It waits for nothing
    else. Leaving by an exception closes everything at once.

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
        check_arguments(config, identity, hub)
        super().__init__(config, identity, None if store is None else wrap(store), hub)
        self._probe = probe
        self._parent: ParallelContext | None = None
        self._children: list[ParallelContext] = []
        self._errands = Errands()
        self._name = ""
        self._is_isolated = False
        self._backend = ""
        self._opened: list[tuple[Rank, ...]] = []
        self._entrance: Entrance | None = None

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
        return cls(config, identity=identity_within(current_environ(), identity, rank=rank, world_size=world_size), store=store)

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
                if self._entrance is not None and self._parent is None:
                    self._entrance.refuse(error, self._config)
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
            if self._entrance is not None and self._meeting is not None:
                self._entrance.keep_store_for(self._meeting, self._config.deadlines.exit_s, error)

    def close(self) -> None:
        """Leave normally, for owners that do not use ``with``. Twice is nothing."""
        self.__exit__(None, None, None)

    @property
    def parent(self) -> "ParallelContext | None":
        """The context that this one was derived from, or is a duplicate of."""
        return self._parent

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
                self._meeting.agree_on_group(len(self._extra_groups) + 1, "+".join(axes), ranks, self._config.deadlines.join_s)
            assert self._table is not None
            is_open = len(axes) == 1 and axes[0] in self._groups
            self._extra_groups[axes] = self._groups[axes[0]] if is_open else self._table.open(*axes)
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
        self._meeting.announce_survivor()
        for child in reversed(tuple(self._children)):
            child._give_up()
        self._stack.close()

        return self._meeting.survivors(self._config.deadlines.join_s if timeout_s is None else timeout_s)

    def _open(self, stack: ExitStack) -> None:
        needs_master = self._store is None and self._hub is None
        if self._identity is None:
            self._identity = detect(current_environ(), needs_master=needs_master)
        identity = self._identity
        self._entrance = Entrance(identity, self.host, self._store)
        self._config = fit_config(self._config, identity)
        self._device = choose_device(self._config, identity, is_thread=self._hub is not None)
        backend = choose_backend(self._config, self._device, has_hub=self._hub is not None)
        self._backend = backend
        self._reach(Stage.JOINING)
        if self._config.world_size == 1 or backend == "fake":
            self._uid = new_uid()
            connect: Connector = connect_fake
        else:
            around = None if self._parent is None else self._parent._meeting
            self._meeting = self._entrance.meet(self._config, name=self._name, parent=around)
            self._store = self._entrance.store
            self._uid = self._meeting.uid
            if len(set(self._meeting.hosts)) > 1:
                self._hosts = [name for _, name in sorted(zip(self._meeting.ranks, self._meeting.hosts, strict=True))]
            connect = choose_connector(
                self._meeting,
                backend=backend,
                device=self._device,
                shm=self._config.shm,
                address=own_address(identity),
                timeout_s=self._config.deadlines.join_s,
                checked=self._config.checked is not False,
                errands=self._errands,
                hub=self._hub,
            )
            self._monitor = Monitor(
                self._meeting,
                host=self.host,
                address=own_address(identity),
                hub=self._hub,
                parent=None if self._parent is None else self._parent._monitor,
                obituaries=self._store,
            )
            stack.callback(self._monitor.close)
        self._reach(Stage.OPENING)
        self._table = GroupTable(
            layout=self.layout,
            rank=identity.rank,
            uid=self._uid,
            local_rank=identity.local_rank,
            device=self._device,
            deadlines=self._config.deadlines,
            checked=self._config.checked is True,
            connect=connect if self._probe is None else probed(connect, self._probe),
            name=self._name,
            shared=self._shared_connections(),
            diagnostician=self._monitor,
            watch=self._watch,
        )
        for name in GROUP_NAMES:
            self._groups[name] = self._table.open(name)
            stack.callback(self._groups[name].close)

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

    def _watch(self, ranks: tuple[Rank, ...], connection: Connection, is_new: bool) -> None:
        if self._monitor is not None:
            self._monitor.watch(ranks, connection.data, connection.control)
        if self._meeting is not None and self._hub is None and is_new:
            self._meeting.note_opened(ranks)
            self._opened.append(ranks)
        self._follow(ranks, connection)

    def _reach(self, stage: Stage) -> None:
        if self._probe is not None:
            self._probe.at(stage)

    def _give_up(self) -> None:
        for child in reversed(tuple(self._children)):
            child._give_up()
        self._table = None
        self._stack.close()

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
        clock = Clock(self._config.deadlines.exit_s)
        if self._meeting is not None:
            self._meeting.wait_until_opened(self._opened, clock.left_s)
        for group in (*self._groups.values(), *self._extra_groups.values()):
            group.flush(clock.left_s)

    def _is_under_closed_parent(self) -> bool:
        return self._parent is not None and self._parent._state is ContextState.CLOSED

    def _forget(self) -> None:
        """Drop every reference, since torch frees sockets and threads with the last one."""
        self._groups, self._extra_groups, self._agreements = {}, {}, {}
        self._table = self._meeting = self._monitor = self._store = self._entrance = None
        self._stack = ExitStack()
