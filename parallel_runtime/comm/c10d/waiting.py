"""How the operations of a backend of torch are waited for, broken off, and what becomes of its errors."""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.c10d.backends import torch_op
from parallel_runtime.comm.communicator import Communicator, ReduceOp, Work
from parallel_runtime.errors import EarlierFailureError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["Backend", "BackendWork"]

_SLICE_S: Final = 0.25
_SLICE: Final = timedelta(seconds=_SLICE_S)
"""How long a gloo collective waits between two looks at what has become of its peers."""
_SLICE_IS_OVER: Final = "Operation timed out!"
_SUSPICIOUS_S: Final = 1.0
"""A slice that ends so much too late tells that this process did not run. A machine's sleep does not count: clocks stop, too."""
_STANDSTILL_S: Final = 60.0
"""So long a standstill of this process is made up for: gloo's own clock, which cannot be stopped, is set later by this much."""
_WATCHED_S: Final = 2.0
"""From here on the deadline of a send or receive is kept by the thread that looks after it, and a standstill is made up for."""
_MOST_KEPT: Final = 256
"""Options that are kept: one per operation, deadline and root."""
_BREAK_TAG: Final = 2**31 - 1
"""Of a message that nobody sends."""
_TIMED_OUT: Final = re.compile(r"[Tt]im(ed|e) ?out|[Tt]imeout")
_LOST: Final = re.compile(r"closed by peer|reset by peer|[Bb]roken pipe|pair closure|refused|not connected|closed|[Ss]hutdown")


@final
class _Wait:
    """For one send or receive."""

    __slots__ = ("deadline", "peer", "start", "timeout_s")

    def __init__(self, peer: int, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self.start = monotonic()
        self.deadline = self.start + timeout_s


class Backend(Communicator):
    """What ``C10dCommunicator`` waits with.

    Attributes:
        backend: Name of torch's backend.
    """

    backend: str
    _group: Any
    _is_gloo: bool
    _ranks: list[int]

    def __init__(self) -> None:
        self._broken = ""
        self._still_s = 0.0
        self._deadline = 0.0
        self._waits_for: _Wait | None = None
        self._looked_at = monotonic()
        self._cut_off: PeerError | None = None
        self._kept: dict[tuple[Any, float, int, int], Any] = {}

    def end_vain_wait(self) -> None:
        """Break a send or receive off that is late, or whose peer is gone though the connection to it is still there."""
        waits_for, diagnostician, now = self._waits_for, self.traffic.diagnostician, monotonic()
        still_s, self._looked_at = now - self._looked_at, now
        if waits_for is None or diagnostician is None or now - waits_for.start < _SLICE_S:
            return
        if still_s > _SUSPICIOUS_S:
            waits_for.deadline += still_s  # this process did not run, so nobody else is late
        error = diagnostician.interruption((self._ranks[waits_for.peer],), self.key, sys.maxsize)
        if error is None and now >= waits_for.deadline:
            error = PeerTimeoutError(f"waited {waits_for.timeout_s:.3g} s for member {waits_for.peer}")
        if error and self._waits_for is waits_for:
            self._cut_off = error
            self._break_off(error)

    def _options(self, kind: Any, timeout_s: float, *, op: ReduceOp | None = None, root: int = 0) -> Any:
        """Torch's options of one operation; making them takes longer than the call itself, so they are kept."""
        key = (kind, timeout_s, id(op), root)  # hashing an enum member runs Python code
        options = self._kept.get(key)
        if options is None:
            options = kind()
            options.timeout = self._limit(timeout_s)
            if op is not None:
                options.reduceOp = torch_op(op)
            if hasattr(options, "rootRank"):
                options.rootRank = root
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = options
        return options

    def _limit(self, timeout_s: float) -> timedelta:
        """What the backend is told. The deadline of a collective of gloo is kept here, where a standstill can be made up for."""
        return timedelta(seconds=timeout_s + (_STANDSTILL_S if self.backend == "gloo" else 0.0))

    def _refuse(self) -> NoReturn:
        if self._broken:
            raise EarlierFailureError(f"this group can no longer be used: {self._broken}")
        raise PeerLostError("this communicator is closed")

    def _start(self, call: Callable[[Any], c10d.Work], whom: str) -> c10d.Work:
        if self._group is None or self._broken:
            self._refuse()
        try:
            return call(self._group)
        except RuntimeError as exc:
            raise self._translated(exc, whom, 0.0) from exc

    def _finish(self, call: Callable[[Any], c10d.Work], whom: str, timeout_s: float) -> None:
        """Run a collective, or what is left of it after a roll call."""
        self._wait(call, whom, timeout_s)
        self._deadline = 0.0
        self.traffic.steps += 1

    def _wait(self, call: Callable[[Any], c10d.Work], whom: str, timeout_s: float) -> None:
        group = self._group
        if group is None or self._broken:
            self._refuse()
        try:
            if self._is_gloo:
                self._wait_in_slices(call(group), whom, timeout_s)
            else:
                call(group).wait()
        except RuntimeError as exc:
            if isinstance(exc, PeerError):
                raise
            raise self._translated(exc, whom, timeout_s) from exc
        except BaseException as exc:  # of a signal's handler: how far the operation went is not known
            self._break_off(PeerLostError(f"a {type(exc).__name__} ended an operation half-way"))
            raise

    def _wait_in_slices(self, work: c10d.Work, whom: str, timeout_s: float) -> None:
        """Wait for a collective until the deadline; a peer that is gone ends it sooner, a standstill of this process later."""
        self._still_s = 0.0
        start = monotonic()
        deadline = self._deadline or start + timeout_s
        slice_s = _SLICE_S if deadline - start >= _SLICE_S else max(deadline - start, 0.001)
        while True:
            try:
                work.wait(_SLICE if slice_s == _SLICE_S else timedelta(seconds=slice_s))
                return
            except RuntimeError as exc:
                still_s = monotonic() - start - slice_s
                if still_s > _SUSPICIOUS_S:
                    self._still_s += still_s
                    deadline += still_s  # stopped itself, so nobody else is late
                    self._deadline = deadline if self._deadline else 0.0
                if _SLICE_IS_OVER not in str(exc):
                    raise
            diagnostician = self.traffic.diagnostician
            error = diagnostician and diagnostician.interruption(self._ranks, self.key, self.traffic.steps + 1)
            if error is None and monotonic() >= deadline:
                error = PeerTimeoutError(f"waited {timeout_s:.3g} s for {whom}")
            if error:
                self._break_off(error)
                raise error
            start = monotonic()
            slice_s = min(_SLICE_S, max(deadline - start, 0.001))

    def _break_off(self, error: PeerError) -> None:
        """End what is under way in the group, and the group with it; its peers learn of it at once.

        Gloo has nothing that ends an operation, but a receive that times out closes every connection of its group. One from a
        peer whose connection is closed already fails at once and closes nothing.
        """
        self._broken = self._broken or str(error)
        group, self._group = self._group, None
        if group is None or self.backend != "gloo":
            return
        for peer in range(self.world_size):
            if peer != self.rank_in_group:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))

    def _translated(self, exc: RuntimeError, whom: str, timeout_s: float) -> PeerError:
        """The typed error for what a backend raised.

        It leaves the group unusable, as the backend does; its connections close at once, so that no peer waits for this member.
        """
        text = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        error: PeerError
        if _TIMED_OUT.search(text):
            error = PeerTimeoutError(f"waited {timeout_s:.3g} s for {whom}")
            if self._still_s > _SUSPICIOUS_S:
                error.add_note(
                    f"this process itself stood still for {self._still_s:.1f} s of that: stopped, or on an overloaded machine"
                )
        elif _LOST.search(text):
            error = PeerLostError(f"lost the connection to {whom} ({text})")
        else:
            error = PeerError(f"{self.backend} failed while waiting for {whom}: {text}")
        self._broken = self._broken or str(error)
        self._group = None
        return error


@final
class BackendWork(Work):
    """A send or receive of the backend. A second wait on gloo's own would block, so the outcome is kept."""

    def __init__(self, communicator: Backend, work: c10d.Work, tensor: Tensor, peer: int) -> None:
        self._communicator = communicator
        self._work: c10d.Work | None = work
        self._tensor: Tensor | None = tensor
        self._peer = peer
        self._error: PeerError | None = None

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            communicator = self._communicator
            communicator._waits_for = _Wait(self._peer, timeout_s)
            is_watched = timeout_s >= _WATCHED_S and communicator.traffic.diagnostician is not None
            try:
                work.wait(timedelta(seconds=timeout_s + (_STANDSTILL_S if is_watched else 0.0)))
            except RuntimeError as exc:
                self._error = communicator._cut_off or communicator._translated(exc, f"member {self._peer}", timeout_s)
                self._error.members = (self._peer,)
            finally:
                communicator._waits_for = None
            self._tensor = None
        if self._error is not None:
            raise self._error
