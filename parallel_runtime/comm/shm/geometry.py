"""Where everything lies inside a segment: integers only, equal on every member."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

__all__ = ["LINE_BYTES", "MAX_MEMBERS", "NUM_SLOTS", "Geometry", "choose_geometries"]

LINE_BYTES: Final = 128
"""Bytes that one writer has to itself: two cache lines, because processors fetch them in pairs."""

NUM_SLOTS: Final = 4
"""Slots of a member, used in turn."""

MAX_MEMBERS: Final = 128
"""Of a group that shares memory: there is a ring for every pair."""

_PAGE: Final = 4096
_HEADER_BYTES: Final = 64
_REPORT_BYTES: Final = 256
_SLOTS_BUDGET: Final = 16 << 20
_RINGS_BUDGET: Final = 8 << 20


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Byte offsets of one segment.

    Attributes:
        world_size: Number of members.
        slot_bytes: Payload of one slot, a multiple of the page size.
        ring_bytes: Payload of the ring between one ordered pair of members, a power of two.
    """

    world_size: int
    slot_bytes: int
    ring_bytes: int

    def member(self, rank_in_group: int) -> int:
        """The line that member alone writes: counter, state, number of its report, and its last announcements."""
        return LINE_BYTES * (1 + rank_in_group)

    def bell(self, rank_in_group: int) -> int:
        """The line of the word that member sleeps on."""
        return LINE_BYTES * (1 + self.world_size + rank_in_group)

    @property
    def sleepers(self) -> int:
        """One byte per member, set while it sleeps; whole words, so that one read covers eight members."""
        return LINE_BYTES * (1 + 2 * self.world_size)

    @property
    def sleeper_words(self) -> int:
        """Number of 8-byte words of ``sleepers``."""
        return _up(self.world_size, 8) // 8

    def report(self, rank_in_group: int) -> int:
        """Text in which that member says what it entered; length in the first byte."""
        return self.sleepers + _up(8 * self.sleeper_words, LINE_BYTES) + _REPORT_BYTES * rank_in_group

    @property
    def report_bytes(self) -> int:
        """Room of one report."""
        return _REPORT_BYTES

    def header(self, rank_in_group: int, slot: int) -> int:
        """Words that travel beside a slot: sizes that the readers do not know."""
        return self.report(self.world_size) + _HEADER_BYTES * (NUM_SLOTS * rank_in_group + slot)

    def written(self, src: int, dst: int) -> int:
        """The line of the ring position that ``src`` advances."""
        return self.header(self.world_size, 0) + 2 * LINE_BYTES * (self.world_size * src + dst)

    def consumed(self, src: int, dst: int) -> int:
        """The line of the ring position that ``dst`` advances."""
        return self.written(src, dst) + LINE_BYTES

    def slot(self, rank_in_group: int, slot: int) -> int:
        """Payload of one slot of one member."""
        return _up(self.written(self.world_size, 0), _PAGE) + self.slot_bytes * (NUM_SLOTS * rank_in_group + slot)

    def ring(self, src: int, dst: int) -> int:
        """Payload of the ring from ``src`` to ``dst``."""
        pair = src * (self.world_size - 1) + dst - (dst > src)
        return self.slot(self.world_size, 0) + self.ring_bytes * pair

    @property
    def nbytes(self) -> int:
        """Size of the segment."""
        return self.slot(self.world_size, 0) + self.ring_bytes * self.world_size * (self.world_size - 1)


def choose_geometries(world_size: int) -> tuple[Geometry, ...]:
    """What to try for a group, largest first; the last one is the least that works.

    Args:
        world_size: Number of members.

    Returns:
        Geometries of falling size.
    """
    return tuple(_geometries(world_size))


def _geometries(world_size: int) -> Iterator[Geometry]:
    slot_bytes = _fit(_SLOTS_BUDGET // (world_size * NUM_SLOTS), 16 * _PAGE, 1 << 20)
    ring_bytes = _fit(_RINGS_BUDGET // (world_size * (world_size - 1)), _PAGE, 1 << 20)
    while True:
        yield Geometry(world_size=world_size, slot_bytes=slot_bytes, ring_bytes=ring_bytes)
        if slot_bytes <= 4 * _PAGE:
            return
        slot_bytes //= 4
        ring_bytes = max(ring_bytes // 4, _PAGE)


def _fit(share: int, least: int, most: int) -> int:
    """The largest power of two within ``share`` and the limits."""
    return min(max(1 << (share.bit_length() - 1), least), most)
