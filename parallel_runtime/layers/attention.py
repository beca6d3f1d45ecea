"""Causal attention, and the seam between a model and whoever owns the KV cache.

Shapes: T new tokens of a step, S tokens a sequence has once the step is done, H query heads and K key/value heads of this rank,
d size of a head.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Attention", "causal_attention", "causal_mask"]


class Attention(Protocol):
    """One step's batch bound to a KV cache: what a model hands its queries, keys and values to.

    The model knows neither sequences nor pages. The owner of the cache binds them to a step, and the model calls ``attend`` once
    per layer, in layer order.
    """

    def attend(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Store the new keys and values, and let every query see its own sequence up to and including itself.

        Args:
            layer: Position of the layer among this stage's layers, from 0.
            q_THd: Queries of the step's tokens, rotated. Query head ``h`` reads key/value head ``h // (H // K)``.
            k_TKd: New keys, rotated; same tokens in the same order.
            v_TKd: New values.

        Returns:
            Tensor ``(T, H, d)`` of the dtype of ``q_THd``, contiguous.
        """
        ...


def causal_mask(num_new: int, length: int, *, device: torch.device | None = None) -> Tensor | None:
    """Which of ``length`` keys each of the last ``num_new`` tokens may see.

    Args:
        num_new: T, the new tokens; they are the last of the sequence.
        length: S, all tokens of the sequence, the new ones included.
        device: Where the mask is used.

    Returns:
        Bool tensor ``(T, S)``, true where a query sees a key, or ``None`` where no mask is needed: for one new token, which sees
        everything, and for a whole sequence, where plain causal attention is meant.
    """
    if num_new in (1, length):
        return None
    return torch.ones(num_new, length, dtype=torch.bool, device=device).tril_(length - num_new)


def causal_attention(q_THd: Tensor, k_KSd: Tensor, v_KSd: Tensor, mask_TS: Tensor | None) -> Tensor:
    """Attention of the last T tokens of one sequence over all its S tokens.

    Args:
        q_THd: Queries, floating point. H is a multiple of K; query head ``h`` reads key/value head ``h // (H // K)``.
        k_KSd: Keys, heads first. May be strided.
        v_KSd: Values, heads first. May be strided.
        mask_TS: ``causal_mask(T, S)``.

    Returns:
        New tensor ``(T, H, d)``.
    """
    T, H, d = q_THd.shape
    K = k_KSd.shape[0]
    keys, values = k_KSd.unsqueeze(0), v_KSd.unsqueeze(0)
    if T == 1:  # the query heads that share a key head stand where several tokens would: nothing is copied
        return scaled_dot_product_attention(q_THd.view(1, K, H // K, d), keys, values).view(1, H, d)
    queries = q_THd.transpose(0, 1).unsqueeze(0)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask_TS, is_causal=mask_TS is None, enable_gqa=H != K)
    return out[0].transpose(0, 1).contiguous()
