"""The one call that most users need: a function on every rank of a world of local processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.launch.pinning import Pin

__all__ = ["launch"]

_T = TypeVar("_T")


def launch(
    fn: Callable[..., _T],
    config: ParallelConfig,
    *args: object,
    timeout_s: float | None = None,
    host: str = "127.0.0.1",
    log_dir: str | os.PathLike[str] | None = None,
    prefix_output: bool = False,
    pin: Pin = "none",
) -> list[_T]:
    """Run ``fn(ctx, *args)`` on every rank of a world of local processes.

    The processes come from ``multiprocessing``'s fork server with torch preloaded: the first launch of a process takes seconds,
    later ones a fraction of one. The caller's variables, start method, signal handlers, thread counts and default dtype are as
    before afterwards; ``multiprocessing``'s idle server process stays until this process ends. While it waits in the main thread,
    a SIGTERM that the caller does not handle raises ``SystemExit(143)``, so that the ranks are ended and files removed.

    Each rank gets an equal share of the cores as intra-op threads, unless ``OMP_NUM_THREADS`` says otherwise.
    Ranks ignore Ctrl-C, which is the parent's to handle, and end when the parent does, however it ends.

    Args:
        fn: A function that other processes can import by name.
        config: Of the context that each rank enters; decides the number of ranks.
        *args: Further arguments; each rank gets a copy.
        timeout_s: Longest run in seconds, from the call on; ``None`` sets no limit. Ranks that run longer are ended, which takes
            up to some seconds more.
        host: Loopback address on which the ranks meet, ``"127.0.0.1"`` or ``"::1"``.
        log_dir: Folder in which each rank's output goes to a file of its own, ``rank-<rank>.log``; an error names the file.
        prefix_output: Whether each line on the caller's streams begins with ``[rank N]``; then a thread passes output on.
        pin: ``"auto"`` keeps each rank to cores of its own, near to each other, where there are at least two for each rank. Two
            launches at a time would choose the same cores, so the default is ``"none"``.

    Returns:
        What each rank returned, in rank order; ``None`` from a rank that called ``sys.exit(0)``.

    Raises:
        ArgumentError: ``fn`` cannot be called, ``config`` is no config, ``timeout_s`` is not a number of seconds, ``host`` is not
            on loopback, or ``pin`` is unknown.
        ConfigError: The config is for threads, does not number its ranks from 0, or needs more file descriptors than there are.
        LauncherEnvironmentError: ``OMP_NUM_THREADS`` is not a number of threads.
        LaunchError: Nothing was started: the call cannot be pickled, the script has no main guard, this process is a rank itself,
            a log file cannot be opened. Or the ranks did not start, or did not finish in time.
        RankFailedError: A rank raised, exited or was killed; the others have been ended.
    """
    from parallel_runtime.launch.processes import LocalRanks, check_timeout  # torch, which takes a second to import

    check_timeout(timeout_s)
    start = time.monotonic()
    ranks = LocalRanks(fn, config, args=args, host=host, log_dir=log_dir, prefix_output=prefix_output, pin=pin)
    with _sigterm_as_exit(), ranks:
        return ranks.wait(timeout_s, since=start)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
