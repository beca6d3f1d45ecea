"""Which worker had a beginning, against looking at every prompt again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.prefix_map import PrefixMap

PROMPTS = st.lists(st.integers(0, 1), max_size=7)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 2)), max_size=12), st.sets(st.integers(0, 2), max_size=1), PROMPTS)
def test_the_longest_known_beginning_decides(seen: list[tuple[list[int], int]], lost: set[int], prompt: list[int]) -> None:
    prefixes = PrefixMap(block_tokens=2)
    owners: dict[tuple[int, ...], int] = {}
    for earlier, worker in seen:
        prefixes.remember(earlier, worker)
        owners.update({tuple(earlier[:end]): worker for end in range(2, len(earlier) + 1, 2)})
    for worker in lost:
        prefixes.forget(worker)
        owners = {key: owner for key, owner in owners.items() if owner != worker}
    expected = None
    for end in range(2, len(prompt) + 1, 2):
        if tuple(prompt[:end]) not in owners:
            break
        expected = owners[tuple(prompt[:end])]
    assert prefixes.find(prompt) == expected
    assert len(prefixes) == len(owners)


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    prefixes = PrefixMap(block_tokens=1, most=2)
    for token in (1, 2, 1, 3):
        prefixes.remember([token], token)
    assert (len(prefixes), prefixes.find([1]), prefixes.find([2]), prefixes.find([3])) == (2, 1, None, 3)


def test_numbers_below_one() -> None:
    with pytest.raises(ArgumentError, match="block_tokens=0 and most=5 must be at least 1"):
        PrefixMap(block_tokens=0, most=5)
