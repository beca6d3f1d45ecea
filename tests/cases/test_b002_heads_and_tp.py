"""B002: heads that tp does not divide are refused before any process starts, with the sizes that would work."""

import pytest

from parallel_runtime.config import ModelShape, ParallelConfig
from parallel_runtime.errors import ConfigError


def shape(heads: int) -> ModelShape:
    """A model with as many KV heads as query heads."""
    return ModelShape(
        num_layers=2, num_query_heads=heads, num_kv_heads=heads, vocab_size=8064, hidden_size=64 * heads, intermediate_size=1344
    )


def test_b002_the_refusal_names_heads_tp_and_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"tp=8 does not split 12 query heads evenly; sizes that do: 1, 2, 3, 4, 6, 12$"):
        ParallelConfig(tp=8).check_model(shape(12), uneven="refuse")
    with pytest.raises(ConfigError, match=r"tp=8 does not split 28 query heads evenly; sizes that do: 1, 2, 4, 7, 14, 28$"):
        ParallelConfig(tp=8).check_model(shape(28), uneven="refuse")


@pytest.mark.parametrize("tp", [3, 12])
def test_b002_sizes_that_divide_are_accepted(tp: int) -> None:
    ParallelConfig(tp=tp).check_model(shape(12), uneven="refuse")


@pytest.mark.parametrize("heads", [12, 28])
def test_b002_uneven_heads_work_unless_refused(heads: int) -> None:
    ParallelConfig(tp=8).check_model(shape(heads))
