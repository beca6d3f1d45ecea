"""The seam through which a group learns why its peers do not come. Whoever opens groups may install somebody who knows."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from parallel_runtime.errors import PeerError

__all__ = ["Diagnostician", "Failure", "different_operations", "last_in_line", "odd_members"]


def different_operations(said: Mapping[int, str], ranks: Sequence[int]) -> str:
    """The text of the error where the members of a group entered different operations.

    Args:
        said: What each member that has come entered.
        ranks: World ranks of the group, in group order.

    Returns:
        One sentence that names ranks.
    """
    entered = "; ".join(f"rank {ranks[member]} entered {what}" for member, what in sorted(said.items()))
    return f"the members entered different operations: {entered}"


def odd_members(said: Mapping[int, str], member: int) -> tuple[int, ...]:
    """Who is at fault where the members of a group entered different operations.

    Args:
        said: What each member that has come entered.
        member: The one that asks.

    Returns:
        Those that differ from more than half of them; where nothing is that common, those that differ from ``member``.
    """
    usual, count = Counter(said.values()).most_common(1)[0]
    reference = usual if 2 * count > len(said) else said[member]
    return tuple(other for other, what in sorted(said.items()) if what != reference)


def last_in_line(waits: Mapping[int, Collection[int]], first: Collection[int]) -> tuple[int, ...]:
    """Follow who waits for whom to the end.

    Args:
        waits: For whom each rank waits; a rank that is missing here waits for nobody.
        first: Where to start.

    Returns:
        The ranks, in order, that wait for nobody, or for each other in a ring, and that everything else waits for.
    """
    reached = {rank: _reach(waits, rank) for rank in _reach(waits, *first)}
    return tuple(rank for rank in sorted(reached) if all(rank in reached[other] for other in reached[rank]))


def _reach(waits: Mapping[int, Collection[int]], *first: int) -> set[int]:
    found, todo = set(first), list(first)
    while todo:
        new = set(waits.get(todo.pop(), ())) - found
        found |= new
        todo += new
    return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One operation that failed because of a peer, as the rank that noticed sees it.

    Attributes:
        group: Name of the group.
        ranks: World ranks of the group, in group order.
        rank: The one that noticed.
        sequence: Number of the operation on its communicator.
        operation: Name of the operation.
        what: The operation with the tensor it moves, like ``"all_reduce(float32[8, 576])"``.
        seconds: How long it has been under way.
        error: What the communicator raised.
    """

    group: str
    ranks: tuple[int, ...]
    rank: int
    sequence: int
    operation: str
    what: str
    seconds: float
    error: PeerError


class Diagnostician(ABC):
    """Knows more about the other ranks than the connection to them does. Never communicates over a group."""

    @abstractmethod
    def interruption(self, ranks: Sequence[int], key: str, step: int) -> PeerError | None:
        """Why an operation under way need not wait on; asked a few times per second by a thread that waits.

        Args:
            ranks: World ranks that may be waited for; none asks only for what concerns every group.
            key: Of the communicator, equal on all members.
            step: Number of the collective among those of the communicator, from 1: a rank that is gone but finished it is not
                missed. Very large where ``ranks`` are known to be missing.

        Returns:
            The error to raise, or ``None`` to wait on.
        """

    @abstractmethod
    def explain(self, failure: Failure) -> PeerError:
        """The error to raise in the place of a bare one, with the whole story. Bounded to a few seconds, never raises."""
