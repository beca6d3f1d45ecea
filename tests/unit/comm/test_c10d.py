"""Groups straight from a store, the stores, and what gloo's errors become."""

import gc
import resource
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel_runtime.comm import (
    C10dCommunicator,
    GroupCoordinator,
    ReduceOp,
    connect_store,
    file_store,
    gloo_device,
    hash_store,
    listen_store,
    prefix_store,
    wrap,
)
from parallel_runtime.comm.c10d import stores, waiting
from parallel_runtime.comm.diagnosis import Diagnostician, Failure
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError, EarlierFailureError, PeerError, PeerLostError, PeerTimeoutError
from parallel_runtime.launch import run_threads
from tests.spmd.worlds import World


def test_no_default_group_is_needed_or_made() -> None:
    assert not dist.is_initialized()
    World("gloo")(2, lambda group: group.barrier())
    assert not dist.is_initialized()


def test_members_and_backends_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="member 0 of 1; a c10d group has at least 2"):
        C10dCommunicator(hash_store(), "k", 0, 1)
    with pytest.raises(ArgumentError, match="member 2 of 2"):
        C10dCommunicator(hash_store(), "k", 2, 2)
    with pytest.raises(ArgumentError, match="unknown backend 'smoke'; use gloo or nccl"):
        C10dCommunicator(hash_store(), "k", 0, 2, backend="smoke")
    if not dist.is_nccl_available():
        with pytest.raises(ArgumentError, match="this build of torch has no nccl"):
            C10dCommunicator(hash_store(), "k", 0, 2, backend="nccl")
    with pytest.raises(ArgumentError, match=r"gloo cannot listen on 'no.such.host.invalid'"):
        gloo_device("no.such.host.invalid")


def test_who_listens_but_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's client would wait for the answer for ever."""
    monkeypatch.setattr(stores, "_RESOLVER_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PeerTimeoutError, match=r"somebody listens at 127\.0\.0\.1:\d+, but does not answer as a store"),
    ):
        connect_store("127.0.0.1", silent.getsockname()[1], timeout_s=0.2)


def test_a_slow_name_service_is_outwaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks it for the name of every connection, and counts that as time to connect."""
    hosted = listen_store()
    limits: list[float] = []

    def slow(host: str, port: int, *, timeout: timedelta, **settings: object) -> object:
        limits.append(timeout.total_seconds())
        if len(limits) == 1:
            raise RuntimeError("The client socket has timed out after 200ms while trying to connect")
        return hash_store()

    monkeypatch.setattr("parallel_runtime.comm.c10d.stores.c10d.TCPStore", slow)
    connect_store("127.0.0.1", hosted.port, timeout_s=0.2)
    assert limits == [0.2, 10.0]


class _Nobody(Diagnostician):
    """Knows of no failure."""

    def interruption(self, ranks: Sequence[int], key: str, step: int) -> PeerError | None:
        return None

    def explain(self, failure: Failure) -> PeerError:
        return failure.error


def test_a_receive_makes_up_for_a_standstill_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked for 100 s, so the process did not run, and those do not count; what follows does."""
    now = [1000.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])
    communicator = C10dCommunicator.__new__(C10dCommunicator)
    waiting.Backend.__init__(communicator)
    communicator.traffic.diagnostician = _Nobody()
    communicator._group, communicator._ranks, communicator.key = None, [0, 1], "k"
    broken: list[PeerError] = []
    monkeypatch.setattr(waiting.Backend, "_break_off", lambda self, error: broken.append(error))
    communicator._waits_for = waiting._Wait(1, 3.0)
    for after in (1001.0, 1101.0, 1103.0):
        while now[0] < after:
            now[0] = after if after == 1101.0 else min(now[0] + 0.25, after)
            communicator.end_vain_wait()
        assert [str(error) for error in broken] == (["waited 3 s for member 1"] if after == 1103.0 else [])


def test_a_late_sender_is_late_by_the_clock_of_the_thread_at_the_side() -> None:
    """Gloo's own clock would wait for another minute."""

    def body(ctx: ParallelContext) -> tuple[type[PeerError], tuple[int, ...], float] | None:
        ctx.tp.barrier()
        if ctx.rank == 1:
            assert over.wait(50)
            return None
        start = time.monotonic()
        try:
            with pytest.raises(PeerTimeoutError, match=r"recv\(\) waited 2\.\d s for rank 1") as caught:
                ctx.tp.recv(1, timeout_s=2.0)
        finally:
            over.set()
        return type(caught.value), caught.value.ranks, time.monotonic() - start

    over = threading.Event()
    config = ParallelConfig(tp=2, backend="gloo", shm="off")
    told = run_threads(body, config, timeout_s=55)[0]
    assert told is not None
    assert told[:2] == (PeerTimeoutError, (1,))
    assert 2.0 <= told[2] < 40


def test_a_member_that_never_comes() -> None:
    with pytest.raises(PeerTimeoutError, match=r"waited 0.2 s for its other members"):
        C10dCommunicator(hash_store(), "k", 0, 2, timeout_s=0.2)


class _Interrupts(Diagnostician):
    """Stands for a signal's handler, which may raise wherever Python code runs in a wait."""

    def interruption(self, ranks: Sequence[int], key: str, step: int) -> None:
        raise KeyboardInterrupt

    def explain(self, failure: Failure) -> PeerError:
        return failure.error


def test_an_interrupted_operation_ends_the_group_on_all_members() -> None:
    is_interrupted = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            assert is_interrupted.wait(30)
            with pytest.raises(PeerLostError):
                group.all_reduce(torch.ones(4))
            return
        group._core.diagnostician = _Interrupts()
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(torch.ones(4))
        with pytest.raises(EarlierFailureError, match="can no longer be used: a KeyboardInterrupt ended an operation half-way"):
            group.all_reduce(torch.ones(4))
        is_interrupted.set()

    World("gloo")(2, body)


def test_a_timed_out_group_says_so_afterwards() -> None:
    over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        if group.is_last_rank:
            assert over.wait(30)
            return
        with pytest.raises(PeerTimeoutError, match=r"g0-1 seq 1 all_reduce\(float32\[2\]\): waited 0.2 s for its peers"):
            group.all_reduce(torch.ones(2), timeout_s=0.2)
        with pytest.raises(PeerLostError, match=r"can no longer be used: waited 0.2 s for its peers"):
            group.barrier()
        over.set()

    World("gloo")(2, body)


def test_a_member_that_leaves_releases_the_others() -> None:
    def body(group: GroupCoordinator) -> None:
        if group.is_first_rank:
            with pytest.raises(PeerLostError, match="lost the connection to its peers"):
                group.barrier(timeout_s=60)

    World("gloo")(2, body)


def test_a_closed_communicator() -> None:
    communicators: dict[int, C10dCommunicator] = {}
    store = hash_store()

    def make(rank: int) -> None:
        communicators[rank] = C10dCommunicator(store, "k", rank, 2)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for communicator in communicators.values():
        communicator.close()
        communicator.close()
        with pytest.raises(PeerLostError, match="this communicator is closed"):
            communicator.barrier(1)


def test_what_gloo_raises_is_always_translated() -> None:
    def body(group: GroupCoordinator) -> None:
        communicator = group._core.communicator
        with pytest.raises(PeerError, match="gloo failed while waiting for its peers: Invalid scalar type"):
            communicator.all_reduce_(torch.ones(20_000, dtype=torch.uint16), ReduceOp.SUM, 5)

    World("gloo")(2, body)


def test_threads_and_descriptors_go_with_the_group() -> None:
    process = psutil.Process()

    def cost() -> tuple[int, int]:
        gc.collect()
        return process.num_threads(), process.num_fds()

    World("gloo")(2, lambda group: group.barrier())
    before = cost()
    for _ in range(5):
        World("gloo")(3, lambda group: group.barrier())
    after = cost()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2


def test_a_hosted_store_listens_where_it_was_told() -> None:
    hosted = listen_store()
    assert hosted.host == "127.0.0.1"
    client = connect_store(hosted.host, hosted.port, timeout_s=10)
    client.set("k", "v")
    assert hosted.store.get("k") == b"v"
    prefix_store(client, "a").set("k", "w")
    assert client.get("a/k") == b"w"
    addresses = {link.laddr.ip for link in psutil.Process().net_connections() if link.laddr.port == hosted.port}
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    with pytest.raises(ArgumentError, match=rf"cannot listen on 127.0.0.1:{hosted.port}"):
        listen_store(port=hosted.port)


def test_no_store_answers() -> None:
    hosted = listen_store()
    port = hosted.port
    del hosted
    gc.collect()
    with pytest.raises(PeerTimeoutError, match=rf"no store answered at 127.0.0.1:{port} within 0.3 s"):
        connect_store("127.0.0.1", port, timeout_s=0.3)


def test_other_stores(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store", 1)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert wrap(store) is store
    with pytest.raises(ArgumentError, match=r"expected a torch.distributed store, got dict"):
        wrap({})
    store.set_timeout(timedelta(seconds=1))


def test_a_member_whose_operation_failed_releases_those_that_wait_for_it() -> None:
    """Member 2 leaves; 1 cannot go on, but keeps its group; 0 waits for nobody but 1."""
    over = threading.Event()

    def body(group: GroupCoordinator) -> None:
        group.barrier()
        if group.rank == 2:
            group.close()
        elif group.rank == 1:
            with pytest.raises(PeerLostError):
                group.all_reduce(torch.ones(1))
            assert over.wait(30)
        else:
            try:
                with pytest.raises(PeerLostError, match="lost the connection to member 1"):
                    group.recv(1)
            finally:
                over.set()

    World("gloo")(3, body)


def test_too_few_descriptors_are_told_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    in_use = psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 4, hard))
        with pytest.raises(ConfigError, match=r"to serve a store, 12 free file descriptors are needed, .* by ulimit -n"):
            listen_store()
        assert psutil.Process().num_fds() == in_use
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(ConfigError, match="to reach a store, 2 free file descriptors"):
            connect_store("127.0.0.1", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_store_that_does_not_come_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("Failed to init uv loop\nmore")

    monkeypatch.setattr("parallel_runtime.comm.c10d.stores.c10d.TCPStore", fail)
    with pytest.raises(PeerError, match=r"a store on 127.0.0.1:\d+ does not come up: Failed to init uv loop$"):
        listen_store()
