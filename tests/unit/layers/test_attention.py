"""Causal attention equals a slow reference, for every way of cutting a sequence into steps."""

import pytest
import torch
from torch import Tensor

from parallel_runtime.layers import causal_attention, causal_mask


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Token by token and head by head; q (T, H, d), k and v (K, S, d)."""
    T, H, d = q.shape
    K, S, _ = k.shape
    out = torch.empty_like(q)
    for token in range(T):
        seen = S - T + token + 1
        for head in range(H):
            kv = head // (H // K)
            weights = torch.softmax(k[kv, :seen] @ q[token, head] / d**0.5, dim=0)
            out[token, head] = weights @ v[kv, :seen]
    return out


@pytest.mark.parametrize(("H", "K"), [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 7), (7, 7), (3, 7), (6, 7)])
def test_every_token_sees_itself_and_what_came_before(T: int, S: int, H: int, K: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((T, H, 8), (K, S, 8), (K, S, 8)))
    out = causal_attention(q, k, v, causal_mask(T, S))
    torch.testing.assert_close(out, reference(q, k, v))
    assert out.is_contiguous()


def test_strided_queries_and_keys_are_taken_as_they_are() -> None:
    both = torch.randn(5, 9, 8)
    store = torch.randn(3, 32, 8)
    for T in (1, 5):
        q, k = both[:T, :6], store[:, :7]
        torch.testing.assert_close(causal_attention(q, k, k, causal_mask(T, 7)), reference(q, k, k))


def test_a_mask_is_made_only_where_one_is_needed() -> None:
    assert causal_mask(1, 9) is None
    assert causal_mask(4, 4) is None
    mask = causal_mask(2, 4)
    assert mask is not None
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]
