"""Ranks under a real ``srun``, where Debian's or another Slurm is installed: one machine stands for two nodes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_runtime.config import detect
from tests.spmd import scripts
from tests.spmd.slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

BODY = """
with ParallelContext(ParallelConfig(dp=-1)) as ctx:
    if sys.argv[1:] == ["die"] and ctx.rank == 1:
        os.kill(os.getpid(), 9)
    total = ctx.dp.all_reduce(torch.tensor(10.0 ** ctx.rank)).item()
    me = ctx.identity
    seat = f"node {me.host_rank} of {me.num_hosts} local {me.local_rank} of {me.local_world_size}"
    os.write(1, f"{me.rank} {me.source} {seat}: {total:g}\\n".encode())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


def srun(cluster: dict[str, str], *command: str, **changes: str) -> tuple[int, str, str]:
    environ = {**cluster, "MASTER_PORT": str(scripts.free_port()), **changes}
    return scripts.finish(scripts.start_program(["srun", *command], environ))


def test_two_ranks_of_one_node_meet_at_the_first_host_of_the_step(cluster: dict[str, str], tmp_path: Path) -> None:
    """Under ``--mpi=pmi2`` too, which sets the variables of MPICH besides: the step knows the host, they do not."""
    script = scripts.write_script(tmp_path, BODY)
    command = ("-n", "2", "-N", "1", sys.executable, str(script))
    status, out, err = srun(cluster, "--mpi=pmi2", *command, MASTER_ADDR="127.0.0.1")
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"{rank} slurm node 0 of 1 local {rank} of 2: 11" for rank in range(2)]


def test_three_ranks_on_two_nodes_of_unequal_size(cluster: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write_script(tmp_path, BODY)
    meeting = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    status, out, err = srun(cluster, "-n", "3", "-N", "2", sys.executable, str(script), **meeting)
    assert status == 0, err
    seats = ("node 0 of 2 local 0 of 2", "node 0 of 2 local 1 of 2", "node 1 of 2 local 0 of 1")
    assert sorted(out.splitlines()) == [f"{rank} slurm {seat}: 111" for rank, seat in enumerate(seats)]


def test_a_rank_that_is_killed_under_srun_is_named_by_the_others(cluster: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write_script(tmp_path, BODY)
    command = ("-n", "2", "-N", "1", sys.executable, str(script), "die")
    status, _, err = srun(cluster, *command, MASTER_ADDR="127.0.0.1")
    assert status != 0
    assert "lost rank 1 of [0, 1]" in err


def test_a_step_is_read_from_its_variables(cluster: dict[str, str]) -> None:
    status, out, err = srun(cluster, "-n", "3", "-N", "2", "--label", "env")
    assert status == 0, err
    tasks: list[dict[str, str]] = [{}, {}, {}]
    for line in out.splitlines():
        label, _, variable = line.partition(": ")
        name, _, value = variable.partition("=")
        if label.strip().isdigit() and name.startswith(("SLURM", "MASTER")):
            tasks[int(label)][name] = value
    identities = [detect(task) for task in tasks]
    assert [(each.rank, each.local_rank, each.local_world_size, each.host_rank) for each in identities] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
        (2, 0, 1, 1),
    ]
    assert {each.master_host for each in identities} == {"n1"}
