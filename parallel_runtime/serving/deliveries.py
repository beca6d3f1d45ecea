"""What becomes of a request, and where it is told."""

from typing import Protocol, TypeAlias

from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.serving.messages import Request, StepOutput

__all__ = ["Delivery", "Sink", "Submitter"]

Delivery: TypeAlias = tuple[str, StepOutput | ParallelRuntimeError]
"""The name of a request, and its new tokens or the error that ended it."""


class Sink(Protocol):
    """Where the deliveries of a request go; several requests may share one. A ``SimpleQueue`` is one."""

    def put(self, item: Delivery, /) -> None:
        """Take one more; must not wait."""
        ...


class Submitter(Protocol):
    """Serves requests; the ``DataParallelController`` is one."""

    def submit(self, request: Request, sink: Sink, *, to: int | None = None, places: dict[str, int] | None = None) -> int | None:
        """Take a request."""
        ...

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them."""
        ...
