"""Placements that do not fit say which tensor and which ranks."""

import re

import pytest

from parallel_runtime.errors import ArgumentError
from parallel_runtime.interop import TensorPlacement, plan_moves
from parallel_runtime.terms import Rank


def _rows(*parts: range, shape: tuple[int, int] = (4, 2), itemsize: int = 4, first: int = 0) -> TensorPlacement:
    return TensorPlacement(shape, itemsize, {Rank(first + rank): (part, range(shape[1])) for rank, part in enumerate(parts)})


def test_neighbouring_parts_travel_as_one() -> None:
    source, target = {"w": _rows(range(4))}, {"w": _rows(range(1), range(1, 3), range(3, 4), first=1)}
    assert [(move.src, move.dst, move.box[0]) for move in plan_moves(source, target)] == [
        (0, 1, range(1)),
        (0, 2, range(1, 3)),
        (0, 3, range(3, 4)),
    ]


def test_a_scalar_moves() -> None:
    source, target = {"n": TensorPlacement((), 8, {Rank(0): ()})}, {"n": TensorPlacement((), 8, {Rank(0): (), Rank(1): ()})}
    (move,) = plan_moves(source, target)
    assert (move.src, move.dst, move.num_bytes) == (0, 1, 8)


def test_a_tensor_that_the_source_lacks_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^w is wanted by ranks \[0\], but the source has no tensor of that name$"):
        plan_moves({}, {"w": _rows(range(4))})


def test_a_tensor_of_another_shape_is_named() -> None:
    text = "w has shape (4, 2) with 4 bytes an element on ranks [0], but (4, 3) with 2 on ranks [1]"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        plan_moves({"w": _rows(range(4))}, {"w": _rows(range(4), shape=(4, 3), itemsize=2, first=1)})


def test_a_part_that_nobody_holds_is_named() -> None:
    text = "no rank holds [2:3, 0:2] of w [4, 2], which rank 5 needs; ranks [0, 1] hold [0:2, 0:2], [3:4, 0:2]"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        plan_moves({"w": _rows(range(2), range(3, 4))}, {"w": _rows(range(4), first=5)})


@pytest.mark.parametrize("box", [(range(4),), (range(5), range(2)), (range(0, 4, 2), range(2))], ids=str)
def test_a_part_is_inside_its_tensor(box: tuple[range, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"^rank 3 is said to hold .* no part of a tensor of shape \(4, 2\)$"):
        TensorPlacement((4, 2), 4, {Rank(3): box})
