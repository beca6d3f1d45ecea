"""B022: a meeting point or an interface that other hosts cannot reach is refused by name."""

from collections.abc import Sequence

import pytest

from parallel_runtime.config.addresses import check_interface, check_master_host
from parallel_runtime.errors import LauncherEnvironmentError


def unknown(host: str) -> Sequence[str]:
    raise OSError("Name or service not known")


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("127.0.1.1", "::1"), ()])
def test_b022_a_loopback_master_is_refused_for_several_hosts(addresses: tuple[str, ...]) -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"'node1' resolves to loopback.*GLOO_SOCKET_IFNAME.*is not set"):
        check_master_host("node1", num_hosts=2, environ={}, resolve=lambda host: addresses)


def test_b022_an_unknown_master_is_refused_for_several_hosts() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"'node1' does not resolve.*Name or service.*GLOO_SOCKET_IFNAME is eth7"):
        check_master_host("node1", num_hosts=2, environ={"GLOO_SOCKET_IFNAME": "eth7"}, resolve=unknown)


def test_b022_agents_of_one_machine_may_meet_on_loopback_if_told_so() -> None:
    check_master_host("127.0.0.1", num_hosts=2, environ={"GLOO_SOCKET_IFNAME": "lo"}, resolve=lambda host: (host,))


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("eth7", "this host has no interface 'eth7'; it has eth0, lo"),
        ("^lo", "a form that only NCCL_SOCKET_IFNAME has"),
        ("=eth0", "a form that only NCCL_SOCKET_IFNAME has"),
    ],
)
def test_b022_an_unusable_interface_names_the_variable_and_its_value(value: str, rule: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=rule) as caught:
        check_interface({"GLOO_SOCKET_IFNAME": value}, ("lo", "eth0"))
    assert f"GLOO_SOCKET_IFNAME={value!r}" in str(caught.value)
