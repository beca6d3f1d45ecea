"""Where settings come from and which of them wins."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import EngineConfig, SamplingParams
from parallel_runtime.serving.engine_sources import (
    PREFIX,
    load_engine_config,
    merge_settings,
    read_settings_file,
    read_variables,
    variable_names,
)

VALUES: dict[tuple[str, ...], st.SearchStrategy[Any]] = {
    ("model",): st.sampled_from(["smollm2", "7", "a,b"]),
    ("replicas",): st.integers(1, 4),
    ("executor",): st.sampled_from(["processes", "threads"]),
    ("parallel", "tp"): st.integers(1, 4),
    ("parallel", "backend"): st.sampled_from(["auto", "gloo"]),
    ("parallel", "deadlines", "join_s"): st.floats(1, 9),
    ("serving", "dtype"): st.sampled_from(["float32", "bfloat16"]),
    ("serving", "stage_layers"): st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=2),
    ("serving", "max_request_tokens"): st.none() | st.integers(2, 99),
    ("supervision", "health_s"): st.floats(1, 9),
    ("sampling", "temperature"): st.floats(0, 2),
    ("sampling", "stop"): st.lists(st.text("ab,", min_size=1), max_size=2),
}
LAYER = st.fixed_dictionaries({}, optional=VALUES)


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def setting(config: EngineConfig, path: tuple[str, ...]) -> object:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


@given(in_file=LAYER, in_variables=LAYER, by_caller=LAYER)
def test_the_strongest_source_that_has_a_setting_wins(
    tmp_path_factory: pytest.TempPathFactory,
    in_file: dict[tuple[str, ...], Any],
    in_variables: dict[tuple[str, ...], Any],
    by_caller: dict[tuple[str, ...], Any],
) -> None:
    file = tmp_path_factory.mktemp("settings") / "engine.json"
    file.write_text(json.dumps(nested(in_file)))
    texts = {path: value if isinstance(value, str) else json.dumps(value) for path, value in in_variables.items()}
    environ = {PREFIX + "_".join(path).upper(): text for path, text in texts.items()} | {"OTHER": "1"}
    config = load_engine_config(file=file, environ=environ, given=nested(by_caller))
    default = EngineConfig()
    for path in VALUES:
        source = next((layer for layer in (by_caller, in_variables, in_file) if path in layer), None)
        assert setting(config, path) == (setting(default, path) if source is None else source[path])


def test_sizes_in_other_words_replace_all_sizes_and_nothing_else() -> None:
    weaker = {"parallel": {"tp": 2, "pp": 3, "shm": "off"}}
    stronger = {"parallel": {"dialect": "vllm", "tensor_parallel_size": 4}}
    config = EngineConfig.model_validate(dict(merge_settings(weaker, stronger)))
    assert (config.parallel.tp, config.parallel.pp, config.parallel.shm) == (4, 1, "off")
    back = EngineConfig.model_validate(dict(merge_settings(stronger, weaker)))
    assert (back.parallel.tp, back.parallel.pp) == (2, 3)
    kept = merge_settings(stronger, {"parallel": {"shm": "off"}})
    assert EngineConfig.model_validate(dict(kept)).parallel.tp == 4


def test_a_yaml_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: smollm2\nreplicas: 2\nparallel: {tp: 2, order: [tp, cp, dp, pp]}\n"
        "serving:\n  stage_layers: [20, 10]\nsampling: {temperature: 0.5, stop: [END]}\n"
    )
    config = load_engine_config(file=file)
    assert (config.replicas, config.parallel.tp, config.serving.stage_layers) == (2, 2, (20, 10))
    assert config.sampling == SamplingParams(temperature=0.5, stop=("END",))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("engine.toml", "a = 1", "settings are read from .json, .yaml or .yml files"),
        ("engine.json", "{", "engine.json cannot be read: Expecting property name"),
        ("engine.yaml", "a: [", "engine.yaml cannot be read: no YAML: while parsing"),
        ("engine.yaml", "", "engine.yaml holds no settings by name; write them as `model: smollm2`"),
        ("engine.json", "[1]", "engine.json holds no settings by name"),
    ],
)
def test_files_that_say_nothing(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings_file(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: .*No such file"):
        load_engine_config(file=tmp_path / "none.json")


def test_variables_have_names_of_their_own() -> None:
    paths = list(variable_names().values())
    assert len(paths) == len(set(paths)) == len(variable_names())
    assert variable_names()[f"{PREFIX}SERVING_DTYPE"] == ("serving", "dtype")
    assert set(VALUES) <= set(paths)


def test_a_variable_that_names_no_setting() -> None:
    with pytest.raises(ConfigError, match=f"{PREFIX}SERVING_DTYP names no setting .*; did you mean {PREFIX}SERVING_DTYPE?"):
        read_variables({f"{PREFIX}SERVING_DTYP": "float32"})
    with pytest.raises(ConfigError, match=f"{PREFIX}QQ names no setting of an engine"):
        read_variables({f"{PREFIX}QQ": "1"})
    assert read_variables({"PARALLEL_RUNTIME_RANK": "0"}) == {}
