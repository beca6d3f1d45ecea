"""The numbers of a model."""

import pytest

from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.errors import ConfigError

NUMBERS = {
    "num_layers": 30,
    "num_query_heads": 9,
    "num_kv_heads": 3,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
}


def test_a_dense_model_has_no_experts() -> None:
    assert ModelShape.model_validate(NUMBERS).num_experts == 0


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 should be greater than or equal to 1"):
        ModelShape.model_validate({**NUMBERS, name: 0})
    with pytest.raises(ConfigError, match=f"ModelShape needs {name}"):
        ModelShape.model_validate({other: value for other, value in NUMBERS.items() if other != name})


def test_experts_may_be_zero_but_not_fewer() -> None:
    with pytest.raises(ConfigError, match="num_experts=-1 should be greater than or equal to 0"):
        ModelShape.model_validate({**NUMBERS, "num_experts": -1})
