"""What a group did last: a fixed ring of records, always on, cheap enough for every operation."""

from collections import deque
from typing import Final, NamedTuple, TypeAlias, final

import torch

__all__ = ["RING_SIZE", "Entry", "Record", "Recorder", "describe"]

RING_SIZE: Final = 256
"""Finished operations that are kept per communicator."""

Entry: TypeAlias = tuple[str, int, str, torch.dtype | None, tuple[int, ...], float]
"""A started operation: group, sequence, operation, dtype, shape, start (``time.perf_counter`` seconds)."""


@final
class Record(NamedTuple):
    """One operation of one group.

    Attributes:
        group: Name of the coordinator it was called on.
        sequence: Its number among the operations of the communicator, from 1.
        operation: Name of the method.
        dtype: Of the tensor, ``None`` for messages and barriers.
        shape: Of the tensor.
        start_s: ``time.perf_counter()`` when it began.
        seconds: How long it took; ``None`` while it is under way.
    """

    group: str
    sequence: int
    operation: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start_s: float
    seconds: float | None

    def __str__(self) -> str:
        what = describe(self.operation, self.dtype, self.shape)
        took = "under way" if self.seconds is None else f"{self.seconds * 1e3:.3f} ms"
        return f"{self.group} seq {self.sequence} {what}: {took}"


@final
class Recorder:
    """The last ``RING_SIZE`` operations and the one under way. Written by one thread at a time, read by any."""

    __slots__ = ("_current", "_ring")

    def __init__(self) -> None:
        self._ring: deque[tuple[Entry, float]] = deque(maxlen=RING_SIZE)
        self._current: Entry | None = None

    def start(self, entry: Entry) -> None:
        """Note that an operation begins."""
        self._current = entry

    def finish(self, entry: Entry, seconds: float) -> None:
        """Note that it ended, well or not."""
        self._ring.append((entry, seconds))
        self._current = None

    @property
    def current(self) -> Record | None:
        """The operation under way, if any."""
        entry = self._current
        return None if entry is None else Record(*entry, None)

    def tail(self, count: int = 16) -> tuple[Record, ...]:
        """The last ``count`` records, oldest first, with the operation under way at the end."""
        current = self.current
        done = [Record(*entry, seconds) for entry, seconds in tuple(self._ring)]
        if current is not None:
            done.append(current)
        return tuple(done[-count:]) if count > 0 else ()


def describe(operation: str, dtype: torch.dtype | None, shape: tuple[int, ...]) -> str:
    """Text like ``all_reduce(float32[8, 576])``."""
    if dtype is None:
        return f"{operation}()"
    return f"{operation}({str(dtype).removeprefix('torch.')}{list(shape)})"
