"""Shards by example, and every refusal."""

from collections.abc import Callable

import pytest

from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.shards import (
    HeadShard,
    split_even,
    split_experts,
    split_heads,
    split_intermediate,
    split_layers,
    split_vocabulary,
)


def test_the_first_parts_take_the_remainder() -> None:
    assert split_even(7, parts=3) == (range(3), range(3, 5), range(5, 7))
    assert split_even(1, parts=3) == (range(1), range(1, 1), range(1, 1))
    assert split_layers(30, num_stages=4) == (range(8), range(8, 16), range(16, 23), range(23, 30))
    assert split_vocabulary(101, parts=2) == (range(51), range(51, 101))


def test_the_split_of_layers_may_be_given() -> None:
    assert split_layers(30, num_stages=3, sizes=[12, 10, 8]) == (range(12), range(12, 22), range(22, 30))


def test_nine_query_heads_on_three_kv_heads() -> None:
    assert split_heads(9, 3, parts=2) == (HeadShard(range(6), range(2)), HeadShard(range(6, 9), range(2, 3)))
    assert split_heads(9, 3, parts=4) == (
        HeadShard(range(2), range(1)),
        HeadShard(range(2, 3), range(1)),
        HeadShard(range(3, 6), range(1, 2)),
        HeadShard(range(6, 9), range(2, 3)),
    )
    assert [len(shard.query) for shard in split_heads(9, 3, parts=9)] == [1] * 9


def test_kv_heads_are_replicated_when_tp_is_a_multiple() -> None:
    assert [shard.kv for shard in split_heads(32, 2, parts=8)] == [range(1)] * 4 + [range(1, 2)] * 4
    assert [shard.kv for shard in split_heads(4, 1, parts=4, uneven="refuse")] == [range(1)] * 4


def test_columns_are_cut_in_whole_blocks() -> None:
    assert split_intermediate(96, parts=2, multiple_of=32) == (range(64), range(64, 96))


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (lambda: split_even(-1, parts=2), "total=-1 must be an integer of 0 or more"),
        (lambda: split_even(2, parts=0), "parts=0 must be an integer of 1 or more"),
        (lambda: split_layers(4, num_stages=True), "num_stages=True must be an integer of 1 or more"),
        (lambda: split_layers(2, num_stages=3), "pp=3 is more than the 2 layers: a rank would hold none; use 1 to 2"),
        (lambda: split_layers(4, num_stages=2, sizes=(1, 2)), "2 stages and 3 layers, but the model has 4 layers on 2 stages"),
        (lambda: split_layers(4, num_stages=2, sizes=(4, 0)), r"stage sizes \(4, 0\).*give 2 positive sizes that add up to 4"),
        (lambda: split_layers(4, num_stages=2, sizes=()), r"stage sizes \(\): 0 stages and 0 layers"),
        (lambda: split_vocabulary(0, parts=1), "0 vocabulary entries cannot be split"),
        (lambda: split_vocabulary(10, parts=0), "parts=0 must be an integer of 1 or more"),
        (
            lambda: split_vocabulary(100, parts=3, uneven="refuse"),
            "tp=3 does not split 100 vocabulary entries evenly; .* 1, 2, 4, 5",
        ),
        (lambda: split_intermediate(100, parts=2, multiple_of=32), "100 is not a multiple of 32; blocks that divide it: 1, 2, 4"),
        (lambda: split_intermediate(96, parts=4, multiple_of=32), "tp=4 is more than the 3 blocks of 32 intermediate columns"),
        (
            lambda: split_intermediate(10, parts=4, uneven="refuse", axis="etp"),
            "etp=4 does not split 10 intermediate columns evenly",
        ),
        (lambda: split_experts(8, ep=3), "ep=3 does not split 8 experts evenly; sizes that do: 1, 2, 4, 8"),
        (lambda: split_heads(9, 2, parts=1), "9 query heads cannot share 2 KV heads equally; KV heads that work: 1, 3, 9"),
        (lambda: split_heads(9, 3, parts=10), "tp=10 is more than the 9 query heads: a rank would hold none; use 1 to 9"),
        (
            lambda: split_heads(28, 4, parts=7, uneven="refuse"),
            r"tp=7 does not split 28 query heads \(4 KV heads\) evenly; sizes that do: 1, 2, 4, 28",
        ),
    ],
)
def test_refusals(refused: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        refused()
