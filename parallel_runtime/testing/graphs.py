"""A pretended device that captures graphs, so that their protocol can be tested where there is no GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

import torch
from torch import Tensor

from parallel_runtime.context.capture import RecordedGraph
from parallel_runtime.errors import ArgumentError

__all__ = ["FakeGraphs"]

_T = TypeVar("_T")


@final
class FakeGraphs:
    """Runs a body when it is recorded, and again at each replay, whose results overwrite those of the first time.

    For ``ctx.graph_capture(graphs=FakeGraphs())``. Bodies return a tensor, several of them in a tuple, or nothing.

    Attributes:
        events: What happened, in order: ``"stream None"``, ``"record"``, ``"replay 0"``, ``"reset 0"``, ``"stream left"``. Graphs
            are numbered from 0.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._count = 0
        self._is_recording = False

    @contextmanager
    def on_stream(self, stream: object | None) -> Iterator[None]:
        """Only noted."""
        self.events.append(f"stream {stream}")
        try:
            yield
        finally:
            self.events.append("stream left")

    def is_recording(self) -> bool:
        """Whether a body runs that is being recorded."""
        return self._is_recording

    def record(self, body: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """Run ``body`` once.

        Raises:
            ArgumentError: It returned neither tensors nor nothing.
        """
        self.events.append("record")
        self._is_recording = True
        try:
            output = body()
        finally:
            self._is_recording = False
        _tensors(output)
        self._count += 1
        return _FakeGraph(self.events, self._count - 1, body, output), output


@final
class _FakeGraph:
    def __init__(self, events: list[str], number: int, body: Callable[[], object], output: object) -> None:
        self._events = events
        self._number = number
        self._body = body
        self._output = output

    def replay(self) -> None:
        self._events.append(f"replay {self._number}")
        with torch.inference_mode():  # the outputs may be of a body that ran like that
            for old, new in zip(_tensors(self._output), _tensors(self._body()), strict=True):
                old.copy_(new)

    def reset(self) -> None:
        self._events.append(f"reset {self._number}")


def _tensors(output: object) -> tuple[Tensor, ...]:
    parts = output if isinstance(output, tuple) else () if output is None else (output,)
    if not all(isinstance(part, Tensor) for part in parts):
        raise ArgumentError(f"the body of a fake graph returns tensors or nothing, got {type(output).__name__}")
    return parts
