"""Which communicators a context really opens, and that it says so."""

import logging

import pytest

from parallel_runtime.comm.select import GroupFacts, choose_communicators
from parallel_runtime.comm.shm import segment
from parallel_runtime.comm.shm.geometry import MAX_MEMBERS
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError, RankFailedError
from parallel_runtime.launch import run_threads

pytestmark = pytest.mark.timeout(60)


def describe(ctx: ParallelContext) -> str:
    ctx.world.barrier()
    return ctx.world.describe()


def config(shm: str) -> ParallelConfig:
    return ParallelConfig(tp=2, backend="gloo", shm=shm)  # type: ignore[arg-type]  # a plain string


@pytest.mark.parametrize(
    ("shm", "said"),
    [("auto", "shm (ranks of one host)"), ("on", "shm (ranks of one host)"), ("off", "c10d (shared memory is off)")],
)
def test_one_host(shm: str, said: str) -> None:
    assert all(f"tensors over {said}, messages over" in text for text in run_threads(describe, config(shm), timeout_s=50))


def test_where_memory_cannot_be_had_gloo_serves_and_everybody_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment, "available_bytes", lambda: 0)
    with caplog.at_level(logging.WARNING):
        texts = run_threads(describe, config("auto"), timeout_s=50)
    assert all("tensors over c10d (no shared memory: member 0 cannot create" in text for text in texts)
    assert "ranks (0, 1) cannot share memory and talk over gloo: member 0 cannot create" in caplog.text
    with pytest.raises(RankFailedError) as caught:
        run_threads(describe, config("on"), timeout_s=50)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert 'shm="on", but ranks (0, 1) cannot share memory: member 0 cannot create' in str(caught.value.__cause__)


def facts(world_size: int, num_hosts: int = 1, most_on_host: int | None = None) -> GroupFacts:
    most = world_size if most_on_host is None else most_on_host
    return GroupFacts(world_size=world_size, num_hosts=num_hosts, most_on_host=most, backend="gloo", uses_shm=True)


def test_a_group_too_large_for_memory_says_why() -> None:
    (chosen,) = choose_communicators(facts(MAX_MEMBERS + 1))
    assert (str(chosen), chosen.reason) == ("c10d:gloo", f"more than {MAX_MEMBERS} members")
    assert [str(one) for one in choose_communicators(facts(MAX_MEMBERS))] == ["shm"]


def test_hosts_decide() -> None:
    assert choose_communicators(facts(1)) == ()
    assert [str(one) for one in choose_communicators(facts(4, 4, 1))] == ["c10d:gloo"]
    assert [(str(one), one.size) for one in choose_communicators(facts(4, 2, 3))] == [("c10d:gloo", 4), ("shm", 3)]
