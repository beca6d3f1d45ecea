"""Root-mean-square normalisation; every member holds all of it."""

from typing import final

import torch
from torch import Tensor, nn
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

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``(..., D)``; new tensor of its shape and dtype."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

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
