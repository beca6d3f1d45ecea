"""The one object behind a group of ranks."""

from collections.abc import Sequence
from typing import NoReturn, Self, final

import torch
from torch import Tensor

from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import Communicator, ReduceOp
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
from parallel_runtime.comm.recorder import Record
from parallel_runtime.errors import ArgumentError, ContextStateError
from parallel_runtime.terms import Rank, RankInGroup

__all__ = ["GroupCoordinator", "open_coordinator"]


def open_coordinator(
    spec: GroupSpec, communicator: Communicator | None = None, *, control: Communicator | None = None
) -> "GroupCoordinator":
    """Open a group over communicators that exist already.

    Args:
        spec: The group as this member sees it.
        communicator: Moves its tensors; ``None`` for a group of one. Aliases of one group may share it: they then share its lock
            and its sequence, and the last of them to close closes it.
        control: Moves messages between CPUs; ``communicator`` itself by default.

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
    return GroupCoordinator._open(GroupCore(spec, communicator, control or communicator))


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

    __slots__ = ("__weakref__", "_collectives", "_core", "_rank_in_group")

    _core: GroupCore
    _collectives: Collectives
    _rank_in_group: RankInGroup

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
        self._collectives = Collectives(core)
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

    def describe(self) -> str:
        """One line: name, ranks, and the communicators in use."""
        core = self._core
        return f"{core.name} ranks {core.spec.ranks}: tensors over {core.communicator.kind}, messages over {core.control.kind}"

    def recent(self, count: int = 16) -> tuple[Record, ...]:
        """The last ``count`` operations of its communicator, oldest first, the one under way at the end."""
        return self._core.traffic.recorder.tail(count)

    def close(self) -> None:
        """Refuse further use and free what only this group uses. Never communicates; twice is nothing."""
        self._core.close()

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
        return self._collectives.all_reduce_(tensor, op, timeout_s)

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
        return self._collectives.all_reduce(tensor, op, out, timeout_s)

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
        return self._collectives.all_gather(tensor, dim, out, timeout_s)

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
        return self._collectives.all_gatherv(tensor, sizes, dim, out, timeout_s)

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
        return self._collectives.reduce_scatter(tensor, dim, op, out, timeout_s)

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
        return self._collectives.reduce_scatterv(tensor, sizes, dim, op, out, timeout_s)

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
        return self._collectives.all_to_all(tensor, split_dim, concat_dim, out, timeout_s)

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
        return self._collectives.all_to_allv(tensor, splits, output_splits, dim, out, timeout_s)

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
        return self._collectives.broadcast_(tensor, src, timeout_s)

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
        return self._collectives.broadcast(tensor, src, timeout_s)

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
