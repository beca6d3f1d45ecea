"""Numbers with named digits, on examples small enough to check by eye."""

from parallel_runtime.topology.mesh import Mesh, shift

MESH = Mesh(("a", "b", "c"), (2, 3, 2))


def test_strides_size_and_index() -> None:
    assert MESH.strides == (1, 2, 6)
    assert MESH.size == 12
    assert [MESH.index(11, axis) for axis in MESH.axes] == [1, 2, 1]
    assert MESH.corner(11, ("a", "c")) == 4


def test_offsets_are_ranges_where_evenly_spaced() -> None:
    assert MESH.offsets(()) == range(1)
    assert MESH.offsets(("b",)) == range(0, 6, 2)
    assert MESH.offsets(("a", "b")) == range(6)
    assert MESH.offsets(("c", "a")) == [0, 1, 6, 7]
    assert Mesh(("a", "b", "c"), (2, 1, 2)).offsets(("a", "c")) == range(4)


def test_groups_ascend_or_follow_the_order_asked_for() -> None:
    assert [list(group) for group in MESH.groups(("b",))] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert [list(group) for group in MESH.groups(("b",), outer=("c", "a"))] == [[0, 2, 4], [6, 8, 10], [1, 3, 5], [7, 9, 11]]


def test_corners_are_counted_without_listing_them() -> None:
    for axes in ((), ("a",), ("b",), ("a", "c"), ("a", "b", "c")):
        corners = [cell for cell in range(12) if MESH.corner(cell, axes) == cell]
        for below in range(13):
            assert MESH.count_corners(axes, below=below) == sum(corner < below for corner in corners)


def test_shift_keeps_ranges() -> None:
    assert shift(range(0, 6, 2), 5) == range(5, 11, 2)
    assert shift([0, 3, 4], 5) == [5, 8, 9]
