"""Hosts and ports as people write them, and whether other hosts can reach them."""

import ipaddress
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from threading import Thread
from typing import final

from parallel_runtime.errors import ConfigError, LauncherEnvironmentError

__all__ = [
    "Address",
    "Resolver",
    "check_interface",
    "check_master_host",
    "interface_names",
    "is_loopback",
    "parse_address",
    "resolve_host",
]

Resolver = Callable[[str], Sequence[str]]
"""From a host name to its addresses as text; raises ``OSError`` where there are none."""

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE = "lo"


@final
@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port. The host of an IPv6 address has no brackets here.

    Raises:
        ConfigError: The host is empty, bracketed or holds a blank or slash, or the port is not in 1 to 65535.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or any(character in self.host for character in "[]/ \t\n"):
            raise ConfigError(f"host {self.host!r} must be a bare name or address such as 'node1', '10.0.0.1' or '::1'")
        if ":" in self.host and not _is_ipv6(self.host):
            raise ConfigError(f"host {self.host!r} holds a colon but is not an IPv6 address; give the port as a field of its own")
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port} of host {self.host!r} is out of range; use 1 to 65535")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, scheme: str = "tcp") -> str:
        """The address as a URL, IPv6 in brackets.

        Args:
            scheme: What stands before ``://``.

        Returns:
            Such as ``"tcp://[::1]:29500"``.
        """
        return f"{scheme}://{self}"


def is_loopback(host: str) -> bool:
    """Whether a host is this one, whatever the network.

    Args:
        host: Name or address.

    Returns:
        ``True`` for ``localhost`` and for loopback addresses.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """Read ``host:port``.

    Args:
        text: ``"node1:29500"``, ``"10.0.0.1:29500"`` or ``"[::1]:29500"``.

    Returns:
        The address, IPv6 hosts without brackets.

    Raises:
        ConfigError: The host or the port is missing or malformed, or an IPv6 host is not in brackets.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":") or not _is_ipv6(host):
            raise ConfigError(f"address {text!r} opens a bracket, so it must read '[IPv6 address]:port', such as '[::1]:29500'")
        port = rest[1:]
    else:
        host, colon, port = text.rpartition(":")
        if ":" in host:
            raise ConfigError(
                f"address {text!r} holds several colons; put an IPv6 host in brackets, such as '[::1]:29500', "
                f"so that the port can be told from it"
            )
        if not colon or not host:
            raise ConfigError(f"address {text!r} has no {'host' if colon else 'port'}; write 'host:port', such as 'node1:29500'")
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(f"address {text!r} needs a port in 1 to 65535 after the colon, not {port!r}")
    return Address(host, int(port))


def resolve_host(host: str, *, timeout_s: float = 5.0) -> tuple[str, ...]:
    """Ask the system for the addresses of a host name, and give up after a while.

    Args:
        host: Name or address.
        timeout_s: Longest wait in seconds; a resolver that hangs must not hang the start.

    Returns:
        Its addresses as text, in the system's order, each once.

    Raises:
        OSError: The name is unknown, or the system did not answer in time.
    """
    answer: Future[tuple[str, ...]] = Future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.set_result(tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=ask, name="parallel-runtime-resolve", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except FutureTimeoutError as error:
        raise OSError(f"no answer for host {host!r} within {timeout_s:g} s") from error


def interface_names() -> tuple[str, ...]:
    """The network interfaces of this host."""
    return tuple(name for _, name in socket.if_nameindex())


def check_master_host(host: str, *, num_hosts: int, environ: Mapping[str, str], resolve: Resolver = resolve_host) -> None:
    """Refuse a meeting point that ranks on other hosts cannot reach.

    Args:
        host: Host of rank 0, as every rank was told.
        num_hosts: Number of hosts of the world. One host may meet on loopback, and so may several launcher agents of one machine,
            each of which counts as a host: ``GLOO_SOCKET_IFNAME=lo`` says so.
        environ: Variables of the process.
        resolve: From a name to its addresses.

    Raises:
        LauncherEnvironmentError: Several hosts, and the name does not resolve or resolves to nothing but loopback.
    """
    if num_hosts < 2 or environ.get(_INTERFACE_VARIABLE) == _LOOPBACK_INTERFACE:
        return
    hint = f"{_INTERFACE_VARIABLE} is {environ.get(_INTERFACE_VARIABLE) or 'not set'}"
    try:
        addresses = tuple(resolve(host))
    except OSError as error:
        raise LauncherEnvironmentError(
            f"master host {host!r} does not resolve on this host ({error}), but the world spans {num_hosts} hosts; "
            f"set MASTER_ADDR to a name or address that every host knows ({hint})"
        ) from error
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        raise LauncherEnvironmentError(
            f"master host {host!r} resolves to loopback ({', '.join(addresses) or 'nothing'}), "
            f"but the world spans {num_hosts} hosts; set MASTER_ADDR to an address that the other hosts reach, "
            f"and {_INTERFACE_VARIABLE} to its interface ({hint}); {_INTERFACE_VARIABLE}={_LOOPBACK_INTERFACE} says that all "
            f"{num_hosts} are agents on one machine"
        )


def check_interface(environ: Mapping[str, str], interfaces: Collection[str]) -> None:
    """Refuse a ``GLOO_SOCKET_IFNAME`` that gloo could not use.

    Args:
        environ: Variables of the process.
        interfaces: Names of the host's interfaces, usually ``interface_names()``.

    Raises:
        LauncherEnvironmentError: The value names an interface that this host lacks, or uses the ``^`` or ``=`` prefixes that only
            ``NCCL_SOCKET_IFNAME`` knows.
    """
    value = environ.get(_INTERFACE_VARIABLE, "")
    if not value:
        return
    known = ", ".join(sorted(interfaces))
    if value[0] in "^=":
        raise LauncherEnvironmentError(
            f"{_INTERFACE_VARIABLE}={value!r} starts with {value[0]!r}, a form that only NCCL_SOCKET_IFNAME has; "
            f"name one interface of this host: {known}"
        )
    missing = [name for name in value.split(",") if name not in interfaces]
    if missing:
        raise LauncherEnvironmentError(
            f"{_INTERFACE_VARIABLE}={value!r}: this host has no interface {', '.join(map(repr, missing))}; it has {known}"
        )


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
