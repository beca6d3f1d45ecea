"""Recording what all ranks do, and writing it as one file on one clock.

Every rank keeps its own operations and stretches while the block lasts. At its end the ranks measure how far their clocks differ,
one after the other against the world's first rank, which collects everything and writes it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final, final

import torch

from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.comm.recorder import Entry, Passed
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.statistics import WAIT_TELLERS
from parallel_runtime.context.trace_document import Clock, Message, Operation, RankTrace, Stretch
from parallel_runtime.terms import Rank

__all__ = ["MAX_OPERATIONS", "Recording"]

MAX_OPERATIONS: Final = 200_000
"""Operations that one connection keeps for one trace; later ones are counted and dropped."""

_PINGS: Final = 16
_PING_TAG: Final = 0


@final
class Recording:
    """What one rank does while a trace is recorded; a ``ParallelContext`` makes it.

    Args:
        rank: Of the world.
        who: For people: this rank's place.
    """

    def __init__(self, rank: int, who: str) -> None:
        self._rank = rank
        self._who = who
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
        kept = _Kept(ranks, self._rank)
        connection.data.traffic.recorder.observe(kept.note, tells_waiting=connection.data.kind in WAIT_TELLERS)
        self._followed.append((connection, kept))

    def stop(self) -> None:
        """Keep no more. Twice is nothing."""
        for connection, kept in self._followed:
            connection.data.traffic.recorder.leave(kept.note)

    def collect(self, group: GroupCoordinator) -> tuple[list[RankTrace], list[Clock]]:
        """Keep no more, measure the clocks, and bring every rank's part to the first one.

        Args:
            group: All ranks that record together.

        Returns:
            The parts, and how the clocks of their ranks differ from that of the first; on the first rank alone, else nothing.

        Raises:
            PeerError: A rank failed or left.

        Collective: all ranks of the group.
        """
        self.stop()
        mine = RankTrace(
            rank=self._rank,
            who=self._who,
            pid=os.getpid(),
            start_s=self._start_s,
            num_dropped=sum(kept.num_dropped for _, kept in self._followed),
            operations=[operation for _, kept in self._followed for operation in kept.operations],
            stretches=self._stretches,
        )
        clocks = _measure_clocks(group)
        parts = group.all_gather_object(mine.to_builtins())
        return ([RankTrace.of(part) for part in parts], clocks) if group.is_first_rank else ([], [])


class _Kept:
    """The operations of one connection."""

    def __init__(self, ranks: tuple[Rank, ...], me: int) -> None:
        self._ranks = tuple(map(int, ranks))
        self._me = me
        self.operations: list[Operation] = []
        self.num_dropped = 0

    def note(self, entry: Entry, seconds: float, waited_s: float | None, passed: Sequence[Passed]) -> None:
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
                messages=tuple(map(self._message, passed)),
            )
        )

    def _message(self, passed: Passed) -> Message:
        here, there = self._me, self._ranks[passed.peer]
        src, dst = (here, there) if passed.is_sent else (there, here)
        return Message(src=src, dst=dst, stream=passed.stream, number=passed.number, is_sent=passed.is_sent)


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
