"""Sizes on the command line: in our words, in a peer's, as compact text, or from a file."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from parallel_runtime.cli.vocabularies import OURS, PEERS, Vocabulary, flag_of
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.plan import Plan
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.hosts import Hosts

__all__ = ["GivenSizes", "add_size_options", "config_from_options", "parse_hosts", "plan_from_text", "sizes_from_options"]

GivenSizes: TypeAlias = tuple[tuple[str, int | str | bool], ...]
"""Flags of sizes as they were written, and their values."""

_ALL = (OURS, *PEERS.values())


@final
class _Remember(argparse.Action):
    """Keeps each flag as it was written: whose word it is depends on ``--from``, which may come later."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = not (option_string or "").startswith("--no-") if self.nargs == 0 else values
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), (option_string, value)))


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a world is cut. Those that say sizes are kept in ``options.sizes``, as ``GivenSizes``.

    Args:
        parser: Of the command that needs them.
    """
    homes = _homes()
    ours = parser.add_argument_group("sizes (those left out are 1)")
    _add_flags(ours, OURS, homes)
    ours.add_argument("--backend", choices=("auto", "gloo", "nccl", "local", "fake"), help="what moves tensors")
    ours.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where tensors live")
    ours.add_argument("--shm", choices=("auto", "on", "off"), help="shared memory between ranks of one host")
    parser.add_argument("--from", dest="peer", choices=tuple(PEERS), help="read the sizes in this project's own words, below")
    for peer in PEERS.values():
        _add_flags(parser.add_argument_group(f"sizes in {peer.title}'s words (--from {peer.name})"), peer, homes)


def config_from_options(options: argparse.Namespace) -> ParallelConfig:
    """Make the config that the options of ``add_size_options`` mean.

    Args:
        options: Parsed options.

    Returns:
        The config, every size known.

    Raises:
        ConfigError: A flag does not belong to the chosen vocabulary, or the sizes are impossible.
    """
    settings = {name: value for name in ("backend", "device", "shm") if (value := getattr(options, name)) is not None}
    if options.peer is not None:
        peer = PEERS[options.peer]
        return peer.read(**_read_sizes(options.sizes, peer)).replace(**settings)
    sizes = _read_sizes(options.sizes, OURS)
    world_size = sizes.pop("world_size", None)
    if "order" in sizes:
        sizes["order"] = tuple(sizes["order"].split("-"))
    config = ParallelConfig(**sizes, **settings)
    if world_size is not None:
        return config.resolve(world_size=world_size)
    return _known(config, "add `--world-size N`, or give a size")


def sizes_from_options(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the sizes that the options of ``add_size_options`` say, without judging them.

    Args:
        options: Parsed options.

    Returns:
        Settings as ``EngineConfig`` takes them for ``parallel``: with ``dialect`` where they are in another project's words.

    Raises:
        ConfigError: A flag does not belong to the chosen vocabulary.
    """
    settings = {name: value for name in ("backend", "device", "shm") if (value := getattr(options, name)) is not None}
    sizes = _read_sizes(options.sizes, OURS if options.peer is None else PEERS[options.peer])
    if options.peer is not None:
        return {"dialect": options.peer, **sizes, **settings}
    if "order" in sizes:
        sizes["order"] = tuple(sizes["order"].split("-"))
    return {**sizes, **settings}


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
        return _known(ParallelConfig.model_validate_json(content), "a file must hold every size").plan(hosts=hosts)
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
    return _known(ParallelConfig(**settings), "a text must hold every size").plan(hosts=own_hosts)


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


def _known(config: ParallelConfig, hint: str) -> ParallelConfig:
    """Refuse a size that nothing fills in."""
    unknown = next((axis for axis in ("tp", "cp", "dp", "pp") if getattr(config, axis) == -1), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}=-1 is filled in from the number of ranks: {hint}")
    return config


def _homes() -> Mapping[str, str]:
    """In whose help each flag stands: the first project that usually writes it, or else the first that takes it."""
    homes: dict[str, str] = {}
    for vocabulary in _ALL:
        for name in vocabulary.helps:
            homes.setdefault(flag_of(name), vocabulary.name)
    for vocabulary in _ALL:
        for flag in (flag for name in vocabulary.helps for flag in vocabulary.flags_of(name)):
            homes.setdefault(flag, vocabulary.name)
    return homes


def _add_flags(group: "argparse._ArgumentGroup", vocabulary: Vocabulary, homes: Mapping[str, str]) -> None:
    """Add the flags that stand in this vocabulary's help, and say there which others it takes."""
    elsewhere: list[str] = []
    for name, text in vocabulary.helps.items():
        flags = vocabulary.flags_of(name)
        own = [flag for flag in flags if homes[flag] == vocabulary.name]
        others = [flag for flag in flags if flag not in own]
        if others:
            elsewhere.append(f"{', '.join(others)} {'as above' if flags[0] in others else f'for {flags[0]}'}")
        if not own:
            continue
        text = text.replace("%", "%%")
        if name in vocabulary.switches:
            group.add_argument(*own, dest="sizes", default=(), action=_Remember, nargs=0, help=text)
        else:
            kind, metavar = (str, "AXES") if name == "order" else (int, "N")
            group.add_argument(*own, dest="sizes", default=(), action=_Remember, type=kind, metavar=metavar, help=text)
    if elsewhere:
        group.description = "also " + ";\n     ".join(elsewhere)


def _read_sizes(given: GivenSizes, vocabulary: Vocabulary) -> dict[str, Any]:
    """Turn flags into sizes by name."""
    sizes: dict[str, Any] = {}
    written: dict[str, str] = {}
    for flag, value in given:
        name = vocabulary.meaning(flag)
        if name is None:
            raise ConfigError(_foreign(flag, vocabulary))
        if name in sizes:
            raise ConfigError(f"`{written[name]} {sizes[name]}` and `{flag} {value}` say the same size twice; keep one of them")
        sizes[name], written[name] = value, flag
    for name in vocabulary.required:
        if name not in sizes:
            raise ConfigError(f"`--from {vocabulary.name}` needs `{flag_of(name)} N`")
    return sizes


def _foreign(flag: str, vocabulary: Vocabulary) -> str:
    """Say whose a flag is, and what to write instead."""
    owners = [owner for owner in _ALL if owner.meaning(flag)]
    meant = owners[0].meaning(flag) or ""
    ours = vocabulary.flag_for(ParallelConfig.spellings.get(meant, meant))
    offers = [f"add `--from {owner.name}`" for owner in owners if owner is not OURS] if vocabulary is OURS else []
    offers += [f"write `{ours}`"] if ours else []
    whose = " and ".join(f"{owner.title}'s" for owner in owners)
    if vocabulary is not OURS:
        whose += f", not {vocabulary.title}'s (--from {vocabulary.name})"
    return f"`{flag}` is {whose}: {', or '.join(offers) or 'leave it out'}"
