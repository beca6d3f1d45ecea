"""B059: gathering along a dim other than the first."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, DimError
from tests.spmd.worlds import EVERY_MAKER, World

KINDS = pytest.mark.parametrize("kind", sorted(set(EVERY_MAKER) - {"hosts"}))


def shard(member: int) -> torch.Tensor:
    return (torch.arange(24.0) + 100 * member).view(2, 3, 4)


@KINDS
def test_b059_all_dims_and_round_trips(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        for dim in range(-3, 3):
            joined = group.all_gather(shard(me), dim)
            assert torch.equal(joined, torch.cat([shard(0), shard(1)], dim))
            assert joined.is_contiguous()
            assert torch.equal(group.reduce_scatter(joined, dim), 2 * shard(me))
        square = torch.arange(16.0).view(4, 4) + 100 * me
        peers = [torch.arange(16.0).view(4, 4) + 100 * member for member in range(2)]
        for split, concat in ((0, 1), (1, 0)):
            want = torch.cat([peer.chunk(2, split)[me] for peer in peers], concat)
            assert torch.equal(group.all_to_all(square, split, concat), want)

    World(kind)(2, body)


@KINDS
def test_b059_uneven_sizes_along_the_second_dim(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        parts = [torch.full((2, 1), 1.0), torch.full((2, 3), 2.0)]
        for sizes in ([1, 3], None):
            assert group.all_gatherv(parts[group.rank_in_group], sizes, 1).tolist() == [[1, 2, 2, 2]] * 2

    World(kind)(2, body)


@KINDS
def test_b059_a_dim_that_is_not_there(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        for call in (group.all_gather, group.reduce_scatter, group.all_to_all, group.all_gatherv):
            args = (None, 3) if call == group.all_gatherv else (3,)
            with pytest.raises(DimError, match="dim=3 of a tensor with 3 dims; use -3 to 2"):
                call(shard(0), *args)
        with pytest.raises(IndexError, match="dim=-4"):
            group.gather(shard(0), 0, -4)
        with pytest.raises(DimError, match="a 0-dim tensor has no dim to split"):
            group.reduce_scatter(torch.tensor(1.0))
        wanted = (DimError, "^scatter: dim=3") if group.is_last_rank else (ArgumentError, "scatter from member 1 .*dim=3 of")
        with pytest.raises(wanted[0], match=wanted[1]):
            group.scatter(shard(0) if group.is_last_rank else None, 1, 3)
        group.barrier()

    World(kind)(2, body)
