"""The settings of an engine on the command line: flags that several commands share, and ``--dry-run``."""

import argparse
import json
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, get_args

from parallel_runtime.cli.sizes import add_size_options, sizes_from_options
from parallel_runtime.cli.tables import show_tables
from parallel_runtime.cli.vocabularies import flag_of, helps_of, option_help
from parallel_runtime.config import FrozenModel, current_environ
from parallel_runtime.config.plan_text import Table, format_bytes
from parallel_runtime.serving import EngineConfig, ServingConfig, Supervision
from parallel_runtime.serving.engine_config import ExecutorKind
from parallel_runtime.serving.engine_sources import load_engine_config
from parallel_runtime.serving.identities import ProcessIdentity, ResolvedEngine
from parallel_runtime.serving.resolved_engine import resolve_engine

__all__ = ["add_engine_options", "engine_config_from_options", "show_dry_run"]

_PARTS: Mapping[str, type[FrozenModel]] = MappingProxyType({"serving": ServingConfig, "supervision": Supervision})
_LEFT_OUT: Final = frozenset(("seed",))
"""Settings of these parts whose flag means something else: ``--seed`` is a request's."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which engine: the model, sizes in any project's words, replicas, serving, supervision.

    Args:
        parser: Of the command that starts an engine.
    """
    group = parser.add_argument_group("the engine (settings left out come from variables, then from --config, then defaults)")
    group.add_argument("--model", help="smollm2 (default), a .gguf file or a directory with config.json")
    group.add_argument("--config", metavar="FILE", help="settings from a .json, .yaml or .yml file")
    group.add_argument("--replicas", type=int, metavar="N", help="independent worlds, each with the whole model")
    group.add_argument(
        "--executor",
        choices=get_args(ExecutorKind),
        help="what ranks are: processes of this machine (default), threads of this one, Ray actors",
    )
    group.add_argument("--dry-run", action="store_true", help="show who every process would be, and start nothing")
    for part, model in _PARTS.items():
        group = parser.add_argument_group(part)
        for name, text in helps_of(model).items():
            if name not in _LEFT_OUT:
                dest, metavar = f"{part}_{name}", name.rpartition("_")[2].upper()
                group.add_argument(flag_of(name), dest=dest, type=_value, metavar=metavar, help=option_help(text))
    add_size_options(parser)


def engine_config_from_options(options: argparse.Namespace) -> EngineConfig:
    """Make the config that the options mean, over variables and a file.

    Args:
        options: Parsed options of ``add_engine_options``.

    Returns:
        The config.

    Raises:
        ConfigError: A source cannot be read, or a setting breaks a rule.
    """
    given: dict[str, Any] = {
        name: value for name in ("model", "replicas", "executor") if (value := getattr(options, name)) is not None
    }
    for part, model in _PARTS.items():
        names = [name for name in model.model_fields if name not in _LEFT_OUT]
        given[part] = {name: value for name in names if (value := getattr(options, f"{part}_{name}")) is not None}
    given["parallel"] = sizes_from_options(options)
    return load_engine_config(file=options.config, environ=current_environ(), given=given)


def show_dry_run(config: EngineConfig, *, as_json: bool) -> int:
    """Show what an engine would be. Nothing is started.

    Args:
        config: Of the engine.
        as_json: Whether to write JSON instead of tables.

    Returns:
        The exit status: 0.

    Raises:
        ParallelRuntimeError: The model or this machine cannot have such an engine.
    """
    resolved = resolve_engine(config)
    if as_json:
        sys.stdout.write(f"{json.dumps(resolved.as_dict(), indent=2)}\n")
    else:
        show_tables(_headline(resolved), _tables(resolved))
    return 0


def _headline(resolved: ResolvedEngine) -> str:
    count, each = len(resolved.processes), resolved.config.parallel.world_size
    what = "thread" if resolved.config.executor == "threads" else "process"
    plural = "" if count == 1 else "es" if what == "process" else "s"
    return (
        f"{resolved.config.model}: {resolved.config.replicas} x {each} ranks, {count} {what}{plural} on {resolved.machine.host}, "
        f"about {format_bytes(resolved.needed_bytes)} of {format_bytes(resolved.machine.memory_bytes)} free; nothing was started"
    )


def _tables(resolved: ResolvedEngine) -> list[Table]:
    header = ("replica", "rank", "is", "device", "threads", "layers", "heads q/kv", "weights", "KV cache", "shared", "channels")
    groups = ("replica", "rank", "host", "opens")
    processes = resolved.processes
    return [
        Table(title="Processes", header=header, rows=tuple(map(_row, processes))),
        Table(
            title="Groups",
            header=groups,
            rows=tuple((str(p.replica), str(p.rank), p.host, "; ".join(p.groups) or "nothing") for p in processes),
        ),
        Table(
            title="Chosen",
            header=("setting", "value", "why"),
            rows=tuple((choice.setting, choice.value, choice.why) for choice in resolved.choices),
        ),
    ]


def _row(process: ProcessIdentity) -> tuple[str, ...]:
    return (
        str(process.replica),
        str(process.rank),
        " ".join(f"{axis}={index}" for axis, index in process.coordinate.items()),
        process.device,
        str(process.threads),
        f"{process.layers[0]}-{process.layers[1]}",
        f"{process.query_heads}/{process.kv_heads}",
        format_bytes(process.weight_bytes),
        format_bytes(process.kv_bytes),
        format_bytes(process.shared_bytes),
        "; ".join(process.channels),
    )


def _value(text: str) -> object:
    """A number, yes or no, a list such as ``11,10,9``, or a text."""
    if "," in text:
        return [_value(part) for part in text.split(",")]
    try:
        return json.loads(text)
    except ValueError:
        return text
