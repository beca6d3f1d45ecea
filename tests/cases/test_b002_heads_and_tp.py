"""B002: heads that tp does not divide are refused before any rank starts, with the sizes that would work."""

from pathlib import Path

import psutil
import pytest

from parallel_runtime.config import ModelShape, ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.launch.fork_server import begin_fork_server
from parallel_runtime.serving import Engine
from tests.spmd.tiny_models import write_tiny_model


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


def test_b002_what_cannot_be_split_at_all_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    text = "tp=13 is more than the 12 query heads: a rank would hold none; use 1 to 12"
    with pytest.raises(ConfigError, match=text):
        ParallelConfig(tp=13).check_model(shape(12))
    model = write_tiny_model(tmp_path / "model", num_query_heads=12, num_kv_heads=12, head_dim=4, hidden_size=48)
    begin_fork_server()  # an engine begins it before it looks at the model
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ConfigError, match=text):
        Engine(model, parallel=ParallelConfig(tp=13)).__enter__()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
