"""One rank's shard of a model with its KV cache, and one forward over a batch.

Legend: T tokens of a batch, S rows whose next token is wanted, D hidden size.
"""

from typing import final

import torch
from torch import Tensor

from parallel_runtime.errors import ArgumentError
from parallel_runtime.models.causal_lm import CausalLM
from parallel_runtime.serving.batch import Batch
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.serving.messages import Sampled
from parallel_runtime.serving.sampling import TokenSampler

__all__ = ["ModelRunner"]


@final
class ModelRunner:
    """Runs one rank's part of a model on batches of the scheduling policy.

    Args:
        model: This rank's shard of one stage, with its weights.
        page_size: Tokens in one block of KV cache.
    """

    def __init__(self, model: CausalLM, *, page_size: int) -> None:
        self.model = model
        self._page_size = page_size
        self._cache: PagedKvCache | None = None

    @property
    def block_bytes(self) -> int:
        """Memory of one block on this rank, keys and values of all its layers."""
        model = self.model
        per_token = 2 * len(model.layers) * model.num_kv_heads * model.head_dim * model.dtype.itemsize
        return per_token * self._page_size

    def open_cache(self, num_blocks: int, *, device: torch.device | None = None) -> None:
        """Make the KV cache; what an earlier one held is gone.

        Args:
            num_blocks: Blocks, equal on every rank of the replica.
            device: Of the model.
        """
        model = self.model
        self._cache = PagedKvCache(
            num_layers=len(model.layers),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=num_blocks,
            page_size=self._page_size,
            dtype=model.dtype,
            device=device,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden_TD: Tensor | None = None) -> Tensor:
        """Run this stage's layers and keep the new keys and values.

        Args:
            batch: Equal on every member of the stage; without chunks it only takes part in the exchange of experts.
            hidden_TD: What the stage before made; ``None`` on the first stage.

        Returns:
            ``(T, D)``, the rows of all chunks in batch order.

        Raises:
            ArgumentError: There is no KV cache yet, or ``hidden_TD`` is given to the first stage or missing on another.

        Collective: those of ``CausalLM.forward``.
        """
        if self._cache is None:
            raise ArgumentError("a runner needs its KV cache before a forward; call open_cache first")
        if (hidden_TD is None) != self.model.is_first_stage:
            raise ArgumentError("the first stage takes tokens and every other one the hidden states of the stage before")
        device = self._cache.keys.device
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.length)]
        if hidden_TD is None:
            tokens = [token for chunk in batch.chunks for token in chunk.token_ids]
            hidden_TD = torch.tensor(tokens, dtype=torch.int64, device=device)
        positions_T = torch.tensor(positions, dtype=torch.int64, device=device)
        return self.model(hidden_TD, positions_T, self._cache.step(batch))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped

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

        Collective: that of ``CausalLM.greedy`` where every row is plain, else those of ``TokenSampler``; none without rows.
        """
        chunks = batch.sampled
        if not chunks:
            return Sampled(token_ids=())
        hidden_SD = hidden_TD[_last_rows(batch)]
        head = self.model.lm_head
        if head is None or all(chunk.sampling.is_plain for chunk in chunks):
            return Sampled(token_ids=tuple(self.model.greedy(hidden_SD).tolist()))
        return TokenSampler(head.tp, head.shards, base_seed=base_seed).choose(chunks, head.local(hidden_SD))


def _last_rows(batch: Batch) -> list[int]:
    """Row of the last token of every sampled chunk."""
    rows, end = [], 0
    for chunk in batch.chunks:
        end += len(chunk.token_ids)
        if chunk.is_sampled:
            rows.append(end - 1)
    return rows
