"""Linear layers whose output columns are spread over a group, one or several projections in a single matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.packing import PackableLayer, apply_linear, dense
from parallel_runtime.layers.regions import copy_to_group
from parallel_runtime.layers.sources import TensorSource, check_shape, span

__all__ = ["ColumnPiece", "ParallelColumns", "gather_rows"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPiece:
    """One projection of a column-parallel layer.

    Attributes:
        name: Such as ``"q_proj"``.
        size: Outputs of the full projection.
        shards: Which of them each member holds. They cover the full projection; members may hold the same ones.
    """

    name: str
    size: int
    shards: tuple[range, ...]


class ParallelColumns(PackableLayer):
    """``y = x A^T + b`` with the rows of A, the outputs, spread over ``tp``; several projections of one input may share A.

    The parameters are uninitialised until ``load``.

    Args:
        in_features: Inputs, all of them on every member.
        pieces: The projections.
        tp: Group they are spread over. Borrowed.
        bias: Whether there is one.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: ``(local outputs of all pieces, in_features)``.
        bias: ``(local outputs of all pieces,)`` or ``None``.
        pieces: The projections.
        local_sizes: Local outputs of each piece.
    """

    def __init__(
        self,
        in_features: int,
        pieces: Sequence[ColumnPiece],
        *,
        tp: GroupCoordinator,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.pieces = tuple(pieces)
        self.local_sizes = [len(piece.shards[tp.rank_in_group]) for piece in pieces]
        rows = sum(self.local_sizes)
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the local columns.

        Args:
            x: ``(..., in_features)``, equal on every member.

        Returns:
            ``(..., sum(local_sizes))``, the local outputs of each piece in turn.

        Collective: none forward; backward one all_reduce of the input's gradient.
        """
        return apply_linear(copy_to_group(x, self.tp), self.weight, self.bias)

    def load(self, weights: Sequence[TensorSource], biases: Sequence[TensorSource] | None = None) -> None:
        """Take this member's rows out of the full weights.

        Args:
            weights: The full weight ``(size, in_features)`` of each piece.
            biases: The full bias ``(size,)`` of each piece, exactly where the layer has one.

        Raises:
            ArgumentError: A shape is wrong, or weights or biases are missing or too many.
        """
        if (biases is None) != (self.bias is None):
            raise ArgumentError(f"bias={self.bias is not None} but biases were {'not ' if biases is None else ''}given to load")
        with self._filling():
            self._fill(self.weight, weights, "weight")
            if self.bias is not None and biases is not None:
                self._fill(self.bias, biases, "bias")

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters of every piece, equal on every member.

        Returns:
            ``"<piece>.weight"`` and, where there is one, ``"<piece>.bias"``.

        Collective: one all_gatherv for each piece and parameter; all members, same order.
        """
        state: dict[str, Tensor] = {}
        for kind, parameter in self.named_parameters(recurse=False):
            parts = torch.split(dense(parameter), self.local_sizes)
            for piece, part in zip(self.pieces, parts, strict=True):
                state[f"{piece.name}.{kind}"] = gather_rows(part, piece.shards, self.tp)
        return state

    def _fill(self, parameter: Tensor, sources: Sequence[TensorSource], kind: str) -> None:
        if len(sources) != len(self.pieces):
            raise ArgumentError(
                f"{len(sources)} {kind}s were given to load; this layer has {[piece.name for piece in self.pieces]}"
            )
        targets = torch.split(parameter, self.local_sizes)
        for piece, source, target in zip(self.pieces, sources, targets, strict=True):
            check_shape(f"{piece.name}.{kind}", source, (piece.size, *parameter.shape[1:]))
            target.copy_(source[span(piece.shards[self.tp.rank_in_group])])


def gather_rows(part: Tensor, shards: Sequence[range], tp: GroupCoordinator) -> Tensor:
    """Join the members' rows; rows that several members hold are taken once.

    Args:
        part: This member's rows, ``(len(shards[tp.rank_in_group]), ...)``.
        shards: The rows of each member, in order.
        tp: Group that holds them.

    Returns:
        New tensor with every row.

    Collective: one all_gatherv of ``part``; all members, same order.
    """
    rows = tp.all_gatherv(part, [len(shard) for shard in shards], dim=0)
    full = rows.new_empty((max(shard.stop for shard in shards), *rows.shape[1:]))
    for shard, values in zip(shards, torch.split(rows, [len(shard) for shard in shards]), strict=True):
        full[span(shard)] = values
    return full
