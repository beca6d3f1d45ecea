"""Attention in parts gives attention over the whole."""

from itertools import pairwise

import pytest
import torch

from parallel_runtime.layers.attention import causal_attention, causal_mask
from parallel_runtime.layers.context_parallel import KeyMask, merge_partials, partial_attention, plain_attention


@pytest.mark.parametrize("cuts", [(0, 7), (0, 1, 7), (0, 0, 3, 5, 7), (0, 2, 3, 4, 7, 7)])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    T, S, K, G, d = 4, 7, 2, 3, 8
    q_THd, k_KSd, v_KSd = size * torch.randn(T, K * G, d), torch.randn(K, S, d), torch.randn(K, S, d)
    expected = causal_attention(q_THd, k_KSd, v_KSd, causal_mask(T, S))
    visible_TS = torch.ones(T, S, dtype=torch.bool).tril_(S - T)
    q_NKRd = q_THd.view(T, K, G, d).transpose(0, 1).reshape(1, K, T * G, d)
    outs, weights = [], []
    for first, stop in pairwise(cuts):
        mask = KeyMask.of(visible_TS[None, :, first:stop].repeat_interleave(G, dim=1), torch.float32)
        out, weight = partial_attention(q_NKRd, k_KSd[None, :, first:stop], v_KSd[None, :, first:stop], mask)
        assert out.dtype == weight.dtype == torch.float32
        outs.append(out)
        weights.append(weight)
    merged = merge_partials(torch.stack(outs), torch.stack(weights))
    found = merged.view(K, T, G, d).transpose(0, 1).reshape(T, K * G, d)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_plain_arithmetic_agree(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    N, K, R, S, d = 3, 2, 5, 9, 16
    q_NKRd, kv_NSLd = torch.randn(N, K, R, d).to(dtype), torch.randn(N, S, 2 * K, d).to(dtype)
    keys, values = kv_NSLd.transpose(1, 2).chunk(2, dim=1)
    visible_NRS = torch.rand(N, R, S) < 0.5
    visible_NRS[1, 2] = False
    mask = KeyMask.of(visible_NRS, dtype)
    (out, weight), (plain, sums) = partial_attention(q_NKRd, keys, values, mask), plain_attention(q_NKRd, keys, values, mask)
    assert out.dtype == weight.dtype == torch.float32
    assert bool((out[1, :, 2] == 0).all())
    assert bool((weight[1, :, 2] == -torch.inf).all())
    assert bool(out.isfinite().all())
    assert bool((plain[1, :, 2] == 0).all())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(weight, sums, atol=1e-4, rtol=1e-4)


def test_no_keys_and_no_queries_are_parts_like_any_other() -> None:
    for rows, keys in ((3, 0), (0, 4), (0, 0)):
        mask = KeyMask.of(torch.ones(2, rows, keys, dtype=torch.bool), torch.float32)
        q_NKRd, k_NKSd = torch.randn(2, 1, rows, 8), torch.randn(2, 1, keys, 8)
        out, weight = partial_attention(q_NKRd, k_NKSd, k_NKSd, mask)
        assert out.shape == (2, 1, rows, 8)
        assert weight.shape == (2, 1, rows)
        assert bool((out == 0).all())
        assert bool((weight == -torch.inf).all())
