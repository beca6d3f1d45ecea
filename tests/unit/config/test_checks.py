"""Models that do not fit, each with what would."""

import pytest

from parallel_runtime.config.checks import check_model_fits
from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology import Layout

SHAPE = ModelShape(num_layers=30, num_query_heads=9, num_kv_heads=3, vocab_size=49152, hidden_size=576, intermediate_size=1536)
MIXTURE = SHAPE.replace(num_experts=6, intermediate_size=10)


@pytest.mark.parametrize(
    ("shape", "config", "text"),
    [
        (SHAPE, ParallelConfig(tp=10), "tp=10 is more than the 9 query heads: a rank would hold none; use 1 to 9"),
        (SHAPE, ParallelConfig(pp=31), "pp=31 is more than the 30 layers: a rank would hold none; use 1 to 30"),
        (SHAPE.replace(vocab_size=3), ParallelConfig(tp=4), "tp=4 is more than the 3 vocabulary entries"),
        (SHAPE.replace(intermediate_size=3), ParallelConfig(tp=4), "tp=4 is more than the 3 intermediate columns"),
        (MIXTURE, ParallelConfig(dp=4, ep=4), "ep=4 does not split 6 experts evenly; sizes that do: 1, 2, 3, 6"),
        (MIXTURE, ParallelConfig(dp=12, etp=12), "etp=12 is more than the 10 intermediate columns"),
        (SHAPE.replace(num_kv_heads=2), ParallelConfig(), "9 query heads cannot share 2 KV heads equally"),
    ],
)
def test_what_never_fits(shape: ModelShape, config: ParallelConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config.check_model(shape)


@pytest.mark.parametrize(
    ("shape", "tp", "text"),
    [
        (SHAPE, 2, r"tp=2 does not split 9 query heads \(3 KV heads\) evenly; sizes that do: 1, 3, 9"),
        (
            SHAPE.replace(vocab_size=100),
            3,
            "tp=3 does not split 100 vocabulary entries evenly; sizes that do: 1, 2, 4, 5, 10, 20",
        ),
        (SHAPE.replace(intermediate_size=100), 3, "tp=3 does not split 100 intermediate columns evenly"),
        (MIXTURE, 3, "etp=3 does not split 10 intermediate columns evenly; sizes that do: 1, 2, 5, 10"),
    ],
)
def test_what_fits_only_unevenly(shape: ModelShape, tp: int, text: str) -> None:
    config = ParallelConfig(tp=tp)
    config.check_model(shape)
    with pytest.raises(ConfigError, match=text):
        config.check_model(shape, uneven="refuse")


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"pp=31 .* query heads.*; tp=10 is more than the 3 vocabulary entries"):
        check_model_fits(SHAPE.replace(vocab_size=3), Layout.of(tp=10, pp=31))


def test_uneven_stages_are_never_refused() -> None:
    ParallelConfig(pp=4).check_model(SHAPE, uneven="refuse")


def test_ranks_that_keep_parts_of_the_same_heads_hold_the_same_heads() -> None:
    text = (
        "dcp=2 spreads the tokens of a KV head over 2 neighbours of a tp group, which must hold the same KV heads; "
        "with tp=4 they hold 0, 0, 1, 2; dcp that work: 1$"
    )
    with pytest.raises(ConfigError, match=text):
        ParallelConfig(tp=4, dcp=2).check_model(SHAPE)
    text = "dcp=12 spreads .* over 6 neighbours .*; with tp=6 they hold 0, 0, 1, 1, 2, 2; dcp that work: 1, 2, 4$"
    with pytest.raises(ConfigError, match=text):
        ParallelConfig(tp=6, cp=2, dcp=12).check_model(SHAPE)
    with pytest.raises(ConfigError, match=r"with tp=2 they hold 0-1, 2; dcp that work: 1$"):
        ParallelConfig(tp=2, dcp=2).check_model(SHAPE)
    for config in (ParallelConfig(tp=4, cp=3, dcp=3), ParallelConfig(tp=6, dcp=2), ParallelConfig(tp=9, cp=2, dcp=6)):
        config.check_model(SHAPE)
    with pytest.raises(ConfigError, match=r"tp=12 is more than the 9 query heads: a rank would hold none; use 1 to 9$"):
        ParallelConfig(tp=12, dcp=2).check_model(SHAPE)
