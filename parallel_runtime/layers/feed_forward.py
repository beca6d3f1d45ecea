"""The gated feed-forward part of a decoder layer.

Legend: T tokens, D hidden size, F local part of the intermediate size.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.layers.linear import GateUpParallelLinear, RowParallelLinear
from parallel_runtime.topology.shards import Uneven

__all__ = ["GatedFeedForward"]


@final
class GatedFeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the intermediate size spread over a group. Uninitialised until its parts are loaded.

    Args:
        hidden_size: D.
        intermediate_size: Of the full layer.
        tp: Group it is spread over. Borrowed.
        bias: Whether the three projections have one.
        uneven: ``"refuse"`` wants slices of equal size.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        gate_up_proj: Both inner projections.
        down_proj: The outer one.

    Raises:
        ConfigError: A slice would be empty, or slices would differ where that is refused.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp: GroupCoordinator,
        bias: bool = False,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            hidden_size, intermediate_size, tp=tp, bias=bias, uneven=uneven, dtype=dtype, device=device
        )
        shards = self.gate_up_proj.pieces[0].shards
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, tp=tp, bias=bias, shards=shards, dtype=dtype, device=device
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T, D)``, equal on every member.

        Collective: one all_reduce of the result; all members, same order.
        """
        out_TD: Tensor = self.down_proj(self.inner(x_TD))
        return out_TD

    def partial(self, x_TD: Tensor) -> Tensor:
        """This member's summand of ``forward``, without the outer bias, for callers that add more to it before the sum.

        Args:
            x_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T, D)``, different on every member.
        """
        return self.down_proj.partial(self.inner(x_TD))

    def inner(self, x_TD: Tensor) -> Tensor:
        """What the outer projection is applied to.

        Args:
            x_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T, F)``, this member's part.
        """
        both: Tensor = self.gate_up_proj(x_TD)
        gate_TF, up_TF = both.chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF
