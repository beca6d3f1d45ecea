"""Settings of the HTTP server: where they come from, and a key that shows nowhere."""

from pathlib import Path

import pytest

from parallel_runtime.errors import ConfigError
from parallel_runtime.serving.http import HttpSettings, load_http_settings

KEY = "sk-very-secret"


def test_flags_win_over_variables_and_these_over_defaults() -> None:
    environ = {"PARALLEL_RUNTIME_SERVE_PORT": "9000", "PARALLEL_RUNTIME_SERVE_HOST": "0.0.0.0", "PATH": "x"}
    settings = load_http_settings(environ, {"port": 9001})
    assert (settings.host, settings.port, settings.max_requests) == ("0.0.0.0", 9001, 512)


def test_the_key_comes_from_three_places_and_shows_in_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    for environ, given in (
        ({"PARALLEL_RUNTIME_SERVE_API_KEY": KEY}, {}),
        ({"PARALLEL_RUNTIME_SERVE_API_KEY_FILE": str(file)}, {}),
        ({}, {"api_key_file": str(file)}),
        ({"PARALLEL_RUNTIME_SERVE_API_KEY_FILE": "nowhere"}, {"api_key": KEY}),
        ({"PARALLEL_RUNTIME_SERVE_API_KEY": "another"}, {"api_key_file": str(file)}),
    ):
        settings = load_http_settings(environ, given)
        assert settings.api_key is not None
        assert settings.api_key.get_secret_value() == KEY
        for text in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
            assert KEY not in text
        assert settings.replace(port=1).api_key == settings.api_key


def test_a_number_as_a_key_is_a_text() -> None:
    settings = load_http_settings({"PARALLEL_RUNTIME_SERVE_API_KEY": "123", "PARALLEL_RUNTIME_SERVE_SERVED_MODEL_NAME": "7"}, {})
    assert settings.api_key is not None
    assert (settings.api_key.get_secret_value(), settings.served_model_name) == ("123", "7")


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"PARALLEL_RUNTIME_SERVE_PROT": "1"}, "names no setting of the HTTP server; did you mean PARALLEL_RUNTIME_SERVE_PORT"),
        ({"PARALLEL_RUNTIME_SERVE_QQQQQQ": "1"}, "an example is PARALLEL_RUNTIME_SERVE_PORT"),
        ({"PARALLEL_RUNTIME_SERVE_PORT": "99999"}, "port=99999"),
        ({"PARALLEL_RUNTIME_SERVE_PORT": "x"}, "port='x'"),
        ({"PARALLEL_RUNTIME_SERVE_API_KEY_FILE": "/nowhere"}, "the file of the API key, /nowhere, cannot be read: No such file"),
    ],
)
def test_what_is_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_http_settings(environ, {})


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "new\nline"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII, without spaces") as caught:
        load_http_settings({}, {"api_key": key})
    assert not key or key not in str(caught.value)


def test_settings_have_limits() -> None:
    with pytest.raises(ConfigError, match="max_requests=0"):
        HttpSettings(max_requests=0)
