"""B061: sending a slice and gathering it corrupts tensors that differ per tensor-parallel rank."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerEncodingError
from tests.spmd.worlds import MAKERS, World

KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))
GROUPS = [(0, 1), (2, 3), (0, 2), (1, 3)]


def equal(count: int) -> torch.Tensor:
    return torch.arange(float(count))


@KINDS
@pytest.mark.parametrize("count", [8, 5, 40_000])
def test_b061_each_rank_gets_what_its_partner_sent(kind: str, count: int) -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> None:
        tp, pp = groups
        if pp.is_first_rank:
            own = torch.full((count,), float(rank))
            pp.send_tensor_dict({"same": equal(count), "own": own}, slice_over=tp, slice_keys=["same"], check_slices=True)
        else:
            got = pp.recv_tensor_dict(slice_over=tp)
            assert list(got) == ["same", "own"]
            assert torch.equal(got["same"], equal(count))
            assert torch.equal(got["own"], torch.full((count,), rank - 2.0))

    World(kind).many(4, lambda rank: GROUPS, body)


@KINDS
def test_b061_the_check_finds_unequal_copies(kind: str) -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> None:
        tp, pp = groups
        if pp.is_first_rank:
            with pytest.raises(CollectiveMismatchError, match="'own' is not equal on the members"):
                pp.send_tensor_dict({"own": torch.full((8,), float(rank))}, slice_over=tp, slice_keys=["own"], check_slices=True)
        else:
            with pytest.raises(PeerEncodingError, match="'own' is not equal on the members"):
                pp.recv_tensor_dict(slice_over=tp)
        pp.barrier()

    World(kind).many(4, lambda rank: GROUPS, body)


@KINDS
def test_b061_arguments_that_do_not_fit(kind: str) -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> None:
        tp, pp = groups
        if pp.is_first_rank:
            with pytest.raises(ArgumentError, match="needs slice_over="):
                pp.send_tensor_dict({"x": equal(8)}, slice_keys=["x"])
            with pytest.raises(ArgumentError, match="slice_keys names 'y'"):
                pp.send_tensor_dict({"x": equal(8)}, slice_over=tp, slice_keys=["y"])
            pp.send_tensor_dict({"x": equal(8)}, slice_over=tp, slice_keys=["x"])
        else:
            for text in ("needs slice_over=", "slice_keys names 'y'"):
                with pytest.raises(PeerEncodingError, match=text):
                    pp.recv_tensor_dict()
            with pytest.raises(ArgumentError, match=r"slices of 4 of 8 elements.*got no group"):
                pp.recv_tensor_dict()

    World(kind).many(4, lambda rank: GROUPS, body)
