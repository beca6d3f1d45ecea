"""Which cores each rank of a machine keeps to."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["Pin", "core_shares", "numa_nodes"]

Pin: TypeAlias = Literal["none", "auto"]
"""Whether ranks are kept to cores of their own: never, or where there are at least two for each."""

_FEWEST_CORES = 2
"""Per rank: its own thread, and those that answer for it and move its messages."""


def core_shares(cores: Sequence[int], nodes: Sequence[Sequence[int]], parts: int) -> tuple[tuple[int, ...], ...]:
    """Split cores over ranks: equal shares that differ by one core at most, and cross as few NUMA nodes as can be.

    Args:
        cores: That may be used.
        nodes: Cores of each NUMA node of the machine; cores that no node names come last.
        parts: Number of ranks.

    Returns:
        The cores of each rank; ``()`` for every rank where there are too few to give each of them two.
    """
    if len(cores) < _FEWEST_CORES * parts:
        return ((),) * parts
    places = {core: place for place, node in enumerate(nodes) for core in node}
    ordered = sorted(cores, key=lambda core: (places.get(core, len(nodes)), core))
    size, rest = divmod(len(ordered), parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return tuple(tuple(ordered[start:end]) for start, end in pairwise(starts))


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """The machine's NUMA nodes.

    Args:
        folder: Where Linux describes them.

    Returns:
        Cores of each; nothing where the system does not say.
    """
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return tuple(_parse(path.read_text(encoding="ascii")) for path in lists)


def _parse(text: str) -> tuple[int, ...]:
    """Cores of a list like ``0-3,8,10-11``."""
    cores: list[int] = []
    for span in text.strip().split(","):
        first, _, last = span.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
