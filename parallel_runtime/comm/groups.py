"""What a group is opened from: plain data, equal in meaning on every member."""

from dataclasses import dataclass, field
from typing import final

import torch

from parallel_runtime.errors import ArgumentError
from parallel_runtime.terms import Rank, RankInGroup
from parallel_runtime.values import seconds_problem

__all__ = ["GroupSpec", "GroupTimeouts", "check_seconds"]


def check_seconds(seconds: float, word: str) -> float:
    """Check a deadline.

    Args:
        seconds: What a caller handed over.
        word: Its name, for the error.

    Returns:
        ``seconds``.

    Raises:
        ArgumentError: It is no positive number, or longer than thirty years.
    """
    if problem := seconds_problem(word, seconds):
        raise ArgumentError(problem)
    return seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimeouts:
    """Deadlines of one group, in seconds.

    Attributes:
        collective_s: Of collectives on tensors.
        control_s: Of messages and barriers.
        p2p_s: Of one send or receive.

    Raises:
        ArgumentError: One of them is no positive number, or longer than thirty years.
    """

    collective_s: float = 120.0
    control_s: float = 120.0
    p2p_s: float = 120.0

    def __post_init__(self) -> None:
        for word in ("collective_s", "control_s", "p2p_s"):
            check_seconds(getattr(self, word), word)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group as one of its members sees it.

    Attributes:
        name: For people, like ``"tp#3"``.
        key: Never reused; names the group in the store and in registries.
        ranks: World ranks in group order.
        rank: This member's world rank.
        local_rank: This member's position on its host.
        device: Where its tensors live.
        timeouts: Deadlines, one per plane.
        checked: Compare a fingerprint of every collective before running it.

    Raises:
        ArgumentError: ``ranks`` is empty, repeats a rank or lacks ``rank``.
    """

    name: str
    key: str
    ranks: tuple[Rank, ...]
    rank: Rank
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeouts: GroupTimeouts = field(default_factory=GroupTimeouts)
    checked: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"group {self.name} needs at least one rank and none twice, got {self.ranks}")
        if self.rank not in self.ranks:
            raise ArgumentError(f"rank {self.rank} is not a member of group {self.name} with ranks {self.ranks}")

    @property
    def rank_in_group(self) -> RankInGroup:
        """This member's position in ``ranks``."""
        return RankInGroup(self.ranks.index(self.rank))
