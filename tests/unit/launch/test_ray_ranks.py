"""Which actor becomes which rank, as far as it can be known without a cluster."""

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.launch.ray_ranks import Place, RayRanks, seat_ranks


def at(node: str) -> list[Place]:
    return [Place(node=node, address=f"{node}.example")] * 2


def test_groups_of_one_node_are_numbered_together() -> None:
    seats = seat_ranks([*at("a"), *at("b"), *at("a")], [[0, 1], [2, 3], [4, 5]])
    assert {seats[index].rank: index for index in seats} == {0: 0, 1: 1, 2: 4, 3: 5, 4: 2, 5: 3}
    assert [(seat.host_rank, seat.local_rank, seat.local_world_size) for seat in seats.values()] == [
        (0, 0, 4),
        (0, 1, 4),
        (0, 2, 4),
        (0, 3, 4),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert {seat.master_host for seat in seats.values()} == {"a.example"}
    assert {seat.num_hosts for seat in seats.values()} == {2}


def test_one_node_meets_on_loopback() -> None:
    seats = seat_ranks([*at("a"), *at("a")], [[0, 1], [2, 3]])
    assert {seat.master_host for seat in seats.values()} == {"127.0.0.1"}


def test_groups_whose_ranks_do_not_follow_each_other() -> None:
    """With pp as the fastest axis the tp groups are 0, 2 and 1, 3."""
    seats = seat_ranks([*at("a"), *at("b")], [[0, 2], [1, 3]])
    assert [(seat.rank, seat.host_rank, seat.local_rank) for seat in seats.values()] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]


@pytest.mark.parametrize("value", [-1, float("inf"), True])
def test_impossible_shares_are_refused(value: float) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"cpus_per_rank=.* must be a number, 0 or more"):
        RayRanks(print, ParallelConfig(tp=2), cpus_per_rank=value)


def test_threads_do_not_run_on_ray() -> None:
    with pytest.raises(ConfigError, match="backend='local' does not fit here"):
        RayRanks(print, ParallelConfig(tp=2, backend="local"))
    with pytest.raises(ArgumentError, match="fn must be a function"):
        RayRanks(3, ParallelConfig(tp=2))  # type: ignore[arg-type]  # what is tested
