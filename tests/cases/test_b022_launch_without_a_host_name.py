"""B022: a host whose name cannot be resolved still launches, on loopback."""

from pathlib import Path

import pytest

from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

BODY = """
import socket
import psutil

def refuse(*args):
    raise OSError("this host has no name")

socket.gethostname = socket.getfqdn = socket.gethostbyname = refuse

def listening():
    return [c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]

def work(ctx):
    return ctx.tp.all_reduce(torch.ones(1)).item(), listening()

if __name__ == "__main__":
    for total, addresses in launch(work, ParallelConfig(tp=2, shm="off")):
        assert total == 2.0, total
        assert set(addresses) == {"127.0.0.1"}, addresses
    print("done")
"""


def test_b022_one_host_needs_no_name(tmp_path: Path) -> None:
    assert scripts.run(scripts.write_script(tmp_path, BODY)) == (0, "done\n", "")
