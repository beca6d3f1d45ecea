"""The one object behind a group of ranks."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Self, final

import torch
from torch import Tensor

from parallel_runtime.comm.collective_calls import CollectiveCalls
from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.diagnosis import Diagnostician
from parallel_runtime.comm.dicts import TensorDicts
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
from parallel_runtime.comm.message_calls import MessageCalls
from parallel_runtime.comm.messages import Messages
from parallel_runtime.comm.outbox import Outbox
from parallel_runtime.comm.p2p import PointToPoint
from parallel_runtime.comm.process_group import RoutedProcessGroup, register, unregister
from parallel_runtime.comm.recorder import Record
from parallel_runtime.comm.tensors import checked_shape
from parallel_runtime.comm.traced import TracedCollectives
from parallel_runtime.errors import ArgumentError, ContextStateError
from parallel_runtime.terms import Rank, RankInGroup

__all__ = ["GroupCoordinator", "open_coordinator"]

_logger = logging.getLogger(__name__)


def open_coordinator(
    spec: GroupSpec,
    communicator: Communicator | None = None,
    *,
    control: Communicator | None = None,
    diagnostician: Diagnostician | None = None,
) -> "GroupCoordinator":
    """Open a group over communicators that exist already.

    Args:
        spec: The group as this member sees it.
        communicator: Moves its tensors; ``None`` for a group of one. Aliases of one group may share it: they then share its lock
            and its sequence, and the last of them to close closes it.
        control: Moves messages between CPUs; ``communicator`` itself by default.
        diagnostician: Ends the group's waits that are in vain, and explains its errors. Aliases may have different ones.

    Returns:
        The open group.

    Raises:
        ArgumentError: The communicator is of another size or member than ``spec`` says.
    """
    if communicator is None:
        if len(spec.ranks) != 1:
            raise ArgumentError(f"group {spec.name} has {len(spec.ranks)} ranks and needs a communicator")
        communicator = FakeCommunicator(0, 1, kind="solo")
    for part in (communicator, control or communicator):
        if (part.rank_in_group, part.world_size) != (spec.rank_in_group, len(spec.ranks)):
            raise ArgumentError(
                f"group {spec.name}: this is member {spec.rank_in_group} of {len(spec.ranks)}, its {part.kind} communicator "
                f"is member {part.rank_in_group} of {part.world_size}"
            )
    return GroupCoordinator._open(GroupCore(spec, communicator, control or communicator, diagnostician))


@final
class GroupCoordinator(CollectiveCalls, MessageCalls):
    """Communication between the ranks of one group. A context opens it; there is no public constructor.

    Peers (``src``, ``dst``) are group-local, in the order of ``ranks``. A trailing underscore works in place and returns its
    argument; without one the input is untouched and the result is new, contiguous and not part of any autograd graph, also in a
    group of one. Any strided tensor may be handed over. Every operation takes ``timeout_s``, by default the group's own deadline.

    Every operation may raise, besides what it lists: ``ContextStateError`` (the group is closed, or belongs to another process),
    ``GroupBusyError`` (another thread is inside an operation of this group), ``PeerTimeoutError``, ``PeerLostError`` and
    ``CollectiveMismatchError``. Arguments are checked before anything is sent; after an ``ArgumentError``, ``DimError`` or
    ``DtypeError`` the group is as usable as before.
    """

    __slots__ = (
        "__weakref__",
        "_collectives",
        "_core",
        "_dicts",
        "_messages",
        "_outbox",
        "_p2p",
        "_process_group",
        "_rank_in_group",
        "_traced",
    )

    _core: GroupCore
    _collectives: Collectives
    _dicts: TensorDicts
    _messages: Messages
    _outbox: Outbox
    _p2p: PointToPoint
    _process_group: RoutedProcessGroup | None
    _rank_in_group: RankInGroup
    _traced: TracedCollectives

    def __init__(self) -> None:
        """Not for use.

        Raises:
            ContextStateError: Always.
        """
        raise ContextStateError("a GroupCoordinator is opened by a ParallelContext; it has no public constructor")

    @classmethod
    def _open(cls, core: GroupCore) -> Self:
        self = cls.__new__(cls)
        self._core = core
        self._outbox = Outbox()
        self._collectives = Collectives(core)
        self._p2p = PointToPoint(core, self._outbox)
        self._messages = Messages(core, self._outbox)
        self._dicts = TensorDicts(core, self._outbox)
        self._process_group = None
        self._rank_in_group = core.spec.rank_in_group
        return self

    @property
    def name(self) -> str:
        """For people, like ``"tp#3"``."""
        return self._core.name

    @property
    def key(self) -> str:
        """Unique for ever: no other group of any context has it."""
        return self._core.spec.key

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """World ranks of the members, in group order."""
        return self._core.spec.ranks

    @property
    def world_size(self) -> int:
        """How many members it has."""
        return len(self._core.spec.ranks)

    @property
    def rank(self) -> Rank:
        """World rank of this member."""
        return self._core.spec.rank

    @property
    def rank_in_group(self) -> RankInGroup:
        """Position of this member in ``ranks``."""
        return self._rank_in_group

    @property
    def local_rank(self) -> int:
        """Position of this member on its host."""
        return self._core.spec.local_rank

    @property
    def first_rank(self) -> Rank:
        """World rank of the first member."""
        return self.ranks[0]

    @property
    def last_rank(self) -> Rank:
        """World rank of the last member."""
        return self.ranks[-1]

    @property
    def next_rank(self) -> Rank:
        """World rank of the member after this one, around the end."""
        return self.ranks[(self._rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> Rank:
        """World rank of the member before this one, around the start."""
        return self.ranks[(self._rank_in_group - 1) % self.world_size]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the first member."""
        return self._rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the last member."""
        return self._rank_in_group == self.world_size - 1

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self._core.spec.device

    @property
    def timeouts(self) -> GroupTimeouts:
        """Its deadlines."""
        return self._core.spec.timeouts

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._core.is_open

    @property
    def process_group(self) -> RoutedProcessGroup:
        """The group as torch's ``ProcessGroup``, made and registered on first use.

        For ``torch.distributed.*(group=...)`` with ``group_src`` and ``group_dst``, functional collectives and DTensor. All go
        through this group's communicators. Its name is never used again and is taken out of torch's table on closing.

        Raises:
            ContextStateError: The group is closed, or belongs to another process.
        """
        if self._process_group is None:
            self._core.check_usable("process_group")
            self._process_group = RoutedProcessGroup(f"{self.key}@{self.rank}", self._collectives, self._p2p)
            register(self._process_group)
        return self._process_group

    def make_traceable(self) -> None:
        """Let code under ``torch.compile`` use the group's collectives. A context does it for its groups when it opens them.

        Raises:
            ContextStateError: The group is closed, or belongs to another process.
        """
        self._traced = TracedCollectives(self.process_group.group_name, self.world_size, self._rank_in_group)

    def symmetric_empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, timeout_s: float | None = None
    ) -> Tensor:
        """A tensor on which ``all_reduce_``, ``all_gather`` and ``reduce_scatter`` copy nothing in, where memory is shared.

        Groups that share no memory give an ordinary tensor, with the same results. Every member passes the same part of its own
        tensor to an operation; one that only some members enter with symmetric memory is a mismatch.

        Args:
            shape: Equal on every member.
            dtype: Equal on every member.
            timeout_s: Deadline in seconds.

        Returns:
            This member's tensor, uninitialised, on the group's device.

        Raises:
            ArgumentError: ``shape`` or ``dtype`` is something else.
            PeerFailedError: The memory could not be had; raised on all members.

        Collective: all members, same order.
        """
        core = self._core
        limit_s = core.deadline(timeout_s, core.spec.timeouts.control_s)
        size = checked_shape(shape, dtype, "symmetric_empty")
        tensor = core.run_agreed("symmetric_empty", None, (dtype, size), core.communicator.symmetric_empty, size, dtype, limit_s)
        return torch.empty(size, dtype=dtype, device=core.spec.device) if tensor is None else tensor

    def symmetric_views(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """What the members have where this one has ``tensor``, to be read without an operation. Local.

        A member reads a part only after a ``publish`` that followed its writing, and writes to its own only after a later
        operation of the group that all readers entered when they were done: two tensors used in turn need no other one.

        Args:
            tensor: Contiguous part of a tensor from ``symmetric_empty``; not empty.

        Returns:
            Its counterparts in group order, this member's own among them, while the group is open; ``None`` on all members where
            memory of other members cannot be read, or for another tensor.

        Raises:
            ContextStateError: The group is closed, or belongs to another process.
        """
        self._core.check_usable("symmetric_views")
        return self._core.communicator.symmetric_views(tensor)

    def publish(self, tensor: Tensor, *, timeout_s: float | None = None) -> None:
        """Return once what every member has written to its counterpart of ``tensor`` can be read through ``symmetric_views``.

        Args:
            tensor: Part of a tensor from ``symmetric_empty``, the same on every member.
            timeout_s: Deadline in seconds.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.

        Collective: one step without data; all members, same order.
        """
        core = self._core
        limit_s = core.deadline(timeout_s, core.collective_s)
        core.run_agreed("publish", tensor, (tensor.dtype, tuple(tensor.shape)), core.communicator.publish, tensor, limit_s)

    @contextmanager
    def capturing(self, is_recording: Callable[[], bool]) -> Iterator[None]:
        """Take part in a capture of graphs while the block lasts; for ``ParallelContext.graph_capture``. Local.

        Args:
            is_recording: Whether what runs now becomes part of a graph.

        Raises:
            ContextStateError: The group's communicator is in a capture already, or the group cannot be used.
        """
        core = self._core
        core.check_usable("graph_capture")
        traffic = core.traffic
        if traffic.is_recording is not None:
            raise ContextStateError(
                f"group {self.name} is in a graph capture already, of this context or of one that shares its connection; "
                "capture in one after the other, or in a duplicate"
            )
        core.communicator.enter_capture()
        traffic.is_recording = is_recording
        try:
            yield
        finally:
            traffic.is_recording = None
            core.communicator.leave_capture()

    def register_captured(self, timeout_s: float) -> None:
        """Make known what a capture that went well on all members has noted; for ``ParallelContext.graph_capture``.

        Args:
            timeout_s: Deadline in seconds.

        Collective: all members, same order.
        """
        self._core.run("register_captured", None, self._core.communicator.register_captured, timeout_s)

    def describe(self, *, paths: bool = False) -> str:
        """One line: name, ranks, and the communicators in use and why.

        Args:
            paths: Say, too, which way which sizes take within the communicator that moves tensors.
        """
        core = self._core
        why = f" ({core.communicator.reason})" if core.communicator.reason else ""
        ways = core.communicator.paths() if paths and core.is_open else ""
        return (
            f"{core.name} ranks {core.spec.ranks}: tensors over {core.communicator.kind}{why}, messages over {core.control.kind}"
            f"{'; ' if ways else ''}{ways}"
        )

    def recent(self, count: int = 16) -> tuple[Record, ...]:
        """The last ``count`` operations of its communicator, oldest first, the one under way at the end."""
        return self._core.traffic.recorder.tail(count)

    def flush(self, grace_s: float) -> int:
        """Wait until receivers have confirmed what was sent to them, then let go of it.

        Args:
            grace_s: How long to wait, in seconds; 0 only looks.

        Returns:
            How many sends were dropped because nobody had confirmed them; more than none is logged, too.
        """
        if not self._core.is_open or self._core.is_foreign:
            return 0
        dropped = self._outbox.settle(grace_s)
        if dropped:
            _logger.warning("group %s dropped %d sends that no receiver had confirmed in time", self.name, dropped)
        return dropped

    def close(self, *, grace_s: float = 0.0) -> int:
        """Refuse further use and free what only this group uses. Twice is nothing.

        Args:
            grace_s: How long to ``flush`` first; 0 never waits, as after an exception.

        Returns:
            How many sends were dropped.
        """
        dropped = self.flush(grace_s)
        if self._process_group is not None:
            unregister(self._process_group)
            self._process_group = None
        if not self._core.is_foreign:
            self._core.close()
        return dropped

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<GroupCoordinator {self.name} member {self._rank_in_group} of {self.world_size}, {state}>"

    def __reduce__(self) -> NoReturn:
        """Not for use.

        Raises:
            ContextStateError: Always.
        """
        raise ContextStateError(f"group {self.name} cannot be pickled or copied: contexts stay in their process")
