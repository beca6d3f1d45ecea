"""B033: IPv6 addresses and host:port text."""

import pytest

from parallel_runtime.config.addresses import Address, parse_address
from parallel_runtime.errors import ConfigError


def test_b033_brackets_are_read() -> None:
    assert parse_address("[::1]:29500") == Address("::1", 29500)
    assert parse_address("localhost:1") == Address("localhost", 1)


def test_b033_a_bare_ipv6_address_gets_a_hint_about_brackets() -> None:
    with pytest.raises(ConfigError, match=r"'::1:29500' holds several colons; put an IPv6 host in brackets"):
        parse_address("::1:29500")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host:", r"'host:' needs a port in 1 to 65535"),
        (":80", r"':80' has no host"),
        ("host:70000", r"port 70000 of host 'host' is out of range"),
        ("[::1", r"'\[::1' opens a bracket"),
    ],
)
def test_b033_malformed_addresses_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_address(text)


def test_b033_separate_fields_make_a_bracketed_url() -> None:
    assert Address("::1", 29500).url() == "tcp://[::1]:29500"
