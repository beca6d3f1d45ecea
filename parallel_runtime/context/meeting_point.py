"""Where the ranks of a world meet: a store that somebody else serves, or one that the first rank serves."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from parallel_runtime.comm.c10d import HostedStore, Store, connect_store, listen_store
from parallel_runtime.config.addresses import check_interface, check_master_host, interface_names, is_loopback
from parallel_runtime.config.environment import Identity
from parallel_runtime.errors import ArgumentError, ConfigError, PeerTimeoutError, RendezvousError
from parallel_runtime.terms import Rank

__all__ = ["MeetingPoint", "find_meeting_point", "is_one_host", "own_address"]

_LOOPBACK = "127.0.0.1"
_EARLIER_CONTEXT_S = 5.0


@final
@dataclass(slots=True)
class MeetingPoint:
    """A store, and the server behind it if this process runs it.

    Attributes:
        store: Reached by every rank.
        server: Keeps the store alive for the others as long as it is referenced; ``None`` where somebody else serves it.
    """

    store: Store
    server: HostedStore | None = None


def find_meeting_point(identity: Identity, *, first_rank: Rank, environ: Mapping[str, str], timeout_s: float) -> MeetingPoint:
    """Connect to the store of a world, or serve it.

    A launcher that serves a store itself (``launch``, torchrun) says so in ``TORCHELASTIC_USE_AGENT_STORE``; otherwise the first
    rank serves it, on loopback where the world is on one host.

    Args:
        identity: Of this rank, with the address at which its launcher wants the ranks to meet.
        first_rank: The rank that serves the store if nobody else does.
        environ: Variables of this process.
        timeout_s: How long to look for the store, in seconds.

    Returns:
        The meeting point.

    Raises:
        ConfigError: The identity does not say where to meet.
        LauncherEnvironmentError: Other hosts cannot reach the address, or gloo's interface variable names no interface.
        PeerTimeoutError: Nobody serves the store.
        RendezvousError: The address cannot be served, and nobody else serves it.
    """
    host, port = identity.master_host, identity.master_port
    if host is None or port is None:
        raise ConfigError(
            f"a world of {identity.world_size} ranks has to meet somewhere: give master_host and master_port in the identity, "
            f"MASTER_ADDR and MASTER_PORT in the environment, or store="
        )
    if not is_one_host(identity):
        check_master_host(host, num_hosts=identity.num_hosts or 2, environ=environ)
        check_interface(environ, interface_names())
    if _is_served_by_launcher(environ, port):
        return MeetingPoint(connect_store(host, port, timeout_s=timeout_s))
    if is_one_host(identity) and not is_loopback(host):
        host = _LOOPBACK
    if identity.rank != first_rank:
        return MeetingPoint(connect_store(host, port, timeout_s=timeout_s))
    try:
        server = listen_store(host, port=port, world_size=None, timeout_s=timeout_s)
    except ArgumentError as error:
        return MeetingPoint(_store_of_an_earlier_context(host, port, error))
    return MeetingPoint(server.store, server)


def is_one_host(identity: Identity) -> bool:
    """Whether all ranks of the world are known to be on this host.

    Args:
        identity: Of this rank.

    Returns:
        ``False`` where the launcher did not say and the meeting point is not on loopback.
    """
    if identity.num_hosts is not None:
        return identity.num_hosts == 1
    if identity.local_world_size is not None:
        return identity.local_world_size == identity.world_size
    return identity.master_host is None or is_loopback(identity.master_host)


def own_address(identity: Identity) -> str:
    """The address on which this rank's transports listen.

    Args:
        identity: Of this rank.

    Returns:
        A loopback address where the world is on one host, else the one from which this host reaches the meeting point.

    Raises:
        RendezvousError: There is no route to the meeting point.
    """
    host = identity.master_host
    if is_one_host(identity) or host is None:
        return host if host is not None and is_loopback(host) and host != "localhost" else _LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, identity.master_port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"rank {identity.rank} has no route to the meeting point {host}: {error}") from error


def _store_of_an_earlier_context(host: str, port: int, cause: ArgumentError) -> Store:
    """An earlier context of this process may serve that port already; anybody else on it is an error."""
    try:
        return connect_store(host, port, timeout_s=_EARLIER_CONTEXT_S)
    except PeerTimeoutError as error:
        raise RendezvousError(f"the ranks cannot meet at {host}:{port}: {cause}; choose another MASTER_PORT") from error


def _is_served_by_launcher(environ: Mapping[str, str], port: int) -> bool:
    ports = (environ.get("MASTER_PORT"), environ.get("PARALLEL_RUNTIME_MASTER_PORT"))
    return environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true" and str(port) in ports
