"""B018, as far as groups go: a rank with nothing to send takes part in every exchange, and in no other."""

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import MAKERS, World

WIDTH = 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("tokens", [(5, 0), (0, 5), (0, 0), (1, 17)])
def test_b018_an_idle_rank_takes_part_in_the_exchange(kind: str, tokens: tuple[int, int]) -> None:
    def body(group: GroupCoordinator) -> int:
        mine = tokens[group.rank_in_group]
        for step in range(8):
            sent = torch.full((mine, WIDTH), float(group.rank_in_group + 10 * step))
            halves = [mine // 2, mine - mine // 2]
            given = [each // 2 if group.rank_in_group == 0 else each - each // 2 for each in tokens]
            got = group.all_to_allv(sent, halves)
            assert got.shape == (sum(given), WIDTH)
            assert torch.equal(group.all_to_allv(got, given, output_splits=halves), sent)
        return group.recent(1)[0].sequence

    first, second = World(kind)(2, body)
    assert first == second
