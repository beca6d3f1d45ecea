"""Stores of ``torch.distributed``: where the ranks of a world leave word for each other before they are connected."""

import os
import resource
import socket
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Final, TypeAlias, final

from torch._C import _distributed_c10d as c10d

from parallel_runtime.errors import ArgumentError, ConfigError, PeerError, PeerTimeoutError

__all__ = [
    "HostedStore",
    "Store",
    "adopted",
    "connect_store",
    "file_store",
    "hash_store",
    "listen_store",
    "need_descriptors",
    "prefix_store",
    "wrap",
]

Store: TypeAlias = c10d.Store
"""Any store of torch: a small shared table of keys and bytes."""

_STORE_START_S: Final = 5.0
"""How long a store may take to answer its own process."""
_RESOLVER_S: Final = 10.0
"""How long a name service may keep torch, which asks it for the name of every connection (of 127.0.0.1, too)."""
_STORE_DESCRIPTORS: Final = 12
_CLIENT_DESCRIPTORS: Final = 2


@final
class HostedStore:
    """A TCP store that this process serves.

    Attributes:
        store: The store itself, usable here like by everyone else.
        host: Where it listens.
        port: The port it was given by the system.
    """

    __slots__ = ("host", "port", "store")

    def __init__(self, store: Store, host: str, port: int) -> None:
        self.store = store
        self.host = host
        self.port = port


def listen_store(
    host: str = "127.0.0.1", *, port: int = 0, world_size: int | None = None, timeout_s: float = 60.0
) -> HostedStore:
    """Serve a store on ``host``, and only there.

    Args:
        host: Address or name to listen on.
        port: Fixed port, or 0 for one that the system picks while binding.
        world_size: How many ranks will connect, if known.
        timeout_s: Default patience of its gets, in seconds.

    Returns:
        The store with its address; it is served until the last reference is dropped.

    Raises:
        ArgumentError: ``host`` and ``port`` cannot be bound.
        ConfigError: This process may open too few descriptors.
        PeerError: The store does not come up.
    """
    need_descriptors(_STORE_DESCRIPTORS, "to serve a store")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ArgumentError(f"cannot listen on {host}:{port}: {exc}") from exc
    bound = int(listener.getsockname()[1])
    try:
        store = c10d.TCPStore(
            host,
            bound,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=min(timeout_s, _STORE_START_S)),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as exc:
        raise PeerError(f"a store on {host}:{bound} does not come up: {str(exc).splitlines()[0]}") from exc
    store.set_timeout(timedelta(seconds=timeout_s))
    return HostedStore(store, host, bound)


def connect_store(host: str, port: int, *, timeout_s: float = 60.0) -> Store:
    """Connect to a store that another process serves.

    Args:
        host: Where it listens.
        port: Its port.
        timeout_s: How long to try, and the default patience of its gets, in seconds. Where somebody listens, torch is given up to
            20 s more: a slow name service delays it, though not for long.

    Returns:
        The store.

    Raises:
        ConfigError: This process may open too few descriptors, or have no other thread.
        PeerTimeoutError: Nobody answered in time, or nobody that speaks as a store does.
    """
    need_descriptors(_CLIENT_DESCRIPTORS, "to reach a store")
    found: list[Store] = []
    errors: list[RuntimeError] = []

    def connect() -> None:
        for limit_s in (timeout_s, _RESOLVER_S):
            limit = timedelta(seconds=limit_s)
            try:
                found.append(c10d.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False))
                return
            except RuntimeError as exc:
                errors.append(exc)
            if not _listens(host, port):
                return

    attempt = Thread(target=connect, name="parallel-runtime-connect", daemon=True)  # torch waits for ever for one that is silent
    try:
        attempt.start()
    except RuntimeError as exc:
        raise ConfigError(f"to reach a store, a thread is needed, but this process got none ({exc})") from exc
    attempt.join(timeout_s + 2 * _RESOLVER_S)
    if found:
        found[0].set_timeout(timedelta(seconds=timeout_s))
        return found[0]
    if attempt.is_alive():
        raise PeerTimeoutError(
            f"somebody listens at {host}:{port}, but does not answer as a store of torch does; is it another one's port?"
        )
    raise PeerTimeoutError(f"no store answered at {host}:{port} within {timeout_s:g} s; is rank 0 running?") from errors[-1]


def _listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def need_descriptors(count: int, purpose: str) -> None:
    """Refuse at once what would otherwise be tried in vain until a deadline.

    Args:
        count: File descriptors that will be opened.
        purpose: What for, for the error.

    Raises:
        ConfigError: This process may not open as many.
    """
    taken: list[int] = []
    try:
        while len(taken) < count:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ConfigError(
            f"{purpose}, {count} free file descriptors are needed, but this process may open {len(taken)} more "
            f"({exc.strerror}; its limit is {limit}); close files, or raise the limit, such as by ulimit -n {limit + 1024}"
        ) from exc
    finally:
        for fd in taken:
            os.close(fd)


def prefix_store(store: Store, prefix: str) -> Store:
    """A view of ``store`` in which every key is under ``prefix``."""
    return c10d.PrefixStore(prefix, store)


def hash_store() -> Store:
    """A store in memory, for ranks that are threads of one process."""
    return c10d.HashStore()


def file_store(path: str | Path, world_size: int) -> Store:
    """A store in a file that every rank can reach.

    Args:
        path: A file that does not exist yet, or that this world made.
        world_size: How many ranks share it.

    Returns:
        The store.
    """
    return c10d.FileStore(str(path), world_size)


def wrap(store: object) -> Store:
    """Accept a store that a user brings along.

    Args:
        store: Any ``torch.distributed.Store``.

    Returns:
        The same object.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(store, c10d.Store):
        raise ArgumentError(f"expected a torch.distributed store, got {type(store).__name__}")
    return store


def adopted(process_group: object) -> tuple[Store, int, int]:
    """What a process group of somebody else offers to stand on. It is neither used for communication nor destroyed.

    Args:
        process_group: Any ``torch.distributed.ProcessGroup``, such as ``torch.distributed.group.WORLD``.

    Returns:
        Its store, this process's rank in it, and its size.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(process_group, c10d.ProcessGroup):
        raise ArgumentError(f"expected a torch.distributed process group, got {type(process_group).__name__}")
    return process_group.get_group_store(), process_group.rank(), process_group.size()
