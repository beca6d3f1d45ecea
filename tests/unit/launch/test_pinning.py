"""Which cores a rank keeps to."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.launch.pinning import core_shares, numa_nodes


def test_ranks_get_neighbours_of_one_node_where_they_fit() -> None:
    nodes = [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert core_shares(range(8), nodes, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert core_shares(range(8), nodes, 4) == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert core_shares([0, 2, 3, 7], nodes, 2) == ((0, 2), (3, 7))


@pytest.mark.parametrize(("cores", "parts"), [(2, 2), (3, 2), (7, 4)])
def test_too_few_cores_pin_nobody(cores: int, parts: int) -> None:
    assert core_shares(range(cores), [], parts) == ((),) * parts


@given(st.sets(st.integers(0, 40), min_size=2), st.integers(1, 8), st.integers(1, 20))
def test_every_core_goes_to_one_rank_in_fair_shares(cores: set[int], parts: int, node_size: int) -> None:
    nodes = [range(start, start + node_size) for start in range(0, 30, node_size)]
    shares = core_shares(sorted(cores), nodes, parts)
    assert len(shares) == parts
    if len(cores) < 2 * parts:
        assert set(shares) == {()}
        return
    assert sorted(core for share in shares for core in share) == sorted(cores)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_nodes_are_read_in_their_order(tmp_path: Path) -> None:
    for name, cores in (("node10", "12"), ("node0", "0-3,8"), ("node2", "4-5,10-11\n"), ("node3", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    (tmp_path / "power").mkdir()
    assert numa_nodes(tmp_path) == ((0, 1, 2, 3, 8), (4, 5, 10, 11), (), (12,))
    assert numa_nodes(tmp_path / "missing") == ()
