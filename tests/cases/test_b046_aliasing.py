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


@KINDS
def test_b046_out_may_be_what_is_sent(kind: str) -> None:
    """Large enough that a peer reads it piece by piece, or where it lies, while the answer comes in."""
    count = 1 << 18

    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        for through_numpy in (False, True):
            mine = torch.arange(count) + me
            out = torch.from_numpy(mine.numpy()) if through_numpy else mine  # a storage of its own, in the same place
            assert group.exchange(mine, out=out) is out
            assert torch.equal(out, torch.arange(count) + 1 - me)

            source = torch.arange(2 * count) if group.is_first_rank else None
            want = torch.arange(2 * count).chunk(2)[me]
            room = torch.empty(count, dtype=torch.int64) if source is None else source[count:]
            out = torch.from_numpy(room.numpy()) if through_numpy else room
            assert torch.equal(group.scatter(source, out=out), want)

            parts = list(torch.arange(2 * count).chunk(2)) if group.is_first_rank else None
            room = torch.empty(count, dtype=torch.int64) if parts is None else parts[1]
            torch.distributed.scatter(room, parts, group_src=0, group=group.process_group)
            assert torch.equal(room, want)

    World(kind)(2, body)


@KINDS
def test_b046_a_view_that_is_still_to_be_negated_or_conjugated(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        numbers = torch.tensor([1 + 2j, 3 - 4j]) * (group.rank_in_group + 1)
        for tensor in (torch._neg_view(numbers.imag.contiguous()), numbers.conj()):
            plain = tensor.resolve_conj().resolve_neg()
            for call in (group.all_reduce, group.all_gather, group.broadcast, group.exchange):
                assert call(tensor).tolist() == call(plain).tolist()
            assert group.exchange(plain, out=tensor.clone()).tolist() == group.exchange(plain).tolist()
            assert group.broadcast_(tensor).tolist() == group.broadcast(plain).tolist()

    World(kind)(2, body)
