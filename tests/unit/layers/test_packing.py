"""Packed weights multiply like plain ones, come back unharmed, and say what they cannot do."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers import ColumnParallelLinear, ParallelHead, RowParallelLinear, VocabParallelEmbedding
from parallel_runtime.layers.packing import add_linear, apply_linear, can_pack, dense
from tests.unit.layers.ranks import alone

DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(not can_pack(torch.zeros(2, 2)), reason="this machine has no packed products")


def packed_column(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[ColumnParallelLinear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias, dtype=dtype)
    layer = ColumnParallelLinear(24, 40, tp=alone(), bias=bias, dtype=dtype)
    layer.load([plain.weight], [plain.bias] if bias else None)
    layer.pack()
    return layer, plain


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 33])
def test_products_equal_those_of_the_plain_weight(dtype: torch.dtype, rows: int) -> None:
    layer, plain = packed_column(dtype)
    assert layer.weight.is_mkldnn
    x = torch.randn(rows, 24, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), functional.linear(x, plain.weight, plain.bias))


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 4, 33])
def test_a_residual_is_added(dtype: torch.dtype, rows: int) -> None:
    layer, plain = packed_column(dtype)
    x, residual = torch.randn(rows, 24, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    before = residual.clone()
    with torch.inference_mode():
        for weight in (layer.weight, plain.weight):
            total = add_linear(residual, x, weight, plain.bias)
            expected = residual + functional.linear(x, plain.weight, plain.bias)
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2  # one operation rounds once, two round twice
            torch.testing.assert_close(total, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual, before)
    residual.requires_grad_()
    add_linear(residual, x, layer.weight).sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert residual.grad is not None


@needs_packing
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer, _ = packed_column()
    x = torch.randn(8, 24)
    every = layer(x)
    for count in range(1, 8):
        assert torch.equal(layer(x[:count]), every[:count])


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_and_may_be_written(dtype: torch.dtype) -> None:
    layer, plain = packed_column(dtype)
    assert torch.equal(dense(layer.weight), plain.weight)
    assert torch.equal(layer.full_state()["proj.weight"], plain.weight)
    layer.unpack()
    assert torch.equal(layer.weight, plain.weight)
    assert layer.weight.requires_grad
    with torch.no_grad():
        layer.weight.mul_(2)
    layer.pack()
    assert torch.equal(dense(layer.weight), 2 * plain.weight)


@needs_packing
def test_loading_packs_again() -> None:
    column, _ = packed_column(bias=False)
    column.load([torch.ones(40, 24)])
    row = RowParallelLinear(24, 40, tp=alone())
    row.load(torch.zeros(40, 24))
    row.pack()
    row.load(torch.ones(40, 24))
    for layer in (column, row):
        assert layer.weight.is_mkldnn
        assert torch.equal(dense(layer.weight), torch.ones(40, 24))


@needs_packing
@torch.inference_mode()
def test_a_tied_head_is_a_packed_copy_and_the_embedding_stays_plain() -> None:
    embedding, head = VocabParallelEmbedding(30, 8, tp=alone()), ParallelHead(30, 8, tp=alone())
    weight = torch.randn(30, 8)
    embedding.load(weight)
    head.tie(embedding)
    assert head.weight is embedding.weight
    head.pack()
    embedding.pack()
    assert torch.equal(embedding(torch.arange(30)), weight)
    torch.testing.assert_close(head(torch.eye(8)), weight.T)
    embedding.load(2 * weight)
    head.tie(embedding)
    assert head.weight.is_mkldnn
    torch.testing.assert_close(head(torch.eye(8)), 2 * weight.T)


@needs_packing
def test_a_gradient_through_a_packed_weight_is_refused() -> None:
    layer, _ = packed_column()
    with pytest.raises(ArgumentError, match=r"packed weights carry no gradients; call unpack\(\)"):
        layer(torch.zeros(1, 24, requires_grad=True))


@pytest.mark.parametrize(
    "weight", [torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, device="meta")]
)
def test_what_has_no_packed_form_stays_plain(weight: Tensor) -> None:
    assert not can_pack(weight)
    assert apply_linear(weight.new_zeros(1, weight.shape[1]), weight).shape == (1, weight.shape[0])


def test_a_machine_without_the_products_keeps_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    layer, plain = packed_column()
    assert not layer.weight.is_mkldnn
    assert torch.equal(layer.weight, plain.weight)
