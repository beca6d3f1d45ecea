"""The one object behind a group of ranks."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from parallel_runtime.comm.channel import Channel
from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import Communicator, ReduceOp
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.diagnosis import Diagnostician
from parallel_runtime.comm.dicts import TensorDicts
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
from parallel_runtime.comm.messages import Messages
from parallel_runtime.comm.outbox import Outbox
from parallel_runtime.comm.p2p import PointToPoint, RecvHandle, SendHandle, check_peer
from parallel_runtime.comm.process_group import RoutedProcessGroup, register, unregister
from parallel_runtime.comm.recorder import Record
from parallel_runtime.comm.traced import TracedCollectives
from parallel_runtime.errors import ArgumentError, ContextStateError
from parallel_runtime.terms import Rank, RankInGroup

__all__ = ["GroupCoordinator", "open_coordinator"]

_T = TypeVar("_T")
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
class GroupCoordinator:
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
            PeerFailedError: The memory could not be had; raised on all members.

        Collective: all members, same order.
        """
        core = self._core
        limit_s = core.deadline(timeout_s, core.spec.timeouts.control_s)
        size = tuple(shape)
        tensor = core.run_agreed("symmetric_empty", None, (dtype, size), core.communicator.symmetric_empty, size, dtype, limit_s)
        return torch.empty(size, dtype=dtype, device=core.spec.device) if tensor is None else tensor

    def describe(self) -> str:
        """One line: name, ranks, and the communicators in use and why."""
        core = self._core
        why = f" ({core.communicator.reason})" if core.communicator.reason else ""
        return (
            f"{core.name} ranks {core.spec.ranks}: tensors over {core.communicator.kind}{why}, messages over {core.control.kind}"
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
            _logger.warning("group %s dropped %d sends that no receiver had confirmed after %g s", self.name, dropped, grace_s)
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

    def all_reduce_(self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, timeout_s: float | None = None) -> Tensor:
        """Combine ``tensor`` of all members in place.

        Args:
            tensor: Same shape and dtype on every member.
            op: sum, avg, max, min or product. bool: sum and max are a logical or, min and product a logical and.
            timeout_s: Deadline in seconds.

        Returns:
            ``tensor`` itself, equal on all members.

        Raises:
            ArgumentError: ``op`` is unknown, or ``tensor`` is expanded.
            DtypeError: This dtype has no such arithmetic.

        Collective: one all-reduce of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_reduce_(tensor, op, timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, out: Tensor | None = None, timeout_s: float | None = None
    ) -> Tensor:
        """Combine ``tensor`` of all members.

        Args:
            tensor: Same shape and dtype on every member. Untouched.
            op: As in ``all_reduce_``.
            out: Where to write, of the same shape and dtype; any strides.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor like ``tensor``.

        Raises:
            ArgumentError: ``op`` is unknown or ``out`` does not fit.
            DtypeError: This dtype has no such arithmetic, or ``out`` is of another one.

        Collective: one all-reduce of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_reduce(tensor, op, out, timeout_s)

    def all_gather(self, tensor: Tensor, dim: int = 0, *, out: Tensor | None = None, timeout_s: float | None = None) -> Tensor:
        """Join the members' tensors along ``dim``, like ``torch.cat`` in group order.

        Args:
            tensor: Same shape and dtype on every member, any dtype.
            dim: May be negative. 0-dim tensors are joined to one dim.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor with ``world_size`` times the size along ``dim``.

        Raises:
            ArgumentError: ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: ``out`` is of another dtype.

        Collective: one all-gather of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_gather(tensor, dim, out, timeout_s)

    def all_gatherv(
        self,
        tensor: Tensor,
        sizes: Sequence[int] | None = None,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Join tensors whose sizes along ``dim`` differ.

        Args:
            tensor: Same dtype and other dims on every member.
            sizes: Size along ``dim`` of every member, equal on all. ``None`` asks the members first, with a small message.
            dim: May be negative.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor with ``sum(sizes)`` along ``dim``.

        Raises:
            ArgumentError: ``sizes`` is not one size per member or not that of ``tensor``, or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: ``out`` is of another dtype.

        Collective: one all-gather; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_gatherv(tensor, sizes, dim, out, timeout_s)

    def reduce_scatter(
        self,
        tensor: Tensor,
        dim: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Combine ``tensor`` of all members and keep this member's equal share along ``dim``.

        Args:
            tensor: Same shape and dtype on every member; its size along ``dim`` is a multiple of ``world_size``.
            dim: May be negative.
            op: As in ``all_reduce_``.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor with the share of ``rank_in_group``.

        Raises:
            ArgumentError: The size does not divide, ``op`` is unknown or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: This dtype has no such arithmetic, or ``out`` is of another one.

        Collective: one reduce-scatter of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).reduce_scatter(tensor, dim, op, out, timeout_s)

    def reduce_scatterv(
        self,
        tensor: Tensor,
        sizes: Sequence[int],
        dim: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Like ``reduce_scatter`` with shares of any size.

        Args:
            tensor: Same shape and dtype on every member.
            sizes: Share of every member along ``dim``, equal on all.
            dim: May be negative.
            op: As in ``all_reduce_``.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor with ``sizes[rank_in_group]`` along ``dim``; combined in group order, so repeatable.

        Raises:
            ArgumentError: ``sizes`` does not add up, ``op`` is unknown or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: This dtype has no such arithmetic, or ``out`` is of another one.

        Collective: one all-to-all of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).reduce_scatterv(
            tensor, sizes, dim, op, out, timeout_s
        )

    def all_to_all(
        self,
        tensor: Tensor,
        split_dim: int = 0,
        concat_dim: int = 0,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Send the i-th equal part along ``split_dim`` to member i; join what arrives along ``concat_dim``.

        Args:
            tensor: Same shape and dtype on every member; its size along ``split_dim`` is a multiple of ``world_size``.
            split_dim: May be negative.
            concat_dim: May be negative.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ArgumentError: The size does not divide, or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: ``out`` is of another dtype.

        Collective: one all-to-all of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_to_all(
            tensor, split_dim, concat_dim, out, timeout_s
        )

    def all_to_allv(
        self,
        tensor: Tensor,
        splits: Sequence[int],
        dim: int = 0,
        *,
        output_splits: Sequence[int] | None = None,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Send ``splits[i]`` rows along ``dim`` to member i; join what arrives in group order.

        Args:
            tensor: Same dtype and other dims on every member.
            splits: One size per member, adding up to the size along ``dim``.
            dim: May be negative.
            output_splits: How much arrives from every member. ``None`` asks the members first, with a small message, and makes
                wrong ``splits`` of one member an error on all. When given, it is trusted.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ArgumentError: The splits of this or (``output_splits=None``) any member do not add up, or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: ``out`` is of another dtype.

        Collective: one all-to-all; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).all_to_allv(
            tensor, splits, output_splits, dim, out, timeout_s
        )

    def broadcast_(self, tensor: Tensor, src: int = 0, *, timeout_s: float | None = None) -> Tensor:
        """Overwrite ``tensor`` with that of member ``src``.

        Args:
            tensor: Same shape and dtype on every member, any dtype.
            src: Group-local.
            timeout_s: Deadline in seconds.

        Returns:
            ``tensor`` itself.

        Raises:
            ArgumentError: ``src`` is not a member, or ``tensor`` is expanded.

        Collective: one broadcast of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).broadcast_(tensor, src, timeout_s)

    def broadcast(self, tensor: Tensor, src: int = 0, *, timeout_s: float | None = None) -> Tensor:
        """A new tensor equal to that of member ``src``.

        Args:
            tensor: On ``src`` the value, elsewhere only its shape and dtype matter. Untouched.
            src: Group-local.
            timeout_s: Deadline in seconds.

        Returns:
            New tensor.

        Raises:
            ArgumentError: ``src`` is not a member.

        Collective: one broadcast of ``tensor.nbytes``; all members, same order.
        """
        return (self._traced if is_dynamo_compiling() else self._collectives).broadcast(tensor, src, timeout_s)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor | None:
        """Combine ``tensor`` of all members on ``dst``.

        Args:
            tensor: Same shape and dtype on every member. Untouched.
            dst: Group-local.
            op: As in ``all_reduce_``.
            out: Where ``dst`` writes.
            timeout_s: Deadline in seconds.

        Returns:
            On ``dst`` the result, elsewhere ``None``.

        Raises:
            ArgumentError: ``dst`` is not a member, ``op`` is unknown or ``out`` does not fit.
            DtypeError: This dtype has no such arithmetic, or ``out`` is of another one.

        Collective: one reduce of ``tensor.nbytes``; all members, same order.
        """
        return self._collectives.reduce(tensor, dst, op, out, timeout_s)

    def gather(
        self, tensor: Tensor, dst: int = 0, dim: int = 0, *, out: Tensor | None = None, timeout_s: float | None = None
    ) -> Tensor | None:
        """Join the members' tensors along ``dim`` on ``dst``.

        Args:
            tensor: Same shape and dtype on every member, any dtype.
            dst: Group-local.
            dim: May be negative.
            out: Where ``dst`` writes.
            timeout_s: Deadline in seconds.

        Returns:
            On ``dst`` the joined tensor, elsewhere ``None``.

        Raises:
            ArgumentError: ``dst`` is not a member, or ``out`` does not fit.
            DimError: There is no such dim.
            DtypeError: ``out`` is of another dtype.

        Collective: one gather of ``tensor.nbytes``; all members, same order.
        """
        return self._collectives.gather(tensor, dst, dim, out, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every member has entered.

        Args:
            timeout_s: Deadline in seconds; the control deadline by default.

        Raises:
            ArgumentError: ``timeout_s`` is not positive.

        Collective: one barrier on the control plane; all members, same order.
        """
        self._collectives.barrier(timeout_s)

    def scatter(
        self, tensor: Tensor | None, src: int = 0, dim: int = 0, *, out: Tensor | None = None, timeout_s: float | None = None
    ) -> Tensor:
        """Deal out equal shards of the tensor on ``src`` along ``dim``.

        Args:
            tensor: On ``src`` a tensor whose size along ``dim`` is a multiple of ``world_size``; may be ``None`` elsewhere.
            src: Group-local.
            dim: May be negative.
            out: Where to write.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor: the shard of ``rank_in_group``.

        Raises:
            ArgumentError: ``src`` is not a member, its tensor cannot be dealt out (on all members), or ``out`` does not fit.
            DimError: There is no such dim (on ``src``; an ``ArgumentError`` elsewhere).
            DtypeError: ``out`` is of another dtype.

        Collective: one small broadcast and one scatter; all members, same order.
        """
        return self._collectives.scatter(tensor, src, dim, out, timeout_s, self._messages.share)

    def send(self, tensor: Tensor, dst: int | None = None, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send ``tensor`` and wait until the receiver has it.

        Args:
            tensor: Any shape and dtype.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv`` with the same tag.
            timeout_s: Deadline in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
            CollectiveMismatchError: The receiver has room for another shape or dtype; it raises, too.
        """
        self._p2p.send(tensor, dst, tag, timeout_s)

    def recv(self, src: int | None = None, tag: int = 0, *, out: Tensor | None = None, timeout_s: float | None = None) -> Tensor:
        """Receive a tensor; its shape and dtype come along.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send`` with the same tag.
            out: Where to write: exactly what is sent, else it is an error on both sides.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor on ``device``.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``out`` is expanded.
            CollectiveMismatchError: ``out`` is of another shape or dtype than what was sent; the sender raises, too.
        """
        return self._p2p.recv(src, tag, out, timeout_s)

    def isend(self, tensor: Tensor, dst: int | None = None, tag: int = 0, *, copy: bool = True) -> SendHandle:
        """Start sending ``tensor``. The group keeps what it needs, also when the handle is dropped.

        Args:
            tensor: Any shape and dtype.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv`` with the same tag.
            copy: Copy first, so that ``tensor`` may be changed at once. ``False`` saves the copy; leave it alone until ``wait``
                returns.

        Returns:
            A handle; waiting for it twice is fine.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
        """
        return self._p2p.isend(tensor, dst, tag, copy)

    def irecv(self, src: int | None = None, tag: int = 0, *, out: Tensor | None = None) -> RecvHandle:
        """Start receiving. Receives from one member with one tag are filled in the order they were started.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send`` with the same tag.
            out: As in ``recv``.

        Returns:
            A handle whose ``wait`` returns the tensor.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``out`` is expanded.
        """
        return self._p2p.irecv(src, tag, out)

    def exchange(
        self,
        tensor: Tensor,
        dst: int | None = None,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Send one way and receive the other way at once, which two blocking sends could not.

        Args:
            tensor: What to send.
            dst: Group-local; by default the next member.
            src: Group-local; by default the previous member.
            tag: Of both.
            out: Where to receive.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ArgumentError: A peer is not another member, ``tag`` is out of range, or ``out`` is expanded.
            CollectiveMismatchError: ``out`` is of another shape or dtype than what was sent.
        """
        return self._p2p.exchange(tensor, dst, src, tag, out, timeout_s)

    def broadcast_object(self, value: Any, src: int = 0, *, pickle: bool = False, timeout_s: float | None = None) -> Any:
        """Send an object to all members.

        Args:
            value: On ``src`` plain data, containers, tensors or numpy values; ignored elsewhere, may be ``None``.
            src: Group-local.
            pickle: Pickle instead, equal on all members: only among members that trust each other.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            ``value`` itself on ``src``, a new equal object elsewhere; tensors arrive detached.

        Raises:
            ArgumentError: ``src`` is not a member.
            SerializationError: It cannot be encoded (on ``src``), or not decoded (here only).
            PeerEncodingError: ``src`` could not encode it. The group is as usable as before.

        Collective: one broadcast of 1 KiB on the control plane, one more for a bigger body and for every tensor from 64 KiB.
        """
        return self._messages.broadcast_object(value, src, pickle, timeout_s)

    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout_s: float | None = None) -> list[Any]:
        """Give every member the objects of all.

        Args:
            value: As in ``broadcast_object``.
            pickle: As in ``broadcast_object``.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            The objects in group order; at this member's place ``value`` itself.

        Raises:
            SerializationError: This member's object cannot be encoded, or another's not decoded here.
            PeerEncodingError: Another member could not encode its object; raised on all, naming it.

        Collective: one all-gather of 1 KiB per member on the control plane, a second one if a body is bigger.
        """
        return self._messages.all_gather_object(value, pickle, timeout_s)

    def send_object(
        self, value: Any, dst: int | None = None, tag: int = 0, *, pickle: bool = False, timeout_s: float | None = None
    ) -> None:
        """Send an object to one member. Returns without waiting for it, unless 64 earlier ones are unconfirmed.

        Args:
            value: As in ``broadcast_object``; tensors are copied.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv_object`` with the same tag; apart from the tags of ``send``.
            pickle: Pickle instead; the receiver has to allow it.
            timeout_s: How long it may wait for room, in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
            SerializationError: It cannot be encoded; the receiver gets a ``PeerEncodingError``.
        """
        self._messages.send_object(value, dst, tag, pickle, timeout_s)

    def recv_object(self, src: int | None = None, tag: int = 0, *, pickle: bool = False, timeout_s: float | None = None) -> Any:
        """Receive an object.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send_object`` with the same tag.
            pickle: Allow a pickled one: only from members that are trusted.
            timeout_s: Deadline in seconds.

        Returns:
            A new object.

        Raises:
            ArgumentError: ``src`` is not another member, or ``tag`` is out of range.
            SerializationError: It cannot be decoded here; the message is used up and the next one is fine.
            PeerEncodingError: The sender could not encode it.
        """
        return self._messages.recv_object(src, tag, pickle, timeout_s)

    def broadcast_tensor_dict(
        self, tensors: Mapping[Any, Any] | None, src: int = 0, *, pickle: bool = False, timeout_s: float | None = None
    ) -> dict[Any, Any]:
        """Send a dict of tensors and plain values, nested in any way, to all members.

        Args:
            tensors: On ``src`` a dict; ignored elsewhere, may be ``None``.
            src: Group-local.
            pickle: As in ``broadcast_object``.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            ``tensors`` itself on ``src``, a new dict elsewhere: same keys in the same order, same containers, detached.

        Raises:
            ArgumentError: ``src`` is not a member, or its value is no dict (a ``PeerEncodingError`` on the others).
            SerializationError: As in ``broadcast_object``.
            PeerEncodingError: As in ``broadcast_object``.

        Collective: as ``broadcast_object``.
        """
        return self._messages.broadcast_tensor_dict(tensors, src, pickle, timeout_s)

    def send_tensor_dict(
        self,
        tensors: dict[Any, Any],
        dst: int | None = None,
        tag: int = 0,
        *,
        slice_over: "GroupCoordinator | None" = None,
        slice_keys: Collection[Any] = (),
        check_slices: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a dict of tensors and plain values to one member and wait until it has it.

        Args:
            tensors: Nested in any way.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv_tensor_dict`` with the same tag.
            slice_over: A group whose members all send an equal copy of the tensors in ``slice_keys``, each to a receiver in a
                group like it: every member sends only its share. Tensors that do not divide are sent whole.
            slice_keys: Top-level keys of tensors that are equal on all members of ``slice_over``.
            check_slices: Compare them first, with a small all-gather over ``slice_over``; by default where the group is checked.
            timeout_s: Deadline in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, ``tag`` is out of range, or ``slice_keys`` do not fit.
            SerializationError: It cannot be encoded; the receiver gets a ``PeerEncodingError``.
            CollectiveMismatchError: A tensor to be sliced differs between members of ``slice_over``.
        """
        self._dicts.send(tensors, dst, tag, _slices(slice_over, slice_keys), check_slices, timeout_s)

    def isend_tensor_dict(
        self,
        tensors: dict[Any, Any],
        dst: int | None = None,
        tag: int = 0,
        *,
        slice_over: "GroupCoordinator | None" = None,
        slice_keys: Collection[Any] = (),
        check_slices: bool | None = None,
        copy: bool = True,
    ) -> SendHandle:
        """Start ``send_tensor_dict``.

        Args:
            tensors: As in ``send_tensor_dict``.
            dst: As in ``send_tensor_dict``.
            tag: As in ``send_tensor_dict``.
            slice_over: As in ``send_tensor_dict``.
            slice_keys: As in ``send_tensor_dict``.
            check_slices: As in ``send_tensor_dict``.
            copy: Copy big tensors first, so that they may be changed at once.

        Returns:
            A handle; the group keeps what it needs, also when it is dropped.

        Raises:
            ArgumentError: As in ``send_tensor_dict``.
            SerializationError: As in ``send_tensor_dict``.
            CollectiveMismatchError: As in ``send_tensor_dict``.
        """
        return self._dicts.isend(tensors, dst, tag, _slices(slice_over, slice_keys), check_slices, copy)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        slice_over: "GroupCoordinator | None" = None,
        timeout_s: float | None = None,
    ) -> dict[Any, Any]:
        """Receive a dict of tensors.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send_tensor_dict`` with the same tag.
            slice_over: The receivers' group, needed where the sender sliced: it joins the slices, so all its members receive.
            timeout_s: Deadline in seconds.

        Returns:
            A new dict.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``slice_over`` does not fit the slices.
            SerializationError: It cannot be decoded here.
            PeerEncodingError: The sender could not encode it.
            CollectiveMismatchError: The sender sent an object that is no tensor dict.
        """
        over = None if slice_over is None else slice_over._collectives
        return self._dicts.recv(src, tag, over, timeout_s)

    def channel(self, name: str, schema: type[_T], peer: int | None = None) -> Channel[_T]:
        """Open this member's end of a typed line to another member. Opening does not communicate.

        Args:
            name: Equal at both ends, unique between the two while open.
            schema: Type of its messages, equal at both ends: anything msgspec knows, like a ``msgspec.Struct`` with tensors.
            peer: Group-local; may be left out in a group of two.

        Returns:
            One end; messages of other channels and tags never meet its own.

        Raises:
            ArgumentError: ``peer`` is not another member or was left out, the name is taken, or the schema is unusable.
            ContextStateError: The group is closed.
        """
        if not self._core.is_open:
            raise ContextStateError(f"channel {name!r} on group {self.name}: the group is closed")
        if peer is None and self.world_size != 2:
            raise ArgumentError(f"channel {name!r}: say which of the {self.world_size} members of {self.name} is the peer")
        return Channel(self._core, self._outbox, name, schema, check_peer(self._core, peer, "peer", 1))


def _slices(over: GroupCoordinator | None, keys: Collection[Any]) -> tuple[Collectives | None, Collection[object]]:
    return (None if over is None else over._collectives), keys
