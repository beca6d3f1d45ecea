"""Addresses read and written; meeting points and interfaces that other hosts cannot reach."""

import socket
import threading

import pytest

from parallel_runtime.config.addresses import (
    Address,
    check_interface,
    check_master_host,
    interface_names,
    parse_address,
    resolve_host,
)
from parallel_runtime.errors import ConfigError, LauncherEnvironmentError


@pytest.mark.parametrize(
    "address", [Address("::1", 29500), Address("localhost", 1), Address("10.0.0.1", 65535), Address("fe80::1", 9)]
)
def test_round_trip(address: Address) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["a:b", "a:", ":80", "a", "", "a:0", "a:65536", "[a]:80", "[::1]", "[::1]80", "[::1", "a b:80", "a:²"]
)
def test_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize("host", ["", "[::1]", "a/b", "a b"])
def test_a_host_is_bare(host: str) -> None:
    with pytest.raises(ConfigError, match="must be a bare name or address"):
        Address(host, 80)


def test_a_host_with_a_colon_is_ipv6() -> None:
    with pytest.raises(ConfigError, match="give the port as a field of its own"):
        Address("node1:80", 80)


@pytest.mark.parametrize("addresses", [("10.0.0.1",), ("127.0.1.1", "10.0.0.1"), ("fe80::1%eth0",)])
def test_a_reachable_master_is_accepted(addresses: tuple[str, ...]) -> None:
    check_master_host("node1", num_hosts=2, environ={}, resolve=lambda host: addresses)


def test_one_host_may_meet_anywhere() -> None:
    check_master_host("nowhere", num_hosts=1, environ={}, resolve=lambda host: pytest.fail("asked"))


def test_resolve_host_on_addresses() -> None:
    assert resolve_host("127.0.0.1") == ("127.0.0.1",)


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: release.wait() and [])
    with pytest.raises(OSError, match=r"no answer for host 'node1' within 0\.01 s"):
        resolve_host("node1", timeout_s=0.01)
    release.set()


def test_interfaces_of_this_host_are_accepted() -> None:
    names = interface_names()
    check_interface({"GLOO_SOCKET_IFNAME": ",".join(names)}, names)
    check_interface({"GLOO_SOCKET_IFNAME": ""}, names)
    check_interface({}, names)


def test_an_unknown_interface_is_refused() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"GLOO_SOCKET_IFNAME='eth0,ib7': this host has no interface 'ib7'"):
        check_interface({"GLOO_SOCKET_IFNAME": "eth0,ib7"}, ("lo", "eth0"))
