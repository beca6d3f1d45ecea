"""Between what a user may hand over and what a communicator accepts: views, dims, dtypes."""

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.errors import ArgumentError, DimError, DtypeError
from parallel_runtime.values import shown, type_problem

__all__ = [
    "Reduction",
    "as_bytes",
    "check_out",
    "check_strided",
    "check_writable",
    "checked_shape",
    "dense",
    "dtype_named",
    "fold",
    "is_plain",
    "movable",
    "normal_dim",
    "overlap",
    "reduction",
]

_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX: Final = frozenset({torch.complex64, torch.complex128})
_HALF: Final = frozenset({torch.float16, torch.bfloat16})
_MOST_BYTES: Final = 2**62
_PLAIN: Final = _FLOATS | {torch.uint8, torch.int8, torch.int32, torch.int64}


@final
class Reduction(NamedTuple):
    """How a reduction of one dtype is put to a communicator.

    Attributes:
        op: What the communicator does.
        view: ``None`` as it is, ``"bytes"`` for bool as uint8, ``"real"`` for complex as pairs of floats.
    """

    op: ReduceOp
    view: str | None

    def apply(self, tensor: Tensor) -> Tensor:
        """The contiguous ``tensor`` in the form the communicator is handed; shares its memory."""
        if self.view is None:
            return tensor
        return tensor.view(torch.uint8) if self.view == "bytes" else torch.view_as_real(tensor)


def dtype_named(name: str) -> torch.dtype:
    """The dtype called ``name``, like ``"torch.float32"``.

    Raises:
        ValueError: There is none.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name}")
    return dtype


def reduction(dtype: torch.dtype, op: ReduceOp | str, operation: str) -> Reduction:
    """Decide how ``dtype`` is reduced with ``op``; a pure function, so every member decides alike.

    Args:
        dtype: Element type of the tensor.
        op: sum, avg, max, min or product.
        operation: Name for the error.

    Returns:
        What to ask of the communicator. bool: sum and max are a logical or, min and product a logical and.

    Raises:
        ArgumentError: ``op`` is none of the five.
        DtypeError: The dtype has no such arithmetic.
    """
    try:
        op = ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"{operation}: unknown op {op!r}; use one of {', '.join(ReduceOp)}") from None
    name = str(dtype).removeprefix("torch.")
    if dtype in _FLOATS:
        return Reduction(op, None)
    if op is ReduceOp.AVG and (dtype in _INTEGERS or dtype is torch.bool):
        raise DtypeError(
            f"{operation}: avg of {name} has no exact result; reduce with sum and divide, or convert to float32 first"
        )
    if dtype in _INTEGERS:
        return Reduction(op, None)
    if dtype is torch.bool:
        return Reduction(ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN, "bytes")
    if dtype in _COMPLEX and op in (ReduceOp.SUM, ReduceOp.AVG):
        return Reduction(op, "real")
    raise DtypeError(f"{operation}: {op} of {name} is not supported; convert to a dtype with that arithmetic (float32) first")


def check_strided(tensor: Tensor) -> None:
    """Refuse what has no plain memory.

    Raises:
        ArgumentError: It is no tensor, a sparse, nested or quantized one, or one that has no memory of its own.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise ArgumentError(f"expected a strided tensor, got a nested one of {tensor.dtype}; send its values() and offsets")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ArgumentError(
            f"expected a strided tensor, got {tensor.layout} {tensor.dtype}; convert it with to_dense() or dequantize()"
        )
    if not _has_memory(tensor):
        raise ArgumentError(
            f"expected a tensor with memory of its own, got a {type(tensor).__name__} that stands for one (fake, functional, "
            "under vmap or grad); call it with a real one, or under torch.compile"
        )


def _has_memory(tensor: Tensor) -> bool:
    try:
        if tensor.untyped_storage().device.type != tensor.device.type:  # a fake one, which warns when asked for its address
            return False
        return tensor.data_ptr() != 0 or not tensor.numel() or tensor.is_meta
    except (RuntimeError, NotImplementedError):
        return False


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph, contiguous; the same memory where it already is.

    Raises:
        ArgumentError: It is no tensor, or not a strided one.
    """
    check_strided(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def movable(tensor: Tensor) -> Tensor:
    """The contiguous ``tensor`` as a dtype that every communicator moves: itself, or its bytes (flat). Shares its memory."""
    return tensor if tensor.dtype in _PLAIN else as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """The contiguous ``tensor`` as one flat uint8 view."""
    # A contiguous tensor of one element may have any stride, which view(dtype) would refuse.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def normal_dim(dim: int, ndim: int, operation: str) -> int:
    """``dim`` counted from the front; a 0-dim tensor is treated as having one dim.

    Raises:
        DimError: The tensor has no such dim.
    """
    count = max(ndim, 1)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -count <= dim < count:
        raise DimError(f"{operation}: dim={dim!r} of a tensor with {ndim} dims; use {-count} to {count - 1}")
    return dim % count


def check_writable(tensor: Tensor, operation: str) -> None:
    """Refuse a tensor several of whose elements share memory, since it cannot be written in place.

    Raises:
        ArgumentError: It is an expanded tensor, or none that can be written.
    """
    check_strided(tensor)
    if tensor.numel() and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(
            f"{operation}: cannot write into an expanded tensor, shape {list(tensor.shape)} strides {tensor.stride()}"
        )


def checked_shape(shape: Sequence[int], dtype: torch.dtype, operation: str) -> tuple[int, ...]:
    """The shape of a tensor to be made.

    Raises:
        ArgumentError: It is no sequence of sizes, ``dtype`` is no dtype, or no memory is that large.
    """
    if problem := type_problem("dtype", dtype, torch.dtype, "such as torch.float32"):
        raise ArgumentError(f"{operation}: {problem}")
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0 or prod(sizes) * dtype.itemsize > _MOST_BYTES:
        raise ArgumentError(f"{operation}: shape={shown(shape)} must be a sequence of sizes of 0 or more, such as (8, 576)")
    return sizes


def check_out(out: Tensor, shape: tuple[int, ...], like: Tensor, operation: str) -> None:
    """Check a caller's output buffer.

    Raises:
        ArgumentError: Its shape or device is wrong, or it cannot be written.
        DtypeError: Its dtype is not that of the input.
    """
    check_strided(out)
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"{operation}: out has shape {list(out.shape)}, the result has {list(shape)}")
    if out.dtype is not like.dtype:
        raise DtypeError(f"{operation}: out is {out.dtype}, the input is {like.dtype}")
    if out.device != like.device:
        raise ArgumentError(f"{operation}: out is on {out.device}, the input on {like.device}")
    check_writable(out, operation)


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be read and written in its place: contiguous, no graph, no pending conjugation or negation."""
    return (
        tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors could overlap in memory; numpy may have made a storage of each for one piece of it."""
    one, other = a.untyped_storage(), b.untyped_storage()
    start, other_start = one.data_ptr(), other.data_ptr()
    return start == other_start or (start < other_start + other.nbytes() and other_start < start + one.nbytes())


def fold(rows: Tensor, op: ReduceOp) -> Tensor:
    """Combine ``rows`` ``(members, ...)`` in member order, so that it is repeatable; half precision is accumulated in float32.

    Args:
        rows: One row per member, of a dtype with this arithmetic.
        op: How.

    Returns:
        New tensor shaped like one row.
    """
    wide = rows.float() if rows.dtype in _HALF else rows
    total = wide[0].clone()
    for row in wide[1:]:
        if op is ReduceOp.MAX:
            torch.maximum(total, row, out=total)
        elif op is ReduceOp.MIN:
            torch.minimum(total, row, out=total)
        elif op is ReduceOp.PRODUCT:
            total.mul_(row)
        else:
            total.add_(row)
    if op is ReduceOp.AVG:
        total.div_(len(rows))
    return total.to(rows.dtype)
