"""What two plans do differently."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

__all__ = ["Difference", "compare_facts", "compare_seats"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that two plans do differently.

    Attributes:
        what: What it is about.
        before: What the first plan says; ``"-"`` where it says nothing.
        after: What the second one says.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


def compare_facts(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """Compare what two plans say.

    Args:
        before: What the first says, by subject.
        after: What the second says.

    Returns:
        The subjects on which they differ, in the order of the first.
    """
    subjects = dict.fromkeys((*before, *after))
    said = (Difference(what=subject, before=before.get(subject, "-"), after=after.get(subject, "-")) for subject in subjects)
    return tuple(difference for difference in said if difference.before != difference.after)


def compare_seats(before: Mapping[int, str], after: Mapping[int, str]) -> tuple[Difference, ...]:
    """Compare where ranks sit.

    Args:
        before: Coordinate and host of each rank that both plans have, as text.
        after: The same in the second plan.

    Returns:
        One difference that counts the ranks that move and shows the first; none where nobody moves.
    """
    moved = [rank for rank, seat in before.items() if seat != after[rank]]
    if not moved:
        return ()
    what = f"{len(moved)} of {len(before)} ranks move, first rank {moved[0]}"
    return (Difference(what=what, before=before[moved[0]], after=after[moved[0]]),)
