"""Decode steps as device graphs: one per batch size and length, captured once, replayed with a batch padded up to the next one.

Legend: N sequences of a graph, B blocks of its longest sequence, S tokens in them, H query heads and K key/value heads of this
rank, d size of a head, D hidden size.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel_runtime.context.capture import CapturedGraph, GraphCapture
from parallel_runtime.models.causal_lm import CausalLM
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.kv_cache import PagedKvCache

__all__ = ["DecodeGraphs", "graph_sizes"]

_LENGTHS: Final = (256, 1024, 4096)


def graph_sizes(max_requests: int, max_tokens: int) -> tuple[tuple[int, int], ...]:
    """What graphs are captured.

    Args:
        max_requests: Requests in one batch at most.
        max_tokens: Tokens of one request at most.

    Returns:
        Pairs of batch size and length, largest first: powers of two and ``max_requests``; 256, 1024 and 4096 tokens as far as
        requests can be longer than the one before. What is longer than all of them runs without a graph.
    """
    sizes = {1 << power for power in range(max_requests.bit_length())} | {max_requests}
    lengths = [length for before, length in zip((0, *_LENGTHS), _LENGTHS, strict=False) if before < max_tokens]
    return tuple(product(sorted(sizes, reverse=True), sorted(lengths, reverse=True)))


@final
class DecodeGraphs:
    """The graphs of one rank's model over one KV cache.

    Args:
        model: Without experts, whose routing the CPU takes part in.
        cache: What the graphs write and read. One more block than the scheduling policy uses: what only fills up goes there.
        sizes: From ``graph_sizes``; equal on every rank that captures.
        capture: The block to capture them in.

    Collective: as the model's forward, two for each graph; all ranks that capture, same order.
    """

    def __init__(self, model: CausalLM, cache: PagedKvCache, *, sizes: Sequence[tuple[int, int]], capture: GraphCapture) -> None:
        self._sizes = sorted(sizes)
        self._capture = capture
        self._graphs: dict[tuple[int, int], _DecodeGraph] = {}
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = _DecodeGraph(model, cache, *size, capture)

    def choose(self, batch: Batch) -> tuple[int, int] | None:
        """The smallest graph that a batch fits into.

        Args:
            batch: What is to be computed.

        Returns:
            Batch size and length; ``None`` where some chunk has several tokens, or no graph is large enough.
        """
        chunks = batch.chunks
        if not chunks or any(len(chunk.token_ids) != 1 for chunk in chunks):
            return None
        longest = max(chunk.length for chunk in chunks)
        return next((size for size in self._sizes if size[0] >= len(chunks) and size[1] >= longest), None)

    def run(self, size: tuple[int, int], batch: Batch, hidden_TD: Tensor | None) -> Tensor:
        """Replay a graph.

        Args:
            size: From ``choose``.
            batch: One token of each of its requests.
            hidden_TD: What the stage before made; ``None`` on the first stage.

        Returns:
            New tensor ``(T, D)``, as the model's forward gives it.

        Raises:
            StaleContextError: The context that the graphs were captured in is closed.

        Collective: as the model's forward; equal on every member.
        """
        return self._graphs[size].run(batch, hidden_TD)

    def close(self) -> None:
        """Give back the graphs and their memory."""
        self._capture.close()


@final
class _DecodeGraph:
    def __init__(self, model: CausalLM, cache: PagedKvCache, num_sequences: int, length: int, capture: GraphCapture) -> None:
        self._model, self._cache = model, cache
        self._num_sequences = num_sequences
        self._num_blocks = -(-length // cache.page_size)
        device = cache.keys.device
        self._spare = cache.num_blocks - 1
        self._told_NX = self._told(Batch()).to(device)
        self._hidden_ND: Tensor | None = None
        if not model.is_first_stage:
            self._hidden_ND = torch.zeros(num_sequences, model.config.hidden_size, dtype=model.dtype, device=device)
        self._graph: CapturedGraph[Tensor] = capture.graph(self._forward)

    def run(self, batch: Batch, hidden_TD: Tensor | None) -> Tensor:
        self._told_NX.copy_(self._told(batch))
        if self._hidden_ND is not None and hidden_TD is not None:
            self._hidden_ND[: len(hidden_TD)].copy_(hidden_TD)
        return self._graph.replay()[: len(batch.chunks)].clone()

    def _told(self, batch: Batch) -> Tensor:
        """Per sequence its token, its position and its blocks, filled up with sequences of one token in the spare block."""
        rows = [
            (
                *chunk.token_ids,
                chunk.start,
                *chunk.blocks[: self._num_blocks],
                *[self._spare] * (self._num_blocks - len(chunk.blocks)),
            )
            for chunk in batch.chunks
        ]
        filler = (0, 0, *[self._spare] * self._num_blocks)
        return torch.tensor([*rows, *[filler] * (self._num_sequences - len(rows))], dtype=torch.int64)

    def _forward(self) -> Tensor:
        token_N, position_N, blocks_NB = self._told_NX[:, 0], self._told_NX[:, 1], self._told_NX[:, 2:]
        inputs = token_N if self._hidden_ND is None else self._hidden_ND
        hidden_ND: Tensor = self._model(inputs, position_N, _PaddedStep(self._cache, position_N, blocks_NB))
        return hidden_ND


@final
class _PaddedStep:
    """One new token of each of N sequences, all in shapes that no value changes."""

    def __init__(self, cache: PagedKvCache, position_N: Tensor, blocks_NB: Tensor) -> None:
        page = torch.arange(cache.page_size, device=blocks_NB.device)
        rows_NS = (blocks_NB.unsqueeze(-1) * cache.page_size + page).flatten(1)
        beyond_NS = torch.arange(rows_NS.shape[1], device=rows_NS.device) > position_N.unsqueeze(1)
        self._cache = cache
        self._written_N = rows_NS.gather(1, position_N.unsqueeze(1)).squeeze(1)
        self._rows_NS = torch.where(beyond_NS, rows_NS[:, :1], rows_NS)  # what nobody wrote may not be a number
        mask_NS = torch.zeros(beyond_NS.shape, dtype=cache.keys.dtype, device=rows_NS.device).masked_fill_(beyond_NS, -torch.inf)
        self._mask_N11S = mask_NS[:, None, None]

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        rows_RLd, keys_RKd, values_RKd = self._cache.layer(layer)
        keys_RKd.index_copy_(0, self._written_N, k_TKd)
        values_RKd.index_copy_(0, self._written_N, v_TKd)
        (N, S), (_, H, d), K = self._rows_NS.shape, q_THd.shape, k_TKd.shape[1]
        kv_NLSd = rows_RLd.index_select(0, self._rows_NS.flatten()).view(N, S, 2 * K, d).transpose(1, 2)
        # the query heads that share a key head stand where several tokens would: nothing is copied
        q_NKGd = q_THd.reshape(N, K, H // K, d)
        out = scaled_dot_product_attention(q_NKGd, kv_NLSd[:, :K], kv_NLSd[:, K:], attn_mask=self._mask_N11S)
        return out.reshape(N, H, d)
