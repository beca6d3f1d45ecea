"""What one rank tells about itself: the operations of its groups, and where in the program its thread is."""

import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Final, final

import msgspec
import torch

from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.recorder import Record, describe
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.context.statistics import Statistics

__all__ = ["Connected", "Done", "Report", "awaited", "make_report", "stack_of"]

_TAIL: Final = 8
_DEEPEST: Final = 6
_OWN: Final = str(Path(__file__).parents[1])
_PLUMBING: Final = tuple(
    [os.path.join(_OWN, room) for room in ("comm", "context", "launch")]
    + [str(Path(module).parent) for module in (threading.__file__, torch.__file__)]
)
_RUN: Final = GroupCore.run.__code__


@final
class Done(msgspec.Struct, frozen=True):
    """One operation of a group.

    Attributes:
        group: Name of the group.
        sequence: Its number among the operations of the communicator.
        operation: Its name.
        what: With the tensor, like ``"all_reduce(float32[8, 576])"``.
        seconds: How long it took, or has been under way.
        is_over: Whether it has ended.
    """

    group: str
    sequence: int
    operation: str
    what: str
    seconds: float
    is_over: bool

    def __str__(self) -> str:
        took = f"{self.seconds * 1e3:.1f} ms" if self.seconds < 1 else f"{self.seconds:.1f} s"
        return f"{self.group} seq {self.sequence} {self.what} {'took' if self.is_over else 'since'} {took}"


@final
class Connected(msgspec.Struct, frozen=True):
    """What ran over one communicator.

    Attributes:
        ranks: World ranks of its members, in group order.
        tail: The last operations, oldest first; the one under way, if any, at the end.
    """

    ranks: tuple[int, ...]
    tail: tuple[Done, ...]

    @property
    def current(self) -> Done | None:
        """The operation under way."""
        return self.tail[-1] if self.tail and not self.tail[-1].is_over else None


@final
class Report(msgspec.Struct, frozen=True):
    """One rank's account of itself.

    Attributes:
        rank: Who.
        pid: Of its process.
        host: Where.
        inside: The group operation that its thread is in, of whatever context: ``"pp#0 seq 12 recv()"``; ``""`` for none.
        stack: Where its thread is, outermost first: ``"serve.py:88 in step"``.
        connections: What ran over each of its communicators.
        failures: The last operations that failed because of a peer, in one line each.
        blamed: World ranks at fault for a failure of a moment ago.
        counted: What its groups did since it began to count; ``None`` where it does not.
    """

    rank: int
    pid: int
    host: str
    inside: str
    stack: tuple[str, ...]
    connections: tuple[Connected, ...]
    failures: tuple[str, ...]
    blamed: tuple[int, ...] = ()
    counted: Statistics | None = None

    def connected(self, ranks: tuple[int, ...]) -> Connected | None:
        """What ran between these ranks."""
        return next((connected for connected in self.connections if connected.ranks == ranks), None)

    def peers(self) -> set[int]:
        """The other members of the groups in whose operations it is."""
        return {rank for each in self.connections if each.current for rank in each.ranks if rank != self.rank}

    def recent(self, count: int = 4) -> list[Done]:
        """The last operations of all its communicators that have ended, oldest first, without doubles."""
        done = [entry for connected in self.connections for entry in connected.tail if entry.is_over]
        return done[-count:]


def awaited(rank: int, reports: Mapping[int, Report]) -> set[int]:
    """For whom a rank waits.

    Args:
        rank: Which.
        reports: Its own, and those of the members of its groups; one that is missing counts as absent.

    Returns:
        Members of the group whose operation it is in that are not in that operation; in no operation, those it has just blamed.
    """
    if rank in reports and not reports[rank].peers():
        return set(reports[rank].blamed)
    found: set[int] = set()
    for connected in reports[rank].connections if rank in reports else ():
        if (current := connected.current) is None:
            continue
        for peer in connected.ranks:
            theirs = reports[peer].connected(connected.ranks) if peer in reports else None
            inside = theirs.current if theirs else None
            if peer != rank and (inside is None or inside.sequence != current.sequence):
                found.add(peer)
    return found


def make_report(
    *,
    rank: int,
    host: str,
    thread: int,
    connections: Mapping[tuple[int, ...], Traffic],
    failures: Sequence[str],
    blamed: Sequence[int] = (),
    counted: Statistics | None = None,
) -> Report:
    """Describe this rank. Touches no lock and no group, so it works while the rank's thread is blocked.

    Args:
        rank: This one.
        host: Name of its host.
        thread: Which thread runs it, if none is found inside an operation of these communicators.
        connections: Traffic of its communicators, by members.
        failures: What it has noticed so far.
        blamed: World ranks at fault for a failure of a moment ago.
        counted: What its groups did, where that is counted.

    Returns:
        The report.
    """
    inside, stack = _look_at(thread, set(map(id, connections.values())))
    return Report(
        rank=rank,
        pid=os.getpid(),
        host=host,
        inside=inside,
        stack=stack,
        connections=tuple(
            Connected(ranks=ranks, tail=tuple(map(_done, traffic.recorder.tail(_TAIL)))) for ranks, traffic in connections.items()
        ),
        failures=tuple(failures),
        blamed=tuple(blamed),
        counted=counted,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile.

    Each look at a frame of another thread makes an object of it. Where that collects garbage, as Python 3.11 does, finalizers may
    let the other thread go on, and then the object is of a frame that is gone: reading it crashes the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def _look_at(thread: int, traffics: set[int]) -> tuple[str, tuple[str, ...]]:
    """The operation that a thread is inside, and where it is; of another one's if that alone is inside one of this traffic."""
    frames = sys._current_frames()
    runs = {ident: _run_of(frame) for ident, frame in frames.items()}
    inside = [ident for ident, run in runs.items() if run is not None and id(run.f_locals.get("traffic")) in traffics]
    chosen = thread if thread in inside or not inside else inside[0]
    run = runs.get(chosen)
    return _name(run) if run is not None else "", stack_of(frames.get(chosen))


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Where a thread is, in the user's words.

    Args:
        frame: The innermost one.

    Returns:
        Outermost first, without the plumbing of this library, of torch and of the standard library, where anything else is left.
    """
    places, frames = [], []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for each in reversed(frames):
        if not each.f_code.co_filename.startswith((*_PLUMBING, "<")):
            places.append(_place(each))
    return tuple(places[-_DEEPEST:] or [_place(each) for each in reversed(frames[:3])])


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _run_of(frame: FrameType | None) -> FrameType | None:
    """The frame of ``GroupCore.run`` in a thread, if it is inside a group operation."""
    while frame is not None and frame.f_code is not _RUN:
        frame = frame.f_back
    return frame


def _name(run: FrameType) -> str:
    seen = run.f_locals
    core, tensor = seen.get("self"), seen.get("tensor")
    if not isinstance(core, GroupCore):
        return ""
    shape = () if tensor is None else tuple(tensor.shape)
    what = describe(str(seen.get("operation")), None if tensor is None else tensor.dtype, shape)
    return f"{core.name} seq {seen.get('sequence', '?')} {what}"


def _done(record: Record) -> Done:
    seconds = perf_counter() - record.start_s if record.seconds is None else record.seconds
    what = describe(record.operation, record.dtype, tuple(record.shape))
    return Done(record.group, record.sequence, record.operation, what, seconds, record.seconds is not None)
