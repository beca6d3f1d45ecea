"""B069, the layout's part of steps 1 and 2: groups of a large job, told per rank and equal where they are the same."""

from parallel_runtime.config import ParallelConfig
from parallel_runtime.terms import GROUP_NAMES

LAYOUT = ParallelConfig(tp=8, pp=8, dp=16, ep=8).layout


def test_b069_a_rank_of_1024_belongs_to_one_group_per_axis() -> None:
    tables = {name: LAYOUT.groups(name) for name in GROUP_NAMES}
    for rank in range(0, 1024, 97):
        for name, groups in tables.items():
            assert [group for group in groups if rank in group] == [LAYOUT.group_of(rank, name)]


def test_b069_axes_with_equal_rank_sets_have_equal_groups() -> None:
    assert LAYOUT.group_of(100, "etp") == LAYOUT.group_of(100, "tp")
    alone = ParallelConfig(tp=8, ep=8).layout
    assert alone.group_of(3, "tp") == alone.group_of(3, "ep") == alone.group_of(3, "stage") == alone.group_of(3, "world")


def test_b069_an_axis_of_size_one_has_groups_of_one() -> None:
    assert all(len(LAYOUT.group_of(100, name)) == 1 for name in ("cp", "dcp"))
