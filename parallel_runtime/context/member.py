"""One rank's entry in the roster of a world, and what its entries differ in."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import final

import torch

from parallel_runtime.context.liveness import has_ended, machine

__all__ = ["Member", "compare_members", "odd_ranks"]

_ETP_SOURCES = frozenset({"tp", "cp", "dp", "ep"})
"""Settings that etp follows from where it is left out: where they differ, it goes without saying."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's entry in the roster.

    Attributes:
        rank: Position in the world.
        host: Name of its host.
        pid: Its process there.
        settings: What must be equal on all ranks: the config's, and the versions of this library and torch.
        world_size: Of all ranks that were started, not only of the world that it joins.
        machine: Equal for processes that see the same process ids.
    """

    rank: int
    host: str
    pid: int
    settings: Mapping[str, object]
    world_size: int = 0
    machine: str = ""

    @classmethod
    def of_this_process(
        cls, rank: int, settings: Mapping[str, object], host: str | None = None, *, world_size: int = 0
    ) -> "Member":
        """The entry of the calling process.

        Args:
            rank: Position in the world.
            settings: Of its config.
            host: Name of its host; by default what the system calls it.
            world_size: Of all ranks that were started.

        Returns:
            The entry, versions included.
        """
        versions = {"parallel_runtime": version("parallel-runtime"), "torch": torch.__version__}
        own = host or os.uname().nodename
        all_settings = {**settings, **versions}
        return cls(rank=rank, host=own, pid=os.getpid(), settings=all_settings, world_size=world_size, machine=machine())

    def to_json(self) -> str:
        """The entry as text for the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> "Member":
        """Read an entry back.

        Args:
            text: From ``to_json``.

        Returns:
            An equal entry.
        """
        return cls(**json.loads(text))

    @property
    def is_ended(self) -> bool:
        """Whether its process is known to have ended; ``False`` where it runs on another machine."""
        return self.machine == machine() and has_ended(self.pid)

    @property
    def is_where(self) -> str:
        """Its process and host, for people."""
        return f"pid {self.pid} on {self.host}"


def compare_members(members: Sequence[Member]) -> str:
    """Say which members were told something else than the others.

    Args:
        members: At least one, in rank order.

    Returns:
        ``""`` if all agree, else one clause per odd rank with the settings that differ.
    """
    usual, odd = _odd_and_usual(members)
    if not odd:
        return ""
    has_company = len(members) - len(odd) > 1
    reference = "the others have" if has_company else f"rank {usual.rank} on host {usual.host} has"
    return "; ".join(_describe_odd(member, usual, reference) for member in odd)


def odd_ranks(members: Sequence[Member]) -> tuple[int, ...]:
    """Which members were told something else than the others.

    Args:
        members: In rank order.

    Returns:
        Their world ranks.
    """
    return tuple(member.rank for member in _odd_and_usual(members)[1])


def _odd_and_usual(members: Sequence[Member]) -> tuple[Member, list[Member]]:
    texts = [json.dumps(dict(member.settings), sort_keys=True) for member in members]
    common, _ = Counter(texts).most_common(1)[0]
    return members[texts.index(common)], [member for member, text in zip(members, texts, strict=True) if text != common]


def _describe_odd(member: Member, usual: Member, reference: str) -> str:
    names = sorted(name for name in {*member.settings, *usual.settings} if member.settings.get(name) != usual.settings.get(name))
    if "etp" in names and not _ETP_SOURCES.isdisjoint(names):
        names.remove("etp")
    has, others = (", ".join(f"{name}={who.settings.get(name)}" for name in names) for who in (member, usual))
    return f"rank {member.rank} on host {member.host} has {has} where {reference} {others}"
