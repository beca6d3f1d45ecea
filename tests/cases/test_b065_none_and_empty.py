"""B065: None against empty when requests are broadcast."""

import pytest

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import MAKERS, World

NOTHINGS: tuple[object, ...] = (None, [], {}, "", 0, False)
KINDS = pytest.mark.parametrize("kind", sorted(MAKERS))


@KINDS
@pytest.mark.parametrize("requests", [[], [1], [1, 2]])
def test_b065_two_hops_give_all_ranks_the_list(kind: str, requests: list[int]) -> None:
    def body(rank: int, groups: list[GroupCoordinator]) -> object:
        tp, cp = groups
        value = cp.broadcast_object(requests if rank == 0 else None) if tp.is_first_rank else None
        return tp.broadcast_object(value)

    assert World(kind).many(4, lambda rank: [(0, 1), (2, 3), (0, 2), (1, 3)], body) == [requests] * 4


@KINDS
def test_b065_none_and_empty_arrive_as_they_are(kind: str) -> None:
    def body(group: GroupCoordinator) -> list[object]:
        return [group.broadcast_object(value if group.is_first_rank else "else") for value in NOTHINGS]

    for got in World(kind)(2, body):
        assert [(type(value), value) for value in got] == [(type(value), value) for value in NOTHINGS]


@KINDS
def test_b065_an_empty_round_costs_one_small_broadcast(kind: str) -> None:
    def body(group: GroupCoordinator) -> int:
        before = len(group.recent(200))
        for _ in range(100):
            group.broadcast_object([])
        ours = group.recent(200)[before:]
        assert {record.operation for record in ours} == {"broadcast_object"}
        return len(ours)

    assert World(kind)(2, body) == [100, 100]
