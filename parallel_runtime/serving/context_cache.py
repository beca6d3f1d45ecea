"""One step of attention on ranks that compute or keep only some of the tokens.

Two ways. Where every rank keeps all keys and values (dcp=1), the ranks of ``cp`` send each other the new ones, and each attends
alone. Where they are spread (dcp>1), chunks that begin their request are attended to while all their keys are at hand; for the
others queries go to every member of ``dcp``, which attends to what it keeps, and the parts come back to be merged.

Legend: T new tokens of this rank, A tokens of all ranks that ask everyone, N sequences of a group, S keys of the longest of them
on this rank, R rows of the cache, P ranks of ``dcp``; H query heads and K key/value heads of this rank, G query heads for each of
the K, of all ranks of ``dcp`` with the same tokens; d size of a head; L the 2 K heads of keys and values.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from parallel_runtime.layers.attention import Attention, causal_attention, causal_mask
from parallel_runtime.layers.context_parallel import KeyMask, merge_partials, partial_attention
from parallel_runtime.serving.batch import Batch, Chunk
from parallel_runtime.serving.context_groups import ContextGroups
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.topology.sequence import kept_rows

__all__ = ["context_step"]


def context_step(
    cache: PagedKvCache, batch: Batch, shares: Sequence[Batch], *, groups: ContextGroups, page_size: int
) -> Attention:
    """Bind one batch.

    Args:
        cache: This rank's, with ``rows_per_block`` rows for each block.
        batch: What the step computes; equal on every member.
        shares: ``groups.share(batch)``.
        groups: Over whom tokens are spread.
        page_size: Tokens of a block.

    Returns:
        What the forward of this rank's share is handed.

    Collective: in each ``attend`` one all_gatherv of new keys and values over ``cp``; where ``dcp`` has several members and some
        chunk does not begin its request, one all_gatherv of queries and one all_to_allv of partial results over ``dcp``; all
        members, same order, those without tokens included. None in a step without tokens.
    """
    if groups.dcp.world_size == 1:
        return _GatheredStep(cache, shares, groups)
    return _ScatteredStep(cache, batch, shares, groups, page_size)


@final
class _GatheredStep:
    """Every rank keeps everything: the new keys and values of the others are stored first, the rest is as on one rank."""

    def __init__(self, cache: PagedKvCache, shares: Sequence[Batch], groups: ContextGroups) -> None:
        self._cache, self._cp = cache, groups.cp
        self._own = cache.step(shares[groups.cp.rank_in_group])
        self._sizes = [share.num_tokens for share in shares]
        rows = [chunk.blocks[at // cache.page_size] * cache.page_size + at % cache.page_size for chunk, at in _tokens(shares)]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=cache.keys.device)

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        if len(self._rows):
            new_Ld = self._cp.all_gatherv(torch.cat((k_TKd, v_TKd), dim=1), self._sizes)
            self._cache.layer(layer)[0].index_copy_(0, self._rows, new_Ld)
        return self._own.attend(layer, q_THd, k_TKd, v_TKd)


@final
class _ScatteredStep:
    """Every rank of ``dcp`` keeps a part."""

    def __init__(self, cache: PagedKvCache, batch: Batch, shares: Sequence[Batch], groups: ContextGroups, page_size: int) -> None:
        device, dcp = cache.keys.device, groups.dcp
        self._cache, self._groups = cache, groups
        self._sizes = [share.num_tokens for share in shares]
        kept = [
            (source, chunk.blocks[at // page_size] * cache.page_size + at % page_size // dcp.world_size)
            for source, (chunk, at) in enumerate(_tokens(shares))
            if at % page_size % dcp.world_size == dcp.rank_in_group
        ]
        self._kept_from, self._kept_in = (torch.tensor(column, dtype=torch.int64, device=device) for column in _columns(kept))
        begun = {chunk.request_id for chunk in batch.chunks if not chunk.start}
        own = shares[groups.cp.rank_in_group].chunks
        self._at_hand = _at_hand(shares, begun, own, device)
        asking = [[chunk for chunk in share.chunks if chunk.request_id not in begun] for share in shares]
        self._asked = [sum(len(chunk.token_ids) for chunk in chunks) for chunks in asking]
        rows = [row for new, chunk in zip(_rows(own), own, strict=True) if chunk.request_id not in begun for row in new]
        self._asking_T = torch.tensor(rows, dtype=torch.int64, device=device)
        self._queries = _Queries(groups, self._asked)
        keeper = _Keeper(cache, page_size, kept_rows(page_size, part=dcp.rank_in_group, parts=dcp.world_size))
        heads = self._queries.num_per_kv_head(cache.keys.shape[2])
        self._parts = list(_parts([chunk for chunks in asking for chunk in chunks], keeper, heads))

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        rows_RLd = self._cache.layer(layer)[0]
        new_Ld = torch.cat((k_TKd, v_TKd), dim=1)
        if self._groups.cp.world_size > 1 and any(self._sizes):
            new_Ld = self._groups.cp.all_gatherv(new_Ld, self._sizes)
        rows_RLd.index_copy_(0, self._kept_in, new_Ld.index_select(0, self._kept_from))
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        for new, keys_at, mask in self._at_hand:
            keys_KSd, values_KSd = new_Ld.index_select(0, keys_at).transpose(0, 1).chunk(2)
            out_THd[new] = causal_attention(q_THd[new], keys_KSd, values_KSd, mask)
        if any(self._asked):
            out_THd.index_copy_(0, self._asking_T, self._ask(q_THd.index_select(0, self._asking_T), rows_RLd))
        return out_THd

    def _ask(self, q_THd: Tensor, rows_RLd: Tensor) -> Tensor:
        """Attention of this rank's queries over what all ranks keep, and of theirs over what this one does."""
        K = rows_RLd.shape[1] // 2
        q_AKGd = self._queries.gather(q_THd, K)
        found_AKGd1 = q_AKGd.new_empty((*q_AKGd.shape[:-1], q_AKGd.shape[-1] + 1), dtype=torch.float32)
        for part in self._parts:
            found_AKGd1[part.places] = part.attend(q_AKGd[part.places], self._cache.gather(rows_RLd, part.rows))
        found_PTHd1 = self._queries.scatter(found_AKGd1)
        return merge_partials(found_PTHd1[..., :-1], found_PTHd1[..., -1]).to(q_THd.dtype)


@final
class _Queries:
    """The way of queries to all members of ``dcp``, who differ in tokens and heads, and of the answers back."""

    def __init__(self, groups: ContextGroups, counts: Sequence[int]) -> None:
        self._dcp, self._members, self._counts = groups.dcp, groups.members, counts
        self._sizes = [counts[member.cp] * member.num_query_heads for member in groups.members]
        self._own = groups.members[groups.dcp.rank_in_group]

    def num_per_kv_head(self, num_kv_heads: int) -> int:
        """G."""
        return sum([member.num_query_heads for member in self._members if member.cp == 0]) // num_kv_heads

    def gather(self, q_THd: Tensor, num_kv_heads: int) -> Tensor:
        """``q_AKGd``: the tokens of one cp index after those of another, the heads of its members side by side."""
        d = q_THd.shape[-1]
        parts = torch.split(self._dcp.all_gatherv(q_THd.reshape(-1, d), self._sizes), self._sizes)
        by_cp: list[list[Tensor]] = [[] for _ in self._counts]
        for part, member in zip(parts, self._members, strict=True):
            heads = member.num_query_heads // num_kv_heads
            by_cp[member.cp].append(part.view(self._counts[member.cp], num_kv_heads, heads, d))
        return torch.cat([torch.cat(parts, dim=2) for parts in by_cp])

    def scatter(self, found_AKGd1: Tensor) -> Tensor:
        """What every member found for this one's queries, ``found_PTHd1``."""
        K, width = found_AKGd1.shape[1], found_AKGd1.shape[-1]
        firsts, taken, pieces = [0, *accumulate(self._counts)], [0] * len(self._counts), []
        for member in self._members:
            rows = slice(firsts[member.cp], firsts[member.cp + 1])
            heads = slice(taken[member.cp], taken[member.cp] + member.num_query_heads // K)
            taken[member.cp] = heads.stop
            pieces.append(found_AKGd1[rows, :, heads].reshape(-1, width))
        P, T, H = self._dcp.world_size, self._counts[self._own.cp], self._own.num_query_heads
        return self._dcp.all_to_allv(torch.cat(pieces), self._sizes, output_splits=[T * H] * P).view(P, T, H, width)


@final
class _Keeper:
    """Which rows of this rank's cache hold which positions of a sequence."""

    def __init__(self, cache: PagedKvCache, page_size: int, kept: range) -> None:
        device = cache.keys.device
        self.device, self.dtype = device, cache.keys.dtype
        self._page_size, self._size = page_size, cache.page_size
        self._kept_r = torch.tensor(kept, dtype=torch.int64, device=device)

    def find(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Rows of all tokens of a sequence up to the last of ``chunk``, and their positions."""
        blocks_B1 = torch.tensor(chunk.blocks[: -(-chunk.length // self._page_size)], device=self.device).unsqueeze(1)
        positions_S = (torch.arange(len(blocks_B1), device=self.device).unsqueeze(1) * self._page_size + self._kept_r).flatten()
        rows_S = (blocks_B1 * self._size + torch.arange(len(self._kept_r), device=self.device)).flatten()
        count = int((positions_S < chunk.length).sum())
        return rows_S[:count], positions_S[:count]


@final
class _Part(NamedTuple):
    """Sequences with equally many asking tokens, attended to in one call over what this rank keeps of them.

    Attributes:
        places: ``(N, T)``, their tokens among the A.
        rows: ``(N, S)``, their rows of the cache, padded.
        mask: What each query sees, rows ordered by token, then query head.
    """

    places: Tensor
    rows: Tensor
    mask: KeyMask

    def attend(self, q_NTKGd: Tensor, cached_NSLd: Tensor) -> Tensor:
        """The partial results with their weights, ``(N, T, K, G, d + 1)``."""
        N, T, K, G, d = q_NTKGd.shape
        q_NKRd, kv_NLSd = q_NTKGd.transpose(1, 2).reshape(N, K, T * G, d), cached_NSLd.transpose(1, 2)
        out_NKRd, weight_NKR = partial_attention(q_NKRd, kv_NLSd[:, :K], kv_NLSd[:, K:], self.mask)
        return torch.cat((out_NKRd, weight_NKR.unsqueeze(-1)), dim=-1).view(N, K, T, G, d + 1).transpose(1, 2)


def _parts(asking: Sequence[Chunk], keeper: _Keeper, num_heads: int) -> Iterator[_Part]:
    """Single tokens together, padded to the longest sequence; longer chunks one by one."""
    every = list(zip(_rows(asking), asking, strict=True))
    singles = [(new, chunk) for new, chunk in every if len(new) == 1]
    groups = [[(new, chunk)] for new, chunk in every if len(new) > 1]
    for group in (*groups, singles) if singles else groups:
        found = [keeper.find(chunk) for _, chunk in group]
        written = next((int(rows[0]) for rows, _ in found if len(rows)), 0)  # what nobody wrote may not be a number
        rows_NS = pad_sequence([rows for rows, _ in found], batch_first=True, padding_value=written)
        beyond = max(chunk.length for _, chunk in group)
        at_NS = pad_sequence([positions for _, positions in found], batch_first=True, padding_value=beyond)
        sees_NT = torch.tensor([range(chunk.start, chunk.length) for _, chunk in group], device=keeper.device)
        places_NT = torch.tensor([new for new, _ in group], device=keeper.device)
        visible_NRS = (at_NS.unsqueeze(1) <= sees_NT.unsqueeze(2)).repeat_interleave(num_heads, dim=1)
        yield _Part(places_NT, rows_NS, KeyMask.of(visible_NRS, keeper.dtype))


def _at_hand(
    shares: Sequence[Batch], begun: set[str], own: Sequence[Chunk], device: torch.device
) -> list[tuple[slice, Tensor, Tensor | None]]:
    """For each own chunk of a request that begins: its tokens, where the keys it sees are among the new ones, its mask."""
    places: dict[str, dict[int, int]] = {name: {} for name in begun}
    for place, (chunk, at) in enumerate(_tokens(shares)):
        if chunk.request_id in begun:
            places[chunk.request_id][at] = place
    found = []
    for new, chunk in zip(_rows(own), own, strict=True):
        if chunk.request_id in begun:
            seen = [places[chunk.request_id][at] for at in range(chunk.length)]
            mask = causal_mask(len(new), chunk.length, device=device)
            found.append((slice(new.start, new.stop), torch.tensor(seen, device=device), mask))
    return found


def _tokens(shares: Sequence[Batch]) -> Iterator[tuple[Chunk, int]]:
    """Every new token, as chunk and position, one share after the other."""
    return ((chunk, at) for share in shares for chunk in share.chunks for at in range(chunk.start, chunk.length))


def _rows(chunks: Sequence[Chunk]) -> list[range]:
    """The rows of each chunk's tokens."""
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    return [range(end - len(chunk.token_ids), end) for end, chunk in zip(ends, chunks, strict=True)]


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
