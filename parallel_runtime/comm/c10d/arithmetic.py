"""Reductions whose result over gloo would not be that of torch: what gloo is handed instead, and what becomes of its answer.

Gloo has no int16, rounds half precision after every step, and its max and min forget a NaN. So int16 travels as int32, halves as
float32, and floats to be compared as integers of the same order, in which a NaN is beyond everything.
"""

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp

__all__ = ["from_gloo", "to_gloo"]

_WIDER: Final = MappingProxyType({torch.int16: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32})
_AS_INTEGERS: Final = MappingProxyType({torch.float32: torch.int32, torch.float64: torch.int64})


def to_gloo(tensor: Tensor, op: ReduceOp) -> Tensor:
    """What gloo reduces in place of ``tensor``.

    Args:
        tensor: This member's, contiguous.
        op: How it is reduced.

    Returns:
        ``tensor`` itself where gloo reduces it as torch would, else a new tensor of its shape.
    """
    wider = _WIDER.get(tensor.dtype)
    work = tensor if wider is None else tensor.to(wider)
    integer = _AS_INTEGERS.get(work.dtype) if op in (ReduceOp.MAX, ReduceOp.MIN) else None
    if integer is None:
        return work
    last = float("nan") if op is ReduceOp.MAX else -float("nan")
    return _ordered(work.masked_fill(work.isnan(), last).view(integer))


def from_gloo(reduced: Tensor, output: Tensor, op: ReduceOp, world_size: int) -> None:
    """Fill ``output`` with what gloo has made of ``to_gloo``'s answer; avg is its sum, divided.

    Args:
        reduced: By gloo.
        output: Of the dtype that was handed to ``to_gloo``; may be ``reduced`` itself.
        op: How it was reduced.
        world_size: Members of the group.
    """
    if output.is_floating_point() and not reduced.is_floating_point():
        reduced = _ordered(reduced).view(torch.float32 if reduced.dtype is torch.int32 else torch.float64)
    if op is ReduceOp.AVG:
        reduced.div_(world_size)
    if reduced is not output:
        output.copy_(reduced)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats as integers in the floats' order, and back: those of negative floats count down, except for their sign."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)
