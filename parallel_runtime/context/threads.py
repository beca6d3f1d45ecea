"""Threads at the side of a rank's own."""

import resource
import threading

from parallel_runtime.errors import ConfigError

__all__ = ["start_thread"]


def start_thread(thread: threading.Thread, purpose: str) -> None:
    """Start a thread, or say why there is none.

    Args:
        thread: New.
        purpose: What for, for the error.

    Raises:
        ConfigError: This process may not have another thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        most = "no limit of its own" if limit == resource.RLIM_INFINITY else f"a limit of {limit} threads and processes per user"
        raise ConfigError(
            f"{purpose}, a thread is needed, but this process, which runs {threading.active_count()} and has {most}, got none "
            f"({error}); end others, or raise the limit (ulimit -u, or the memory and pids of its cgroup)"
        ) from error
