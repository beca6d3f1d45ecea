"""How a rank ended, as plain text that always crosses the process border, and which failure was the first."""

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from parallel_runtime.errors import PeerError, RankFailedError

__all__ = ["RankFailure", "describe_exit", "failure_of", "find_root", "rank_failed_error"]

_HINTS = MappingProxyType(
    {
        int(signal.SIGKILL): "; the kernel does this when memory runs out",
        int(signal.SIGABRT): "; with checked=False gloo does this when a peer entered an operation of another size",
    }
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank's end, other than by returning.

    Attributes:
        rank: Who.
        text: What happened in one line or a few, such as ``"ValueError: boom"`` or ``"was killed by SIGKILL"``.
        traceback: The rank's own traceback, ``""`` where it left none.
        blames_peer: Whether it is a ``PeerError``, so probably the consequence of another rank's failure.
        exitcode: Exit status of the process, negative for a signal; ``None`` where the function raised.
    """

    rank: int
    text: str
    traceback: str = ""
    blames_peer: bool = False
    exitcode: int | None = None


def failure_of(rank: int, error: BaseException, *, skip_frames: int = 0) -> RankFailure:
    """Describe an exception that a rank raised.

    Args:
        rank: Who raised it.
        error: What was raised. Need not be picklable; only text is kept.
        skip_frames: Leading frames of this library to leave out of the traceback.

    Returns:
        The failure; ``exitcode`` is set for ``SystemExit``.
    """
    trace = error.__traceback__
    for _ in range(skip_frames):
        trace = trace.tb_next if trace and trace.tb_next else trace
    lines = traceback.TracebackException(type(error), error, trace)
    text = "".join(lines.format_exception_only()).strip()
    exitcode = None
    if isinstance(error, SystemExit):
        exitcode = error.code if isinstance(error.code, int) else 1
        text = f"called sys.exit({error.code!r})"
    return RankFailure(
        rank=rank,
        text=text,
        traceback="".join(lines.format()),
        blames_peer=isinstance(error, PeerError),
        exitcode=exitcode,
    )


def describe_exit(exitcode: int) -> str:
    """Say how a process ended that left no word.

    Args:
        exitcode: As ``multiprocessing.Process.exitcode``: negative for a signal.

    Returns:
        A clause that follows "rank N".
    """
    if exitcode >= 0:
        return f"exited with status {exitcode} before it returned a result"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name} ({-exitcode})"


def find_root(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that explains the others.

    Args:
        failures: In the order they were seen.

    Returns:
        The first that does not blame a peer; ``None`` while all of them do.
    """
    return next((failure for failure in failures if not failure.blames_peer), None)


def rank_failed_error(failures: Sequence[RankFailure], *, world_size: int, what: str) -> RankFailedError:
    """One error for a world in which something failed: the cause first, what followed from it marked as such.

    Args:
        failures: At least one, in the order they were seen.
        world_size: Number of ranks.
        what: Name of the function they ran.

    Returns:
        The error to raise; ``rank``, ``exitcode`` and ``remote_traceback`` are those of the cause.
    """
    root = find_root(failures) or failures[0]
    lines = [f"rank {root.rank} of {world_size} failed in {what}: {root.text}"]
    if root.exitcode is not None:
        hint = _HINTS.get(-root.exitcode, "")
        lines = [f"rank {root.rank} of {world_size} {root.text} in {what}{hint}"]
    if root.traceback:
        lines += ["", f"traceback of rank {root.rank}:", root.traceback.rstrip()]
    if others := [failure for failure in failures if failure is not root]:
        lines += ["", "follow-ups, seen once that rank had failed:"]
        lines += [f"  rank {failure.rank}: {failure.text}" for failure in others]
    return RankFailedError("\n".join(lines), rank=root.rank, exitcode=root.exitcode, remote_traceback=root.traceback)
