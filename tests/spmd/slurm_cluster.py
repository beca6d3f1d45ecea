"""A Slurm cluster on this machine: its controller and two nodes, all of them on loopback, for as long as a block lasts."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.spmd import scripts

__all__ = ["slurm_cluster"]

_CONFIG = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_UP_S = 20.0


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start one, and stop it.

    Skips the test where Slurm is not installed or does not come up.

    Args:
        folder: For its configuration, state and logs.

    Yields:
        Variables under which ``srun`` finds it.
    """
    missing = [name for name in ("slurmctld", "slurmd", "srun", "sinfo") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    host = socket.gethostname().partition(".")[0]
    ports = [scripts.free_port() for _ in range(3)]
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    user = pwd.getpwuid(os.getuid()).pw_name
    config.write_text(_CONFIG.format(host=host, ports=ports, folder=folder, user=user))
    environ = scripts.clean_environ(SLURM_CONF=str(config))
    with ExitStack() as stack:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            stack.enter_context(_daemon(command, environ, folder / f"{'.'.join(command)}.log"))
        _wait_for_nodes(environ, folder)
        yield environ


@contextmanager
def _daemon(command: list[str], environ: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_nodes(environ: dict[str, str], folder: Path) -> None:
    deadline_s = time.monotonic() + _UP_S
    while True:
        told = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environ, capture_output=True, text=True, check=False)
        if told.stdout.split() == ["idle", "2"]:
            return
        if time.monotonic() > deadline_s:
            logs = "\n".join(path.read_text()[-500:] for path in sorted(folder.glob("*.log")))
            pytest.skip(f"Slurm does not come up here: {told.stdout}{told.stderr}\n{logs}")
        time.sleep(0.1)
