"""Shapes tell equal groups from groups with equal members in another order."""

import pytest

from parallel_runtime.errors import ArgumentError
from parallel_runtime.topology import Layout
from parallel_runtime.topology.shapes import group_ends, group_shape


def test_dcp_over_tp_and_cp_lists_cp_first_and_is_no_alias() -> None:
    layout = Layout.of(tp=2, cp=2, dcp=4)
    assert layout.group_of(0, "dcp") == (0, 2, 1, 3)
    assert group_shape(layout, "dcp") != group_shape(layout, "stage")
    assert group_shape(layout, "dcp").steps == group_shape(layout, "stage").steps


def test_dcp_over_cp_first_is_an_alias() -> None:
    layout = Layout.of(tp=2, cp=2, dcp=4, order=("cp", "tp", "dp", "pp"))
    assert group_shape(layout, "dcp") == group_shape(layout, "stage")
    assert group_shape(Layout.of(tp=4, dcp=4), "dcp") == group_shape(Layout.of(tp=4), "tp")


def test_no_ends_for_strangers() -> None:
    layout = Layout.of(tp=2)
    with pytest.raises(ArgumentError, match="rank 2 is not in this world"):
        group_ends(layout, 2, group_shape(layout, "tp"))
