"""``parallel-runtime serve`` up to where it serves: its flags, and what it refuses before a model is loaded."""

import socket
import sys

import pytest

from parallel_runtime.cli.main import build_parser, main
from tests.spmd.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(60)

KEY = "sk-very-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What it says, with nothing on stdout."""
    assert main(["serve", "--executor", "threads", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def test_a_taken_port_is_told_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = fails(capsys, "--model", "nowhere", "--port", str(port))
    assert said == (
        f"parallel-runtime: cannot listen on 127.0.0.1 port {port}: another program listens there; "
        "choose another port, or 0 for any free one"
    )


def test_a_missing_model_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model at" in fails(capsys, "--model", "./nowhere", "--port", "0")


def test_settings_are_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "max_requests=0" in fails(capsys, "--max-requests", "0")
    assert "cannot be read" in fails(capsys, "--api-key-file", "/nowhere")
    monkeypatch.setenv("PARALLEL_RUNTIME_SERVE_PROT", "1")
    assert "did you mean PARALLEL_RUNTIME_SERVE_PORT?" in fails(capsys)


def test_a_dry_run_starts_nothing_and_hides_the_key(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run", "--model", model, "--tp", "2", "--api-key", KEY]) == 0
    out, err = capsys.readouterr()
    assert "nothing was started" in out
    assert KEY not in out + err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    out = capsys.readouterr().out
    for flag in (
        "--host",
        "--port",
        "--api-key-file",
        "--max-body-bytes",
        "--drain-s",
        "--replicas",
        "--tp",
        "--kv-cache-tokens",
    ):
        assert flag in out


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("parallel_runtime.serving.http.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert fails(capsys) == "parallel-runtime: serving over HTTP needs uvicorn: pip install 'parallel-runtime[serve]'"
