"""The sizes that error messages offer."""

import pytest

from parallel_runtime.topology.sizes import divisors, join_sizes, nearest


@pytest.mark.parametrize("number", [*range(1, 50), 360, 961, 65536])
def test_divisors_are_all_and_ascend(number: int) -> None:
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


def test_nearest_and_join() -> None:
    assert nearest((1, 2, 4, 8), 3) == (2, 4)
    assert nearest((4, 8), 3) == (4,)
    assert nearest((1, 2), 3) == (2,)
    assert nearest((), 3) == ()
    assert join_sizes((1, 2, 4)) == "1, 2, 4"
