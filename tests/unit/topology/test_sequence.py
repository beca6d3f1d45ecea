"""Whose tokens are whose, by example, and every refusal."""

import pytest

from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.sequence import TokenSpan, kept_rows, rows_per_block, split_tokens


def test_a_rank_takes_a_head_and_its_mirror_image() -> None:
    assert split_tokens([8], parts=2) == (
        (TokenSpan(0, range(2)), TokenSpan(0, range(6, 8))),
        (TokenSpan(0, range(2, 6)),),
    )
    assert split_tokens([7], parts=3) == (
        (TokenSpan(0, range(2)), TokenSpan(0, range(6, 7))),
        (TokenSpan(0, range(2, 3)), TokenSpan(0, range(5, 6))),
        (TokenSpan(0, range(3, 5)),),
    )
    assert split_tokens([5, 2], parts=1) == ((TokenSpan(0, range(5)), TokenSpan(1, range(2))),)


def test_single_tokens_go_round() -> None:
    assert split_tokens([1, 1, 1, 0, 1], parts=3) == (
        (TokenSpan(0, range(1)),),
        (TokenSpan(1, range(1)), TokenSpan(4, range(1))),
        (TokenSpan(2, range(1)),),
    )
    assert split_tokens([], parts=2) == ((), ())


def test_neighbours_within_a_block_are_kept_by_different_ranks() -> None:
    assert [list(kept_rows(8, part=part, parts=3)) for part in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert rows_per_block(8, parts=3) == 3
    assert rows_per_block(16, parts=2) == 8
    assert rows_per_block(2, parts=3) == 1
    assert list(kept_rows(2, part=2, parts=3)) == []


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="parts=0 must be an integer of 1 or more"):
        split_tokens([], parts=0)
    with pytest.raises(ConfigError, match="total=-1 must be an integer of 0 or more"):
        split_tokens([-1], parts=2)
    with pytest.raises(ConfigError, match="page_size=4 and parts=0 must be integers of 1 or more"):
        rows_per_block(4, parts=0)
