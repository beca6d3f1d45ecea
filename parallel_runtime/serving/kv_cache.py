"""Keys and values of one rank in pages, so that any block may hold any part of any request.

Legend: T new tokens of a step, S tokens of one sequence once the step is done, H query heads and K key/value heads of this rank,
d size of a head.
"""

from typing import final

import torch
from torch import Tensor

from parallel_runtime.layers.attention import Attention, causal_attention, causal_mask
from parallel_runtime.serving.policy import Batch, Chunk

__all__ = ["PagedKvCache"]


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
        shape = (num_layers, num_blocks * page_size, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.page_size = page_size

    def step(self, batch: Batch) -> Attention:
        """Bind one batch.

        Args:
            batch: What the step computes.

        Returns:
            What the forward of this step is handed.
        """
        return _Step(self, batch)


@final
class _Step:
    """Where the tokens of one batch are written and read."""

    def __init__(self, cache: PagedKvCache, batch: Batch) -> None:
        self._cache = cache
        self._sequences = [_Sequence(chunk, cache) for chunk in batch.chunks]
        none = torch.zeros(0, dtype=torch.int64, device=cache.keys.device)
        self._written_T = torch.cat([none, *(sequence.written for sequence in self._sequences)])

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._written_T, k_TKd)
        values.index_copy_(0, self._written_T, v_TKd)
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        first = 0
        for sequence in self._sequences:
            new = slice(first, first + sequence.count)
            k_KSd, v_KSd = sequence.read(keys), sequence.read(values)
            out_THd[new] = causal_attention(q_THd[new], k_KSd, v_KSd, sequence.mask)
            first = new.stop
        return out_THd


@final
class _Sequence:
    """One request's rows in the cache."""

    def __init__(self, chunk: Chunk, cache: PagedKvCache) -> None:
        device, size = cache.keys.device, cache.page_size
        self.count = len(chunk.token_ids)
        self.mask = causal_mask(self.count, chunk.length, device=device)
        blocks = torch.tensor(chunk.blocks, device=device)
        rows_S = (blocks.unsqueeze(1) * size + torch.arange(size, device=device)).flatten()[: chunk.length]
        self.written = rows_S[chunk.start :]
        first = chunk.blocks[0]
        is_run = chunk.blocks == tuple(range(first, first + len(chunk.blocks)))
        self._rows = slice(first * size, first * size + chunk.length) if is_run else rows_S

    def read(self, cache_RKd: Tensor) -> Tensor:
        """``(K, S, d)``, a view where the blocks follow each other, a copy elsewhere."""
        return cache_RKd[self._rows].transpose(0, 1)
