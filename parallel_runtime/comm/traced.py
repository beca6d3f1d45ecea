"""Collectives as operators of torch, for code that ``torch.compile`` traces.

A traced call names its group by a *ticket*: the bytes of a name that no other group ever has, in a tensor. As the ticket is data,
one compiled graph serves every context it is called with, on every rank and in every later process. Sizes and splits are plain
integers. The public text of each operation is on ``GroupCoordinator``.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.process_group import find
from parallel_runtime.errors import ArgumentError

__all__ = ["TracedCollectives"]


@final
class TracedCollectives:
    """The collectives of a group, with the signatures of ``Collectives``, as a traced function calls them.

    Args:
        name: Under which torch knows the group.
        world_size: Members of the group.
        rank_in_group: This one.

    Raises:
        ArgumentError: Sizes that would have to be asked for while the code runs.
    """

    __slots__ = ("_rank_in_group", "_ticket", "_world_size")

    def __init__(self, name: str, world_size: int, rank_in_group: int) -> None:
        self._ticket = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)
        self._world_size = world_size
        self._rank_in_group = rank_in_group

    def all_reduce_(self, tensor: Tensor, op: ReduceOp | str, timeout_s: float | None) -> Tensor:
        """Combine in place."""
        return tensor.copy_(self.all_reduce(tensor, op, None, timeout_s))

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Combine into a new tensor, or ``out``."""
        return _store(_all_reduce(tensor.detach(), self._ticket, str(op), timeout_s), out)

    def all_gather(self, tensor: Tensor, dim: int, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Join equal shards along ``dim``."""
        shard = tensor if tensor.dim() else tensor.view(1)
        return self.all_gatherv(shard, [shard.shape[dim]] * self._world_size, dim, out, timeout_s)

    def all_gatherv(
        self, tensor: Tensor, sizes: Sequence[int] | None, dim: int, out: Tensor | None, timeout_s: float | None
    ) -> Tensor:
        """Join shards whose sizes along ``dim`` differ."""
        if sizes is None:
            raise ArgumentError("all_gatherv under torch.compile: give sizes, they cannot be asked for there")
        return _store(_all_gatherv(tensor.detach(), self._ticket, list(sizes), dim, timeout_s), out)

    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Combine and keep this member's share along ``dim``."""
        sizes = [tensor.shape[dim] // self._world_size] * self._world_size
        return self.reduce_scatterv(tensor, sizes, dim, op, out, timeout_s)

    def reduce_scatterv(
        self, tensor: Tensor, sizes: Sequence[int], dim: int, op: ReduceOp | str, out: Tensor | None, timeout_s: float | None
    ) -> Tensor:
        """Combine and keep a share whose size along ``dim`` differs between members."""
        args = (list(sizes), self._rank_in_group, dim, str(op), timeout_s)
        return _store(_reduce_scatterv(tensor.detach(), self._ticket, *args), out)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, out: Tensor | None, timeout_s: float | None) -> Tensor:
        """Exchange equal parts."""
        shard = tensor.shape[split_dim] // self._world_size
        received = self.all_to_allv(tensor, [shard] * self._world_size, [shard] * self._world_size, split_dim, None, timeout_s)
        return _store(torch.cat(torch.split(received, shard, split_dim), concat_dim), out)

    def all_to_allv(
        self,
        tensor: Tensor,
        splits: Sequence[int],
        output_splits: Sequence[int] | None,
        dim: int,
        out: Tensor | None,
        timeout_s: float | None,
    ) -> Tensor:
        """Exchange parts of any size along ``dim``."""
        if output_splits is None:
            raise ArgumentError("all_to_allv under torch.compile: give output_splits, they cannot be asked for there")
        args = (list(splits), list(output_splits), dim, timeout_s)
        return _store(_all_to_allv(tensor.detach(), self._ticket, *args), out)

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float | None) -> Tensor:
        """Overwrite with that of ``src``."""
        return tensor.copy_(self.broadcast(tensor, src, timeout_s))

    def broadcast(self, tensor: Tensor, src: int, timeout_s: float | None) -> Tensor:
        """A new tensor equal to that of ``src``."""
        return _store(_broadcast(tensor.detach(), self._ticket, src, timeout_s), None)


def _store(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _group(ticket: Tensor) -> Collectives:
    collectives: Collectives = find(bytes(ticket.tolist()).decode()).collectives
    return collectives


@torch.library.custom_op("parallel_runtime::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, ticket: Tensor, op: str, timeout_s: float | None) -> Tensor:
    return _group(ticket).all_reduce(x, op, None, timeout_s)


@_all_reduce.register_fake
def _(x: Tensor, ticket: Tensor, op: str, timeout_s: float | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("parallel_runtime::all_gatherv", mutates_args=())
def _all_gatherv(x: Tensor, ticket: Tensor, sizes: Sequence[int], dim: int, timeout_s: float | None) -> Tensor:
    return _group(ticket).all_gatherv(x, sizes, dim, None, timeout_s)


@_all_gatherv.register_fake
def _(x: Tensor, ticket: Tensor, sizes: Sequence[int], dim: int, timeout_s: float | None) -> Tensor:
    return _resized(x, dim, sum(sizes))


@torch.library.custom_op("parallel_runtime::reduce_scatterv", mutates_args=())
def _reduce_scatterv(
    x: Tensor, ticket: Tensor, sizes: Sequence[int], own: int, dim: int, op: str, timeout_s: float | None
) -> Tensor:
    group = _group(ticket)
    if len(set(sizes)) == 1:
        return group.reduce_scatter(x, dim, op, None, timeout_s)
    return group.reduce_scatterv(x, sizes, dim, op, None, timeout_s)


@_reduce_scatterv.register_fake
def _(x: Tensor, ticket: Tensor, sizes: Sequence[int], own: int, dim: int, op: str, timeout_s: float | None) -> Tensor:
    return _resized(x, dim, sizes[own])


@torch.library.custom_op("parallel_runtime::all_to_allv", mutates_args=())
def _all_to_allv(
    x: Tensor, ticket: Tensor, splits: Sequence[int], output_splits: Sequence[int], dim: int, timeout_s: float | None
) -> Tensor:
    return _group(ticket).all_to_allv(x, splits, output_splits, dim, None, timeout_s)


@_all_to_allv.register_fake
def _(
    x: Tensor, ticket: Tensor, splits: Sequence[int], output_splits: Sequence[int], dim: int, timeout_s: float | None
) -> Tensor:
    return _resized(x, dim, sum(output_splits))


@torch.library.custom_op("parallel_runtime::broadcast", mutates_args=())
def _broadcast(x: Tensor, ticket: Tensor, src: int, timeout_s: float | None) -> Tensor:
    return _group(ticket).broadcast(x, src, timeout_s)


@_broadcast.register_fake
def _(x: Tensor, ticket: Tensor, src: int, timeout_s: float | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)
