"""B046: a collective is sometimes in place, sometimes not."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))
SIZES = pytest.mark.parametrize("world_size", [1, 2])


@KINDS
@SIZES
@pytest.mark.parametrize("count", [2, 1 << 18])
def test_b046_results_are_new_and_stay(kind: str, world_size: int, count: int) -> None:
    def body(group: GroupCoordinator) -> None:
        for call in (group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast, group.all_to_all):
            first = torch.full((count,), 1.0)
            second = torch.full((count,), 2.0)
            one = call(first)
            kept = one.clone()
            two = call(second)
            assert bool((first == 1).all())
            assert one.untyped_storage().data_ptr() not in (first.untyped_storage().data_ptr(), two.untyped_storage().data_ptr())
            assert torch.equal(one, kept)

    World(kind)(world_size, body)


@KINDS
@SIZES
def test_b046_one_element_is_no_exception(kind: str, world_size: int) -> None:
    def body(group: GroupCoordinator) -> None:
        for one in (torch.tensor([3.0]), torch.tensor(3.0)):
            for call in (group.all_reduce, group.all_gather, group.broadcast):
                got, again = call(one), call(one.clone())
                places = {tensor.untyped_storage().data_ptr() for tensor in (one, got, again)}
                assert len(places) == 3
            assert one.item() == 3.0
            assert group.all_reduce_(one) is one
            assert one.item() == 3.0 * world_size

    World(kind)(world_size, body)


@KINDS
@SIZES
def test_b046_in_place_returns_its_argument(kind: str, world_size: int) -> None:
    def body(group: GroupCoordinator) -> None:
        tensor = torch.full((3,), group.rank_in_group + 1.0)
        pointer = tensor.data_ptr()
        assert group.all_reduce_(tensor) is tensor
        assert group.broadcast_(tensor) is tensor
        assert tensor.data_ptr() == pointer
        assert tensor.tolist() == [sum(range(1, world_size + 1))] * 3
        leaf = torch.ones(2, requires_grad=True)
        assert group.all_reduce_(leaf) is leaf
        assert leaf.tolist() == [world_size] * 2
        assert not group.all_reduce(leaf).requires_grad

    World(kind)(world_size, body)
