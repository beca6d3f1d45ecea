"""The groups of a replica that cuts sequences over ranks, and which rank computes which part of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, final

from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.context import ParallelContext
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.serving.batch import Batch
from parallel_runtime.topology.sequence import split_tokens
from parallel_runtime.topology.shards import split_heads

__all__ = ["ContextGroups", "ContextMember", "share_batch"]


@final
class ContextMember(NamedTuple):
    """What one member of the dcp group computes.

    Attributes:
        cp: Index of its share of the tokens.
        num_query_heads: Its query heads.
    """

    cp: int
    num_query_heads: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroups:
    """Over whom the tokens of a sequence are spread. The groups are borrowed.

    Attributes:
        cp: Its members compute different tokens.
        dcp: Its members keep different keys and values; with one member, every rank keeps those of all tokens.
        members: Of ``dcp``, in its order. All have the same key/value heads, and those of one ``cp`` index different query heads.
    """

    cp: GroupCoordinator
    dcp: GroupCoordinator
    members: tuple[ContextMember, ...]

    @classmethod
    def of(cls, ctx: ParallelContext, config: ModelConfig) -> Self:
        """The groups of one rank.

        Args:
            ctx: Open context of the rank. Borrowed.
            config: Of the model.
        """
        heads = split_heads(config.num_query_heads, config.num_kv_heads, parts=ctx.tp.world_size)
        places = [ctx.config.layout.coordinate(rank) for rank in ctx.dcp.ranks]
        members = tuple(ContextMember(place.cp, len(heads[place.tp].query)) for place in places)
        return cls(cp=ctx.cp, dcp=ctx.dcp, members=members)

    @property
    def is_alone(self) -> bool:
        """Whether this rank computes and keeps all tokens of its replica."""
        return self.cp.world_size == self.dcp.world_size == 1

    def share(self, batch: Batch) -> tuple[Batch, ...]:
        """``share_batch`` over ``cp``."""
        return share_batch(batch, parts=self.cp.world_size)

    def gather_sampled(self, batch: Batch, shares: Sequence[Batch], rows_SD: Tensor) -> Tensor:
        """Put together what the members of ``cp`` have for the sampled chunks.

        Args:
            batch: The batch.
            shares: Its shares.
            rows_SD: A row for each of the ``sampled`` of this member's share.

        Returns:
            A row for each of ``batch.sampled``, equal on every member of ``cp``.

        Collective: one all_gatherv of ``rows_SD`` over ``cp``, where it has several members; all members.
        """
        if self.cp.world_size == 1:
            return rows_SD
        all_SD = self.cp.all_gatherv(rows_SD, [len(share.sampled) for share in shares])
        at = {chunk.request_id: row for row, chunk in enumerate(chunk for share in shares for chunk in share.sampled)}
        return all_SD[[at[chunk.request_id] for chunk in batch.sampled]]


def share_batch(batch: Batch, *, parts: int) -> tuple[Batch, ...]:
    """Cut a batch into what each member of a cp group computes.

    Args:
        batch: The batch.
        parts: Members.

    Returns:
        A batch for each member, of up to two chunks of one request. The one with the last token has ``is_sampled``.
    """
    if parts == 1:
        return (batch,)
    shares = []
    for spans in split_tokens([len(chunk.token_ids) for chunk in batch.chunks], parts=parts):
        chunks = []
        for sequence, tokens in spans:
            chunk = batch.chunks[sequence]
            own = chunk.token_ids[tokens.start : tokens.stop]
            is_sampled = chunk.is_sampled and tokens.stop == len(chunk.token_ids)
            chunks.append(replace(chunk, start=chunk.start + tokens.start, token_ids=own, is_sampled=is_sampled))
        shares.append(Batch(chunks=tuple(chunks)))
    return tuple(shares)
