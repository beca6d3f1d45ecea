"""Weights in the form that the CPU's matrix kernels read fastest.

A plain matrix is arranged anew on every call of a matrix product with a few rows, which costs as much as the product itself; a
packed one is arranged once. oneDNN's form was the fastest of those tried for all shapes of SmolLM2 from 4 rows on, in float32
and bfloat16. The choice is by rule and not by a stopwatch at load: ranks and replicas that choose alike give equal bits. Packed
weights take the place of the plain ones; gradients and everything but ``apply_linear`` need the plain ones back.
"""

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.errors import ArgumentError

__all__ = ["PackableLayer", "add_linear", "apply_linear", "can_pack", "dense", "missing_rows", "pad_rows"]

_NO_SCALARS: Final[tuple[float, ...]] = ()
_LEAST_ROWS: Final = 4
"""Fewer rows are padded: the kernel for a single one reads weights at four fifths of the speed."""

_DTYPES: Final = (torch.float32, torch.bfloat16)


def can_pack(weight: Tensor) -> bool:
    """Whether this machine has packed products for a weight.

    Args:
        weight: ``(outputs, inputs)``.

    Returns:
        True for non-empty float32 and bfloat16 matrices on an x86-64 CPU with AVX2 or more, where torch was built with oneDNN.
    """
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.numel() == 0:
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    operations = torch.ops.mkldnn
    if not hasattr(operations, "_linear_pointwise") or not hasattr(operations, "_reorder_linear_weight"):  # built without oneDNN
        return False
    return weight.dtype is torch.float32 or bool(operations._is_mkldnn_bf16_supported())


def dense(weight: Tensor) -> Tensor:
    """The plain form of a weight.

    Args:
        weight: Packed or not.

    Returns:
        A new tensor with the same values where it is packed, the weight itself, detached, elsewhere.
    """
    return weight.detach().to_dense(weight.dtype) if weight.is_mkldnn else weight.detach()


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x A^T + b`` with a packed or a plain A.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``.

    Returns:
        ``(..., outputs)``.

    Raises:
        ArgumentError: A gradient is wanted through a packed weight.
    """
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("packed weights carry no gradients; call unpack() on the layer or the model before training it")
    num_padding = missing_rows(x, weight) if x.dim() == 2 else 0
    if num_padding:
        x = pad_rows(x, num_padding)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", _NO_SCALARS, "")
    return out[:-num_padding] if num_padding else out


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``r + x A^T + b``: one operation where A is packed and there are rows enough.

    Args:
        residual: ``(T, outputs)``, r.
        x: ``(T, inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``.

    Returns:
        New tensor ``(T, outputs)``.

    Raises:
        ArgumentError: A gradient is wanted through a packed weight.
    """
    is_one = weight.is_mkldnn and x.dim() == 2 and x.shape[0] >= _LEAST_ROWS and residual.is_contiguous()
    if not is_one or (torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad)):
        return residual + apply_linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
    return out


def missing_rows(x: Tensor, weight: Tensor) -> int:
    """How many rows of padding make a product with a packed weight faster; several products in a row may share them.

    Args:
        x: ``(T, inputs)``.
        weight: ``(outputs, inputs)``, packed or plain.

    Returns:
        0 for a plain weight, and for no rows at all. Equal on members that pack alike.
    """
    return max(_LEAST_ROWS - x.shape[0], 0) if weight.is_mkldnn and x.shape[0] else 0


def pad_rows(x: Tensor, count: int) -> Tensor:
    """``count`` rows of zeros behind those of ``x`` ``(T, D)``; new tensor."""
    return functional.pad(x, (0, 0, 0, count))


class PackableLayer(nn.Module, ABC):
    """A layer with one large ``weight`` that is applied with ``apply_linear``.

    Attributes:
        weight: ``(outputs, inputs)``, packed after ``pack``: its shape and dtype stay, its elements cannot be written.
    """

    weight: nn.Parameter

    def pack(self) -> None:
        """Pack the weight, where this machine can; it takes the place of the plain one. Twice is nothing."""
        if not self.weight.is_mkldnn and can_pack(self.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous())
            self.weight = nn.Parameter(packed, requires_grad=False)

    def unpack(self) -> None:
        """Have the plain weight back, with the same values, to be read, written or trained. Twice is nothing."""
        if self.weight.is_mkldnn:
            self.weight = nn.Parameter(dense(self.weight))

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Inside, the weight is plain and may be written; it is packed again afterwards if it was before."""
        was_packed = self.weight.is_mkldnn
        self.unpack()
        with torch.no_grad():
            yield
        if was_packed:
            self.pack()
