"""Attention over keys that are spread over ranks: each rank attends to those it keeps, and the parts are merged exactly.

Legend: N sequences of a call, R query rows of each (new tokens times the query heads that share a key/value head), S keys of this
rank, K key/value heads, d size of a head, P parts.
"""

from math import sqrt
from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["KeyMask", "merge_partials", "partial_attention", "plain_attention"]


@final
class KeyMask(NamedTuple):
    """Which keys of a part the queries see, ready for every layer.

    Attributes:
        added: ``(N, 1, R, S)``, added to the scores: 0 or ``-inf``.
        blind: ``(N, 1, R)`` bool, true for a query that sees no key of this part.
    """

    added: Tensor
    blind: Tensor

    @classmethod
    def of(cls, visible_NRS: Tensor, dtype: torch.dtype) -> "KeyMask":
        """Prepare a mask.

        Args:
            visible_NRS: Bool, true where a query sees a key.
            dtype: Of the queries.
        """
        added_NRS = torch.zeros(visible_NRS.shape, dtype=dtype, device=visible_NRS.device).masked_fill_(~visible_NRS, -torch.inf)
        return cls(added_NRS.unsqueeze(1), ~visible_NRS.any(-1).unsqueeze(1))


def partial_attention(q_NKRd: Tensor, keys_NKSd: Tensor, values_NKSd: Tensor, mask: KeyMask) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the weight that this part has in the whole.

    Args:
        q_NKRd: Queries, floating point.
        keys_NKSd: Keys, numbers where nobody sees them, too. May be strided, and may be none (``S = 0``).
        values_NKSd: Values, likewise.
        mask: Which of them each query sees; it may be none.

    Returns:
        ``out_NKRd``, float32, the softmax-weighted values, zeros where a query sees no key; and ``weight_NKR``, float32, the
        logarithm of the sum of ``exp(score)``, ``-inf`` there.
    """
    N, K, R, d = q_NKRd.shape
    if 0 in (N, R, keys_NKSd.shape[2]):  # the kernel does not take nothing
        return q_NKRd.new_zeros((N, K, R, d), dtype=torch.float32), q_NKRd.new_full((N, K, R), -torch.inf, dtype=torch.float32)
    if q_NKRd.device.type != "cpu":
        return plain_attention(q_NKRd, keys_NKSd, values_NKSd, mask)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out_NKRd, weight_NKR = attend(q_NKRd, keys_NKSd, values_NKSd, attn_mask=mask.added)
    return _without_blind(out_NKRd, weight_NKR, mask)


def plain_attention(q_NKRd: Tensor, keys_NKSd: Tensor, values_NKSd: Tensor, mask: KeyMask) -> tuple[Tensor, Tensor]:
    """``partial_attention`` from plain operations, on any device; scores are held in float32."""
    scores_NKRS = q_NKRd.float() @ keys_NKSd.float().transpose(-1, -2) / sqrt(q_NKRd.shape[-1]) + mask.added
    return _without_blind(scores_NKRS.softmax(-1) @ values_NKSd.float(), scores_NKRS.logsumexp(-1), mask)


def merge_partials(outs_Pd: Tensor, weights_P: Tensor) -> Tensor:
    """Attention over all keys, from the parts: each counts by its share of the whole sum, whatever the size of the scores.

    Args:
        outs_Pd: ``(P, ..., d)``, float32, as ``partial_attention`` gave them.
        weights_P: ``(P, ...)``. At least one part of each query saw a key.

    Returns:
        ``(..., d)``, float32.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3; Dao et al. 2022, arXiv:2205.14135, section 3.1.
    """
    return (outs_Pd * weights_P.softmax(0).unsqueeze(-1)).sum(0)


def _without_blind(out_NKRd: Tensor, weight_NKR: Tensor, mask: KeyMask) -> tuple[Tensor, Tensor]:
    """Nothing, of no weight, where a query sees no key."""
    blind_NKR = mask.blind.expand_as(weight_NKR)
    return out_NKRd.float().masked_fill(blind_NKR.unsqueeze(-1), 0.0), weight_NKR.masked_fill(blind_NKR, -torch.inf)
