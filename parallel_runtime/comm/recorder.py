"""What a group did last: a fixed ring of records, always on, cheap enough for every operation."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias, final

import torch

__all__ = ["RING_SIZE", "Entry", "Observer", "Passed", "Record", "Recorder", "describe"]

RING_SIZE: Final = 256
"""Finished operations that are kept per communicator."""

Entry: TypeAlias = tuple[str, int, str, torch.dtype | None, tuple[int, ...], float]
"""A started operation: group, sequence, operation, dtype, shape, start (``time.perf_counter`` seconds)."""


@final
class Passed(NamedTuple):
    """A message between this member and another one; both ends count it alike.

    Attributes:
        is_sent: Whether this member sent it.
        peer: The other one, group-local.
        stream: Its tag on the wire.
        number: Which one of the stream, from 1.
    """

    is_sent: bool
    peer: int
    stream: int
    number: int


Observer: TypeAlias = Callable[[Entry, float, float | None, Sequence[Passed]], None]
"""Told of every finished operation: entry, seconds, those of them spent waiting for peers (``None``: nobody can tell), and the
messages that it began to send or took."""


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
    """The last ``RING_SIZE`` operations and the one under way. Written by one thread at a time, read by any.

    Attributes:
        under_way: The operation that has begun; set by whoever begins it.
        observers: Told of what is finished, beside the ring.
    """

    __slots__ = ("_passed", "_ring", "_waited_s", "observers", "under_way")

    def __init__(self) -> None:
        self._ring: deque[tuple[Entry, float]] = deque(maxlen=RING_SIZE)
        self._waited_s: float | None = None
        self._passed: list[Passed] = []
        self.under_way: Entry | None = None
        self.observers: tuple[Observer, ...] = ()

    def finish(self, entry: Entry, seconds: float) -> None:
        """Note that what was under way ended, well or not."""
        self._ring.append((entry, seconds))
        self.under_way = None
        if self.observers:
            for observer in self.observers:
                observer(entry, seconds, self._waited_s, self._passed)
            if self._waited_s:
                self._waited_s = 0.0
            if self._passed:
                self._passed = []

    def observe(self, observer: Observer, *, tells_waiting: bool) -> None:
        """Tell somebody of every operation that finishes from now on.

        Args:
            observer: Called in the thread of the operation, so it is quick and raises nothing.
            tells_waiting: Whether the communicator calls ``add_wait`` for every wait.
        """
        self._waited_s = 0.0 if tells_waiting else None
        self.observers += (observer,)

    def leave(self, observer: Observer) -> None:
        """Tell ``observer`` no more. Twice is nothing."""
        self.observers = tuple(other for other in self.observers if other != observer)

    def add_wait(self, seconds: float) -> None:
        """Note that the operation under way waited for a peer; to be called while there are ``observers``."""
        if self._waited_s is not None:
            self._waited_s += seconds

    def pass_message(self, is_sent: bool, stream: tuple[int, int], number: int) -> None:
        """Note that the operation under way sends a message, or has taken one.

        Args:
            is_sent: Whether it sends it.
            stream: (peer, tag on the wire).
            number: Which one of the stream.
        """
        if self.observers:
            self._passed.append(Passed(is_sent, *stream, number))

    @property
    def current(self) -> Record | None:
        """The operation under way, if any."""
        entry = self.under_way
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
