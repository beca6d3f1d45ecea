"""Replicas in step: needed where the experts of one are held by ranks of another, and nowhere else.

In each turn the leaders agree on one thing: whether some replica computes, so that all do, those without requests on no tokens.
When nobody has anything to do they fall asleep together, each on its own link to the front, and communicate no more. A message
that may bring work reaches all leaders (a request one of them, a ``Wake`` the others), so they count these messages: as long as
the counts differ one is still on its way, and nobody sleeps. A leader that is told to leave waits for the others' next agreement.
"""

from typing import NamedTuple, final

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config import ModelShape
from parallel_runtime.config.parallel_config import ParallelConfig

__all__ = ["Lockstep", "Turn", "needs_lockstep"]


def needs_lockstep(parallel: ParallelConfig, shape: ModelShape) -> bool:
    """Whether a rank can reach some expert only on another data-parallel rank.

    Args:
        parallel: Sizes of the world.
        shape: Of the model.
    """
    layout = parallel.layout
    blocks = layout.groups("etp", "ep") if shape.num_experts else ()
    return any(len({layout.coordinate(rank).dp for rank in block}) > 1 for block in blocks)


@final
class Turn(NamedTuple):
    """What the leaders agreed on.

    Attributes:
        together: Whether every replica computes a batch now, an empty one where it has no other.
        is_over: Whether every replica leaves its loop now.
        num_controls: Controls that every replica does at the end of this turn.
    """

    together: bool
    is_over: bool
    num_controls: int = 0


@final
class Lockstep:
    """One leader's part in the agreement.

    Args:
        leaders: The leaders of all data-parallel ranks. Borrowed.

    Attributes:
        is_asleep: Whether no leader has anything to do until the front tells it more.
    """

    def __init__(self, leaders: GroupCoordinator) -> None:
        self.is_asleep = False
        self._leaders = leaders
        self._num_told = 0

    def agree(self, *, starts: bool, is_busy: bool, num_told: int, leaves: bool, num_controls: int = 0) -> Turn:
        """Decide what happens in this turn.

        Args:
            starts: Whether this replica has a batch to compute now.
            is_busy: Whether it has any request or batch under way.
            num_told: Messages from the front that may bring work, this replica's or another's.
            leaves: Whether it was told to leave.
            num_controls: Controls it could do at the end of this turn; all replicas do as many.

        Returns:
            The decision, equal on all leaders.

        Raises:
            PeerError: A leader failed or left.

        Collective: one small message of every leader; none while they sleep.
        """
        if self.is_asleep and num_told == self._num_told and not leaves:
            return Turn(together=False, is_over=False)
        self._num_told = num_told
        mine = (starts, is_busy, num_told, leaves, num_controls)
        said: list[tuple[bool, bool, int, bool, int]] = self._leaders.all_gather_object(mine)
        start, busy, told, leave, controls = zip(*said, strict=True)
        self.is_asleep = not any(start) and not any(busy) and len(set(told)) == 1
        return Turn(together=any(start), is_over=all(leave), num_controls=min(controls))
