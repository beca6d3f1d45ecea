"""Where a tensor-parallel part begins and ends, forward and backward.

Legend of every layer: T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel_runtime.comm import GroupCoordinator

__all__ = ["copy_to_group", "gather_from_group", "gather_rows_to_group", "reduce_from_group", "scatter_rows_from_group"]


def copy_to_group(x: Tensor, tp: GroupCoordinator) -> Tensor:
    """Enter a parallel part: every member holds the same ``x``, and each uses it for its own shard.

    Args:
        x: Equal on every member.
        tp: Group the part is split over.

    Returns:
        ``x``; its gradient is the sum of the members' gradients.

    Collective: none forward; backward one all_reduce of the gradient.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, operator f.
    """
    return x if tp.world_size == 1 or not _needs_grad(x) else _Copy.apply(x, tp)  # type: ignore[no-untyped-call]  # torch


def reduce_from_group(partial: Tensor, tp: GroupCoordinator) -> Tensor:
    """Leave a parallel part: add up what the members have.

    Args:
        partial: This member's summand, fresh from an operation: it is overwritten where no gradient is wanted.
        tp: Group the part is split over.

    Returns:
        The sum, equal on every member; its gradient passes through unchanged.

    Collective: one all_reduce of ``partial``; all members, same order.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, operator g.
    """
    if tp.world_size == 1:
        return partial
    if _needs_grad(partial):
        return _Reduce.apply(partial, tp)  # type: ignore[no-any-return,no-untyped-call]  # torch
    return tp.all_reduce_(partial)


def gather_from_group(x: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
    """Join the members' slices of the last dim.

    Args:
        x: This member's slice; its last dim has ``len(shards[tp.rank_in_group])`` elements.
        shards: The slice of each member; together they tile the whole.
        tp: Group the last dim is split over.

    Returns:
        The whole, equal on every member; the gradient of the own slice is its part of the gradient.

    Collective: one all_gatherv of ``x``; all members, same order.
    """
    if tp.world_size == 1:
        return x
    if _needs_grad(x):
        return _Gather.apply(x, shards, tp)  # type: ignore[no-any-return,no-untyped-call]  # torch
    return _gather(x, shards, tp)


def gather_rows_to_group(x_TD: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
    """Enter a parallel part from a sequence-parallel one, where every member holds other tokens.

    Args:
        x_TD: This member's tokens, ``len(shards[tp.rank_in_group])`` rows, possibly none.
        shards: The tokens of each member; together they tile all of them.
        tp: Group both parts are split over.

    Returns:
        All tokens, equal on every member; the gradient is added up over the members and cut like the tokens.

    Collective: one all_gatherv of ``x_TD``; backward one reduce_scatterv. All members, same order.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2, operator g.
    """
    if tp.world_size == 1:
        return x_TD
    sizes = [len(shard) for shard in shards]
    if _needs_grad(x_TD):
        return _GatherRows.apply(x_TD, sizes, tp)  # type: ignore[no-any-return,no-untyped-call]  # torch
    return tp.all_gatherv(x_TD, sizes)


def scatter_rows_from_group(partial_TD: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
    """Leave a parallel part into a sequence-parallel one: ``reduce_from_group``, of which every member gets its own tokens.

    Args:
        partial_TD: This member's summand, of all tokens.
        shards: The tokens of each member; together they tile all of them.
        tp: Group both parts are split over.

    Returns:
        The sum, this member's rows of it; its gradient comes back from all members.

    Collective: one reduce_scatterv of ``partial_TD``; backward one all_gatherv. All members, same order.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2, operator g-bar.
    """
    if tp.world_size == 1:
        return partial_TD
    sizes = [len(shard) for shard in shards]
    if _needs_grad(partial_TD):
        return _ScatterRows.apply(partial_TD, sizes, tp)  # type: ignore[no-any-return,no-untyped-call]  # torch
    return tp.reduce_scatterv(partial_TD, sizes)


def _gather(x: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
    return tp.all_gatherv(x, [len(shard) for shard in shards], dim=-1)


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: GroupCoordinator) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(grad), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: GroupCoordinator) -> Tensor:
        return tp.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
        ctx.own = shards[tp.rank_in_group]
        return _gather(x, shards, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.own.start : ctx.own.stop], None, None


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, sizes: Sequence[int], tp: GroupCoordinator) -> Tensor:
        ctx.sizes, ctx.tp = sizes, tp
        return tp.all_gatherv(x_TD, sizes)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tp.reduce_scatterv(grad_TD.contiguous(), ctx.sizes), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, partial_TD: Tensor, sizes: Sequence[int], tp: GroupCoordinator) -> Tensor:
        ctx.sizes, ctx.tp = sizes, tp
        return tp.reduce_scatterv(partial_TD, sizes)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tp.all_gatherv(grad_TD.contiguous(), ctx.sizes), None, None
