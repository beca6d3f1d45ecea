"""Flags that say which engine, and what a dry run shows."""

import argparse
import json
from pathlib import Path

import pytest

from parallel_runtime.cli.engine_options import add_engine_options, engine_config_from_options
from parallel_runtime.cli.main import main
from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import EngineConfig, ServingConfig, Supervision
from tests.spmd.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300))


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config_from_options(parser.parse_args(arguments))


def test_flags_make_a_config() -> None:
    assert parse() == EngineConfig()
    config = parse(
        *("--model", "m", "--tp", "2", "--pp", "2", "--order", "tp-cp-dp-pp", "--backend", "gloo", "--replicas", "2"),
        *("--dtype", "bfloat16", "--stage-layers", "3,1", "--health-s", "2.5", "--executor", "threads"),
    )
    assert config == EngineConfig(
        model="m",
        parallel=ParallelConfig(tp=2, pp=2, backend="gloo"),
        replicas=2,
        executor="threads",
        serving=ServingConfig(dtype="bfloat16", stage_layers=(3, 1)),
        supervision=Supervision(health_s=2.5),
    )


def test_sizes_in_another_projects_words() -> None:
    config = parse("--from", "sglang", "--tp", "4", "--dp", "2")
    assert (config.parallel.tp, config.replicas) == (4, 2)
    assert parse("--dp", "-1", "--tp", "2", "--world-size", "8").parallel.dp == 4


def test_flags_win_over_variables_and_these_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.json"
    file.write_text('{"replicas": 4, "parallel": {"tp": 4, "pp": 4}, "serving": {"dtype": "bfloat16"}}')
    monkeypatch.setenv("PARALLEL_RUNTIME_ENGINE_PARALLEL_TP", "3")
    monkeypatch.setenv("PARALLEL_RUNTIME_ENGINE_REPLICAS", "3")
    config = parse("--config", str(file), "--replicas", "2")
    assert (config.replicas, config.parallel.tp, config.parallel.pp, config.serving.dtype) == (2, 3, 4, "bfloat16")


def test_a_dry_run_shows_every_process(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--dry-run", "--model", model, "--tp", "2", "--replicas", "2", "Hi"]) == 0
    out = capsys.readouterr().out
    assert f"{model}: 2 x 2 ranks, 4 processes on " in out.splitlines()[0]
    assert "nothing was started" in out.splitlines()[0]
    for text in ("Processes", "Groups", "Chosen", "tp=1 cp=0 dp=0 pp=0", "steps from the leader", "the model's context length"):
        assert text in out


def test_a_dry_run_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--dry-run", "--json", "--executor", "threads", "--model", model, "--pp", "2", "Hi"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [process["coordinate"]["pp"] for process in shown["processes"]] == [0, 1]
    assert EngineConfig.model_validate(shown["config"]).model == model
    assert {"setting", "value", "why"} == set(shown["choices"][0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tp", "9"), "tp=9 is more than the 4 query heads"),
        (("--model", "nowhere"), "no model at 'nowhere'"),
        (("--replicas", "0"), "replicas=0 should be greater than or equal to 1"),
        (("--page-size", "x"), "page_size='x'"),
        (("--tp-size", "2"), "`--tp-size` is SGLang's"),
        (("--kv-cache-tokens", "1000000000000"), "1 ranks need"),
    ],
)
def test_what_cannot_be_is_one_line(
    model: str, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--dry-run", "--model", model, *arguments, "Hi"]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
