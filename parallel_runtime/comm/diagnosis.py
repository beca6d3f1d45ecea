"""The seam through which a group learns why its peers do not come. Whoever opens groups may install somebody who knows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from parallel_runtime.errors import PeerError

__all__ = ["Diagnostician", "Failure"]


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
            ranks: World ranks of the group, in group order; none asks only for what concerns every group.
            key: Of the communicator, equal on all members.
            step: Number of the collective among those of the communicator, from 1.

        Returns:
            The error to raise, or ``None`` to wait on.
        """

    @abstractmethod
    def explain(self, failure: Failure) -> PeerError:
        """The error to raise in the place of a bare one, with the whole story. Bounded to a few seconds, never raises."""
