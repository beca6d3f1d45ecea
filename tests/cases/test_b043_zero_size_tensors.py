"""B043: tensors without elements crash or hang."""

from typing import Any

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from tests.spmd.worlds import EVERY_MAKER, World

KINDS = pytest.mark.parametrize("kind", sorted(set(EVERY_MAKER) - {"hosts"}))


@KINDS
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_b043_empty_tensors_keep_shape_and_dtype(kind: str, shape: tuple[int, ...]) -> None:
    def body(group: GroupCoordinator) -> None:
        empty = torch.empty(shape, dtype=torch.bfloat16)
        joined = (shape[0] * 2, *shape[1:])
        for got, want in (
            (group.all_reduce(empty), shape),
            (group.all_gather(empty), joined),
            (group.broadcast(empty), shape),
            (group.exchange(empty), shape),
            (group.broadcast_tensor_dict({"x": empty})["x"], shape),
        ):
            assert tuple(got.shape) == want
            assert got.dtype is torch.bfloat16
        if group.is_first_rank:
            group.send(empty)
            group.send_tensor_dict({"x": empty})
        else:
            for got in (group.recv(), group.recv_tensor_dict()["x"]):
                assert (tuple(got.shape), got.dtype) == (shape, torch.bfloat16)

    World(kind)(2, body)


@KINDS
def test_b043_members_with_nothing_take_part(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        for rows in ((0, 3), (3, 0), (0, 0)):
            got = group.all_gatherv(torch.full((rows[me], 4), float(me)), rows)
            assert got[:, 0].tolist() == [0.0] * rows[0] + [1.0] * rows[1]
            assert got.shape == (sum(rows), 4)
        got = group.reduce_scatterv(torch.ones(3, 4), (0, 3))
        assert got.shape == ((0, 4), (3, 4))[me]
        assert bool((got == 2).all())
        splits = ([1, 1], [0, 0])[me]
        got = group.all_to_allv(torch.full((sum(splits), 4), 5.0), splits)
        assert got.tolist() == [[5.0] * 4]
        assert group.all_to_allv(torch.empty(0, 4), [0, 0]).shape == (0, 4)

    World(kind)(2, body)


@KINDS
def test_b043_tensors_without_dims(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        scalar = torch.tensor(float(group.rank_in_group))
        assert group.all_reduce(scalar).shape == ()
        assert group.broadcast(scalar, 1).item() == 1
        assert group.broadcast_tensor_dict({"x": scalar}, 1)["x"].shape == ()
        assert group.all_gather(scalar).tolist() == [0, 1]
        assert group.all_gather(scalar, -1).tolist() == [0, 1]

    World(kind)(2, body)


@KINDS
def test_b043_bad_splits_are_refused_on_every_rank(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        rows = torch.ones(4, 2)
        with pytest.raises(ValueError, match=r"sizes=\[1, 2\] add up to 3, the tensor has 4"):
            group.reduce_scatterv(rows, [1, 2])
        with pytest.raises(ArgumentError, match="must be 2 sizes"):
            group.all_gatherv(rows, [4])
        with pytest.raises(ArgumentError, match="must be 2 sizes"):
            group.reduce_scatterv(rows, [5, -1])
        with pytest.raises(ArgumentError, match=r"says \d for member"):
            group.all_gatherv(rows, [3, 5])
        with pytest.raises(ArgumentError, match="not a multiple of the 2 members"):
            group.reduce_scatter(torch.ones(3))
        with pytest.raises(ArgumentError, match="not a multiple of the 2 members"):
            group.all_to_all(torch.ones(3))
        with pytest.raises(ArgumentError, match="add up to 3" if me == 1 else "member 1 of .* gave splits that do not fit"):
            group.all_to_allv(rows, [2, 2] if me == 0 else [2, 1])
        no_size: Any = 2.0
        with pytest.raises(ArgumentError, match=r"\[2.0, 2\] must be 2 sizes" if me == 1 else "member 1 of .* gave splits that"):
            group.all_to_allv(rows, [2, 2] if me == 0 else [no_size, 2])
        with pytest.raises(ArgumentError, match="add up to 3"):
            group.all_to_allv(rows, [2, 1], output_splits=[2, 1])
        with pytest.raises(ArgumentError, match="not a multiple of the 2 members"):
            group.scatter(torch.ones(3) if me == 0 else None)
        with pytest.raises(ArgumentError, match="has to hand over a tensor"):
            group.scatter(None)
        assert group.all_reduce(rows)[0, 0].item() == 2

    World(kind)(2, body)
