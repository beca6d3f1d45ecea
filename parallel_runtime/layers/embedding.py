"""The two ends of a language model, spread over a group by vocabulary: embedding and head. Nothing is ever padded."""

from typing import final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.columns import gather_rows
from parallel_runtime.layers.packing import PackableLayer, apply_linear, dense
from parallel_runtime.layers.regions import copy_to_group, gather_from_group, reduce_from_group
from parallel_runtime.layers.sources import TensorSource, check_shape, span
from parallel_runtime.topology.shards import Uneven, split_vocabulary

__all__ = ["ParallelHead", "VocabParallelEmbedding"]


class _VocabularyShard(PackableLayer):
    """A ``(V, D)`` matrix of which every member holds some rows."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: GroupCoordinator,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.shards = split_vocabulary(vocab_size, parts=tp.world_size, uneven=uneven)
        self.own = self.shards[tp.rank_in_group]
        self.weight = nn.Parameter(torch.empty(len(self.own), hidden_size, dtype=dtype, device=device))

    def load(self, weight: TensorSource) -> None:
        """Take this member's rows out of the full weight.

        Args:
            weight: Full ``(V, D)``.

        Raises:
            ArgumentError: It has another shape.
        """
        check_shape("weight", weight, (self.vocab_size, self.weight.shape[1]))
        with self._filling():
            self.weight.copy_(weight[span(self.own)])

    def full_state(self) -> dict[str, Tensor]:
        """The full parameter, equal on every member.

        Returns:
            ``"weight"``, ``(V, D)``.

        Collective: one all_gatherv of the weight; all members, same order.
        """
        return {"weight": gather_rows(dense(self.weight), self.shards, self.tp)}


@final
class VocabParallelEmbedding(_VocabularyShard):
    """Token embedding of which every member holds some rows. Uninitialised until ``load``.

    Args:
        vocab_size: V.
        hidden_size: D.
        tp: Group the vocabulary is spread over. Borrowed.
        uneven: ``"refuse"`` wants equally many rows on every member.
        dtype: Of the weight.
        device: Of the weight.

    Raises:
        ConfigError: A member would have no row, or rows would differ in number where that is refused.
    """

    def forward(self, ids_T: Tensor) -> Tensor:
        """Look tokens up.

        Args:
            ids_T: Integers below V of any shape, equal on every member.

        Returns:
            ``(*ids_T.shape, D)``, equal on every member and to the lookup in the full weight.

        Raises:
            ArgumentError: An id is outside the vocabulary; raised on every member, before anything is sent. Looking costs a
                synchronisation where ids are on a GPU, and is left out under ``torch.compile`` and in graphs.

        Collective: one all_reduce of the result; all members, same order.
        """
        self._check(ids_T)
        if self.tp.world_size == 1:
            return functional.embedding(ids_T, self.weight)
        local_T = ids_T - self.own.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.own))
        rows_TD = functional.embedding(local_T.masked_fill_(elsewhere_T, 0), self.weight)
        return reduce_from_group(rows_TD.masked_fill(elsewhere_T.unsqueeze(-1), 0), self.tp)

    def pack(self) -> None:
        """Nothing: rows are looked up in the plain form."""

    def _check(self, ids_T: Tensor) -> None:
        if is_dynamo_compiling() or ids_T.numel() == 0 or (ids_T.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        least, most = (int(bound) for bound in ids_T.aminmax())
        if least < 0 or most >= self.vocab_size:
            raise ArgumentError(
                f"token ids reach from {least} to {most}; the vocabulary has {self.vocab_size}: 0 to {self.vocab_size - 1}"
            )


@final
class ParallelHead(_VocabularyShard):
    """Projection ``(T, D) -> (T, V)`` of which every member computes some columns. Uninitialised before ``load`` or ``tie``.

    Args:
        vocab_size: V.
        hidden_size: D.
        tp: Group the vocabulary is spread over. Borrowed.
        uneven: ``"refuse"`` wants equally many columns on every member.
        dtype: Of the weight.
        device: Of the weight.

    Raises:
        ConfigError: A member would have no column, or columns would differ in number where that is refused.
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight as this layer's: the same parameter, or a packed copy where this layer was packed before.

        Raises:
            ArgumentError: It is of another size, or cut differently.
        """
        if embedding.weight.shape != self.weight.shape or embedding.shards != self.shards:
            raise ArgumentError(
                f"the embedding's shard is {tuple(embedding.weight.shape)} of {embedding.vocab_size}; "
                f"the head's is {tuple(self.weight.shape)} of {self.vocab_size}"
            )
        was_packed = self.weight.is_mkldnn
        self.weight = embedding.weight
        if was_packed:
            self.pack()

    def local(self, hidden_TD: Tensor) -> Tensor:
        """The logits of this member's part of the vocabulary.

        Args:
            hidden_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T, len(self.own))``.

        Collective: none forward; backward one all_reduce of the input's gradient.
        """
        return apply_linear(copy_to_group(hidden_TD, self.tp), self.weight)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """The logits of the whole vocabulary.

        Args:
            hidden_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T, V)``, exactly V wide, equal on every member.

        Collective: one all_gatherv of the local logits; all members, same order.
        """
        return gather_from_group(self.local(hidden_TD), self.shards, self.tp)

    def greedy(self, hidden_TD: Tensor) -> Tensor:
        """The most likely token of each row; among equals the lowest id. No logits travel.

        Args:
            hidden_TD: ``(T, D)``, equal on every member.

        Returns:
            ``(T,)`` int64, equal on every member.

        Collective: one all_gather of 16 bytes for each row; all members, same order.
        """
        value_T, index_T = self.local(hidden_TD).max(dim=-1)
        if self.tp.world_size == 1:
            return index_T
        best_T2 = torch.stack((value_T.double(), (index_T + self.own.start).double()), dim=-1)  # exact: ids stay below 2**53
        all_RT2 = self.tp.all_gather(best_T2.unsqueeze(0), dim=0)
        winner_T = all_RT2[..., 0].argmax(dim=0)  # the first of equals, which holds the lower ids
        return all_RT2[..., 1].gather(0, winner_T.unsqueeze(0))[0].long()
