"""Capture of device graphs: which groups take part, what may be recorded, and when a graph may run.

A graph is recorded once and replayed often. What the CPU does while it is recorded is not part of it, so groups refuse, while one
is recorded, every operation in which the CPU takes part. The CUDA part was read against ``torch/cuda/graphs.py`` of torch 2.13;
it has not run on a GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from enum import StrEnum
from typing import Generic, Protocol, Self, TypeVar, final

import torch

from parallel_runtime.comm.coordinator import GroupCoordinator
from parallel_runtime.context.agreement import Agreement
from parallel_runtime.errors import ArgumentError, ContextStateError, StaleContextError

__all__ = ["CapturedGraph", "CudaGraphs", "GraphCapture", "GraphDevice", "RecordedGraph", "capture_members"]

_T = TypeVar("_T")


class RecordedGraph(Protocol):
    """What a device recorded."""

    def replay(self) -> None:
        """Start it, on the current stream."""

    def reset(self) -> None:
        """Give back its memory; it cannot be replayed any more."""


class GraphDevice(Protocol):
    """What a capture needs of a device. ``parallel_runtime.testing.graphs`` pretends to be one."""

    def on_stream(self, stream: object | None) -> AbstractContextManager[None]:
        """Make a stream the current one.

        Args:
            stream: Which; ``None`` makes a new one.

        Returns:
            For ``with``. Work is ordered: what was started before comes before what the block starts, and so behind it.
        """

    def is_recording(self) -> bool:
        """Whether what is started now, on the current stream, becomes part of a graph."""

    def record(self, body: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """Record what ``body`` starts on the current stream, without running it. What it raises comes out as it is.

        Args:
            body: Called once. Memory it takes belongs to the graph, and to all others that this device records.

        Returns:
            The graph, and what ``body`` returned.
        """


class _State(StrEnum):
    CAPTURING = "capturing"
    READY = "ready"
    FAILED = "failed"
    STALE = "stale"


@final
class CapturedGraph(Generic[_T]):
    """A graph, made by ``GraphCapture.graph``. It can be replayed once its block has ended well, until its context closes.

    Attributes:
        output: What the recorded body returned: the same tensors at every replay, with what the latest one wrote.
    """

    def __init__(self, recorded: RecordedGraph, output: _T, capture: "GraphCapture") -> None:
        self.output = output
        self._recorded = recorded
        self._capture = capture

    def replay(self) -> _T:
        """Run it again, on the current stream, with what its input tensors hold now.

        Returns:
            ``output``; the next replay overwrites it.

        Raises:
            ContextStateError: The block that captured it has not ended yet, or ended with an error on a rank.
            StaleContextError: Its context is closed.

        Collective: what was recorded; all members of those groups, same order.
        """
        self._capture.check_replayable()
        self._recorded.replay()
        return self.output


@final
class GraphCapture:
    """One block of captures; ``ParallelContext.graph_capture`` makes it.

    Args:
        groups: Those that take part, of two or more members, in the order in which they do.
        device: Captures.
        uid: Of the context, for errors.
    """

    def __init__(self, groups: Sequence[GroupCoordinator], device: GraphDevice, uid: str) -> None:
        self._groups = tuple(groups)
        self._device = device
        self._uid = uid
        self._recorded: list[RecordedGraph] = []
        self._is_entered = False
        self._state = _State.CAPTURING

    @property
    def groups(self) -> tuple[GroupCoordinator, ...]:
        """The groups that take part, aliases once, in an order that is equal on every rank."""
        return self._groups

    def graph(self, body: Callable[[], _T], *, num_warmups: int = 1) -> CapturedGraph[_T]:
        """Record what ``body`` does on the device. All graphs of one block share their memory: replay one at a time.

        Capture the largest first: the others then fit into the memory that it took.

        Args:
            body: Works on tensors that stay where they are, and gives the same work each time it is called.
            num_warmups: How often to run it before. Once makes the connections, workspaces and plans that it needs.

        Returns:
            The graph; it can be replayed once the block has ended.

        Raises:
            ContextStateError: The block is over, a graph is being recorded already, or ``body`` uses a group in a way that
                cannot become part of a graph.

        Collective: what ``body`` does, ``num_warmups`` times on the device and once only recorded; same order on every rank.
        """
        if not self._is_entered:
            raise ContextStateError("this graph capture is over; enter another one with ctx.graph_capture()")
        if self._device.is_recording():
            raise ContextStateError("a graph is being recorded already; record the next one after it")
        for _ in range(num_warmups):
            body()
        recorded, output = self._device.record(body)
        self._recorded.append(recorded)
        return CapturedGraph(recorded, output, self)

    @contextmanager
    def run(self, agreement: Agreement, stream: object | None, timeout_s: float) -> Iterator[Self]:
        """The block, from entering the groups to making known what they noted.

        Args:
            agreement: Of the ranks that capture.
            stream: As in ``GraphDevice.on_stream``.
            timeout_s: Longest wait for the others, once after the block and once after making known, in seconds.

        Raises:
            ContextStateError: A group is in another capture.
            PeerError: As ``Agreement.guard``.
        """
        try:
            with agreement.guard(timeout_s, unmasked=True), self._entered(stream):
                yield self
            with agreement.guard(timeout_s, unmasked=True):
                for group in self._groups:
                    group.register_captured(timeout_s)
        except BaseException:
            self._end(_State.FAILED)
            raise
        if self._state is _State.CAPTURING:
            self._state = _State.READY

    def check_replayable(self) -> None:
        """Check that graphs of this block may run.

        Raises:
            ContextStateError: The block has not ended yet, or ended with an error on a rank.
            StaleContextError: The context or this capture is closed.
        """
        if self._state is _State.STALE:
            raise StaleContextError(
                f"this graph of context {self._uid} was given back when the context closed, or before, and its connections may "
                "be gone; capture it again in a context that is open"
            )
        if self._state is _State.FAILED:
            raise ContextStateError("the capture of this graph failed on a rank, so it runs on none; capture it again")
        if self._state is _State.CAPTURING:
            raise ContextStateError("this graph can be replayed once its graph_capture block has ended on every rank")

    def close(self) -> None:
        """Give back all graphs, before the connections that they use go. Never communicates; twice is nothing."""
        self._end(_State.STALE)

    @contextmanager
    def _entered(self, stream: object | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._device.on_stream(stream))
            for group in self._groups:
                stack.enter_context(group.capturing(self._device.is_recording))
            self._is_entered = True
            try:
                yield
            finally:
                self._is_entered = False

    def _end(self, state: _State) -> None:
        self._state = state if self._state is not _State.STALE else self._state
        while self._recorded:
            with suppress(RuntimeError):  # of a device that failed; there is nothing more to give back
                self._recorded.pop().reset()


def capture_members(opened: Iterable[GroupCoordinator], within: GroupCoordinator) -> tuple[GroupCoordinator, ...]:
    """The groups that take part in a capture.

    Args:
        opened: Every group of a context, aliases included.
        within: Whose members capture.

    Returns:
        Those of two or more ranks, all of them in ``within``, of equal ranks once. Ordered by their ranks, so that any two
        members of any two groups see them in the same order.
    """
    inside = frozenset(within.ranks)
    distinct: dict[tuple[int, ...], GroupCoordinator] = {}
    for group in opened:
        if group.world_size > 1 and inside.issuperset(group.ranks):
            distinct.setdefault(group.ranks, group)
    return tuple(distinct[ranks] for ranks in sorted(distinct))


@final
class CudaGraphs:
    """Torch's CUDA graphs, in one memory pool.

    Args:
        device: Of the context.

    Raises:
        ArgumentError: It is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ArgumentError(f"graphs are captured on CUDA devices, and the tensors of this context live on {device}")
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def on_stream(self, stream: object | None) -> Iterator[None]:
        """A side stream, since the default stream cannot be captured."""
        with torch.cuda.device(self._device):
            if stream is None:
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if not isinstance(stream, torch.cuda.Stream):
                raise ArgumentError(f"stream is a torch.cuda.Stream or None, got {type(stream).__name__}")
            before = torch.cuda.current_stream(self._device)
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    yield
            except BaseException:
                with suppress(RuntimeError):  # of a device that failed: the first error tells
                    before.wait_stream(stream)
                raise
            before.wait_stream(stream)

    def is_recording(self) -> bool:
        """As torch says."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, body: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """What other threads do meanwhile, such as nccl's watchdog, is no part of it and does not disturb it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = body()
        except BaseException:
            with suppress(RuntimeError):  # the capture may be invalid already, which is no news
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, output
