"""A rank that cannot come, for whatever reason of its own, is not waited for."""

import socket
import threading
import time

import pytest

from parallel_runtime.comm.c10d import Store, hash_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.probe import Stage
from parallel_runtime.context.threads import start_thread
from parallel_runtime.errors import ConfigError, RendezvousError
from parallel_runtime.terms import Rank
from parallel_runtime.testing.faults import Fault, FaultKind, FaultProbe, InjectedError, Phase

pytestmark = pytest.mark.timeout(60)

PATIENT = Deadlines(join_s=50)
FITS = ParallelConfig(tp=3, backend="gloo", deadlines=PATIENT)
DOES_NOT_FIT = ParallelConfig(tp=2, backend="gloo", deadlines=PATIENT)


def enter(config: ParallelConfig, rank: int, *, store: Store | None, port: int | None = None) -> BaseException | None:
    identity = Identity(
        rank=Rank(rank),
        world_size=3,
        local_rank=rank,
        local_world_size=3,
        num_hosts=1,
        host_rank=0,
        master_host="127.0.0.1" if port else None,
        master_port=port,
    )
    try:
        with ParallelContext(config, identity=identity, store=store):
            return None
    except Exception as error:
        return error


def enter_all(odd: int, *, store: Store | None, port: int | None = None) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * 3

    def run(rank: int) -> None:
        errors[rank] = enter(DOES_NOT_FIT if rank == odd else FITS, rank, store=store, port=port)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert time.monotonic() - start < 15
    return errors


def check(errors: list[BaseException | None], odd: int) -> None:
    for rank, error in enumerate(errors):
        if rank == odd:
            assert isinstance(error, ConfigError), error
        else:
            assert isinstance(error, RendezvousError), error
            assert f"rank {odd} (pid " in str(error)
            assert "cannot take part: ConfigError: " in str(error)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_config_that_does_not_fit_ends_all_at_once(odd: int) -> None:
    check(enter_all(odd, store=hash_store()), odd)


@pytest.mark.parametrize("odd", [0, 2])
def test_it_is_told_also_where_a_rank_serves_the_store(odd: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check(enter_all(odd, store=None, port=port), odd)


def test_after_a_refusal_the_same_ranks_can_meet() -> None:
    store = hash_store()
    check(enter_all(1, store=store), 1)
    assert enter_all(3, store=store) == [None] * 3


def test_an_exception_before_the_meeting_is_told() -> None:
    store = hash_store()
    errors: list[BaseException | None] = [None] * 2
    config = ParallelConfig(tp=2, backend="gloo", deadlines=PATIENT)

    def run(rank: int) -> None:
        identity = Identity(rank=Rank(rank), world_size=2, local_rank=rank)
        probe = FaultProbe(Fault(kind=FaultKind.RAISE, rank=1, phase=Phase.JOINING), config.layout, rank)
        try:
            ParallelContext(config, identity=identity, store=store, probe=probe).__enter__()
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert isinstance(errors[1], InjectedError)
    assert "rank 1 (pid " in str(errors[0])
    assert f"cannot take part: InjectedError: injected: raise while {Stage.JOINING}" in str(errors[0])


def test_a_config_that_leaves_this_rank_out_is_nobody_elses_business() -> None:
    store = hash_store()
    error = enter(ParallelConfig(tp=1, ranks=(1,), backend="gloo"), 0, store=store)
    assert isinstance(error, ConfigError)
    assert store.num_keys() == 0


class NoThread(threading.Thread):
    """As at the limit of a user or a cgroup."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_a_process_at_its_limit_of_threads_is_told() -> None:
    with pytest.raises(ConfigError, match=r"to answer for its rank, a thread is needed.*can't start new thread.*raise the limit"):
        start_thread(NoThread(), "to answer for its rank")
