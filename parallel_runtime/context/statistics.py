"""What the groups of a context did: calls, bytes and seconds per operation, as data and as text.

*Bytes* are those of the one tensor that the call names in records and errors (``numel * itemsize``): what this member hands over
(for ``recv`` with ``out``, what it takes in). An all_gather counts the member's own part and not the joined result, a
reduce_scatter the whole input. Messages (objects, dicts of tensors, channels) and barriers count 0, for their size is known to
the codec alone. Bytes on the wire are another matter: they depend on the communicator's way.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Final, final

from parallel_runtime.comm.recorder import Entry, Passed
from parallel_runtime.config.plan_text import Table, format_bytes, format_ranks, render_tables
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.prometheus import family
from parallel_runtime.terms import Rank

__all__ = ["WAIT_TELLERS", "OperationCounter", "OperationStatistics", "Statistics", "operation_lines"]

WAIT_TELLERS: Final = frozenset(("shm", "local"))
"""Kinds of communicators that know how long they waited for peers."""

_METRICS: Final = (
    ("operations_total", "Operations of a group that have ended.", "calls"),
    ("operation_bytes_total", "Bytes of the tensors that were handed to operations.", "nbytes"),
    ("operation_seconds_total", "Seconds inside operations.", "seconds"),
    ("operation_waited_seconds_total", "Seconds of these spent waiting for peers, where the communicator can tell.", "waited_s"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStatistics:
    """What one operation of one group came to.

    Attributes:
        group: Name of the group, like ``"tp#0"``.
        ranks: World ranks of its members, in group order.
        operation: Name of the method.
        calls: How often it ended, well or not.
        nbytes: Bytes of the tensors it was handed; 0 for messages and barriers.
        seconds: Time inside it.
        waited_s: Time of it spent waiting for peers; ``None`` where the communicator cannot tell (c10d).
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    calls: int
    nbytes: int
    seconds: float
    waited_s: float | None

    @property
    def waiting_share(self) -> float | None:
        """Share of its time spent waiting for peers; ``None`` where nobody can tell."""
        return None if self.waited_s is None or not self.seconds else min(1.0, self.waited_s / self.seconds)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the groups of one rank did since counting began.

    Attributes:
        rank: Whose.
        elapsed_s: How long it was counted, in seconds.
        operations: What was called at all, by group and operation.
    """

    rank: int
    elapsed_s: float
    operations: tuple[OperationStatistics, ...]

    def to_json(self) -> str:
        """As JSON, with ``waiting_share`` in every operation."""
        told = [{**asdict(each), "waiting_share": each.waiting_share} for each in self.operations]
        return json.dumps({"rank": self.rank, "elapsed_s": self.elapsed_s, "operations": told}, indent=2)

    def table(self) -> Table:
        """As a table for people."""
        header = ("group", "ranks", "operation", "calls", "bytes", "ms", "of the time", "waiting")
        note = ""
        if any(each.waited_s is None for each in self.operations):
            note = "waiting -: the communicator of this group cannot tell"
        title = f"Rank {self.rank}, {self.elapsed_s:.2f} s"
        return Table(title=title, header=header, rows=tuple(map(self._row, self.operations)), note=note)

    def to_prometheus(self, *, prefix: str = "parallel_runtime_", labels: Mapping[str, str] | None = None) -> str:
        """As Prometheus's text format: counters with the labels ``rank``, ``group`` and ``operation``.

        Args:
            prefix: In front of every name.
            labels: Further labels of every sample.

        Returns:
            Text that ends with a newline.
        """
        return "\n".join(operation_lines([(labels or {}, self)], prefix=prefix)) + "\n"

    def __str__(self) -> str:
        return render_tables([self.table()])

    def _row(self, each: OperationStatistics) -> tuple[str, ...]:
        waiting = "-" if each.waiting_share is None else f"{each.waiting_share:.0%}"
        share = f"{each.seconds / self.elapsed_s:.1%}" if self.elapsed_s else "-"
        size, took = format_bytes(each.nbytes), f"{each.seconds * 1e3:.2f}"
        return (each.group, format_ranks(each.ranks), each.operation, f"{each.calls:,}", size, took, share, waiting)


def operation_lines(counted: Iterable[tuple[Mapping[str, str], Statistics]], *, prefix: str) -> Iterator[str]:
    """Write what several ranks counted as Prometheus's text format.

    Args:
        counted: Further labels, and what one rank counted.
        prefix: In front of every name.

    Yields:
        Lines, without their ends.
    """
    told = [
        ({**labels, "rank": str(each.rank), "group": operation.group, "operation": operation.operation}, operation)
        for labels, each in counted
        for operation in each.operations
    ]
    for name, text, attribute in _METRICS:
        samples = ((labels, value) for labels, each in told if (value := getattr(each, attribute)) is not None)
        yield from family(f"{prefix}{name}", "counter", text, samples)


@final
class OperationCounter:
    """Counts operations of connections, from their recorders.

    Args:
        start_s: Now, by ``time.perf_counter``.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._followed: list[tuple[Connection, _Totals]] = []

    def follow(self, ranks: tuple[Rank, ...], connection: Connection) -> None:
        """Count the operations of one more connection.

        Args:
            ranks: World ranks of its members, in group order.
            connection: Which.
        """
        totals = _Totals(ranks)
        connection.data.traffic.recorder.observe(totals.note, tells_waiting=connection.data.kind in WAIT_TELLERS)
        self._followed.append((connection, totals))

    def stop(self) -> None:
        """Count no more. Twice is nothing."""
        for connection, totals in self._followed:
            connection.data.traffic.recorder.leave(totals.note)

    def read(self, rank: int, now_s: float) -> Statistics:
        """What was counted.

        Args:
            rank: Whose operations these are.
            now_s: Now, by ``time.perf_counter``.

        Returns:
            A copy that no longer changes.
        """
        counted = [each for _, totals in self._followed for each in totals.read()]
        operations = tuple(sorted(counted, key=lambda each: (each.group, each.operation)))
        return Statistics(rank=rank, elapsed_s=now_s - self._start_s, operations=operations)


class _Sums:
    """Of one operation of one group."""

    __slots__ = ("calls", "nbytes", "seconds", "tells_waiting", "waited_s")

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.waited_s = 0.0
        self.tells_waiting = True


class _Totals:
    """Sums of one connection, by group and operation."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = ranks
        self._sums: dict[tuple[str, str], _Sums] = {}

    def note(self, entry: Entry, seconds: float, waited_s: float | None, passed: Sequence[Passed]) -> None:
        del passed
        key = (entry[0], entry[2])
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums()
        sums.calls += 1
        sums.seconds += seconds
        if (dtype := entry[3]) is not None:
            sums.nbytes += prod(entry[4]) * dtype.itemsize
        if waited_s is None:
            sums.tells_waiting = False
        elif waited_s:
            sums.waited_s += waited_s

    def read(self) -> list[OperationStatistics]:
        return [
            OperationStatistics(
                group=group,
                ranks=self._ranks,
                operation=operation,
                calls=sums.calls,
                nbytes=sums.nbytes,
                seconds=sums.seconds,
                waited_s=sums.waited_s if sums.tells_waiting else None,
            )
            for (group, operation), sums in tuple(self._sums.items())
        ]
