"""What whoever started the ranks knows about the end of one, told to the others through the store in which they meet."""

from contextlib import suppress

from parallel_runtime.comm.c10d import Store
from parallel_runtime.context.meeting import wait_for_keys

__all__ = ["announce_supervisor", "obituary", "post_obituary"]

_SUPERVISED = "parallel_runtime/supervised"
_ENDED = "parallel_runtime/ended"


def announce_supervisor(store: Store) -> None:
    """Promise that the end of every rank will be told here.

    Args:
        store: In which the ranks meet.
    """
    store.set(_SUPERVISED, "yes")


def post_obituary(store: Store, pid: int, text: str) -> None:
    """Tell how a rank ended. A store that is gone is no error.

    Args:
        store: In which the ranks meet.
        pid: Of the rank.
        text: A clause that follows "rank N", such as ``"was killed by SIGKILL (9)"``.
    """
    with suppress(RuntimeError):
        store.set(f"{_ENDED}/{pid}", text)


def obituary(store: Store, pid: int, timeout_s: float) -> str:
    """Read how a rank ended.

    Args:
        store: In which the ranks meet.
        pid: Of the rank.
        timeout_s: Longest wait for somebody who has promised to tell, in seconds.

    Returns:
        The clause; ``""`` where nobody knows.
    """
    with suppress(RuntimeError):
        key = f"{_ENDED}/{pid}"
        if store.check([_SUPERVISED]) and wait_for_keys(store, [key], timeout_s):
            return store.get(key).decode()
    return ""
