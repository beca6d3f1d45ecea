"""The trace of a whole engine: what each rank recorded, brought together by its replica, joined by the front process."""

from collections.abc import Iterable
from time import monotonic, perf_counter
from types import MappingProxyType
from typing import Any, Final, final

import msgspec

from parallel_runtime.context import ParallelContext
from parallel_runtime.context.trace import Recording
from parallel_runtime.context.trace_document import Clock, RankTrace, trace_document
from parallel_runtime.serving.controls import RankProfile, ReplicaTrace
from parallel_runtime.serving.worker import TpModelWorker

__all__ = ["RankTracer", "engine_trace"]

_NAMES: Final = MappingProxyType(
    {"compute": "forward", "receive": "wait for the stage before", "schedule": "scheduler step"},
)


@final
class RankTracer:
    """Records one rank between two controls.

    Args:
        ctx: Open context of this rank. Borrowed.
        worker: This rank's worker. Borrowed.
    """

    def __init__(self, ctx: ParallelContext, worker: TpModelWorker) -> None:
        self._ctx = ctx
        self._worker = worker
        self._recording: Recording | None = None

    def start(self) -> None:
        """Begin; an earlier recording is dropped."""
        self._ctx.stop_recording()
        self._recording = self._ctx.start_recording()

    def stop(self, profiles: Iterable[RankProfile]) -> ReplicaTrace | None:
        """End it, where one was begun.

        Args:
            profiles: Of all ranks of the replica, with what each did beside its groups' operations.

        Returns:
            What all ranks of the replica recorded, on the leader; ``None`` elsewhere, and where nothing was begun.

        Raises:
            PeerError: A rank of the replica failed or left.

        Collective: all ranks of the replica, if they have begun.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        self._ctx.stop_recording()
        for profile in profiles:
            if profile.rank == self._ctx.rank:
                _add_spans(recording, profile, samples=self._ctx.pp.is_last_rank)
        parts, clocks = recording.collect(self._worker.replica)
        return ReplicaTrace(parts, clocks, perf_counter()) if parts else None


def engine_trace(
    told: Iterable[tuple[int, ReplicaTrace]], *, ranks_per_replica: int, asked_s: float, heard_s: float
) -> dict[str, Any]:
    """Put the traces of all replicas on the clock of the front process.

    Args:
        told: Number of the replica, and a trace of some of its ranks.
        ranks_per_replica: Ranks are numbered through all replicas.
        asked_s: When the leaders were asked for them, by ``time.perf_counter`` of this process.
        heard_s: When all had answered.

    Returns:
        As ``trace_document``.
    """
    parts: list[RankTrace] = []
    clocks: list[Clock] = []
    for replica, trace in told:
        to_leader = Clock(offset_s=trace.told_s - (asked_s + heard_s) / 2, uncertainty_s=(heard_s - asked_s) / 2)
        first = replica * ranks_per_replica
        place = f"replica {replica}, " if first else ""
        parts += [msgspec.structs.replace(part, first=first, who=place + part.who) for part in trace.parts]
        clocks += [msgspec.structs.replace(clock, base_s=to_leader.applied_s) for clock in trace.clocks]
    return trace_document(parts, clocks)


def _add_spans(recording: Recording, profile: RankProfile, *, samples: bool) -> None:
    """Put the rank's stretches into the trace; on the last stage each forward is followed by the choice of its tokens."""
    shift_s = perf_counter() - monotonic()
    is_sampling = False
    for span in profile.spans:
        name = _NAMES.get(span.what, span.what)
        if span.what == "compute" and samples and span.num_tokens:
            name = "sampling" if is_sampling else name
            is_sampling = not is_sampling
        start_s, end_s = span.start_s + shift_s, span.end_s + shift_s
        recording.add(name, start_s, end_s, lane="serving", num_tokens=span.num_tokens)
