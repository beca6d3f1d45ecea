"""One rank's shard of a model with its KV cache, and one forward over a batch.

Legend: T tokens of a batch, S rows whose next token is wanted, D hidden size.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parallel_runtime.context.capture import GraphCapture
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention
from parallel_runtime.models.causal_lm import CausalLM
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.context_cache import context_step
from parallel_runtime.serving.context_groups import ContextGroups
from parallel_runtime.serving.graphs import DecodeGraphs
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.serving.messages import Sampled
from parallel_runtime.serving.sampling import TokenSampler
from parallel_runtime.topology.sequence import rows_per_block

__all__ = ["ModelRunner"]


@final
class ModelRunner:
    """Runs one rank's part of a model on batches of the scheduling policy.

    Args:
        model: This rank's shard of one stage, with its weights.
        page_size: Tokens in one block of KV cache.
        context: Over whom the tokens of sequences are spread; ``None`` where they are not.
    """

    def __init__(self, model: CausalLM, *, page_size: int, context: ContextGroups | None = None) -> None:
        self.model = model
        self._page_size = page_size
        self._context = None if context is None or context.is_alone else context
        self._rows_per_block = rows_per_block(page_size, parts=context.dcp.world_size if context else 1)
        self._cache: PagedKvCache | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def block_bytes(self) -> int:
        """Memory of one block on this rank, keys and values of all its layers."""
        model = self.model
        per_token = 2 * len(model.layers) * model.num_kv_heads * model.head_dim * model.dtype.itemsize
        return per_token * self._rows_per_block

    @property
    def can_capture(self) -> bool:
        """Whether its decode steps need no CPU between the layers: not with experts, nor with sequences that are cut."""
        return self._context is None and self.model.config.mixture is None

    def open_cache(self, num_blocks: int, *, device: torch.device | None = None, for_graphs: bool = False) -> None:
        """Make the KV cache; what an earlier one held is gone.

        Args:
            num_blocks: Blocks, equal on every rank of the replica.
            device: Of the model.
            for_graphs: Whether ``capture_decodes`` follows, which needs one more block.
        """
        self.close()
        model = self.model
        self._cache = PagedKvCache(
            num_layers=len(model.layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=num_blocks + for_graphs,
            page_size=self._rows_per_block,
            dtype=model.dtype,
            device=device,
        )

    @torch.inference_mode()
    def capture_decodes(self, sizes: Sequence[tuple[int, int]], capture: GraphCapture) -> None:
        """Capture steps of one new token per request; ``forward`` replays them from then on, where a batch fits into one.

        Args:
            sizes: Batch size and length of each, as from ``graph_sizes``; equal on every rank that captures.
            capture: The block to capture in; its graphs are this runner's.

        Raises:
            ArgumentError: There is no KV cache with a block for graphs, the model has experts, or sequences are cut.

        Collective: those of ``CausalLM.forward``, twice for each graph; same order on every rank.
        """
        if self._cache is None or self._cache.num_blocks < 2:
            raise ArgumentError("capture_decodes needs a KV cache with a block of its own; call open_cache(..., for_graphs=True)")
        if not self.can_capture:
            raise ArgumentError("models with experts, and sequences that are cut over ranks, have no decode graphs")
        self._graphs = DecodeGraphs(self.model, self._cache, sizes=sizes, capture=capture)

    def close(self) -> None:
        """Give back the graphs, if any were captured; ``forward`` goes on without. Twice is nothing."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden_TD: Tensor | None = None) -> Tensor:
        """Run this stage's layers and keep the new keys and values.

        Args:
            batch: Equal on every member of the stage; without chunks it only takes part in the exchange of experts.
            hidden_TD: What the stage before made; ``None`` on the first stage.

        Returns:
            ``(T, D)``, the rows of all chunks in batch order; with ``context``, of this rank's share of them.

        Raises:
            ArgumentError: There is no KV cache yet, or ``hidden_TD`` is given to the first stage or missing on another.

        Collective: those of ``CausalLM.forward``, and of ``context_step``.
        """
        if self._cache is None:
            raise ArgumentError("a runner needs its KV cache before a forward; call open_cache first")
        if (hidden_TD is None) != self.model.is_first_stage:
            raise ArgumentError("the first stage takes tokens and every other one the hidden states of the stage before")
        size = None if self._graphs is None else self._graphs.choose(batch)
        if self._graphs is not None and size is not None:
            return self._graphs.run(size, batch, hidden_TD)
        own, step = self._bind(batch, self._cache)
        device = self._cache.keys.device
        positions = [position for chunk in own.chunks for position in range(chunk.start, chunk.length)]
        if hidden_TD is None:
            tokens = [token for chunk in own.chunks for token in chunk.token_ids]
            hidden_TD = torch.tensor(tokens, dtype=torch.int64, device=device)
        positions_T = torch.tensor(positions, dtype=torch.int64, device=device)
        return self.model(hidden_TD, positions_T, step)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped

    @torch.inference_mode()
    def sample(self, batch: Batch, hidden_TD: Tensor, *, base_seed: int) -> Sampled:
        """Choose the next token of each of ``batch.sampled``; last stage only.

        Args:
            batch: The batch.
            hidden_TD: What ``forward`` returned for it.
            base_seed: Seed of this replica, for requests without one of their own.

        Returns:
            The tokens, in the order of ``batch.sampled``, and what else is wanted; equal on every member of the stage.

        Raises:
            ArgumentError: This is not the last stage.

        Collective: over ``cp`` one all_gatherv of the rows; that of ``CausalLM.greedy`` where every row is plain, else those of
            ``TokenSampler``; none without rows.
        """
        chunks = batch.sampled
        if not chunks:
            return Sampled(token_ids=())
        hidden_SD = self._last_rows(batch, hidden_TD)
        head = self.model.lm_head
        if head is None or all(chunk.sampling.is_plain for chunk in chunks):
            return Sampled(token_ids=tuple(self.model.greedy(hidden_SD).tolist()))
        return TokenSampler(head.tp, head.shards, base_seed=base_seed).choose(chunks, head.local(hidden_SD))

    def _bind(self, batch: Batch, cache: PagedKvCache) -> tuple[Batch, Attention]:
        """What this rank computes of a batch, and its attention."""
        if self._context is None:
            return batch, cache.step(batch)
        shares = self._context.share(batch)
        step = context_step(cache, batch, shares, groups=self._context, page_size=self._page_size)
        return shares[self._context.cp.rank_in_group], step

    def _last_rows(self, batch: Batch, hidden_TD: Tensor) -> Tensor:
        """The row of the last token of every sampled chunk, from the rank that computed it."""
        if self._context is None:
            return hidden_TD[_last_rows(batch)]
        shares = self._context.share(batch)
        own_SD = hidden_TD[_last_rows(shares[self._context.cp.rank_in_group])]
        return self._context.gather_sampled(batch, shares, own_SD)


def _last_rows(batch: Batch) -> list[int]:
    """Row of the last token of every sampled chunk."""
    rows, end = [], 0
    for chunk in batch.chunks:
        end += len(chunk.token_ids)
        if chunk.is_sampled:
            rows.append(end - 1)
    return rows
