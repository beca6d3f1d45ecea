"""The part of a context through which one sees what its groups do: counts, and traces."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.statistics import OperationCounter, Statistics
from parallel_runtime.context.trace import Recording
from parallel_runtime.context.trace_document import trace_document, write_trace
from parallel_runtime.errors import ContextStateError
from parallel_runtime.terms import Rank

__all__ = ["Seeing"]


class Seeing(ABC):
    """What a ``ParallelContext`` tells of the operations of its groups."""

    def __init__(self) -> None:
        self._counter: OperationCounter | None = None
        self._recording: Recording | None = None

    def start_stats(self) -> None:
        """Count this rank's operations from now on; what was counted before is forgotten.

        Counting costs every operation one to two microseconds, so it begins when it is asked for.

        Raises:
            ContextStateError: The context is not open, or was opened by another process.
        """
        self._check_open()
        if self._counter is not None:
            self._counter.stop()
        counter, rank = OperationCounter(perf_counter()), self.world.rank
        self._counter = counter
        self._follow_all(counter)
        self._tell_counts(lambda: counter.read(rank, perf_counter()))

    def stats(self) -> Statistics:
        """What this rank's groups did since ``start_stats``. Communicates nothing.

        Returns:
            Calls, bytes, seconds and the share of waiting per group and operation; it no longer changes.

        Raises:
            ContextStateError: ``start_stats`` was not called, or the context is not open.
        """
        self._check_open()
        if self._counter is None:
            raise ContextStateError("nothing was counted: call `context.start_stats()` before what stats() is to tell of")
        return self._counter.read(self.world.rank, perf_counter())

    def answers_at(self) -> str:
        """Where this rank tells, also while its own thread is blocked, in which operation of which group it is.

        Returns:
            For ``Address.from_json`` and ``ask`` of ``context.control``, in any process. It holds a secret. ``""``
            in a world of one, which has no groups to tell of.

        Raises:
            ContextStateError: The context is not open.
        """
        self._check_open()
        return self._answer_address()

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Recording]:
        """Record what all ranks do in a block, and write it as one file for Perfetto or ``chrome://tracing``.

        A block that ends by an exception writes nothing and communicates nothing.

        Args:
            path: Where the world's first rank writes; other ranks write nothing.

        Yields:
            Takes further stretches of this rank: ``with trace.span("sampling"): ...``.

        Raises:
            ContextStateError: The context is not open, or records already.
            OSError: The file cannot be written; on the first rank alone.
            PeerError: A rank failed or left.

        Collective: all ranks, at the same point of their programs. Its end measures clocks and sends all parts to the first.
        """
        recording = self.start_recording()
        try:
            yield recording
        finally:
            self.stop_recording()
        parts, clocks = recording.collect(self.world)
        if parts:
            write_trace(path, trace_document(parts, clocks))

    def start_recording(self) -> Recording:
        """Record this rank's operations until ``stop_recording``: for programs in which no block can stand around them.

        Returns:
            Takes further stretches; its ``collect`` brings the parts of several ranks together after ``stop_recording``.

        Raises:
            ContextStateError: The context is not open, or records already.
        """
        self._check_open()
        if self._recording is not None:
            raise ContextStateError("this context records a trace already; end that one before the next")
        self._recording = Recording(self.world.rank, self._place())
        self._follow_all(self._recording)
        return self._recording

    def stop_recording(self) -> None:
        """Record no more. Twice is nothing."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    @property
    @abstractmethod
    def world(self) -> GroupCoordinator:
        """All ranks."""

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _place(self) -> str:
        """Where this rank is, for people."""

    @abstractmethod
    def _connections(self) -> Mapping[tuple[Rank, ...], Connection]:
        """What its groups move their data with, by world ranks in group order."""

    @abstractmethod
    def _answer_address(self) -> str: ...

    @abstractmethod
    def _tell_counts(self, read: Callable[[], Statistics]) -> None:
        """Let whoever asks this rank from outside know what it counts."""

    def _follow_all(self, follower: OperationCounter | Recording) -> None:
        for ranks, connection in self._connections().items():
            follower.follow(ranks, connection)

    def _follow(self, ranks: tuple[Rank, ...], connection: Connection) -> None:
        """Include a connection that was opened just now."""
        for follower in (self._counter, self._recording):
            if follower is not None:
                follower.follow(ranks, connection)
