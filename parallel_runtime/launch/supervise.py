"""Watching every rank at once: what they say, and whether they are alive."""

import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from typing import Any, final

from parallel_runtime.errors import LaunchError
from parallel_runtime.launch.guards import UNGUARDED_STATUS, unguarded_error
from parallel_runtime.launch.outcome import RankFailure, describe_exit, find_root, rank_failed_error
from parallel_runtime.launch.rank_process import Result, Stage
from parallel_runtime.launch.wires import MessageReader
from parallel_runtime.values import error_text

__all__ = ["RankHandle", "Supervisor", "end_processes"]

_BLAME_GRACE_S = 2.0
"""How long a failure that blames a peer waits for that peer's own word."""
_TERMINATE_GRACE_S = 2.0
_KILL_GRACE_S = 5.0


@final
class RankHandle:
    """One launched process as its parent sees it.

    Args:
        rank: Which rank it is.
        process: Started.
        messages: Read end of its pipe; owned.
    """

    def __init__(self, rank: int, process: ForkServerProcess, messages: MessageReader) -> None:
        self.rank = rank
        self.process = process
        self.pid = process.pid or 0
        self.messages = messages
        self.stage = "importing the main module"
        self.has_started = False
        self.outcome: Result | RankFailure | None = None

    def update(self) -> None:
        """Take in its messages and, if it has ended, how. Never blocks."""
        exitcode = self.process.exitcode
        for message in self.messages.read():
            self.has_started = True
            if isinstance(message, Stage):
                self.stage = message.text
            else:
                self.outcome = message
        if exitcode is not None and self.outcome is None:
            text = f"{describe_exit(exitcode)}, while {self.stage}"
            self.outcome = RankFailure(rank=self.rank, text=text, exitcode=exitcode)

    def waitables(self) -> list[int]:
        """Descriptors that become ready when there is news of it."""
        alive = [self.process.sentinel] if self.process.exitcode is None else []
        return [*alive, *([self.messages.fileno()] if self.messages.is_open else [])]

    def describe(self) -> str:
        """Who and where it is, for people."""
        return f"rank {self.rank} (pid {self.pid}) is {self.stage}"


@final
class Supervisor:
    """Waits until every rank has returned, or one has failed.

    Args:
        handles: One per rank, in rank order.
        what: Name of the function they run.
        start_s: Seconds for a process to come alive; it then imports and joins under its own deadline.
        tell: Told the process id of a rank that ended without a word, and how, so that the other ranks learn of it.
    """

    def __init__(
        self,
        handles: Sequence[RankHandle],
        *,
        what: str,
        start_s: float,
        tell: Callable[[int, str], None] = lambda pid, text: None,
    ) -> None:
        self._handles = handles
        self._what = what
        self._start_s = start_s
        self._tell = tell
        self._started_at = time.monotonic()
        self._failures: list[RankFailure] = []
        self._failed_at = 0.0

    def check(self) -> bool:
        """Take in what there is, without waiting.

        Returns:
            Whether every rank has returned.

        Raises:
            LaunchError: A rank did not start in time, or imported a script without a main guard.
            RankFailedError: A rank failed.
        """
        for handle in self._handles:
            had_outcome = handle.outcome is not None
            handle.update()
            if isinstance(handle.outcome, RankFailure) and not had_outcome:
                self._failed_at = self._failed_at or time.monotonic()
                self._failures.append(handle.outcome)
                if handle.outcome.exitcode is not None and not handle.outcome.traceback:
                    self._tell(handle.pid, describe_exit(handle.outcome.exitcode))
        if self._failures and (find_root(self._failures) or self._has_settled()):
            if not any(handle.has_started for handle in self._handles) and self._failures[0].exitcode == UNGUARDED_STATUS:
                raise unguarded_error()
            raise rank_failed_error(self._failures, world_size=len(self._handles), what=self._what)
        self._check_started()
        return all(isinstance(handle.outcome, Result) for handle in self._handles)

    def wait(self, timeout_s: float | None, start: float) -> list[Any]:
        """Wait for every rank.

        Args:
            timeout_s: Longest wait in seconds; ``None`` waits as long as they run.
            start: Where these seconds begin, on the monotonic clock.

        Returns:
            Each rank's result, in rank order.

        Raises:
            LaunchError: They did not return in time, or did not start, or a result cannot be unpickled here.
            RankFailedError: A rank failed.
        """
        deadline = None if timeout_s is None else start + timeout_s
        while not self.check():
            if deadline is not None and time.monotonic() >= deadline:
                late = [handle.describe() for handle in self._handles if handle.outcome is None]
                raise LaunchError(
                    f"{len(late)} of {len(self._handles)} ranks had not finished {self._what} within {timeout_s:g} s: "
                    f"{'; '.join(late)}"
                )
            wait_for_any(self._waitables(), self._pause(deadline))
        return [_unpack(handle.rank, handle.outcome) for handle in self._handles if isinstance(handle.outcome, Result)]

    def wait_for_exit(self, timeout_s: float) -> None:
        """Give the processes time to leave by themselves once they have reported.

        Args:
            timeout_s: Longest wait in seconds.
        """
        deadline = time.monotonic() + timeout_s
        while sentinels := [h.process.sentinel for h in self._handles if h.process.exitcode is None]:
            if not wait_for_any(sentinels, max(0.0, deadline - time.monotonic())):
                return

    def _has_settled(self) -> bool:
        is_over = all(handle.outcome is not None for handle in self._handles)
        return is_over or time.monotonic() - self._failed_at >= _BLAME_GRACE_S

    def _check_started(self) -> None:
        if time.monotonic() - self._started_at < self._start_s:
            return
        if late := [handle.describe() for handle in self._handles if not handle.has_started]:
            raise LaunchError(
                f"{len(late)} of {len(self._handles)} ranks did not start within {self._start_s:g} s (deadlines.join_s): "
                f"{'; '.join(late)}"
            )

    def _waitables(self) -> list[int]:
        return [waitable for handle in self._handles if handle.outcome is None for waitable in handle.waitables()]

    def _pause(self, deadline: float | None) -> float | None:
        ends = [] if deadline is None else [deadline]
        if self._failures:
            ends.append(self._failed_at + _BLAME_GRACE_S)
        if not all(handle.has_started for handle in self._handles):
            ends.append(self._started_at + self._start_s)
        return max(0.0, min(ends) - time.monotonic()) if ends else None


def end_processes(handles: Sequence[RankHandle], lifeline: int) -> None:
    """Make sure that no rank is left: ask, then insist. Bounded, and complete even if a second Ctrl-C interrupts it.

    Args:
        handles: Ranks, ended or not.
        lifeline: Write end of the pipe whose end they watch; closed here.
    """
    try:
        for handle in handles:
            if handle.process.exitcode is None:
                handle.process.terminate()
        _join(handles, _TERMINATE_GRACE_S)
    finally:
        os.close(lifeline)
        for handle in handles:
            if handle.process.exitcode is None:
                handle.process.kill()
        _join(handles, _KILL_GRACE_S)
        for handle in handles:
            handle.messages.close()


def _unpack(rank: int, result: Result) -> Any:
    try:
        return pickle.loads(result.data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise LaunchError(f"the result of rank {rank} came back but cannot be unpickled here: {error_text(error)}") from error


def _join(handles: Sequence[RankHandle], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for handle in handles:
        handle.process.join(max(0.0, deadline - time.monotonic()))
