"""The cut of a model over pipeline stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ConfigError
from parallel_runtime.models.stages import split_stages
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config


def lengths(stages: tuple[range, ...]) -> list[int]:
    return [len(stage) for stage in stages]


def test_a_large_head_is_worth_several_layers() -> None:
    smollm2 = tiny_llama_config(
        num_layers=30, hidden_size=576, intermediate_size=1536, num_query_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152
    )
    assert lengths(split_stages(smollm2, num_stages=2)) == [19, 11]
    assert lengths(split_stages(smollm2, num_stages=3)) == [13, 12, 5]
    assert lengths(split_stages(smollm2, num_stages=2, sizes=(10, 20))) == [10, 20]


def test_a_small_one_changes_nothing() -> None:
    assert lengths(split_stages(tiny_llama_config(num_layers=5), num_stages=2)) == [3, 2]
    assert lengths(split_stages(tiny_moe_config(num_layers=4), num_stages=3)) == [2, 1, 1]


@given(layers=st.integers(1, 40), num_stages=st.integers(1, 8), vocab_size=st.integers(3, 10**7))
def test_stages_tile_the_layers_and_none_is_empty(layers: int, num_stages: int, vocab_size: int) -> None:
    config = tiny_llama_config(num_layers=layers, vocab_size=vocab_size)
    if num_stages > layers:
        with pytest.raises(ConfigError, match="pp"):
            split_stages(config, num_stages=num_stages)
        return
    stages = split_stages(config, num_stages=num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert len(stages) == num_stages
    assert min(lengths(stages)) >= 1
    assert lengths(stages) == sorted(lengths(stages), reverse=True), "the last one has the head and is never the larger one"
