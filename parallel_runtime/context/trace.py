"""Recording what all ranks do, and writing it as one file on one clock.

Every rank keeps its own operations and stretches while the block lasts. At its end the ranks measure how far their clocks differ,
one after the other against the world's first rank, which collects everything and writes it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final, final

import torch

from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.comm.recorder import Entry
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.statistics import WAIT_TELLERS
from parallel_runtime.context.trace_document import Clock, Operation, RankTrace, Stretch, trace_document, write_trace
from parallel_runtime.terms import Rank

__all__ = ["MAX_OPERATIONS", "Recording"]

MAX_OPERATIONS: Final = 200_000
"""Operations that one connection keeps for one trace; later ones are counted and dropped."""

_PINGS: Final = 16
_PING_TAG: Final = 0


@final
class Recording:
    """What one rank does while a trace is recorded; ``ParallelContext.trace`` makes it.

    Args:
        who: For people: this rank's place.
        path: Where the world's first rank writes.
    """

    def __init__(self, who: str, path: str | os.PathLike[str]) -> None:
        self._who = who
        self._path = Path(path)
        self._start_s = perf_counter()
        self._followed: list[tuple[Connection, _Kept]] = []
        self._stretches: list[Stretch] = []

    def add(self, name: str, start_s: float, end_s: float, *, lane: str = "program", **details: str | int | float) -> None:
        """Add a stretch of this rank's work.

        Args:
            name: What it is.
            start_s: When it began, by ``time.perf_counter``.
            end_s: When it ended.
            lane: The line it is drawn on; stretches of one lane lie beside or inside each other.
            details: Shown with it.
        """
        self._stretches.append(Stretch(name=name, lane=lane, start_s=start_s, seconds=end_s - start_s, details=details))

    @contextmanager
    def span(self, name: str, *, lane: str = "program", **details: str | int | float) -> Iterator[None]:
        """A stretch that lasts as long as a block.

        Args:
            name: What it is.
            lane: The line it is drawn on.
            details: Shown with it.
        """
        start_s = perf_counter()
        try:
            yield
        finally:
            self.add(name, start_s, perf_counter(), lane=lane, **details)

    def follow(self, ranks: tuple[Rank, ...], connection: Connection) -> None:
        """Keep the operations of one more connection.

        Args:
            ranks: World ranks of its members, in group order.
            connection: Which.
        """
        kept = _Kept(ranks)
        connection.data.traffic.recorder.observe(kept.note, tells_waiting=connection.data.kind in WAIT_TELLERS)
        self._followed.append((connection, kept))

    def stop(self) -> None:
        """Keep no more. Twice is nothing."""
        for connection, kept in self._followed:
            connection.data.traffic.recorder.leave(kept.note)

    def finish(self, world: GroupCoordinator) -> None:
        """Measure the clocks, collect every rank's part on the first one, and write the file there.

        Args:
            world: All ranks of the context.

        Raises:
            OSError: The file cannot be written; on the first rank alone.
            PeerError: A rank failed or left.

        Collective: all ranks.
        """
        self.stop()
        mine = RankTrace(
            rank=world.rank,
            who=self._who,
            pid=os.getpid(),
            start_s=self._start_s,
            num_dropped=sum(kept.num_dropped for _, kept in self._followed),
            operations=[operation for _, kept in self._followed for operation in kept.operations],
            stretches=self._stretches,
        )
        clocks = _measure_clocks(world)
        parts = world.all_gather_object(mine.to_builtins())
        if world.is_first_rank:
            write_trace(self._path, trace_document([RankTrace.of(part) for part in parts], clocks))


class _Kept:
    """The operations of one connection."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = tuple(map(int, ranks))
        self.operations: list[Operation] = []
        self.num_dropped = 0

    def note(self, entry: Entry, seconds: float, waited_s: float | None) -> None:
        if len(self.operations) >= MAX_OPERATIONS:
            self.num_dropped += 1
            return
        group, sequence, name, dtype, shape, start_s = entry
        self.operations.append(
            Operation(
                group=group,
                ranks=self._ranks,
                sequence=sequence,
                name=name,
                dtype="" if dtype is None else str(dtype).removeprefix("torch."),
                shape=tuple(shape),
                start_s=start_s,
                seconds=seconds,
                waited_s=waited_s,
            )
        )


def _measure_clocks(world: GroupCoordinator) -> list[Clock]:
    """How each rank's clock differs from the first one's, by messages there and back; known on the first rank.

    Of several messages the quickest counts: the answer was read somewhere between its two ends, so half of the time between them
    is the most that the middle can be wrong by.
    """
    clocks = [Clock(offset_s=0.0, uncertainty_s=0.0)]
    for member in range(1, world.world_size):
        if world.is_first_rank:
            clocks.append(_ask_clock(world, member, perf_counter))
        elif world.rank_in_group == member:
            _answer_clock(world, perf_counter)
    return clocks


def _ask_clock(world: GroupCoordinator, member: int, now: Callable[[], float]) -> Clock:
    best = Clock(offset_s=0.0, uncertainty_s=float("inf"))
    word, answer = torch.zeros(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    for _ in range(_PINGS):
        asked = now()
        world.send(word.to(world.device), dst=member, tag=_PING_TAG)
        theirs = float(world.recv(src=member, tag=_PING_TAG, out=answer.to(world.device)))
        heard = now()
        if (heard - asked) / 2 < best.uncertainty_s:
            best = Clock(offset_s=theirs - (asked + heard) / 2, uncertainty_s=(heard - asked) / 2)
    return best


def _answer_clock(world: GroupCoordinator, now: Callable[[], float]) -> None:
    word = torch.empty(1, dtype=torch.float64, device=world.device)
    for _ in range(_PINGS):
        world.recv(src=0, tag=_PING_TAG, out=word)
        world.send(torch.tensor([now()], dtype=torch.float64, device=world.device), dst=0, tag=_PING_TAG)
