"""Root-mean-square normalisation; every member holds all of it."""

from math import sqrt
from typing import final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from parallel_runtime.layers.sources import TensorSource, check_shape

__all__ = ["RMSNorm"]


@final
class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim. Ones until ``load``.

    Args:
        hidden_size: D.
        eps: Added to the mean square.
        dtype: Of the weight.
        device: Of the weight.
    """

    def __init__(
        self, hidden_size: int, *, eps: float, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self._root = sqrt(hidden_size)
        self._least = torch.tensor(sqrt(eps * hidden_size))
        self._zero = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``(..., D)``; new tensor of its shape and dtype."""
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if not x.is_cpu or needs_grad or x.dtype is torch.float64 or is_dynamo_compiling():
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.by_length(x)

    def by_length(self, x: Tensor) -> Tensor:
        """``sqrt(D) x / sqrt(|x|^2 + eps D) * weight``: ``forward`` on CPU, in four operations where torch has a dozen.

        Args:
            x: ``(..., D)`` on CPU, of up to 32 bits; no gradients.

        Returns:
            New tensor of its shape and dtype. All but the product with the weight is computed in float32.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        out = torch.addcdiv(self._zero, x, torch.hypot(length, self._least), value=self._root)
        if x.dtype is not torch.float32:
            out = out.to(x.dtype)
        return out.mul_(self._parameters["weight"])  # type: ignore[arg-type]  # it has one; read without a module's look-up

    @torch.no_grad()
    def load(self, weight: TensorSource) -> None:
        """Take the weight ``(D,)``.

        Raises:
            ArgumentError: It has another shape.
        """
        check_shape("weight", weight, tuple(self.weight.shape))
        self.weight.copy_(weight[:])

    def full_state(self) -> dict[str, Tensor]:
        """The parameter, ``"weight"``; every member holds it already."""
        return {"weight": self.weight.detach().clone()}
