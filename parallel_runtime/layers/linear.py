"""Linear layers split over a tensor-parallel group: by columns, by rows, and the two fused ones of a transformer."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.columns import ColumnPiece, ParallelColumns, gather_rows
from parallel_runtime.layers.packing import PackableLayer, add_linear, apply_linear, dense
from parallel_runtime.layers.regions import reduce_from_group
from parallel_runtime.layers.sources import TensorSource, check_shape, span
from parallel_runtime.topology.shards import HeadShard, Uneven, split_heads, split_intermediate

__all__ = ["ColumnParallelLinear", "GateUpParallelLinear", "QkvParallelLinear", "RowParallelLinear"]


@final
class ColumnParallelLinear(ParallelColumns):
    """``y = x A^T + b`` where every member computes a slice of the outputs.

    Args:
        in_features: Inputs, all of them on every member.
        out_features: Outputs of the full layer.
        tp: Group the outputs are spread over. Borrowed.
        bias: Whether there is one; it is sliced like the outputs.
        uneven: ``"refuse"`` wants slices of equal size.
        name: Of the projection in ``full_state``.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ConfigError: A slice would be empty, or slices would differ where that is refused.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: GroupCoordinator,
        bias: bool = False,
        uneven: Uneven = "allow",
        name: str = "proj",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        shards = split_intermediate(out_features, parts=tp.world_size, uneven=uneven)
        piece = ColumnPiece(name=name, size=out_features, shards=shards)
        super().__init__(in_features, [piece], tp=tp, bias=bias, dtype=dtype, device=device)


@final
class GateUpParallelLinear(ParallelColumns):
    """The gate and up projections of a gated feed-forward part in one matrix; both are cut alike.

    Args:
        in_features: Inputs, all of them on every member.
        intermediate_size: Outputs of each full projection.
        tp: Group the outputs are spread over. Borrowed.
        bias: Whether there is one.
        uneven: ``"refuse"`` wants slices of equal size.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ConfigError: A slice would be empty, or slices would differ where that is refused.
    """

    def __init__(
        self,
        in_features: int,
        intermediate_size: int,
        *,
        tp: GroupCoordinator,
        bias: bool = False,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        shards = split_intermediate(intermediate_size, parts=tp.world_size, uneven=uneven)
        pieces = [ColumnPiece(name=name, size=intermediate_size, shards=shards) for name in ("gate_proj", "up_proj")]
        super().__init__(in_features, pieces, tp=tp, bias=bias, dtype=dtype, device=device)


@final
class QkvParallelLinear(ParallelColumns):
    """The query, key and value projections in one matrix, cut by whole heads; members may share a key/value head.

    Args:
        in_features: Inputs, all of them on every member.
        num_query_heads: Query heads of the full layer.
        num_kv_heads: Key/value heads of the full layer.
        head_dim: Size of a head.
        tp: Group the heads are spread over. Borrowed.
        bias: Whether there is one.
        uneven: ``"refuse"`` wants equally many heads on every member.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        head_shards: The heads of every member.
        heads: Those of this one.

    Raises:
        ConfigError: A member would have no query head, or heads would differ in number where that is refused.
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tp: GroupCoordinator,
        bias: bool = False,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        shards = split_heads(num_query_heads, num_kv_heads, parts=tp.world_size, uneven=uneven)
        query = ColumnPiece(name="q_proj", size=num_query_heads * head_dim, shards=_scale([s.query for s in shards], head_dim))
        key, value = (
            ColumnPiece(name=name, size=num_kv_heads * head_dim, shards=_scale([s.kv for s in shards], head_dim))
            for name in ("k_proj", "v_proj")
        )
        super().__init__(in_features, [query, key, value], tp=tp, bias=bias, dtype=dtype, device=device)
        self.head_shards: tuple[HeadShard, ...] = shards
        self.heads: HeadShard = shards[tp.rank_in_group]


@final
class RowParallelLinear(PackableLayer):
    """``y = x A^T + b`` where every member holds a slice of the inputs; the partial sums are added up, then the bias, once.

    The parameters are uninitialised until ``load``.

    Args:
        in_features: Inputs of the full layer.
        out_features: Outputs, all of them on every member.
        tp: Group the inputs are spread over. Borrowed.
        bias: Whether there is one; every member holds all of it.
        shards: The inputs of each member, where another layer decides (the heads of an attention); an even split otherwise.
        uneven: ``"refuse"`` wants slices of equal size.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: ``(out_features, local inputs)``.
        bias: ``(out_features,)`` or ``None``.

    Raises:
        ConfigError: A slice would be empty, or slices would differ where that is refused.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: GroupCoordinator,
        bias: bool = False,
        shards: Sequence[range] | None = None,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        self.shards = tuple(shards) if shards is not None else split_intermediate(in_features, parts=tp.world_size, uneven=uneven)
        self._own = span(self.shards[tp.rank_in_group])
        self.weight = nn.Parameter(torch.empty(out_features, self._own.stop - self._own.start, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the local inputs.

        Args:
            x: ``(..., local inputs)``, as a column-parallel layer gives them.

        Returns:
            ``(..., out_features)``, equal on every member.

        Collective: one all_reduce of the result; all members, same order.
        """
        out = reduce_from_group(self.partial(x), self.tp)
        return out if self.bias is None else out + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` plus the layer's output.

        Args:
            residual: ``(..., out_features)``, equal on every member.
            x: ``(..., local inputs)``.

        Returns:
            New tensor ``(..., out_features)``, equal on every member.

        Collective: as ``forward``.
        """
        return add_linear(residual, x, self.weight, self.bias) if self.tp.world_size == 1 else residual + self.forward(x)

    def partial(self, x: Tensor) -> Tensor:
        """This member's summand, for callers that add more to it before the sum. The bias is left out.

        Args:
            x: ``(..., local inputs)``.

        Returns:
            ``(..., out_features)``, different on every member.
        """
        return apply_linear(x, self.weight)

    def partial_into(self, x: Tensor, out: Tensor) -> None:
        """``partial`` written to ``out``: by the product itself where the weight is plain. No gradients.

        Args:
            x: ``(T, local inputs)``.
            out: ``(T, out_features)``.
        """
        if self.weight.is_mkldnn:
            out.copy_(apply_linear(x, self.weight))
        else:
            torch.mm(x, self.weight.detach().t(), out=out)

    def load(self, weight: TensorSource, bias: TensorSource | None = None) -> None:
        """Take this member's columns out of the full weight, and the whole bias.

        Args:
            weight: Full ``(out_features, in_features)``.
            bias: Full ``(out_features,)``, exactly where the layer has one.

        Raises:
            ArgumentError: A shape is wrong, or the bias is missing or too many.
        """
        if (bias is None) != (self.bias is None):
            raise ArgumentError(f"bias={self.bias is not None} but a bias was {'not ' if bias is None else ''}given to load")
        out_features = self.weight.shape[0]
        check_shape("weight", weight, (out_features, self.in_features))
        with self._filling():
            self.weight.copy_(weight[:, self._own])
            if self.bias is not None and bias is not None:
                check_shape("bias", bias, (out_features,))
                self.bias.copy_(bias[:])

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters, equal on every member.

        Returns:
            ``"weight"`` and, where there is one, ``"bias"``.

        Collective: one all_gatherv of the weight; all members, same order.
        """
        columns = gather_rows(dense(self.weight).T.contiguous(), self.shards, self.tp)
        state = {"weight": columns.T.contiguous()}
        return state if self.bias is None else state | {"bias": self.bias.detach().clone()}


def _scale(heads: Sequence[range], head_dim: int) -> tuple[range, ...]:
    return tuple(range(part.start * head_dim, part.stop * head_dim) for part in heads)
