"""One value that says everything about an engine: what it takes, what it refuses, and how it travels."""

from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.serving import EngineConfig, SamplingParams, ServingConfig, Supervision
from parallel_runtime.serving.engine_config import engine_config, shared_threads

FULL = EngineConfig(
    model="some/model",
    parallel=ParallelConfig(tp=2, pp=2, deadlines=Deadlines(join_s=7.0)),
    replicas=3,
    executor="threads",
    serving=ServingConfig(dtype="bfloat16", stage_layers=(2, 1)),
    supervision=Supervision(health_s=4.0),
    sampling=SamplingParams(temperature=0.5, stop=("x",), stop_token_ids=(3,)),
)


@pytest.mark.parametrize("config", [EngineConfig(), FULL])
def test_it_travels_as_json(config: EngineConfig) -> None:
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("parallel", "expected", "replicas"),
    [
        ({"tp": 2, "dp": -1, "world_size": 8}, ParallelConfig(tp=2, dp=4), 1),
        ({"dialect": "vllm", "tensor_parallel_size": 2, "backend": "gloo"}, ParallelConfig.from_vllm(tensor_parallel_size=2), 1),
        ({"dialect": "sglang", "tp_size": 4, "dp_size": 2}, ParallelConfig(tp=4), 2),
        (
            {"dialect": "sglang", "tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
            ParallelConfig.from_sglang(tp_size=4, dp_size=2, enable_dp_attention=True),
            1,
        ),
        ({"dialect": "megatron", "world_size": 4, "tensor_model_parallel_size": 2}, ParallelConfig(tp=2, dp=2), 1),
    ],
)
def test_sizes_in_any_words(parallel: dict[str, Any], expected: ParallelConfig, replicas: int) -> None:
    config = EngineConfig.model_validate({"parallel": parallel})
    assert config.parallel.replace(backend="auto").layout == expected.layout
    assert config.parallel.backend == parallel.get("backend", "auto")
    assert config.replicas == replicas


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": 0}, "replicas=0 should be greater than or equal to 1"),
        ({"model": ""}, "model='' "),
        ({"model_path": "x"}, "EngineConfig has no setting 'model_path'; did you mean 'model'"),
        ({"temperature": 1.0}, "no setting 'temperature'; did you mean 'sampling'"),
        ({"parallel": {"dialect": "deepspeed"}}, "dialect='deepspeed' is unknown; there are sglang, vllm, megatron, torchtitan"),
        ({"parallel": {"dialect": "vllm", "tp_size": 2}}, "no setting 'tp_size'"),
        ({"parallel": {"tp": 3, "world_size": 4}}, r"world_size=4 but tp\*cp\*dp\*pp = 3"),
        ({"parallel": {"dialect": "sglang", "dp_size": 2}, "replicas": 3}, "replicas=3 but SGLang's dp_size=2"),
        ({"parallel": {"dialect": "sglang", "dp_size": 0}}, "replicas=0 should be greater"),
        ({"serving": {"page_size": 0}}, "page_size=0 should be greater"),
        ({"sampling": {"temperature": -1}}, "temperature=-1 must be a finite number"),
        ({"sampling": 3}, "sampling=3 should be an instance of SamplingParams"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.model_validate(settings)


def test_an_engine_takes_a_config_or_its_settings() -> None:
    assert engine_config(FULL) is FULL
    assert engine_config(Path("m"), replicas=2, serving=None) == EngineConfig(model="m", replicas=2)
    with pytest.raises(ArgumentError, match=r"and replicas came beside it; use config\.replace"):
        engine_config(FULL, replicas=2)
    with pytest.raises(ArgumentError, match="model=5 is neither a name nor a path"):
        engine_config(5)  # type: ignore[arg-type]  # what is tested


def test_replicas_share_the_cores() -> None:
    two = EngineConfig(parallel=ParallelConfig(tp=1000), replicas=2)
    assert shared_threads(EngineConfig(), {}) is None
    assert shared_threads(two, {"OMP_NUM_THREADS": "3"}) is None
    assert shared_threads(two, {}) == 1
