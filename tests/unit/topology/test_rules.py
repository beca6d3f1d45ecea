"""The rules that sizes obey: each refusal, with its numbers and the sizes it offers."""

from collections.abc import Callable

import pytest

from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.rules import check_dcp, check_expert_sizes, check_order, check_ranks, check_sizes, fit_world


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (lambda: check_sizes(tp=0), "tp=0: a size is an integer of 1 or more; leave tp out, or use tp=1"),
        (lambda: check_sizes(tp=True), "tp=True: a size is an integer of 1 or more"),
        (lambda: check_sizes(tp=10**30), r"tp=10{30}: a size is at most 2\*\*31 - 1 = 2147483647"),
        (lambda: check_sizes(ep=10**5000), r"ep=<int>: a size is at most"),
        (
            lambda: check_sizes(tp=2**16, cp=1, dp=2**15, pp=1),
            r"tp\*cp\*dp\*pp = 65536\*1\*32768\*1 = 2147483648 ranks: a world has at most 2\*\*31 - 1 = 2147483647",
        ),
        (lambda: check_order(("tp", "cp", "dp", "dp")), "must name each of tp, cp, dp, pp once, fastest first"),
        (
            lambda: check_expert_sizes(tp=8, cp=1, dp=1, ep=3, etp=1),
            r"ep=3 does not divide stage_size = tp\*cp\*dp = 8\*1\*1 = 8; nearest ep that do: 2, 4 \(all: 1, 2, 4, 8\)",
        ),
        (
            lambda: check_expert_sizes(tp=4, cp=1, dp=2, ep=2, etp=3),
            r"etp=3 does not divide stage_size/ep = 8/2 = 4; nearest etp that do: 2, 4 \(all: 1, 2, 4\); left out, .* = 4",
        ),
        (lambda: check_dcp(3, tp=8, cp=1), r"dcp=3 does not divide tp=8, .*; nearest dcp that work: 2, 4 \(all: 1, 2, 4, 8\)"),
        (
            lambda: check_dcp(3, tp=4, cp=2),
            r"dcp=3 is not cp times a divisor of tp with tp=4, cp=2, .* work: 2, 4 \(all: 1, 2, 4, 8\)",
        ),
        (lambda: check_ranks(range(3), world_size=4), r"3 ranks are named but tp\*cp\*dp\*pp = 4; name 4 ranks"),
        (lambda: check_ranks(range(-1, 1), world_size=2), "rank -1 is negative; ranks count from 0"),
        (lambda: check_ranks((0, -2), world_size=2), "rank -2 is not an integer of 0 or more"),
        (lambda: check_ranks((0, True), world_size=2), "rank True is not an integer of 0 or more"),
        (lambda: check_ranks((5, 4, 5), world_size=3), "rank 5 is named twice"),
        (lambda: check_ranks([0, 1], world_size=2), "ranks must be a range or a tuple of ranks, not list"),
    ],
)
def test_refusals(refused: Callable[[], None], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        refused()


@pytest.mark.parametrize(
    ("sizes", "world_size", "text"),
    [
        ((3, 1, 1, 2), 8, r"^world_size=8 but tp\*cp\*dp\*pp = 3\*1\*1\*2 = 6; launch 6 ranks, or change one size: tp=4$"),
        ((5, 1, 1, 7), 8, r"^world_size=8 but tp\*cp\*dp\*pp = 5\*1\*1\*7 = 35; launch 35 ranks$"),
        (
            (3, 1, 1, -1),
            8,
            r"^pp=-1 cannot be inferred: tp\*cp\*dp = 3\*1\*1 = 3 does not divide world_size=8; nearest worlds that work: 6, 9, "
            r"or change one size: tp=2, tp=4$",
        ),
        ((5, 1, -1, 7), 8, r"^dp=-1 cannot be inferred: tp\*cp\*pp = 5\*1\*7 = 35 .* worlds that work: 35$"),
        ((1, 1, 1, 1), 0, "world_size=0: a size is an integer of 1 or more"),
    ],
)
def test_worlds_that_do_not_fit(sizes: tuple[int, ...], world_size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fit_world(dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True)), world_size=world_size)


def test_the_largest_world_is_accepted() -> None:
    check_sizes(tp=2**31 - 1, cp=1, dp=1, pp=1, ep=2**31 - 1)


@pytest.mark.parametrize(("tp", "cp"), [(8, 1), (12, 1), (4, 2), (6, 3), (1, 5)])
def test_dcp_widths(tp: int, cp: int) -> None:
    def works(dcp: int) -> bool:
        try:
            check_dcp(dcp, tp=tp, cp=cp)
        except ConfigError:
            return False
        return True

    expected = {1, *(cp * width for width in range(1, tp + 1) if tp % width == 0)}
    assert {dcp for dcp in range(1, 2 * tp * cp) if works(dcp)} == expected
