"""``parallel-runtime serve``: a model behind OpenAI's HTTP API."""

import argparse
import asyncio
import json
import signal
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from parallel_runtime.cli.engine_options import add_engine_options, engine_config_from_options, show_dry_run
from parallel_runtime.cli.vocabularies import flag_of, helps_of, option_help
from parallel_runtime.config import current_environ
from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import AsyncEngine, EngineConfig
from parallel_runtime.serving.http import HTTP_PREFIX, HttpSettings, load_http_settings

if TYPE_CHECKING:
    from parallel_runtime.serving.http.server import HttpServer

__all__ = ["add_serve", "run_serve"]

_KINDS: Final = MappingProxyType(
    {"host": str, "served_model_name": str, "api_key": str, "read_s": float, "write_s": float, "drain_s": float}
)


def add_serve(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``serve``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "serve",
        help="offer a model over HTTP, as OpenAI's API does",
        description="Offer a model over HTTP: completions, chats, models, health, metrics, and a status page.",
        epilog="SIGTERM or Ctrl-C lets running requests end; a second one ends them at once",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_serve)
    group = parser.add_argument_group(f"the HTTP server (settings left out come from variables {HTTP_PREFIX}..., then defaults)")
    for name, text in helps_of(HttpSettings).items():
        kind = _KINDS.get(name, int)
        group.add_argument(
            flag_of(name), dest=f"http_{name}", type=kind, metavar=name.rpartition("_")[2].upper(), help=option_help(text)
        )
    group.add_argument(
        "--api-key-file",
        dest="http_api_key_file",
        metavar="FILE",
        help="file that holds the API key, which keeps it out of the process list",
    )
    parser.add_argument("--json", action="store_true", help="say where it listens as one JSON object on stdout")
    add_engine_options(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Run ``serve``. Everything about the run goes to stderr.

    Args:
        arguments: As parsed.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        ConfigError: A setting is wrong, the port is taken, or the extra is not installed.
        ParallelRuntimeError: The model could not be served, or no replica is left.
    """
    names = (*HttpSettings.model_fields, "api_key_file")
    given = {name: value for name in names if (value := getattr(arguments, f"http_{name}")) is not None}
    settings = load_http_settings(current_environ(), given)
    config = engine_config_from_options(arguments)
    if arguments.dry_run:
        return show_dry_run(config, as_json=arguments.json)
    try:
        from parallel_runtime.serving.http.server import serve_http
    except ImportError as error:
        raise ConfigError(f"serving over HTTP needs {error.name}: pip install 'parallel-runtime[serve]'") from error
    talk = _Talk(config, as_json=arguments.json)
    number = asyncio.run(serve_http(AsyncEngine(config), settings, say=talk.say))
    return 128 + number if number == signal.SIGINT else 0


class _Talk:
    """Says what the server does."""

    def __init__(self, config: EngineConfig, *, as_json: bool) -> None:
        self._config = config
        self._as_json = as_json
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.perf_counter()

    def say(self, server: "HttpServer", what: str) -> None:
        settings = server.service.settings
        match what:
            case "listening":
                ranks = self._config.replicas * self._config.parallel.world_size
                self._print(f"listening on {server.url}; starting {ranks} rank(s) with {self._config.model}")
            case "ready":
                parallel, seconds = self._config.parallel, time.perf_counter() - self._started
                sizes = f"tp={parallel.tp} pp={parallel.pp} dp={parallel.dp} x {self._config.replicas}"
                key = "with an API key" if settings.api_key else "without an API key"
                self._print(f"{server.service.model} on {sizes}, ready in {seconds:.1f} s, {key}")
                self._print(f"  API     {server.url}/v1")
                self._print(f"  status  {server.url}/")
                if self._as_json:
                    sys.stdout.write(json.dumps({"url": server.url, "model": server.service.model}) + "\n")
                    sys.stdout.flush()
            case "draining":
                left = len(server.service.live)
                self._print(f"draining: {left} request(s) under way have {settings.drain_s:g} s to end; again to end them now")
            case _:
                self._print("ending now")

    def _print(self, text: str) -> None:
        self._notes.print(text, markup=False)
