"""A world of pretended peers: right shapes and dtypes, and the truth for a group of one."""

import pytest
import torch

from parallel_runtime.comm import FakeCommunicator, GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.errors import SerializationError
from parallel_runtime.terms import Rank


@pytest.fixture
def rank_37() -> GroupCoordinator:
    ranks = tuple(Rank(rank) for rank in range(1024))
    return open_coordinator(GroupSpec(name="world", key="k", ranks=ranks, rank=ranks[37]), FakeCommunicator(37, 1024))


def test_a_rank_of_a_big_world_sees_the_right_shapes(rank_37: GroupCoordinator) -> None:
    group = rank_37
    assert group.all_reduce(torch.ones(3)).tolist() == [1024.0] * 3
    assert group.all_reduce(torch.ones(3), "avg").tolist() == [1.0] * 3
    assert group.all_gather(torch.ones(2, 3), 1).shape == (2, 3072)
    assert group.reduce_scatter(torch.ones(2048)).tolist() == [1024.0] * 2
    assert group.all_to_all(torch.ones(2048)).shape == (2048,)
    assert group.all_gatherv(torch.ones(2), [1] * 37 + [2] + [0] * 986).shape == (39,)
    assert group.broadcast(torch.ones(2), 37).tolist() == [1, 1]
    assert group.broadcast(torch.ones(2), 0).tolist() == [0, 0]
    gathered = group.gather(torch.ones(2), 37)
    assert gathered is not None
    assert gathered.shape == (2048,)
    assert group.gather(torch.ones(2), 0) is None
    reduced = group.reduce(torch.ones(2), 37)
    assert reduced is not None
    assert reduced.tolist() == [1024.0] * 2
    assert group.scatter(torch.arange(2048), 37).tolist() == [74, 75]
    group.barrier()
    with pytest.raises(SerializationError, match="a message arrived damaged: its first bytes are 0 and 0"):
        group.broadcast_object(1, 0)
    assert group.describe().endswith("tensors over fake, messages over fake")


def test_a_group_of_one_is_the_whole_truth() -> None:
    group = open_coordinator(GroupSpec(name="tp", key="k", ranks=(Rank(5),), rank=Rank(5)))
    value = torch.arange(4.0)
    for got in (
        group.all_reduce(value),
        group.all_reduce(value, "avg"),
        group.all_gather(value),
        group.all_gatherv(value),
        group.reduce_scatter(value),
        group.reduce_scatterv(value, [4]),
        group.all_to_all(value),
        group.all_to_allv(value, [4]),
        group.broadcast(value),
        group.gather(value),
        group.reduce(value),
        group.scatter(value),
    ):
        assert got is not None
        assert torch.equal(got, value)
        assert got.data_ptr() != value.data_ptr()
    assert group.all_gather_object({"a": 1}) == [{"a": 1}]
    assert group.describe() == "tp ranks (5,): tensors over solo, messages over solo"
