"""Which rank runs on which host: a bijection, proved when it is made.

A placement either cuts the world into equal consecutive blocks, one per host, or lists the ranks of every host. Blocks cost
nothing, whatever the world size: positions are computed, not stored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, final

from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.terms import Rank
from parallel_runtime.topology.sizes import divisors, join_sizes, nearest

__all__ = ["HostMap", "Hosts", "place_ranks"]

Hosts: TypeAlias = int | Sequence[str] | Mapping[str, Sequence[int]]
"""A number of hosts of equal size; or a host name for every rank, in ascending rank order; or the ranks of every host by name."""

_SHOWN = 8


@final
class HostMap:
    """Every rank of a world on one host, and every host's ranks in local order.

    Made by ``place_ranks``. Hosts are numbered from 0; a rank's position on its host is its local rank.

    Attributes:
        num_hosts: Number of hosts.
        largest: Number of ranks on the host that has most.
        is_contiguous: Whether the hosts hold consecutive blocks of ascending ranks, so that the two ends of a set of ranks tell
            whether it stays on one host.
    """

    __slots__ = ("_members", "_names", "_places", "_ranks", "is_contiguous", "largest", "num_hosts")

    def __init__(self, num_hosts: int, ranks: range | None, table: Mapping[str, tuple[int, ...]]) -> None:
        self.num_hosts = num_hosts
        self.is_contiguous = ranks is not None
        self._ranks = ranks
        self._names = tuple(table)
        self._members = tuple(table.values())
        self.largest = max(map(len, self._members)) if ranks is None else len(ranks) // num_hosts
        self._places = {rank: (host, place) for host, on_host in enumerate(self._members) for place, rank in enumerate(on_host)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMap):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        few = range(min(self.num_hosts, _SHOWN))
        return f"HostMap(num_hosts={self.num_hosts}, {_show(f'{self.name(host)}: {_show(self.ranks_on(host))}' for host in few)})"

    def _identity(self) -> tuple[int, range | None, tuple[str, ...], tuple[tuple[int, ...], ...]]:
        return (self.num_hosts, self._ranks, self._names, self._members)

    def name(self, host: int) -> str:
        """The name of a host.

        Args:
            host: Its number.

        Returns:
            The name it was given, or ``"host3"`` for number 3.

        Raises:
            ArgumentError: No such host.
        """
        self._check_host(host)
        return self._names[host] if self._names else f"host{host}"

    def ranks_on(self, host: int) -> Sequence[int]:
        """The ranks of a host in local order.

        Args:
            host: Its number.

        Returns:
            A range or tuple of ranks.

        Raises:
            ArgumentError: No such host.
        """
        self._check_host(host)
        if self._ranks is None:
            return self._members[host]
        size = len(self._ranks) // self.num_hosts
        return self._ranks[host * size : (host + 1) * size]

    def host_of(self, rank: int) -> int:
        """The number of the host that holds a rank.

        Args:
            rank: A rank of the world.

        Returns:
            Its host, from 0.

        Raises:
            ArgumentError: No such rank.
        """
        return self._place(rank)[0]

    def local_rank(self, rank: int) -> int:
        """The position of a rank on its host.

        Args:
            rank: A rank of the world.

        Returns:
            Its position, from 0.

        Raises:
            ArgumentError: No such rank.
        """
        return self._place(rank)[1]

    def as_table(self) -> int | dict[str, list[int]]:
        """What ``place_ranks`` needs to make this placement again: a number of equal hosts, or the ranks of each by name."""
        if self._ranks is not None:
            return self.num_hosts
        return {name: list(ranks) for name, ranks in zip(self._names, self._members, strict=True)}

    def _place(self, rank: int) -> tuple[int, int]:
        if self._ranks is not None and rank in self._ranks:
            return divmod(self._ranks.index(rank), len(self._ranks) // self.num_hosts)
        if rank in self._places:
            return self._places[rank]
        raise ArgumentError(f"rank {rank} is on none of the {self.num_hosts} hosts")

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.num_hosts:
            raise ArgumentError(f"host {host} does not exist; there are {self.num_hosts} hosts, from 0")


def place_ranks(ranks: Sequence[int], hosts: Hosts | None = None) -> HostMap:
    """Put every rank on one host.

    Args:
        ranks: The ranks of the world, in any order.
        hosts: A number of hosts, which get equal blocks of ascending ranks; or one host name for each rank, in ascending rank
            order; or the ranks of each host by name, in local order. By default one host holds all.

    Returns:
        The placement, a bijection between ``ranks`` and the (host, local rank) pairs.

    Raises:
        ConfigError: The ranks do not divide over the hosts, or some rank is on no host, on two, or is not of this world. The text
            holds the table of what every host would get.
    """
    if hosts is None:
        hosts = 1
    if isinstance(hosts, int):
        return _place_blocks(ranks, hosts)
    if isinstance(hosts, Mapping):
        return _place_table(ranks, {name: tuple(members) for name, members in hosts.items()})
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise ConfigError(f"hosts={hosts!r}: give a number of hosts, a host name for each rank, or ranks by host name")
    if len(hosts) != len(ranks):
        raise ConfigError(f"{len(hosts)} host names for {len(ranks)} ranks; give one name for each rank, in ascending rank order")
    table: dict[str, list[Rank]] = {}
    for rank, name in zip(sorted(ranks), hosts, strict=True):
        table.setdefault(name, []).append(Rank(rank))
    return _place_table(ranks, {name: tuple(members) for name, members in table.items()})


def _place_blocks(ranks: Sequence[int], num_hosts: int) -> HostMap:
    if isinstance(num_hosts, bool) or num_hosts < 1:
        raise ConfigError(f"hosts={num_hosts} must be 1 or more")
    world_size = len(ranks)
    if world_size % num_hosts:
        per_host, extra = divmod(world_size, num_hosts)
        filled = _show(f"host{host}: {per_host + (host < extra)}" for host in range(min(num_hosts, _SHOWN)))
        raise ConfigError(
            f"{world_size} ranks do not divide over hosts={num_hosts}: {world_size} = {num_hosts}*{per_host} + {extra}, "
            f"so the hosts would hold {filled}{' ...' if num_hosts > _SHOWN else ''} ranks. "
            f"Nearest hosts that work: {join_sizes(nearest(divisors(world_size), num_hosts))}; or list the ranks of every host"
        )
    if isinstance(ranks, range) and ranks.step > 0:
        return HostMap(num_hosts, ranks, {})
    ordered, size = sorted(ranks), world_size // num_hosts
    return HostMap(num_hosts, None, {f"host{host}": tuple(ordered[host * size : (host + 1) * size]) for host in range(num_hosts)})


def _place_table(ranks: Sequence[int], table: Mapping[str, tuple[int, ...]]) -> HostMap:
    counts = Counter(rank for members in table.values() for rank in members)
    world = set(ranks)
    faults = {
        "on no host": sorted(world - counts.keys()),
        "on two places": sorted(rank for rank, count in counts.items() if count > 1),
        "not of this world": sorted(counts.keys() - world),
    }
    empty = [name for name, members in table.items() if not members]
    if any(faults.values()) or empty:
        said = [f"{_show(found)} {'is' if len(found) == 1 else 'are'} {fault}" for fault, found in faults.items() if found]
        said += [f"host {name} has no ranks" for name in empty]
        rows = _show((f"{name}: {_show(members)}" for name, members in table.items()), separator="; ")
        raise ConfigError(f"every rank of the world of {len(world)} must be on exactly one host, but {'; '.join(said)} ({rows})")
    return HostMap(len(table), None, table)


def _show(values: Iterable[object], separator: str = ", ") -> str:
    texts = [str(value) for value in values]
    return separator.join(texts[:_SHOWN]) + (f"{separator}... {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
