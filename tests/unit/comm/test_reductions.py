"""Reductions at the edges of a dtype: on every communicator what torch makes of the members' rows in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import EVERY_MAKER, World

MEMBERS = 3
KINDS = pytest.mark.parametrize("kind", sorted(EVERY_MAKER))
COPIES = pytest.mark.parametrize("copies", [1, 3000], ids=["small", "large"])  # a roll call moves what is small along with it
NAN, INF = float("nan"), float("inf")


def reduced(kind: str, rows: Tensor, op: str) -> list[Tensor]:
    """``rows[member]`` reduced in every way there is, on every member."""

    def body(group: GroupCoordinator) -> list[Tensor]:
        mine = rows[group.rank_in_group]
        assert mine.numel() % MEMBERS == 0
        sizes = [0, mine.numel(), 0]
        scattered = [group.reduce_scatter(mine, 0, op), group.reduce_scatterv(mine, sizes, 0, op)]
        on_last = group.reduce(mine, MEMBERS - 1, op)
        results = [group.all_reduce(mine, op), group.all_gather(scattered[0]), group.all_gatherv(scattered[1], sizes)]
        return results if on_last is None else [*results, on_last]

    return [result for results in World(kind)(MEMBERS, body) for result in results]


@KINDS
@COPIES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("op", "whole"), [("max", torch.amax), ("min", torch.amin)])
def test_max_and_min_keep_every_nan(
    kind: str, copies: int, dtype: torch.dtype, op: str, whole: Callable[[Tensor, int], Tensor]
) -> None:
    rows = torch.tensor([[NAN, 1, 2, INF, -INF, -1.5], [1, -NAN, 2, 1, 3, -1.25], [1, 1, NAN, -2, 0, -2.0]], dtype=dtype)
    rows = rows.repeat(1, copies)
    wanted = whole(rows, 0)
    assert int(wanted.isnan().sum()) == 3 * copies
    for result in reduced(kind, rows, op):
        assert result.dtype is dtype
        assert torch.equal(result.nan_to_num(77.0), wanted.nan_to_num(77.0))
        assert torch.equal(result.isnan(), wanted.isnan())


@KINDS
@COPIES
def test_an_average_of_halves_may_have_a_sum_beyond_them(kind: str, copies: int) -> None:
    rows = torch.full((MEMBERS, 3 * copies), 40_000.0, dtype=torch.float16)
    for result in reduced(kind, rows, "avg"):
        assert bool((result == 40_000).all())


@KINDS
@COPIES
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_halves_are_rounded_once(kind: str, copies: int, op: str) -> None:
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16).repeat(1, 3 * copies)
    exact = rows.float().sum(0) / (MEMBERS if op == "avg" else 1)
    assert op == "avg" or float(rows[0, 0] + rows[1, 0] + rows[2, 0]) != float(exact[0].bfloat16()), "two roundings tell"
    for result in reduced(kind, rows, op):
        assert torch.equal(result, exact.bfloat16())
