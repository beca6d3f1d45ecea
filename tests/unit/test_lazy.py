"""Packages import their names on demand, so that an engine's ranks can be on their way before this process has torch."""

import subprocess
import sys

import pytest

import parallel_runtime
import parallel_runtime.launch.processes
from parallel_runtime import serving
from parallel_runtime.lazy import lazy_exports

LIGHT = """
import sys
from parallel_runtime import Engine, ParallelConfig, SamplingParams, launch
from parallel_runtime.serving import ServingConfig

Engine("smollm2", parallel=ParallelConfig(tp=2), serving=ServingConfig(), sampling=SamplingParams())
sys.exit(int("torch" in sys.modules))
"""


def test_an_engine_can_be_described_without_torch() -> None:
    assert subprocess.run([sys.executable, "-c", LIGHT], check=False).returncode == 0


@pytest.mark.parametrize("package", [parallel_runtime, serving, parallel_runtime.comm, parallel_runtime.context])
def test_every_name_is_there_and_no_other(package: object) -> None:
    names: list[str] = getattr(package, "__all__")  # noqa: B009  # mypy knows no attribute of an object
    assert all(getattr(package, name) is not None for name in names)
    assert set(names) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(package, "Nothing")  # noqa: B009


def test_the_function_is_not_hidden_by_the_package_of_its_name() -> None:
    assert callable(parallel_runtime.launch)
    assert "launch" in dir(parallel_runtime)


def test_a_package_without_a_source_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "bare", types.ModuleType("bare"))
    get, _ = lazy_exports("bare")
    with pytest.raises(AttributeError, match="module 'bare' has no attribute 'x'"):
        get("x")
