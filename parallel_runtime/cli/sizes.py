"""Sizes on the command line: in our words, in a peer's, as compact text, or from a file."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallel_runtime.config import FrozenModel, ParallelConfig
from parallel_runtime.config.peers import MegatronSizes, SglangSizes, TorchtitanSizes, VllmSizes
from parallel_runtime.config.plan import Plan
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.hosts import Hosts

__all__ = ["add_size_options", "config_from_options", "parse_hosts", "plan_from_text"]

_SIZES = ("tp", "pp", "dp", "cp", "ep", "etp", "dcp")

_PEERS: Mapping[str, tuple[str, type[FrozenModel], Callable[..., ParallelConfig]]] = MappingProxyType(
    {
        "sglang": ("SGLang", SglangSizes, ParallelConfig.from_sglang),
        "vllm": ("vLLM", VllmSizes, ParallelConfig.from_vllm),
        "megatron": ("Megatron-core", MegatronSizes, ParallelConfig.from_megatron),
        "torchtitan": ("torchtitan", TorchtitanSizes, ParallelConfig.from_torchtitan),
    }
)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a world is cut.

    Args:
        parser: Of the command that needs them.
    """
    ours = parser.add_argument_group("sizes (those left out are 1)")
    for name in _SIZES:
        ours.add_argument(f"--{name}", type=int, metavar="N", help=_help_of(ParallelConfig, name))
    ours.add_argument("--order", metavar="AXES", help="dense axes, fastest first, such as tp-cp-dp-pp")
    ours.add_argument("--world-size", type=int, metavar="N", help="number of ranks; fills in the one size given as -1")
    ours.add_argument("--backend", choices=("auto", "gloo", "nccl", "local", "fake"), help="what moves tensors")
    ours.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where tensors live")
    ours.add_argument("--shm", choices=("auto", "on", "off"), help="shared memory between ranks of one host")
    parser.add_argument("--from", dest="peer", choices=tuple(_PEERS), help="read the sizes in this project's own words, below")
    taken = {"order", "world_size"}
    for peer, (title, sizes, _) in _PEERS.items():
        group = parser.add_argument_group(f"sizes in {title}'s words (--from {peer})")
        for name, field in sizes.model_fields.items():
            if name in taken:
                continue
            taken.add(name)
            flag = f"--{name.replace('_', '-')}"
            if field.annotation is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=_help_of(sizes, name))
            else:
                group.add_argument(flag, type=int, metavar="N", help=_help_of(sizes, name))


def config_from_options(options: argparse.Namespace) -> ParallelConfig:
    """Make the config that the options of ``add_size_options`` mean.

    Args:
        options: Parsed options.

    Returns:
        The config, every size known.

    Raises:
        ConfigError: A flag does not belong to the chosen vocabulary, or the sizes are impossible.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = {name: given[name] for name in ("backend", "device", "shm") if name in given}
    known = {name for _, sizes, _ in _PEERS.values() for name in sizes.model_fields} | {*_SIZES, "order", "world_size"}
    sizes = {name: value for name, value in given.items() if name in known}
    if options.peer is not None:
        title, model, read = _PEERS[options.peer]
        _refuse_foreign(sizes, set(model.model_fields), f"{title} (--from {options.peer})")
        return read(**sizes).replace(**settings)
    _refuse_foreign(sizes, {*_SIZES, "order", "world_size"}, "this command without --from")
    world_size = sizes.pop("world_size", None)
    if "order" in sizes:
        sizes["order"] = tuple(sizes["order"].split("-"))
    config = ParallelConfig(**sizes, **settings)
    return config if world_size is None else config.resolve(world_size=world_size)


def parse_hosts(text: str | None) -> Hosts | None:
    """Read ``--hosts``.

    Args:
        text: A number, or a host name for each rank, separated by commas.

    Returns:
        What ``ParallelConfig.plan`` takes.
    """
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else tuple(text.split(","))


def plan_from_text(text: str, *, hosts: Hosts | None = None) -> Plan:
    """Make a plan from a file, or from compact text.

    Args:
        text: Path of a JSON file (a plan, or a ``ParallelConfig``), or settings such as ``"tp=2,pp=2,hosts=2"``.
        hosts: Where the text says nothing about hosts.

    Returns:
        The plan.

    Raises:
        ConfigError: The text is neither, or what it says is impossible.
    """
    if Path(text).is_file():
        content = _read(Path(text))
        if _is_plan(content):
            return Plan.from_json(content)
        return ParallelConfig.model_validate_json(content).plan(hosts=hosts)
    if "=" not in text:
        raise ConfigError(f"{text!r} is no file, and no settings such as 'tp=2,pp=2,hosts=2'")
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in settings:
            raise ConfigError(f"{text!r} gives {name} twice")
        settings[name] = int(value) if value.lstrip("-").isdecimal() else value
    if "order" in settings:
        settings["order"] = tuple(str(settings["order"]).split("-"))
    own_hosts = settings.pop("hosts", hosts)
    return ParallelConfig(**settings).plan(hosts=own_hosts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text file: {error}") from error


def _is_plan(content: str) -> bool:
    try:
        data = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the file is not JSON: {error}") from error
    return isinstance(data, dict) and "layout" in data


def _refuse_foreign(given: Mapping[str, object], known: set[str], whose: str) -> None:
    foreign = [_flag(name) for name in given if name not in known]
    if foreign:
        raise ConfigError(f"{whose} does not know {', '.join(foreign)}; it knows {', '.join(sorted(map(_flag, known)))}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help_of(model: type[FrozenModel], name: str) -> str:
    """The line of a model's docstring that explains an attribute."""
    lines = (line.strip() for line in (model.__doc__ or "").splitlines())
    return next(
        (line.removeprefix(f"{name}: ").replace("`", "").replace("%", "%%") for line in lines if line.startswith(f"{name}: ")), ""
    )
