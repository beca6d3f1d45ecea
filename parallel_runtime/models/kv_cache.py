"""A KV cache with one slot of fixed length per sequence: the simplest owner of keys and values.

Enough for tests, evaluation and small batches. A server that shares prefixes brings its own; the model only sees ``Attention``.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention, causal_attention, causal_mask

__all__ = ["SlotKvCache"]


@final
class SlotKvCache:
    """Keys and values of ``num_slots`` sequences of up to ``max_length`` tokens, for the layers of one stage.

    Args:
        num_layers: Layers of this stage.
        num_kv_heads: K, key/value heads of this rank.
        head_dim: d.
        num_slots: Sequences held at once.
        max_length: Tokens a sequence may have.
        dtype: Of the model.
        device: Of the model.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, max_length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_slots
        self.max_length = max_length

    def reset(self, slot: int) -> None:
        """Forget the sequence in ``slot``."""
        self.lengths[slot] = 0

    def step(self, slots: Sequence[int], num_new: Sequence[int]) -> Attention:
        """Bind one step: ``num_new[i]`` tokens are appended to the sequence in ``slots[i]``.

        Args:
            slots: Distinct slots, in the order of the step's flattened tokens.
            num_new: Tokens of each, at least 1.

        Returns:
            What the forward of this step is handed; good for exactly one forward.

        Raises:
            ArgumentError: A slot is named twice, or a sequence would outgrow ``max_length``.
        """
        if len(set(slots)) != len(slots):
            raise ArgumentError(f"slots {list(slots)} name a slot twice; a step appends to each sequence once")
        starts = [self.lengths[slot] for slot in slots]
        for slot, start, count in zip(slots, starts, num_new, strict=True):
            if count < 1 or start + count > self.max_length:
                raise ArgumentError(
                    f"slot {slot} has {start} tokens and would get {count} more; a slot holds 1 to {self.max_length}"
                )
        for slot, start, count in zip(slots, starts, num_new, strict=True):
            self.lengths[slot] = start + count
        return _Step(self, tuple(zip(slots, starts, num_new, strict=True)))


class _Step:
    """The sequences of one step, as (slot, tokens before the step, new tokens)."""

    def __init__(self, cache: SlotKvCache, sequences: tuple[tuple[int, int, int], ...]) -> None:
        self._cache = cache
        self._sequences = sequences
        device = cache.keys.device
        self._masks = [causal_mask(count, start + count, device=device) for _, start, count in sequences]

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        first = 0
        for (slot, start, count), mask in zip(self._sequences, self._masks, strict=True):
            new, end = slice(first, first + count), start + count
            keys[slot, :, start:end] = k_TKd[new].transpose(0, 1)
            values[slot, :, start:end] = v_TKd[new].transpose(0, 1)
            out_THd[new] = causal_attention(q_THd[new], keys[slot, :, :end], values[slot, :, :end], mask)
            first += count
        return out_THd
