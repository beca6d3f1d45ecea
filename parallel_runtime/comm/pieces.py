"""How the tensors of a collective are cut, joined and handed back; all facts here are equal on every member."""

from collections.abc import Sequence
from operator import index
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.tensors import check_out, dense, is_plain, movable, normal_dim, overlap
from parallel_runtime.errors import ArgumentError, DimError

__all__ = [
    "Joined",
    "as_rows",
    "check_shares",
    "check_splits",
    "deliver",
    "do_nothing",
    "exchanged",
    "loosely_agreed",
    "merged_rows",
    "new_copy",
    "put_back",
    "real_dim",
    "resized_shape",
    "room_for",
    "scaled_shape",
    "shards",
    "split_rows",
]


@final
class Joined:
    """Receives pieces that are joined along ``dim``: views of the result where that is possible, else copied into it."""

    def __init__(self, like: Tensor, sizes: Sequence[int], dim: int, out: Tensor | None, operation: str) -> None:
        self._out = out
        self._buffer = room_for(out, resized_shape(like, dim, sum(sizes)), like, operation)
        self._parts = torch.split(self._buffer, list(sizes), dim)
        self.pieces = [part if part.is_contiguous() else torch.empty_like(part).contiguous() for part in self._parts]

    def result(self) -> Tensor:
        """The joined tensor, or the caller's ``out``."""
        for part, piece in zip(self._parts, self.pieces, strict=True):
            if piece is not part:
                part.copy_(piece)
        return deliver(self._out, self._buffer)


def split_rows(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Equal parts along ``dim`` as ``(parts, ...)``, contiguous."""
    shape = (*tensor.shape[:dim], parts, tensor.shape[dim] // parts, *tensor.shape[dim + 1 :])
    return tensor.view(shape).movedim(dim, 0).contiguous()


def shards(core: GroupCore, tensor: Tensor | None, dim: int) -> Tensor:
    """``tensor`` as one row per member.

    Raises:
        ArgumentError: There is none, or its size is no multiple of the members.
    """
    if tensor is None:
        raise ArgumentError("scatter: the source has to hand over a tensor, got None")
    payload = dense(core.on_device(tensor))
    dim = real_dim(dim, payload, "scatter")
    check_shares(core, payload, dim, "scatter")
    return split_rows(payload, dim, core.communicator.world_size)


def exchanged(core: GroupCore, operation: str, values: list[int], fault: str, limit_s: float) -> list[list[int]]:
    """Every member's ``values``.

    Raises:
        ArgumentError: One of them has a fault; raised on all.
    """
    mine = torch.tensor([1 if fault else 0, *values], dtype=torch.int64)
    rows = mine.new_empty((core.control.world_size, mine.numel()))
    core.run_agreed(operation + " sizes", None, (), core.control.all_gather, rows, mine, limit_s)
    faulty = [member for member, row in enumerate(rows.tolist()) if row[0]]
    if faulty:
        raise ArgumentError(fault or f"{operation}: member {faulty[0]} of {core.name} gave splits that do not fit its tensor")
    return [row[1:] for row in rows.tolist()]


def do_nothing(*_: object) -> None:
    """Stand in for a communicator where there is nothing to move."""


def new_copy(tensor: Tensor, payload: Tensor) -> Tensor:
    """New memory with the values of ``tensor``, whose dense form is ``payload``."""
    return payload.clone() if overlap(payload, tensor) else payload


def put_back(tensor: Tensor, work: Tensor) -> Tensor:
    """Write ``work``, the dense form of ``tensor``, into it where they are not the same memory."""
    if work.data_ptr() != tensor.data_ptr() or work.stride() != tensor.stride():
        tensor.detach().copy_(work)
    return tensor


def room_for(out: Tensor | None, shape: tuple[int, ...], like: Tensor, operation: str) -> Tensor:
    """A contiguous tensor to receive into: ``out`` itself where nothing speaks against it."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_out(out, shape, like, operation)
    if is_plain(out) and not overlap(out, like):
        return out
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def merged_rows(rows: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """``rows`` ``(members, ...)`` joined along ``dim``, contiguous also where reshape would give a view."""
    return rows.movedim(0, dim).reshape(shape).contiguous()


def deliver(out: Tensor | None, result: Tensor) -> Tensor:
    """``result``, in the caller's ``out`` where there is one."""
    if out is None:
        return result
    if out is not result:
        out.detach().copy_(result)
    return out


def as_rows(target: Tensor, moved: Tensor) -> Tensor:
    """``target`` ``(world_size, ...)`` in the form that ``moved`` has, one row per member."""
    if moved.dtype is target.dtype:
        return target
    return movable(target).view(target.shape[0], *moved.shape)


def scaled_shape(tensor: Tensor, dim: int, factor: int) -> tuple[int, ...]:
    """The shape of ``factor`` tensors joined along ``dim``; 0-dim tensors join to one dim."""
    return resized_shape(tensor, dim, tensor.shape[dim] * factor) if tensor.dim() else (factor,)


def resized_shape(tensor: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """The shape of ``tensor`` with another size along ``dim``."""
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])


def loosely_agreed(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[object, ...]:
    """What members agree on where their sizes along ``dim`` differ."""
    return ("dim", dim, "sizes", sizes, tensor.dtype, resized_shape(tensor, dim, -1))


def real_dim(dim: int, tensor: Tensor, operation: str) -> int:
    """``dim`` counted from the front, of a tensor that has one.

    Raises:
        DimError: It has none, or not this one.
    """
    if not tensor.dim():
        raise DimError(f"{operation}: a 0-dim tensor has no dim to split or join along; use tensor.view(1)")
    return normal_dim(dim, tensor.dim(), operation)


def check_shares(core: GroupCore, tensor: Tensor, dim: int, operation: str, instead: str = "") -> None:
    """Check that ``tensor`` has an equal share along ``dim`` for every member.

    Raises:
        ArgumentError: It has not; ``instead`` says what would work.
    """
    size, world_size = tensor.shape[dim], core.communicator.world_size
    if size % world_size:
        text = f"{operation}: dim {dim} has {size} elements, not a multiple of the {world_size} members of {core.name}"
        raise ArgumentError(f"{text}; {instead}" if instead else text)


def check_splits(splits: Sequence[int], world_size: int, operation: str, word: str, total: int | None = None) -> None:
    """Check that there is one size per member, and that together they are ``total``.

    Raises:
        ArgumentError: They are not.
    """
    if len(splits) != world_size or not all(map(_is_size, splits)):
        raise ArgumentError(f"{operation}: {word}={list(splits)} must be {world_size} sizes of 0 or more, one per member")
    if total is not None and sum(splits) != total:
        raise ArgumentError(f"{operation}: {word}={list(splits)} add up to {sum(splits)}, the tensor has {total}")


def _is_size(value: object) -> bool:
    try:
        return index(value) >= 0  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        return False
