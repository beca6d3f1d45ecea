"""B070: the average is wrong, or missing."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, DtypeError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


@KINDS
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b070_avg_is_the_mean_everywhere(kind: str, world_size: int, dtype: torch.dtype) -> None:
    mean = (world_size + 1) / 2

    def body(group: GroupCoordinator) -> None:
        tensor = torch.full((6,), group.rank_in_group + 1.0, dtype=dtype)
        sizes = [0] * (world_size - 1) + [6]
        results = [
            group.all_reduce(tensor, "avg"),
            group.reduce_scatter(tensor, 0, "avg"),
            group.reduce_scatterv(tensor, sizes, 0, "avg"),
        ]
        on_dst = group.reduce(tensor, world_size - 1, "avg")
        assert (on_dst is not None) == group.is_last_rank
        results += [] if on_dst is None else [on_dst]
        for got in results:
            assert got.dtype is dtype
            assert bool((got == mean).all())
        assert bool((tensor == group.rank_in_group + 1).all())
        assert group.all_reduce_(tensor, "avg") is tensor
        assert bool((tensor == mean).all())

    World(kind)(world_size, body)


@KINDS
@pytest.mark.parametrize("world_size", [1, 2])
def test_b070_avg_of_integers_is_refused(kind: str, world_size: int) -> None:
    def body(group: GroupCoordinator) -> None:
        for dtype in (torch.int64, torch.bool, torch.uint8):
            tensor = torch.ones(2, dtype=dtype)
            for call in (group.all_reduce, group.all_reduce_, group.reduce_scatter, group.reduce):
                with pytest.raises(DtypeError, match="avg of"):
                    call(tensor, op="avg")
        group.barrier()

    World(kind)(world_size, body)


@KINDS
def test_b070_other_ops_on_negative_numbers(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        tensor = torch.tensor([-3.0, 2.0]) if group.is_first_rank else torch.tensor([-1.0, -5.0])
        assert group.all_reduce(tensor, "max").tolist() == [-1, 2]
        assert group.all_reduce(tensor, "min").tolist() == [-3, -5]
        assert group.all_reduce(tensor, "product").tolist() == [3, -10]
        for op in ("mean", "", None, 3):
            with pytest.raises(ArgumentError, match=r"unknown op .*; use one of sum, avg, max, min, product"):
                group.all_reduce(tensor, op)  # type: ignore[arg-type]
        group.barrier()

    World(kind)(2, body)
