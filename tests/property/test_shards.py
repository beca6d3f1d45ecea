"""What holds for every way to cut a model."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.config import ModelShape, ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.testing.strategies import model_shapes
from parallel_runtime.topology.shards import (
    split_even,
    split_experts,
    split_heads,
    split_intermediate,
    split_layers,
    split_vocabulary,
)

counts = st.integers(1, 64)


@given(st.integers(0, 200), counts)
def test_even_parts_tile_and_differ_by_one_at_most(total: int, parts: int) -> None:
    cut = split_even(total, parts=parts)
    sizes = [len(part) for part in cut]
    assert list(chain.from_iterable(cut)) == list(range(total))
    assert len(cut) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(model_shapes(), counts)
def test_heads_tile_and_keep_their_kv_heads(shape: ModelShape, parts: int) -> None:
    query_heads, kv_heads = shape.num_query_heads, shape.num_kv_heads
    if parts > query_heads:
        with pytest.raises(ConfigError, match=f"tp={parts} is more than the {query_heads} query heads"):
            split_heads(query_heads, kv_heads, parts=parts)
        return
    cut = split_heads(query_heads, kv_heads, parts=parts)
    assert len(cut) == parts
    assert list(chain.from_iterable(shard.query for shard in cut)) == list(range(query_heads))
    assert set(chain.from_iterable(shard.kv for shard in cut)) == set(range(kv_heads))
    for shard in cut:
        assert len(shard.query) % len(shard.kv) == 0
        per_kv = len(shard.query) // len(shard.kv)
        for local, head in enumerate(shard.query):
            assert shard.kv[local // per_kv] == head // (query_heads // kv_heads)
    if parts <= kv_heads:
        assert list(chain.from_iterable(shard.kv for shard in cut)) == list(range(kv_heads))


@given(model_shapes(), counts)
def test_even_heads_are_refused_exactly_when_parts_would_differ(shape: ModelShape, parts: int) -> None:
    query_heads, kv_heads = shape.num_query_heads, shape.num_kv_heads
    loads = set()
    if parts <= query_heads:
        loads = {(len(shard.query), len(shard.kv)) for shard in split_heads(query_heads, kv_heads, parts=parts)}
    if len(loads) == 1:
        assert split_heads(query_heads, kv_heads, parts=parts, uneven="refuse")
    else:
        with pytest.raises(ConfigError, match=f"tp={parts}"):
            split_heads(query_heads, kv_heads, parts=parts, uneven="refuse")


@given(counts, counts, st.sampled_from((1, 2, 32)))
def test_columns_tile_in_whole_blocks(blocks: int, parts: int, multiple_of: int) -> None:
    if parts > blocks:
        with pytest.raises(ConfigError, match=f"tp={parts} is more than the {blocks}"):
            split_intermediate(blocks * multiple_of, parts=parts, multiple_of=multiple_of)
        return
    cut = split_intermediate(blocks * multiple_of, parts=parts, multiple_of=multiple_of)
    assert list(chain.from_iterable(cut)) == list(range(blocks * multiple_of))
    assert all(len(part) % multiple_of == 0 for part in cut)


@given(counts, counts)
def test_layers_vocabulary_and_experts_tile_or_are_refused(total: int, parts: int) -> None:
    if parts <= total:
        assert list(chain.from_iterable(split_layers(total, num_stages=parts))) == list(range(total))
        assert list(chain.from_iterable(split_vocabulary(total, parts=parts))) == list(range(total))
    else:
        with pytest.raises(ConfigError, match=f"pp={parts} is more than the {total} layers"):
            split_layers(total, num_stages=parts)
        with pytest.raises(ConfigError, match=f"tp={parts} is more than the {total} vocabulary entries"):
            split_vocabulary(total, parts=parts)
    if total % parts == 0:
        assert {len(part) for part in split_experts(total, ep=parts)} == {total // parts}
    else:
        with pytest.raises(ConfigError, match=f"ep={parts} does not split {total} experts"):
            split_experts(total, ep=parts)


@given(model_shapes(), st.integers(1, 8), st.integers(1, 4))
def test_a_model_fits_exactly_when_no_rank_is_left_empty(shape: ModelShape, tp: int, pp: int) -> None:
    config = ParallelConfig(tp=tp, pp=pp)
    fits = tp <= min(shape.num_query_heads, shape.vocab_size, shape.intermediate_size) and pp <= shape.num_layers
    if fits:
        config.check_model(shape)
    else:
        with pytest.raises(ConfigError, match="the model does not fit the layout"):
            config.check_model(shape)
