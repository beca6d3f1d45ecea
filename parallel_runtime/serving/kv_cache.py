"""Keys and values of one rank in pages, so that any block may hold any part of any request.

Legend: T new tokens of a step, N sequences of a group, S tokens of the longest of them once the step is done, R rows of the
cache, H query heads and K key/value heads of this rank, d size of a head.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel_runtime.layers.attention import Attention, causal_attention, causal_mask
from parallel_runtime.serving.batch import Batch, Chunk

__all__ = ["PagedKvCache"]

_LEAST_SHARE = 0.5
"""Sequences are attended to in one call where each has at least this share of the longest one's tokens."""


@final
class PagedKvCache:
    """Keys and values of ``num_blocks`` blocks of ``page_size`` tokens, for the layers of one stage.

    Memory is reserved at once; on CPU the system hands out pages of it when they are first written.

    Args:
        num_layers: Layers of this stage.
        num_kv_heads: K.
        head_dim: d.
        num_blocks: Blocks, numbered as the scheduling policy numbers them.
        page_size: Tokens in one block.
        dtype: Of the model.
        device: Of the model.

    Attributes:
        keys: ``(num_layers, R, K, d)``, a view; a token's keys and values lie side by side, so that both are read at once.
        values: Likewise.
        num_blocks: Blocks.
        page_size: Tokens in one block.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        rows = torch.empty((num_layers, num_blocks * page_size, 2 * num_kv_heads, head_dim), dtype=dtype, device=device)
        self.keys, self.values = rows[:, :, :num_kv_heads], rows[:, :, num_kv_heads:]
        self.num_blocks = num_blocks
        self.page_size = page_size
        self._layers = [(layer, layer[:, :num_kv_heads], layer[:, num_kv_heads:]) for layer in rows.unbind()]
        self._scratch = rows.new_empty(0)

    def step(self, batch: Batch) -> Attention:
        """Bind one batch.

        Args:
            batch: What the step computes.

        Returns:
            What the forward of this step is handed.
        """
        return _Step(self, batch)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """All rows of a layer: keys and values side by side ``(R, 2 K, d)``, keys, values."""
        return self._layers[index]

    def gather(self, rows_RLd: Tensor, wanted: Tensor) -> Tensor:
        """Copy rows of a layer, in memory that the next call uses again.

        Args:
            rows_RLd: First of ``layer``.
            wanted: Their numbers, of any shape.

        Returns:
            ``(*wanted.shape, 2 K, d)``.
        """
        shape = rows_RLd.shape[1:]
        numel = wanted.numel() * shape.numel()
        if self._scratch.numel() < numel:
            self._scratch = rows_RLd.new_empty(numel)
        out = self._scratch[:numel].view(-1, *shape)
        return torch.index_select(rows_RLd, 0, wanted.flatten(), out=out).view(*wanted.shape, *shape)


@final
class _Step:
    """Where the tokens of one batch are written and read: chunks one by one, single new tokens in groups of like length."""

    def __init__(self, cache: PagedKvCache, batch: Batch) -> None:
        self._cache = cache
        device = cache.keys.device
        firsts = accumulate((len(chunk.token_ids) for chunk in batch.chunks), initial=0)
        written = [row for chunk in batch.chunks for row in _rows(chunk, cache.page_size)]
        self._written_T = torch.tensor(written, dtype=torch.int64, device=device)
        self._chunks: list[_Prefill] = []
        singles: list[tuple[int, Chunk]] = []
        for first, chunk in zip(firsts, batch.chunks, strict=False):
            if len(chunk.token_ids) == 1:
                singles.append((first, chunk))
            else:
                self._chunks.append(_Prefill(first, chunk, cache))
        self._groups = [_Decodes(group, cache) for group in _alike(singles)]
        self._is_one_group = len(self._groups) == 1 and not self._chunks

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        rows_RLd, keys_RKd, values_RKd = self._cache.layer(layer)
        keys_RKd.index_copy_(0, self._written_T, k_TKd)
        values_RKd.index_copy_(0, self._written_T, v_TKd)
        if self._is_one_group:
            return self._groups[0].attend(q_THd, rows_RLd)
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        for chunk in self._chunks:
            out_THd[chunk.new] = chunk.attend(q_THd[chunk.new], k_TKd, v_TKd, rows_RLd)
        for group in self._groups:
            out_THd.index_copy_(0, group.places_N, group.attend(q_THd.index_select(0, group.places_N), rows_RLd))
        return out_THd


@final
class _Prefill:
    """Several new tokens of one request."""

    def __init__(self, first: int, chunk: Chunk, cache: PagedKvCache) -> None:
        device, size = cache.keys.device, cache.page_size
        count = len(chunk.token_ids)
        self._cache = cache
        self.new = slice(first, first + count)
        self._mask = causal_mask(count, chunk.length, device=device)
        self._is_whole = chunk.start == 0
        rows = [block * size + row for block in chunk.blocks for row in range(size)][: chunk.length]
        self._rows_S = torch.tensor([] if self._is_whole else rows, dtype=torch.int64, device=device)

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, rows_RLd: Tensor) -> Tensor:
        if self._is_whole:  # everything it sees is at hand
            keys_KSd, values_KSd = k_TKd[self.new].transpose(0, 1), v_TKd[self.new].transpose(0, 1)
        else:
            keys_KSd, values_KSd = self._cache.gather(rows_RLd, self._rows_S).transpose(0, 1).chunk(2)
        return causal_attention(q_THd, keys_KSd, values_KSd, self._mask)


@final
class _Decodes:
    """One new token of each of several requests: padded to the longest, attended to in one call."""

    def __init__(self, members: Sequence[tuple[int, Chunk]], cache: PagedKvCache) -> None:
        device, size = cache.keys.device, cache.page_size
        self._cache = cache
        self.places_N = torch.tensor([place for place, _ in members], device=device)
        lengths = [chunk.length for _, chunk in members]
        most = -(-max(lengths) // size)
        table = [(*chunk.blocks[:most], *chunk.blocks[:1] * (most - len(chunk.blocks))) for _, chunk in members]
        rows_NBP = torch.tensor(table, device=device).mul_(size).unsqueeze(-1) + torch.arange(size, device=device)
        rows_NS = rows_NBP.flatten(1)[:, : max(lengths)]
        self._mask_N11S: Tensor | None = None
        if min(lengths) < max(lengths):
            beyond_NS = torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)
            rows_NS = torch.where(beyond_NS, rows_NS[:, :1], rows_NS)  # what nobody wrote may not be a number
            mask_NS = torch.zeros(beyond_NS.shape, dtype=cache.keys.dtype, device=device).masked_fill_(beyond_NS, -torch.inf)
            self._mask_N11S = mask_NS[:, None, None]
        blocks = members[0][1].blocks
        is_run = len(members) == 1 and blocks == tuple(range(blocks[0], blocks[0] + len(blocks)))
        self._run = slice(blocks[0] * size, blocks[0] * size + lengths[0]) if is_run else None
        self._rows_NS = rows_NS

    def attend(self, q_NHd: Tensor, rows_RLd: Tensor) -> Tensor:
        cached_NSLd = rows_RLd[self._run].unsqueeze(0) if self._run else self._cache.gather(rows_RLd, self._rows_NS)
        N, H, d = q_NHd.shape
        K = cached_NSLd.shape[2] // 2
        # the query heads that share a key head stand where several tokens would: nothing is copied
        q_NKGd, kv_NLSd = q_NHd.reshape(N, K, H // K, d), cached_NSLd.transpose(1, 2)
        out = scaled_dot_product_attention(q_NKGd, kv_NLSd[:, :K], kv_NLSd[:, K:], attn_mask=self._mask_N11S)
        return out.reshape(N, H, d)


def _rows(chunk: Chunk, page_size: int) -> list[int]:
    """Where the new tokens of ``chunk`` go."""
    blocks = chunk.blocks
    return [blocks[place // page_size] * page_size + place % page_size for place in range(chunk.start, chunk.length)]


def _alike(members: Sequence[tuple[int, Chunk]]) -> list[list[tuple[int, Chunk]]]:
    """Groups of like length, so that padding never doubles the work; in their given order where one group does."""
    lengths = [chunk.length for _, chunk in members]
    if not members or min(lengths) >= _LEAST_SHARE * max(lengths):
        return [list(members)] if members else []
    groups: list[list[tuple[int, Chunk]]] = []
    for member in sorted(members, key=lambda member: -member[1].length):
        if not groups or member[1].length < _LEAST_SHARE * groups[-1][0][1].length:
            groups.append([])
        groups[-1].append(member)
    return groups
