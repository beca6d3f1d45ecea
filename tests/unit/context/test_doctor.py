"""The doctor, on this machine and on a job made of threads that meet in a TCP store."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from parallel_runtime.cli.main import main
from parallel_runtime.comm.c10d import HostedStore, connect_store, listen_store
from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.context.attach import attach
from parallel_runtime.context.doctor import examine_machine
from parallel_runtime.errors import PeerTimeoutError, RendezvousError
from parallel_runtime.terms import Rank

pytestmark = pytest.mark.timeout(60)


def verdicts(environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {finding.topic: (finding.verdict, finding.text) for finding in examine_machine(environ)}


def test_a_machine_that_is_fine_has_no_bad_finding() -> None:
    found = verdicts({})
    assert [topic for topic, (verdict, _) in found.items() if verdict == "bad"] == []
    assert "rank 0 of 1" in found["identity"][1]
    assert "no launcher" in found["leftover variables"][1]
    assert "answered within" in found["ports"][1]


@pytest.mark.parametrize(
    ("environ", "topic", "verdict", "text"),
    [
        ({"RANK": "1"}, "identity", "bad", "WORLD_SIZE"),
        ({"RANK": "1"}, "leftover variables", "note", "RANK are set although"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, "leftover variables", "note", "unset them"),
        ({"GLOO_SOCKET_IFNAME": "nowhere7"}, "interfaces", "bad", "this host has no interface 'nowhere7'"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "meeting point", "bad", "no-such-host"),
        ({"MASTER_PORT": "1"}, "ports", "ok", "MASTER_PORT=1 is free"),
        ({"OMP_NUM_THREADS": "9999"}, "cores and threads", "note", "more than there are cores"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "GPUs", "ok", "CUDA_VISIBLE_DEVICES is ''"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "leftover variables",
            "ok",
            "belong to it",
        ),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], topic: str, verdict: str, text: str) -> None:
    found = verdicts(environ)[topic]
    assert found[0] == verdict, found
    assert text in found[1]


def test_a_command_for_people_and_one_for_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    assert "ok    versions" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert {"topic", "verdict", "text"} == set(json.loads(capsys.readouterr().out)[0])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    assert main(["doctor"]) == 1
    assert "bad   interfaces" in capsys.readouterr().out


@contextmanager
def job() -> Iterator[tuple[HostedStore, threading.Event]]:
    """Rank 0 waits in an all-reduce for rank 1, which thinks."""
    server, over, ready = listen_store(), threading.Event(), threading.Barrier(3)
    config = ParallelConfig(tp=2, backend="gloo", shm="off", deadlines=Deadlines(exit_s=5))

    def rank_main(rank: int) -> None:
        identity = Identity(rank=Rank(rank), world_size=2, local_rank=rank, local_world_size=2, num_hosts=1)
        with ParallelContext(config, identity=identity, store=connect_store(server.host, server.port)) as ctx:
            ctx.tp.barrier()
            ready.wait(30)
            if rank == 1:
                think(over)
            ctx.tp.all_reduce(torch.ones(3))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(30)
    try:
        yield server, over
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def think(over: threading.Event) -> None:
    over.wait(30)


def test_a_live_job_answers_the_four_questions(capsys: pytest.CaptureFixture[str]) -> None:
    with job() as (server, _):
        (context,) = attach(server.host, server.port)
        while not context.reports[0].inside:  # rank 0 is on its way into the operation
            (context,) = attach(server.host, server.port)
        text = "\n".join(context.lines())
        assert f"context {context.uid}: 2 ranks joined" in text
        assert "settings: equal on all of them" in text
        assert "group of ranks [0, 1]: open on all that answer" in text
        assert "is in tp#0 seq 2 all_reduce(float32[3]) since" in text
        assert "is in no operation of a group" in text
        assert " in think" in text
        assert attach(server.host, server.port, uid=context.uid[:4]) != []
        assert main(["doctor", "--attach", f"{server.host}:{server.port}", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts[0]["reports"]["0"]["inside"].startswith("tp#0 seq 2 all_reduce")
        assert main(["doctor", "--attach", f"{server.host}:{server.port}", "--context", "zz"]) == 1
        assert "no context zz meets in the store" in capsys.readouterr().err


def test_a_job_that_did_not_come_together_says_why() -> None:
    server = listen_store()
    identity = Identity(rank=Rank(0), world_size=2, local_rank=0, local_world_size=2, num_hosts=1)
    context = ParallelContext(
        ParallelConfig(tp=2, deadlines=Deadlines(join_s=0.2)), identity=identity, store=connect_store(server.host, server.port)
    )
    with pytest.raises(RendezvousError):
        context.__enter__()
    (found,) = attach(server.host, server.port)
    text = "\n".join(found.lines())
    assert "(not met yet): 1 ranks joined" in text
    assert "it did not come together: 1 of 2 ranks joined within 0.2 s" in text
    assert "has left: refused" in text


def test_no_store_is_an_error_at_once() -> None:
    with pytest.raises(PeerTimeoutError, match="no store answered"):
        attach("127.0.0.1", 1, timeout_s=0.2)
