"""B022: a host whose name cannot be resolved still launches, on loopback."""

import re
import time
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LauncherEnvironmentError
from parallel_runtime.terms import Rank
from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

BODY = """
import socket
import psutil

def refuse(*args):
    raise OSError("this host has no name")

socket.gethostname = socket.getfqdn = socket.gethostbyname = refuse

def work(ctx, parent):
    processes = psutil.Process(), psutil.Process(parent)
    connections = [c for process in processes for c in process.net_connections(kind="inet")]
    listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    ctx.tp.barrier()
    return ctx.tp.all_reduce(torch.ones(1)).item(), listening

if __name__ == "__main__":
    for total, addresses in launch(work, ParallelConfig(tp=2, shm="off"), os.getpid()):
        assert total == 2.0, total
        assert set(addresses) == {"127.0.0.1"}, addresses
    print("done")
"""


def test_b022_one_host_needs_no_name(tmp_path: Path) -> None:
    assert scripts.run(scripts.write_script(tmp_path, BODY)) == (0, "done\n", "")


def far_away(host: str) -> ParallelContext:
    """A context of two hosts with two ranks each."""
    identity = Identity(
        rank=Rank(1), world_size=4, local_rank=1, local_world_size=2, master_host=host, master_port=scripts.free_port()
    )
    return ParallelContext(ParallelConfig(tp=4), identity=identity)


@pytest.mark.parametrize(
    ("host", "text"), [("localhost", "'localhost' resolves to loopback"), ("no-such-host.invalid", "does not resolve")]
)
def test_b022_a_context_refuses_a_meeting_point_that_others_cannot_reach(
    host: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    start = time.monotonic()
    with pytest.raises(LauncherEnvironmentError, match=rf"{text}.*GLOO_SOCKET_IFNAME"):
        far_away(host).__enter__()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("value", ["eth77", "^lo"])
def test_b022_a_context_refuses_an_interface_that_is_not_there(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(LauncherEnvironmentError, match=rf"GLOO_SOCKET_IFNAME='{re.escape(value)}'"):
        far_away("192.0.2.1").__enter__()
