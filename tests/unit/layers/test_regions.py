"""Sequence-parallel regions equal the plain sum on all members, forward and backward, for any cut of the tokens."""

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.layers import copy_to_group, gather_rows_to_group, reduce_from_group, scatter_rows_from_group
from parallel_runtime.topology.shards import split_even
from tests.unit.layers.ranks import on_ranks

SIZE = 6


def run(tp: GroupCoordinator, tokens: int, dtype: torch.dtype, *, is_sequential: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A product split over the group between two norms: this member's outputs, and gradients of inputs and weight.

    The reference holds all tokens everywhere; its rows are cut at the end alone.
    """
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(tokens, SIZE, generator=generator).to(dtype)
    weights = torch.randn(tp.world_size, SIZE, SIZE, generator=generator).to(dtype)
    shards = split_even(tokens, parts=tp.world_size)
    own = slice(shards[tp.rank_in_group].start, shards[tp.rank_in_group].stop)
    weight = weights[tp.rank_in_group].requires_grad_()
    inputs = (x_TD[own].clone() if is_sequential else x_TD).requires_grad_()
    normed = torch.nn.functional.layer_norm(inputs, (SIZE,))
    full = gather_rows_to_group(normed, shards, tp) if is_sequential else copy_to_group(normed, tp)
    partial = full @ weight
    out = scatter_rows_from_group(partial, shards, tp) if is_sequential else reduce_from_group(partial, tp)[own]
    torch.autograd.backward((out.float() ** 2).sum())
    grad = inputs.grad
    assert grad is not None
    assert weight.grad is not None
    return out.detach(), grad if is_sequential else grad[own], weight.grad


@pytest.mark.parametrize("tokens", [8, 7, 2, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_equals_the_plain_sum(world_size: int, tokens: int) -> None:
    def work(tp: GroupCoordinator) -> None:
        summand = torch.arange(tokens * SIZE).reshape(tokens, SIZE).float() * (tp.rank_in_group + 1)
        shards = split_even(tokens, parts=tp.world_size)
        own = shards[tp.rank_in_group]
        expected = reduce_from_group(summand.clone(), tp)
        part = scatter_rows_from_group(summand, shards, tp)
        assert torch.equal(part, expected[own.start : own.stop])
        assert torch.equal(gather_rows_to_group(part, shards, tp), expected)

    on_ranks(world_size, work)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("tokens", [6, 5])
def test_gradients_equal_those_of_the_plain_sum(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    def work(tp: GroupCoordinator) -> None:
        got = run(tp, tokens, dtype, is_sequential=True)
        expected_out, _, _ = run(tp, tokens, dtype, is_sequential=False)
        torch.testing.assert_close(got[0], expected_out, rtol=tolerance, atol=tolerance)
        # the loss of a member is that of its rows here, so the plain one has to hear of all rows
        whole = whole_gradients(tp, tokens, dtype)
        torch.testing.assert_close(got[1], whole[0], rtol=tolerance, atol=tolerance * 10)
        torch.testing.assert_close(got[2], whole[1], rtol=tolerance, atol=tolerance * 10)

    on_ranks(2, work)


def whole_gradients(tp: GroupCoordinator, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same on one process with the whole weight: gradients of this member's rows and of its part of the weight."""
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(tokens, SIZE, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(tp.world_size, SIZE, SIZE, generator=generator).to(dtype).requires_grad_()
    normed = torch.nn.functional.layer_norm(x_TD, (SIZE,))
    out = sum(normed @ weight for weight in weights)
    assert isinstance(out, Tensor)
    torch.autograd.backward((out.float() ** 2).sum())
    own = split_even(tokens, parts=tp.world_size)[tp.rank_in_group]
    assert x_TD.grad is not None
    assert weights.grad is not None
    return x_TD.grad[own.start : own.stop], weights.grad[tp.rank_in_group]
