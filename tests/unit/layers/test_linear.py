"""Split linear layers equal plain ones, forward, backward, loaded and gathered."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.layers import ColumnParallelLinear, GateUpParallelLinear, QkvParallelLinear, RowParallelLinear
from parallel_runtime.layers.sources import span
from tests.unit.layers.ranks import alone, on_ranks

SIZES = [1, 2, 3, 4]


def plain(in_features: int, out_features: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(in_features * 100 + out_features)
    return nn.Linear(in_features, out_features, bias=bias)


@pytest.mark.parametrize("tp", SIZES)
def test_column_then_row_equals_two_plain_layers_forward_and_backward(tp: int) -> None:
    first, second = plain(6, 11), plain(11, 5)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = second(first(x).relu())
    expected.square().sum().backward()

    def run(group: GroupCoordinator) -> None:
        column, row = ColumnParallelLinear(6, 11, tp=group, bias=True), RowParallelLinear(11, 5, tp=group, bias=True)
        column.load([first.weight], [first.bias])
        row.load(second.weight, second.bias)
        local = x.detach().clone().requires_grad_()
        out = row(column(local).relu())
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        own = span(row.shards[group.rank_in_group])
        torch.testing.assert_close(local.grad, x.grad)
        torch.testing.assert_close(column.weight.grad, _grad(first.weight)[own])
        torch.testing.assert_close(row.weight.grad, _grad(second.weight)[:, own])
        assert column.bias is not None
        assert row.bias is not None
        torch.testing.assert_close(column.bias.grad, _grad(first.bias)[own])
        torch.testing.assert_close(row.bias.grad, _grad(second.bias))

    on_ranks(tp, run)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("tp", SIZES)
def test_gate_and_up_are_cut_alike(tp: int) -> None:
    gate, up = plain(6, 11), plain(6, 11, bias=False)
    x = torch.randn(2, 6)

    def run(group: GroupCoordinator) -> None:
        layer = GateUpParallelLinear(6, 11, tp=group)
        layer.load([gate.weight, up.weight])
        left, right = layer(x).chunk(2, dim=-1)
        own = span(layer.pieces[0].shards[group.rank_in_group])
        torch.testing.assert_close(left, (x @ gate.weight.T)[:, own])
        torch.testing.assert_close(right, (x @ up.weight.T)[:, own])
        state = layer.full_state()
        assert torch.equal(state["gate_proj.weight"], gate.weight)
        assert torch.equal(state["up_proj.weight"], up.weight)

    on_ranks(tp, run)


@pytest.mark.parametrize(("query", "kv"), [(9, 3), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("tp", SIZES)
def test_query_heads_keep_the_kv_head_they_read(tp: int, query: int, kv: int) -> None:
    d = 2
    full = {name: plain(5, heads * d) for name, heads in (("q_proj", query), ("k_proj", kv), ("v_proj", kv))}
    x = torch.randn(3, 5)

    def run(group: GroupCoordinator) -> range:
        layer = QkvParallelLinear(5, num_query_heads=query, num_kv_heads=kv, head_dim=d, tp=group, bias=True)
        layer.load([part.weight for part in full.values()], [part.bias for part in full.values()])
        q, k, v = torch.split(layer(x), layer.local_sizes, dim=-1)
        heads = layer.heads
        for local, head in enumerate(heads.query):
            torch.testing.assert_close(_head(q, local, d), _head(full["q_proj"](x), head, d))
            read = local // (len(heads.query) // len(heads.kv))
            torch.testing.assert_close(_head(k, read, d), _head(full["k_proj"](x), head // (query // kv), d))
            torch.testing.assert_close(_head(v, read, d), _head(full["v_proj"](x), head // (query // kv), d))
        state = layer.full_state()
        for name, part in full.items():
            assert torch.equal(state[f"{name}.weight"], part.weight)
            assert torch.equal(state[f"{name}.bias"], part.bias)
        return heads.query

    assert [head for part in on_ranks(tp, run) for head in part] == list(range(query))


def _head(x: Tensor, head: int, d: int) -> Tensor:
    return x[:, head * d : (head + 1) * d]


@pytest.mark.parametrize("tp", SIZES)
def test_full_state_of_a_row_split_layer_is_what_was_loaded(tp: int) -> None:
    full = plain(7, 3)

    def run(group: GroupCoordinator) -> None:
        layer = RowParallelLinear(7, 3, tp=group, bias=True)
        layer.load(full.weight, full.bias)
        state = layer.full_state()
        assert torch.equal(state["weight"], full.weight)
        assert torch.equal(state["bias"], full.bias)

    on_ranks(tp, run)


def test_the_input_of_a_row_split_layer_is_left_alone() -> None:
    full, x = plain(4, 4, bias=False), torch.randn(2, 4)

    def run(group: GroupCoordinator) -> None:
        layer = RowParallelLinear(4, 4, tp=group)
        layer.load(full.weight)
        with torch.inference_mode():
            mine = x[:, span(layer.shards[group.rank_in_group])].clone()
            before = mine.clone()
            torch.testing.assert_close(layer(mine), full(x))
            assert torch.equal(mine, before)

    on_ranks(2, run)


@pytest.mark.parametrize(
    "build",
    [
        lambda tp: ColumnParallelLinear(4, 5, tp=tp, uneven="refuse"),
        lambda tp: RowParallelLinear(5, 4, tp=tp, uneven="refuse"),
        lambda tp: GateUpParallelLinear(4, 5, tp=tp, uneven="refuse"),
        lambda tp: QkvParallelLinear(4, num_query_heads=5, num_kv_heads=5, head_dim=2, tp=tp, uneven="refuse"),
    ],
)
def test_uneven_shards_can_be_refused(build: Callable[[GroupCoordinator], nn.Module]) -> None:
    def run(group: GroupCoordinator) -> None:
        with pytest.raises(ConfigError, match="tp=2 does not split 5"):
            build(group)

    on_ranks(2, run)


def test_wrong_shapes_and_biases_are_refused() -> None:
    row, column = RowParallelLinear(4, 3, tp=alone(), bias=True), ColumnParallelLinear(4, 3, tp=alone(), name="up")
    weight, bias = torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(ArgumentError, match=r"weight has shape \(4, 3\); the full tensor of this layer has \(3, 4\)"):
        row.load(weight.T, bias)
    with pytest.raises(ArgumentError, match=r"bias has shape \(4,\); the full tensor of this layer has \(3,\)"):
        row.load(weight, torch.zeros(4))
    with pytest.raises(ArgumentError, match="bias=True but a bias was not given to load"):
        row.load(weight)
    with pytest.raises(ArgumentError, match=r"up\.weight has shape \(4, 3\)"):
        column.load([weight.T])
    with pytest.raises(ArgumentError, match=r"2 weights were given to load; this layer has \['up'\]"):
        column.load([weight, weight])
    with pytest.raises(ArgumentError, match="bias=False but biases were given to load"):
        column.load([weight], [bias])
