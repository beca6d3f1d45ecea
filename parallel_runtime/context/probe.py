"""A seam for tests: be told where a context is, and stand between its groups and what moves their data."""

from enum import StrEnum
from typing import Protocol

from parallel_runtime.context.connectors import Connection, Connector
from parallel_runtime.terms import Rank

__all__ = ["Probe", "Stage", "probed"]


class Stage(StrEnum):
    """Points in the life of a context at which its probe is called, in this order."""

    JOINING = "joining"
    OPENING = "opening groups"
    CLOSING = "closing"


class Probe(Protocol):
    """What ``ParallelContext(probe=...)`` takes. ``parallel_runtime.testing.faults`` makes ones that break things on purpose."""

    def at(self, stage: Stage) -> None:
        """Called when the context is about to meet the others, to open its groups, and to leave normally.

        Args:
            stage: Which of these. What this raises, the context raises.
        """

    def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
        """Called once for each connection of two or more ranks.

        Args:
            ranks: World ranks of its members, in group order.
            connection: Just opened.

        Returns:
            What the groups are to use: the same, or something around it.
        """


def probed(connect: Connector, probe: Probe) -> Connector:
    """Let a probe stand between the groups and what a connector opens.

    Args:
        connect: Opens a connection.
        probe: Told of each.

    Returns:
        The connector.
    """

    def connect_and_tell(key: str, ranks: tuple[Rank, ...], rank_in_group: int) -> Connection:
        return probe.connected(ranks, connect(key, ranks, rank_in_group))

    return connect_and_tell
