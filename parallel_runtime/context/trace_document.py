"""The trace of several ranks as one document that Perfetto and ``chrome://tracing`` read. Pure.

A process is a rank, a thread is a group or a lane of stretches. Times are microseconds on the clock of the first rank, from the
first beginning on. A clock that differs by no more than the measurement can tell counts as equal.

The ranks enter and leave a recording at the same point of their programs, so collectives of one connection are the same for the
same number, counted from the first one of the recording; sequence numbers would not do, since members also count their sends.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, final

import msgspec

__all__ = ["COLLECTIVES", "Clock", "Message", "Operation", "RankTrace", "Stretch", "trace_document", "write_trace"]

COLLECTIVES: Final = frozenset(
    "all_reduce all_gather all_gatherv reduce_scatter reduce_scatterv all_to_all all_to_allv broadcast reduce gather scatter "
    "barrier all_gather_object broadcast_object broadcast_tensor_dict symmetric_empty".split()
)
"""Operations that all members of a group enter, without a trailing underscore."""

_LATER_US: Final = 0.1
"""How long a message is under way at least, so that its arrow has a direction."""


class Clock(msgspec.Struct, frozen=True):
    """How one rank's clock differs from that of the first rank.

    Attributes:
        offset_s: Seconds it is ahead, as measured.
        uncertainty_s: How far off that may be.
        base_s: Seconds that the first rank's clock is itself ahead of the one that everything is put on.
    """

    offset_s: float
    uncertainty_s: float
    base_s: float = 0.0

    @property
    def applied_s(self) -> float:
        """What is taken off its times: nothing where the difference cannot be told from none, as on one machine."""
        return self.base_s + (0.0 if abs(self.offset_s) <= self.uncertainty_s else self.offset_s)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message that an operation began to send, or took.

    Attributes:
        src: World rank of the sender.
        dst: World rank of the receiver.
        stream: Its tag on the wire.
        number: Which one of the stream, as both ends count.
        is_sent: Whether this is the sender's end.
    """

    src: int
    dst: int
    stream: int
    number: int
    is_sent: bool


class Operation(msgspec.Struct, frozen=True):
    """One operation of a group, as one member saw it.

    Attributes:
        group: Name of the group.
        ranks: World ranks of its members.
        sequence: Its number on this member's connection.
        name: Of the method.
        dtype: Of its tensor, ``""`` for none.
        shape: Of its tensor.
        start_s: When it began, by this rank's clock.
        seconds: How long it took.
        waited_s: How long of it was spent waiting for peers; ``None`` where nobody can tell.
        messages: What it sent to and took from single members.
    """

    group: str
    ranks: tuple[int, ...]
    sequence: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    start_s: float
    seconds: float
    waited_s: float | None
    messages: tuple[Message, ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether all members enter it."""
        return self.name.removesuffix("_") in COLLECTIVES


class Stretch(msgspec.Struct, frozen=True):
    """Some work of one rank.

    Attributes:
        name: What it is.
        lane: The line it is drawn on.
        start_s: When it began, by this rank's clock.
        seconds: How long it took.
        details: Shown with it.
    """

    name: str
    lane: str
    start_s: float
    seconds: float
    details: dict[str, str | int | float]


@final
class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank recorded.

    Attributes:
        rank: Who.
        who: Its place, for people.
        pid: Of its process.
        start_s: When it began to record, by its clock.
        num_dropped: Operations that were not kept.
        operations: Of its groups.
        stretches: Of its own.
        first: Number of its world's first rank, where several worlds are drawn together.
    """

    rank: int
    who: str
    pid: int
    start_s: float
    num_dropped: int
    operations: list[Operation]
    stretches: list[Stretch]
    first: int = 0

    @property
    def number(self) -> int:
        """Its number through all worlds that are drawn."""
        return self.first + self.rank

    def to_builtins(self) -> object:
        """As plain data for a message."""
        return msgspec.to_builtins(self)

    @classmethod
    def of(cls, told: object) -> Self:
        """Read it back.

        Args:
            told: From ``to_builtins``.

        Returns:
            An equal one.
        """
        return msgspec.convert(told, cls)


def trace_document(parts: Sequence[RankTrace], clocks: Sequence[Clock]) -> dict[str, Any]:
    """Put the parts of all ranks on one clock.

    Args:
        parts: One of each rank.
        clocks: Of the same ranks, in the same order.

    Returns:
        A document in Chrome's trace format: ``traceEvents`` in order of time, and ``metadata`` with the clocks.
    """
    zero_s = min((part.start_s - clock.applied_s for part, clock in zip(parts, clocks, strict=True)), default=0.0)
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    meetings: dict[tuple[int, tuple[int, ...], int], list[dict[str, Any]]] = defaultdict(list)
    posted: dict[tuple[int, tuple[int, ...], int, int, int, int], dict[bool, dict[str, Any]]] = defaultdict(dict)
    for part, clock in zip(parts, clocks, strict=True):
        lanes = _Lanes(part.number)
        entered: dict[tuple[int, ...], int] = defaultdict(int)
        for stretch in part.stretches:
            start_us = (stretch.start_s - clock.applied_s - zero_s) * 1e6
            events.append(_event(stretch.name, "work", lanes.of(stretch.lane), start_us, stretch.seconds, stretch.details))
        for operation in part.operations:
            start_us = (operation.start_s - clock.applied_s - zero_s) * 1e6
            kind = "collective" if operation.is_collective else "message"
            event = _event(operation.name, kind, lanes.of(operation.group), start_us, operation.seconds, _details(operation))
            events.append(event)
            for message in operation.messages:
                key = (part.first, operation.ranks, message.src, message.dst, message.stream, message.number)
                posted[key][message.is_sent] = event
            if operation.is_collective:
                meetings[part.first, operation.ranks, entered[operation.ranks]].append(event)
                event["args"]["collective"] = entered[operation.ranks]
                entered[operation.ranks] += 1
        names += lanes.names(f"rank {part.rank}: {part.who}, pid {part.pid}")
    events += [arrow for number, meeting in enumerate(meetings.values(), 1) for arrow in _arrows(number, meeting)]
    passed = [ends for ends in posted.values() if len(ends) == 2]
    events += [
        each for number, ends in enumerate(passed, len(meetings) + 1) for each in _passage(number, ends[True], ends[False])
    ]
    metadata = {
        "clock": "perf_counter of the first rank, measured at the end",
        "clocks": [
            {"rank": part.number, "offset_us": clock.offset_s * 1e6, "uncertainty_us": clock.uncertainty_s * 1e6}
            | {"applied_us": clock.applied_s * 1e6}
            for part, clock in zip(parts, clocks, strict=True)
        ],
        "dropped": {str(part.number): part.num_dropped for part in parts if part.num_dropped},
    }
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "metadata": metadata}


def write_trace(path: str | PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a document as JSON.

    Args:
        path: Where.
        document: From ``trace_document``.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


class _Lanes:
    """The lines of one rank, numbered as they appear."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[str, int] = {}

    def of(self, name: str) -> dict[str, int]:
        return {"pid": self._rank, "tid": self._numbers.setdefault(name, len(self._numbers) + 1)}

    def names(self, title: str) -> list[dict[str, Any]]:
        about = {"ph": "M", "pid": self._rank, "ts": 0}
        lines = [
            {**about, "name": "process_name", "args": {"name": title}},
            {**about, "name": "process_sort_index", "args": {"sort_index": self._rank}},
        ]
        return lines + [
            {**about, "tid": number, "name": "thread_name", "args": {"name": name}} for name, number in self._numbers.items()
        ]


def _event(
    name: str, kind: str, lane: Mapping[str, int], start_us: float, seconds: float, details: Mapping[str, object]
) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": start_us, "dur": seconds * 1e6, **lane, "args": dict(details)}


def _details(operation: Operation) -> dict[str, object]:
    details: dict[str, object] = {"group": operation.group, "ranks": list(operation.ranks), "sequence": operation.sequence}
    if operation.dtype:
        details["tensor"] = f"{operation.dtype}{list(operation.shape)}"
    if operation.waited_s is not None:
        details["waited_us"] = operation.waited_s * 1e6
    return details


def _arrows(number: int, meeting: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the member that came first, through the others, to the last one; none for a collective that was seen once."""
    if len(meeting) < 2:
        return []
    ordered = sorted(meeting, key=lambda event: float(event["ts"]))
    phases = ["s", *"t" * (len(ordered) - 2), "f"]
    name = ordered[0]["name"]
    return [_point(number, phase, event, name, event["ts"]) for event, phase in zip(ordered, phases, strict=True)]


def _passage(number: int, sent: dict[str, Any], taken: dict[str, Any]) -> list[dict[str, Any]]:
    """A message: the part of a receiving operation in which it was under way, and an arrow to there from where it was sent.

    An arrow to the operation itself would be drawn backwards by Perfetto where the receiver was there first.
    """
    end_us = taken["ts"] + taken["dur"]
    start_us = min(max(taken["ts"], sent["ts"] + _LATER_US), max(taken["ts"], end_us - _LATER_US))
    lane = {"pid": taken["pid"], "tid": taken["tid"]}
    under_way = _event("message", "message", lane, start_us, (end_us - start_us) / 1e6, {"from rank": sent["pid"]})
    begin_us = min(sent["ts"], start_us)  # clocks are equal only as far as they could be measured
    return [under_way, _point(number, "s", sent, "message", begin_us), _point(number, "f", under_way, "message", start_us)]


def _point(number: int, phase: str, event: dict[str, Any], name: str, ts: float) -> dict[str, Any]:
    """One end of an arrow, on a slice. All points of one arrow have one name and category, by which they are found."""
    where = {"pid": event["pid"], "tid": event["tid"]}
    point = {"name": name, "cat": event["cat"], "ph": phase, "id": number, "ts": ts, **where}
    return {**point, "bp": "e"} if phase == "f" else point
