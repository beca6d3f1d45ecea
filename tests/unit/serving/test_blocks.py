"""The block pool: what it hands out, what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.blocks import BlockPool, blocks_for


@given(st.integers(0, 500), st.integers(1, 64))
def test_blocks_hold_the_tokens_and_not_one_block_more(num_tokens: int, page_size: int) -> None:
    count = blocks_for(num_tokens, page_size)
    assert count * page_size >= num_tokens > (count - 1) * page_size


def test_lowest_blocks_first_and_released_ones_next() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 5]
    assert (pool.num_free, pool.num_used, pool.num_blocks) == (0, 6, 6)


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_used == 0


def test_refusals_change_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(ArgumentError, match="cannot take 2 blocks: 1 of 3 are free"):
        pool.allocate(2)
    with pytest.raises(ArgumentError, match="cannot take -1 blocks"):
        pool.allocate(-1)
    with pytest.raises(ArgumentError, match="block 2 is not in use"):
        pool.release([held[0], 2])
    with pytest.raises(ArgumentError, match="block -1 is not in use"):
        pool.share([-1])
    with pytest.raises(ArgumentError, match="block 3 is not in use; the pool has blocks 0 to 2"):
        pool.share([3])
    with pytest.raises(ArgumentError, match="named twice"):
        pool.release([0, 0])
    assert (pool.num_used, pool.num_free) == (2, 1)
    pool.release(held)
    with pytest.raises(ArgumentError, match="block 0 is not in use"):
        pool.release([0])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ArgumentError, match="num_blocks=0"):
        BlockPool(0)
