"""Rotary positions: pairs of elements half a head apart are turned by an angle that grows with the position."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["RotaryAngles", "RotaryPositions", "rotate"]


@final
class RotaryAngles(NamedTuple):
    """What the tokens of one step are turned by, for all layers.

    Attributes:
        cos: Cosines, ``(T, 1, d)``.
        sin: Sines, negative in the first half.
    """

    cos: Tensor
    sin: Tensor


@final
class RotaryPositions:
    """The frequencies of a model.

    Args:
        head_dim: d, even.
        theta: Base of the frequencies.
        factors: Divisor of each of the d/2 frequencies, or ``None``.
        device: Where positions are.

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    def __init__(
        self, head_dim: int, *, theta: float, factors: Sequence[float] | None = None, device: torch.device | None = None
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self._frequencies = 1.0 / theta**exponents
        if factors is not None:
            self._frequencies /= torch.tensor(factors, dtype=torch.float32, device=device)

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Compute the angles of a step once, for all its layers.

        Args:
            positions_T: Integers.
            dtype: Of the queries and keys.
        """
        turns_Th = positions_T.to(torch.float32).unsqueeze(-1) * self._frequencies
        cos, sin = turns_Th.cos(), turns_Th.sin()
        return RotaryAngles(
            cos=torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
            sin=torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
        )


def rotate(x_THd: Tensor, angles: RotaryAngles) -> Tensor:
    """Turn every head of every token.

    Args:
        x_THd: Queries or keys, or both side by side; may be strided.
        angles: Of the same tokens and dtype.

    Returns:
        New tensor of the same shape, contiguous.
    """
    swapped = x_THd.roll(x_THd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THd * angles.cos, swapped, angles.sin)
