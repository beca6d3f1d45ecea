"""Normalisation and rotary positions equal those of ``transformers``."""

import pytest
import torch

from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers import RMSNorm, RotaryPositions, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    weight, x = torch.randn(16), torch.randn(5, 16).to(dtype)
    ours, theirs = RMSNorm(16, eps=1e-3, dtype=dtype), LlamaRMSNorm(16, eps=1e-3).to(dtype)
    ours.load(weight)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(ours(x), theirs(x))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x))
        assert ours(x[:0]).shape == (0, 16)
    assert torch.equal(ours.full_state()["weight"], weight.to(dtype))
    with pytest.raises(ArgumentError, match=r"weight has shape \(8,\)"):
        ours.load(weight[:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    positions = torch.tensor([0, 5, 6, 7000])
    q, k = torch.randn(4, 3, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    theirs = apply_rotary_pos_emb(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    turned = rotate(torch.cat([q, k], dim=1), RotaryPositions(8, theta=500.0).angles(positions, dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(turned[:, :3], theirs[0][0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(turned[:, 3:], theirs[1][0], atol=tolerance, rtol=tolerance)


def test_position_zero_and_factors() -> None:
    x = torch.randn(1, 2, 4)
    assert torch.equal(rotate(x, RotaryPositions(4, theta=10.0).angles(torch.tensor([0]), x.dtype)), x)
    slowed = RotaryPositions(4, theta=10.0, factors=(2.0, 2.0)).angles(torch.tensor([6]), x.dtype)
    plain = RotaryPositions(4, theta=10.0).angles(torch.tensor([3]), x.dtype)
    torch.testing.assert_close(rotate(x, slowed), rotate(x, plain))
