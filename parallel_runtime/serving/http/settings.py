"""What a user sets about the HTTP server, and where it comes from: flags over variables over defaults."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field, SecretStr, field_serializer

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.errors import ConfigError
from parallel_runtime.values import LONGEST_S

__all__ = ["HTTP_PREFIX", "HttpSettings", "load_http_settings"]

HTTP_PREFIX: Final = "PARALLEL_RUNTIME_SERVE_"
"""How a variable begins that says a setting of the HTTP server."""

_TEXTS: Final = frozenset(("host", "served_model_name", "api_key", "api_key_file"))


class HttpSettings(FrozenModel):
    """How a model is offered over HTTP.

    Attributes:
        host: Address or name to listen on. The default is reached from this machine only.
        port: TCP port; 0 takes any free one.
        served_model_name: What requests call the model; ``None`` takes the name of the engine's model.
        api_key: Secret that requests must bring as ``Authorization: Bearer``; ``None`` lets everybody in who reaches the port. It
            never appears in a text or a log.
        max_requests: HTTP requests for answers under way at once; one more is refused with 503.
        max_answers: Answers that one request may ask for: its prompts times ``n``.
        max_connections: Open connections; one more is refused with 503.
        max_body_bytes: Longest body of a request; a longer one is refused with 413.
        read_s: Longest time in which a request must have arrived.
        write_s: Longest time for which a client may take nothing of an answer that waits for it, before its connection is ended.
        drain_s: Longest time that running requests have to end once the server was told to stop.

    Raises:
        ConfigError: A value breaks a rule.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    served_model_name: str | None = Field(default=None, min_length=1)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    max_requests: int = Field(default=512, ge=1)
    max_answers: int = Field(default=256, ge=1)
    max_connections: int = Field(default=512, ge=1)
    max_body_bytes: int = Field(default=2**20, ge=1)
    read_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    write_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    drain_s: float = Field(default=30.0, ge=0, le=LONGEST_S)

    @field_serializer("api_key")
    def _hide_key(self, value: SecretStr | None) -> None:
        """The key is written nowhere."""
        del value


def load_http_settings(environ: Mapping[str, str], given: Mapping[str, Any]) -> HttpSettings:
    """Make settings of all their sources.

    Args:
        environ: Variables, usually ``current_environ()``; those that begin with ``HTTP_PREFIX`` count.
        given: What the caller says, which wins. ``api_key_file`` names a file that holds the key.

    Returns:
        The settings.

    Raises:
        ConfigError: A variable names no setting, a file cannot be read, or a value breaks a rule.
    """
    merged = {**_read_variables(environ), **given}
    if "api_key" in given:
        merged.pop("api_key_file", None)
    path = merged.pop("api_key_file", None)
    if path is not None:
        merged["api_key"] = _read_key(Path(path))
    if (key := merged.get("api_key")) is not None:
        merged["api_key"] = SecretStr(_checked_key(key))
    return HttpSettings.model_validate(merged)


def _read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    known = [*HttpSettings.model_fields, "api_key_file"]
    found: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(HTTP_PREFIX)):
        name = variable.removeprefix(HTTP_PREFIX).lower()
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {HTTP_PREFIX}{close[0].upper()}?" if close else f"an example is {HTTP_PREFIX}PORT"
            raise ConfigError(f"{variable} names no setting of the HTTP server; {hint}")
        found[name] = environ[variable] if name in _TEXTS else _value(environ[variable])
    return found


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of the API key, {path}, cannot be read: {getattr(error, 'strerror', error)}") from error


def _checked_key(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("the API key must be at least one character of printable ASCII, without spaces; it is not shown here")
    return key
