"""The fused sum, residual and norm is the plain one bit for bit, over shared memory of threads and of processes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.layers import ResidualSum, RMSNorm, RowParallelLinear
from parallel_runtime.layers.packing import can_pack
from parallel_runtime.terms import Rank
from tests.spmd.worlds import World
from tests.unit.comm.shm.members import Processes, open_member
from tests.unit.layers.ranks import alone

pytestmark = pytest.mark.timeout(60)

COUNTS = (1, 0, 3, 130, 1, 2500, 7)
"""Tokens of the steps one after the other: one slot is used for different sizes, and the long ones take several."""


def cut(size: int, parts: int) -> list[range]:
    """Shards that differ: the last ones are the smallest."""
    bounds = [0, *(size - size * (parts - member) ** 2 // (parts**2 + 1) for member in range(1, parts)), size]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def parts_of(tp: GroupCoordinator, dtype: torch.dtype, *, bias: bool) -> tuple[RowParallelLinear, RMSNorm]:
    inputs, size = 37, 321
    seeded = torch.Generator().manual_seed(5)
    layer = RowParallelLinear(inputs, size, tp=tp, bias=bias, shards=cut(inputs, tp.world_size), dtype=dtype)
    layer.load(
        torch.randn(size, inputs, generator=seeded).to(dtype), torch.randn(size, generator=seeded).to(dtype) if bias else None
    )
    norm = RMSNorm(size, eps=1e-5, dtype=dtype)
    norm.load(torch.randn(size, generator=seeded).to(dtype))
    return layer, norm


def compare(tp: GroupCoordinator, dtype: torch.dtype, *, bias: bool, pack: bool) -> list[tuple[Tensor, Tensor]]:
    """Every step both ways, in turn with other operations of the group."""
    layer, norm = parts_of(tp, dtype, bias=bias)
    if pack:
        layer.pack()
    add = ResidualSum(tp, fused=True)
    outs = []
    for step, count in enumerate(COUNTS):
        x = torch.randn(count, 37, generator=torch.Generator().manual_seed(step)).to(dtype)
        residual = torch.randn(count, 321, generator=torch.Generator().manual_seed(99 + step)).to(dtype)
        mine, before = x[:, layer.shards[tp.rank_in_group].start : layer.shards[tp.rank_in_group].stop], residual.clone()
        with torch.inference_mode(mode=step % 2 == 0), torch.no_grad():
            hidden, normed = add(layer, mine, residual, norm)
            same, none = add(layer, mine, residual, None)
            expected = add.plain(layer, mine, residual, norm)
        assert torch.equal(residual, before)
        assert none is same
        assert torch.equal(same, hidden)
        assert torch.equal(hidden, expected[0])
        assert torch.equal(normed, expected[1])
        outs.append((hidden, normed))
    return outs


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["local", "shm", "gloo"])
def test_it_equals_the_plain_way(kind: str, world_size: int, dtype: torch.dtype, *, pack: bool) -> None:
    if pack and not can_pack(torch.zeros(2, 2, dtype=dtype)):
        pytest.skip("this machine has no packed products")

    def body(tp: GroupCoordinator) -> list[tuple[Tensor, Tensor]]:
        return compare(tp, dtype, bias=world_size == 3, pack=pack)

    first, *others = World(kind)(world_size, body)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("kind", ["local", "shm"])
def test_it_is_one_step_without_data(kind: str) -> None:
    def body(tp: GroupCoordinator) -> list[str]:
        layer, norm = parts_of(tp, torch.float32, bias=False)
        add, x = ResidualSum(tp, fused=True), torch.ones(4, len(layer.shards[tp.rank_in_group]))
        with torch.inference_mode():
            for _ in range(2):
                add(layer, x, torch.ones(4, 321), norm)
        return [record.operation for record in tp.recent(4)]

    assert World(kind)(2, body) == [["symmetric_empty", "symmetric_empty", "publish", "publish"]] * 2


def test_gradients_take_the_plain_way() -> None:
    def body(tp: GroupCoordinator) -> tuple[str, Tensor, bool]:
        layer, norm = parts_of(tp, torch.float32, bias=False)
        x = torch.ones(4, len(layer.shards[tp.rank_in_group]))
        residual = torch.ones(4, 321, requires_grad=True)
        _, normed = ResidualSum(tp, fused=True)(layer, x, residual, norm)
        normed.sum().backward()  # type: ignore[no-untyped-call]  # torch
        assert residual.grad is not None
        return tp.recent(1)[0].operation, residual.grad, layer.weight.grad is not None

    (one, grad, has_grad), (other, same, _) = World("local")(2, body)
    assert one == other == "all_reduce"
    assert has_grad
    assert torch.equal(grad, same)


def test_a_group_of_one_has_nothing_to_sum() -> None:
    tp = alone()
    compare(tp, torch.float32, bias=True, pack=False)
    assert tp.recent() == ()


def in_process(store: Any, rank: int, world_size: int) -> list[float]:
    torch.set_num_threads(1)
    comm = open_member(store, rank, world_size)
    ranks = tuple(map(Rank, range(world_size)))
    tp = open_coordinator(GroupSpec(name="tp#0", key="test", ranks=ranks, rank=Rank(rank)), comm)
    try:
        outs = [compare(tp, torch.float32, bias=False, pack=False) for _ in range(3)]
        tp.barrier()
    finally:
        tp.close()
    return [normed.double().sum().item() for out in outs for _, normed in out]


@pytest.mark.processes
def test_between_processes(tmp_path: Path) -> None:
    with Processes(tmp_path, 3, in_process) as members:
        results = members.results()
    assert results == [results[0]] * 3
