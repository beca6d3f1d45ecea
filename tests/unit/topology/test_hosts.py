"""Placements are bijections, or refused with the table."""

import pytest

from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.topology.hosts import HostMap, Hosts, place_ranks


def seats(hosts: HostMap, ranks: range | tuple[int, ...]) -> list[tuple[str, int]]:
    return [(hosts.name(hosts.host_of(rank)), hosts.local_rank(rank)) for rank in ranks]


def test_one_host_by_default() -> None:
    assert seats(place_ranks(range(3)), range(3)) == [("host0", 0), ("host0", 1), ("host0", 2)]


def test_blocks_of_a_range_with_an_offset() -> None:
    hosts = place_ranks(range(4, 8), 2)
    assert seats(hosts, range(4, 8)) == [("host0", 0), ("host0", 1), ("host1", 0), ("host1", 1)]
    assert hosts.ranks_on(1) == range(6, 8)
    assert (hosts.num_hosts, hosts.largest, hosts.is_contiguous) == (2, 2, True)


def test_blocks_of_listed_ranks_ascend() -> None:
    hosts = place_ranks((9, 2, 7, 0), 2)
    assert [hosts.ranks_on(host) for host in range(2)] == [(0, 2), (7, 9)]
    assert not hosts.is_contiguous


def test_a_name_for_each_rank() -> None:
    hosts = place_ranks((3, 1, 2), ["b", "a", "b"])
    assert seats(hosts, (1, 2, 3)) == [("b", 0), ("a", 0), ("b", 1)]


def test_ranks_by_name_keep_their_local_order_and_may_be_uneven() -> None:
    hosts = place_ranks(range(3), {"a": [2, 0], "b": [1]})
    assert seats(hosts, range(3)) == [("a", 1), ("b", 0), ("a", 0)]
    assert hosts.largest == 2


@pytest.mark.parametrize("spec", [2, ["b", "a", "b", "a"], {"a": [2, 0], "b": [1, 3]}])
def test_as_table_makes_it_again(spec: Hosts) -> None:
    hosts = place_ranks(range(4), spec)
    again = place_ranks(range(4), hosts.as_table())
    assert again == hosts
    assert hash(again) == hash(hosts)
    assert hosts != place_ranks(range(4), 4)
    assert hosts != "hosts"


def test_a_big_world_is_not_listed() -> None:
    hosts = place_ranks(range(1 << 40), 1 << 37)
    assert (hosts.host_of(12_345_678_901), hosts.local_rank(12_345_678_901)) == divmod(12_345_678_901, 8)
    assert "host0: 0, 1" in repr(hosts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, r"hosts=0 must be 1 or more"),
        (-2, r"hosts=-2 must be 1 or more"),
        (True, r"hosts=True must be 1 or more"),
        (
            4,
            r"6 ranks .* hosts=4: 6 = 4\*1 \+ 2.*host0: 2, host1: 2, host2: 1, host3: 1 ranks.*that work: .*3.*6",
        ),
        ("a,b", r"hosts='a,b': give a number of hosts, a host name for each rank, or"),
        (2.0, r"hosts=2\.0: give a number of hosts"),
        (10**15, r"host7: 0 \.\.\. ranks"),
        (["a", "b"], r"2 host names for 6 ranks"),
        ({"a": [0, 1, 2], "b": [3, 4]}, r"5 is on no host \(a: 0, 1, 2; b: 3, 4\)"),
        ({"a": [0, 1, 2], "b": [2, 3, 4, 5]}, r"2 is on two places"),
        ({"a": [0, 1, 2], "b": [3, 4, 5, 6, 7]}, r"6, 7 are not of this world"),
        ({"a": [0, 1, 2, 3, 4, 5], "b": []}, r"host b has no ranks"),
    ],
)
def test_refused(spec: Hosts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_ranks(range(6), spec)


def test_a_long_table_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"0, 1, 2, 3, 4, 5, 6, 7, \.\.\. 92 more are on no host"):
        place_ranks(range(101), {"a": [100]})


@pytest.mark.parametrize("spec", [2, {"a": [0, 1, 2], "b": [3]}])
def test_strangers_are_refused(spec: Hosts) -> None:
    hosts = place_ranks(range(4), spec)
    with pytest.raises(ArgumentError, match="rank 4 is on none of the 2 hosts"):
        hosts.host_of(4)
    with pytest.raises(ArgumentError, match="rank -1 is on none"):
        hosts.local_rank(-1)
    with pytest.raises(ArgumentError, match="host 2 does not exist"):
        hosts.name(2)
    with pytest.raises(ArgumentError, match="host -1 does not exist"):
        hosts.ranks_on(-1)
