"""The block pool: what it hands out, what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.blocks import BlockPool, blocks_for, chain_keys


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
    with pytest.raises(ArgumentError, match="cannot take 2 blocks: 1 of 3 are free or cached"):
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


TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_equal_keys_are_equal_beginnings(first: list[int], second: list[int], page_size: int) -> None:
    keys = [chain_keys(tokens, page_size) for tokens in (first, second)]
    assert [len(each) for each in keys] == [len(first) // page_size, len(second) // page_size]
    for count, (one, other) in enumerate(zip(*keys, strict=False), start=1):
        assert (one == other) == (first[: count * page_size] == second[: count * page_size])
    assert chain_keys(first, page_size, known=keys[0][:1]) == keys[0]


def test_what_is_remembered_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(4)
    first, second, third = chain_keys(range(6), 2)
    held = pool.allocate(3)
    for block, key in zip(held, (first, second, third), strict=True):
        pool.remember(block, key)
    assert pool.find([first, second, third]) == held
    pool.release(held)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 3, 0, 4)
    assert pool.num_cached_among(held) == 3
    pool.share(pool.find([first]))
    assert (pool.num_cached, pool.num_used, pool.num_cached_among(held)) == (2, 1, 2)
    assert pool.allocate(2) == [3, held[2]], "free ones first, then the end of the chain"
    assert pool.find([first, second, third]) == held[:2]
    assert pool.find([second]) == held[1:2], "a chain is asked for from its beginning; nobody has this one"
    assert pool.allocate(1) == [held[1]]
    assert pool.find([first, second]) == held[:1]


def test_the_first_of_two_equal_blocks_stays_the_one_to_find() -> None:
    pool = BlockPool(2)
    (key,) = chain_keys([5], 1)
    first, second = pool.allocate(2)
    pool.remember(first, key)
    pool.remember(second, key)
    pool.release([first, second])
    assert (pool.num_free, pool.num_cached, pool.find([key])) == (1, 1, [first])


def test_forgetting_frees_what_nobody_holds() -> None:
    pool = BlockPool(3)
    keys = chain_keys(range(2), 1)
    held = pool.allocate(2)
    for block, key in zip(held, keys, strict=True):
        pool.remember(block, key)
    pool.release(held[1:])
    assert pool.forget() == 1
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.find(keys)) == (2, 0, 1, [])
    pool.release(held[:1])
    assert pool.num_free == 3
    with pytest.raises(ArgumentError, match="block 0 is not in use"):
        pool.remember(0, keys[0])
    with pytest.raises(ArgumentError, match="block 0 is not in use"):
        pool.share([0])


@given(st.data())
def test_every_block_is_free_cached_or_used(data: st.DataObject) -> None:
    """Against books that hold nothing but who has what."""
    pool = BlockPool(5)
    holders: list[list[int]] = []
    for step in range(25):
        choice = data.draw(st.sampled_from(["take", "share", "give", "remember", "forget"]))
        if choice == "take":
            count = data.draw(st.integers(0, pool.num_available))
            taken = pool.allocate(count)
            assert not set(taken) & {block for held in holders for block in held}
            holders.append(taken)
        elif choice == "share" and holders:
            held = data.draw(st.sampled_from(holders))
            pool.share(held)
            holders.append(list(held))
        elif choice == "give" and holders:
            pool.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        elif choice == "remember" and (blocks := [block for held in holders for block in held]):
            pool.remember(data.draw(st.sampled_from(blocks)), bytes([step]))
        elif choice == "forget":
            pool.forget()
        used = {block for held in holders for block in held}
        assert pool.num_used == len(used)
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
