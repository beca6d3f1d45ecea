"""What ``GroupCoordinator`` offers on tensors that all members hand over."""

from abc import ABC
from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.messages import Messages
from parallel_runtime.comm.traced import TracedCollectives

__all__ = ["CollectiveCalls"]


class CollectiveCalls(ABC):
    """The collectives of a ``GroupCoordinator``, whose text says what holds for all of them."""

    __slots__ = ()

    _collectives: Collectives
    _messages: Messages
    _traced: TracedCollectives

    @property
    def _carrier(self) -> Collectives | TracedCollectives:
        """What carries a call: where ``torch.compile`` traces it, operators of torch."""
        return self._traced if is_dynamo_compiling() else self._collectives

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
        return self._carrier.all_reduce_(tensor, op, timeout_s)

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
        return self._carrier.all_reduce(tensor, op, out, timeout_s)

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
        return self._carrier.all_gather(tensor, dim, out, timeout_s)

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
        return self._carrier.all_gatherv(tensor, sizes, dim, out, timeout_s)

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
        return self._carrier.reduce_scatter(tensor, dim, op, out, timeout_s)

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
        return self._carrier.reduce_scatterv(tensor, sizes, dim, op, out, timeout_s)

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
        return self._carrier.all_to_all(tensor, split_dim, concat_dim, out, timeout_s)

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
        return self._carrier.all_to_allv(tensor, splits, output_splits, dim, out, timeout_s)

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
        return self._carrier.broadcast_(tensor, src, timeout_s)

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
        return self._carrier.broadcast(tensor, src, timeout_s)

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
