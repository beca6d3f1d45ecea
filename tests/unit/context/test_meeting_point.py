"""Where ranks meet when nobody hands them a store."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parallel_runtime.comm.c10d import listen_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.context import meeting_point as room
from parallel_runtime.context.meeting_point import MeetingPoint, find_meeting_point, is_one_host, own_address
from parallel_runtime.errors import ConfigError, LauncherEnvironmentError, PeerTimeoutError, RendezvousError
from parallel_runtime.terms import Rank


def identity(rank: int = 0, **facts: Any) -> Identity:
    facts = {"world_size": 2, "local_rank": rank, "master_host": "127.0.0.1", "master_port": 29500, **facts}
    return Identity(rank=Rank(rank), **facts)


def find(who: Identity, environ: dict[str, str] | None = None, timeout_s: float = 5.0) -> MeetingPoint:
    return find_meeting_point(who, first_rank=Rank(0), environ=environ or {}, timeout_s=timeout_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_first_rank_serves_and_the_others_connect() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: find(identity(rank, master_port=port)), range(2))
    assert first.server is not None
    assert second.server is None
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"


def test_one_host_meets_on_loopback_whatever_its_name() -> None:
    port = free_port()
    found = find(identity(num_hosts=1, master_host="a-name-nobody-knows", master_port=port))
    assert found.server is not None
    assert found.server.host == "127.0.0.1"


@pytest.mark.parametrize("name", ["MASTER_PORT", "PARALLEL_RUNTIME_MASTER_PORT"])
def test_a_store_that_the_launcher_serves_is_used_by_every_rank(name: str) -> None:
    server = listen_store()
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", name: str(server.port)}
    assert find(identity(master_port=server.port), environ).server is None


def test_a_port_that_an_earlier_context_serves_is_shared() -> None:
    server = listen_store()
    found = find(identity(master_port=server.port))
    found.store.set("key", "value")
    assert found.server is None
    assert server.store.get("key") == b"value"


def test_a_port_in_other_hands_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_EARLIER_CONTEXT_S", 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(RendezvousError, match=r"cannot meet at 127.0.0.1:\d+: cannot listen.*choose another MASTER_PORT"):
            find(identity(master_port=other.getsockname()[1]))


def test_nobody_there_is_an_error_in_time() -> None:
    with pytest.raises(PeerTimeoutError, match="no store answered"):
        find(identity(1, master_port=free_port()), timeout_s=0.5)


def test_an_identity_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="a world of 2 ranks has to meet somewhere"):
        find(identity(master_host=None))


@pytest.mark.parametrize(("host", "text"), [("127.0.0.1", "resolves to loopback"), ("no-such-host.invalid", "does not resolve")])
def test_several_hosts_do_not_meet_on_loopback(host: str, text: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=f"master host '{host}' {text}.*GLOO_SOCKET_IFNAME"):
        find(identity(num_hosts=2, master_host=host))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"num_hosts": 1, "master_host": "node1"}, True),
        ({"num_hosts": 2}, False),
        ({"local_world_size": 2, "master_host": "node1"}, True),
        ({"local_world_size": 1}, False),
        ({"master_host": "localhost"}, True),
        ({"master_host": "::1"}, True),
        ({"master_host": "node1"}, False),
        ({"master_host": None}, True),
    ],
)
def test_what_counts_as_one_host(facts: dict[str, Any], expected: bool) -> None:
    assert is_one_host(identity(**facts)) is expected


def test_transports_listen_on_loopback_on_one_host_and_on_the_route_elsewhere() -> None:
    assert own_address(identity()) == "127.0.0.1"
    assert own_address(identity(master_host="::1")) == "::1"
    assert own_address(identity(num_hosts=1, master_host="node1")) == "127.0.0.1"
    assert own_address(identity(num_hosts=2, master_host="127.0.0.1")) == "127.0.0.1"
    with pytest.raises(RendezvousError, match=r"rank 0 has no route to the meeting point no-such-host\.invalid"):
        own_address(identity(num_hosts=2, master_host="no-such-host.invalid"))


def test_the_rank_that_serves_the_store_keeps_it_until_all_know_who_is_missing() -> None:
    port = free_port()

    def visit(rank: int) -> str:
        deadlines = Deadlines(join_s=0.3 if rank == 0 else 30)
        config = ParallelConfig(tp=3, backend="gloo", deadlines=deadlines)
        who = identity(rank, world_size=3, master_port=port)
        try:
            ParallelContext(config, identity=who).__enter__()
        except RendezvousError as error:  # not kept, since its frames would keep the store
            return str(error)
        return "it opened"

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(visit, range(2)))
    assert told == ["2 of 3 ranks joined within 0.3 s (deadlines.join_s); missing: 2"] * 2


def test_the_rank_that_serves_the_store_waits_until_the_others_have_left() -> None:
    port = free_port()
    left = []

    def visit(rank: int) -> None:
        config = ParallelConfig(tp=2, backend="gloo", deadlines=Deadlines(exit_s=30))
        with ParallelContext(config, identity=identity(rank, master_port=port)) as ctx:
            ctx.tp.barrier()
            if rank == 1:
                assert ctx.store is not None
                while not ctx.store.check(["parallel_runtime/0/all/1/left/0"]):
                    threading.Event().wait(0.01)
                threading.Event().wait(0.3)  # long enough for a rank that does not wait to be gone
                left.append(rank)
        left.append(10 + rank)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(visit, range(2)))
    assert left.index(1) < left.index(10), "rank 0 was gone while rank 1 was still inside"
