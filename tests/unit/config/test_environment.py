"""Identities from recorded launcher environments: accepted, set aside, refused."""

import pytest

from parallel_runtime.config.environment import Identity, current_environ, detect
from parallel_runtime.errors import LauncherEnvironmentError
from parallel_runtime.terms import Rank
from tests.unit.config.recorded import MASTER, SBATCH, SRUN_PMI2, hydra, openmpi, slurm_step, torchrun

EXPLICIT_OF_FOUR = {
    "PARALLEL_RUNTIME_RANK": "2",
    "PARALLEL_RUNTIME_WORLD_SIZE": "4",
    "PARALLEL_RUNTIME_LOCAL_RANK": "0",
    "PARALLEL_RUNTIME_LOCAL_WORLD_SIZE": "2",
    "PARALLEL_RUNTIME_MASTER_ADDR": "own",
    "PARALLEL_RUNTIME_MASTER_PORT": "1234",
}


def test_nothing_is_a_world_of_one() -> None:
    assert detect({"PATH": "/bin"}) == Identity(rank=Rank(0), world_size=1, local_world_size=1, source="single")


def test_torchrun() -> None:
    assert detect(torchrun(rank=5, world_size=8, local_rank=1, local_world_size=4)) == Identity(
        rank=Rank(5),
        world_size=8,
        local_rank=1,
        local_world_size=4,
        host_rank=1,
        num_hosts=2,
        source="torchrun",
        master_host="node1",
        master_port=29500,
    )


def test_slurm_step_takes_the_meeting_host_from_the_node_list() -> None:
    identity = detect(slurm_step(rank=6, tasks=7, local_rank=2, node=1, nodes=2, per_node="4,3") | {"MASTER_PORT": "29500"})
    assert identity == Identity(
        rank=Rank(6),
        world_size=7,
        local_rank=2,
        local_world_size=3,
        host_rank=1,
        num_hosts=2,
        source="slurm",
        master_host="gpu03",
        master_port=29500,
    )


def test_slurm_step_without_a_port_is_refused() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"slurm .* is a world of 2, but MASTER_PORT is not set"):
        detect(slurm_step(rank=0, tasks=2, local_rank=0, node=0, nodes=1, per_node="2"))


def test_a_caller_with_its_own_store_needs_no_meeting_point() -> None:
    assert detect(openmpi(rank=1, size=2, local_rank=1, local_size=2), needs_master=False).master_host is None


def test_openmpi_and_hydra() -> None:
    assert detect(openmpi(rank=3, size=4, local_rank=1, local_size=2) | MASTER).source == "openmpi"
    identity = detect(hydra(rank=3, size=4, local_rank=1, local_size=2) | MASTER)
    assert (identity.source, identity.rank, identity.local_rank, identity.local_world_size) == ("mpich", 3, 1, 2)


def test_srun_with_pmi2_is_a_step_as_any_other() -> None:
    identity = detect({**SRUN_PMI2, "MASTER_PORT": "29500"})
    assert identity == Identity(
        rank=Rank(3),
        world_size=4,
        local_rank=0,
        local_world_size=1,
        host_rank=1,
        num_hosts=2,
        source="slurm",
        master_host="n1",
        master_port=29500,
    )


def test_pmi_that_contradicts_its_slurm_step_is_refused() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"found PMI_RANK=3, PMI_SIZE=8; missing MPI_LOCALRANKID"):
        detect({**SRUN_PMI2, "PMI_SIZE": "8", "MASTER_PORT": "29500"})


def test_a_recorded_batch_script_is_no_rank() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"SLURM_JOB_ID=7, no SLURM_STEP_ID and SLURM_NTASKS=4"):
        detect(SBATCH)


def test_pmi_of_one_needs_no_local_rank() -> None:
    assert detect({"PMI_RANK": "0", "PMI_SIZE": "1"}).local_rank == 0


def test_explicit_variables_decide_alone() -> None:
    identity = detect(EXPLICIT_OF_FOUR | torchrun(rank=5, world_size=8, local_rank=1, local_world_size=4))
    assert (identity.source, identity.rank, identity.world_size, identity.local_world_size) == ("explicit", 2, 4, 2)
    assert (identity.master_host, identity.master_port) == ("own", 1234)


def test_explicit_world_of_one_needs_no_local_rank() -> None:
    environ = {"PARALLEL_RUNTIME_RANK": "0", "PARALLEL_RUNTIME_WORLD_SIZE": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}
    assert detect(environ).source == "explicit"


def test_torchrun_inside_a_slurm_step_counts_agents() -> None:
    step = slurm_step(rank=1, tasks=2, local_rank=0, node=1, nodes=2, per_node="1(x2)")
    identity = detect(step | torchrun(rank=5, world_size=8, local_rank=1, local_world_size=4))
    assert (identity.source, identity.rank) == ("torchrun", 5)
    assert len(identity.set_aside) == 1
    assert "counts agents" in identity.set_aside[0]


def test_mpirun_on_slurm_daemons_counts_agents() -> None:
    step = slurm_step(rank=1, tasks=2, local_rank=0, node=1, nodes=2, per_node="1(x2)")
    identity = detect(step | openmpi(rank=5, size=8, local_rank=1, local_size=4) | MASTER)
    assert (identity.source, identity.rank) == ("openmpi", 5)


@pytest.mark.parametrize(
    ("tasks", "nodes", "per_node", "inner"),
    [
        # two agents that do not know each other: --nnodes was forgotten
        (2, 2, "1(x2)", torchrun(rank=1, world_size=2, local_rank=1, local_world_size=2)),
        # several tasks on a host are no daemons
        (4, 2, "2(x2)", openmpi(rank=5, size=8, local_rank=1, local_size=4)),
        # as many ranks as tasks, but another rank
        (2, 2, "1(x2)", openmpi(rank=0, size=2, local_rank=0, local_size=1)),
    ],
)
def test_an_outer_launcher_that_counts_no_agents_must_agree(tasks: int, nodes: int, per_node: str, inner: dict[str, str]) -> None:
    step = slurm_step(rank=1, tasks=tasks, local_rank=0, node=1, nodes=nodes, per_node=per_node)
    with pytest.raises(LauncherEnvironmentError, match="contradict each other"):
        detect(step | inner | MASTER)


def test_torchrun_names_without_an_agent_do_not_excuse_slurm() -> None:
    step = slurm_step(rank=1, tasks=2, local_rank=0, node=1, nodes=2, per_node="1(x2)")
    by_hand = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2", **MASTER}
    with pytest.raises(LauncherEnvironmentError, match=r"RANK=5 WORLD_SIZE=8.*SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2"):
        detect(step | by_hand)


def test_sets_that_agree_are_accepted() -> None:
    step = slurm_step(rank=3, tasks=4, local_rank=1, node=1, nodes=2, per_node="2(x2)")
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect(step | by_hand).source == "torchrun"


@pytest.mark.parametrize("field", ["local rank", "local size"])
def test_local_positions_must_agree_too(field: str) -> None:
    other = {"local_rank": 0} if field == "local rank" else {"local_size": 4}
    environ = openmpi(**{"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, **other})
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER}
    with pytest.raises(LauncherEnvironmentError, match="contradict each other"):
        detect(environ | by_hand)


# Recorded: `salloc -n 8` with LaunchParameters=use_interactive_step, and the shell of `sbatch -n 8`.
INTERACTIVE = {
    "SLURM_JOB_ID": "815",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_PTY_PORT": "39029",
    "SLURM_TASKS_PER_NODE": "8",
}
BATCH = {"SLURM_JOB_ID": "815", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "12"}


@pytest.mark.parametrize("shell", [INTERACTIVE, BATCH, BATCH | {"SLURM_STEP_ID": "batch"}, {"SLURM_JOBID": "815"}])
def test_an_allocation_shell_is_no_rank(shell: dict[str, str]) -> None:
    identity = detect(shell)
    assert (identity.source, identity.world_size) == ("single", 1)
    assert "is the shell of an sbatch or salloc allocation" in identity.set_aside[0]


@pytest.mark.parametrize("shell", [INTERACTIVE, BATCH])
@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_NPROCS"])
def test_an_allocation_shell_with_many_tasks_is_refused(shell: dict[str, str], name: str) -> None:
    with pytest.raises(
        LauncherEnvironmentError, match=r"SLURM_NTASKS=8\) is the shell of an sbatch.*srun.*PARALLEL_RUNTIME_RANK"
    ):
        detect(shell | {name: "8"})


def test_torchrun_in_an_allocation_shell_sets_slurm_aside() -> None:
    identity = detect(BATCH | {"SLURM_NTASKS": "8"} | torchrun(rank=0, world_size=2, local_rank=0, local_world_size=2))
    assert identity.source == "torchrun"
    assert "not a rank of a step" in identity.set_aside[0]


def test_a_step_of_one_task_numbers_no_ranks() -> None:
    identity = detect(slurm_step(rank=0, tasks=1, local_rank=0, node=0, nodes=1, per_node="1"))
    assert identity.source == "single"
    assert "has one task" in identity.set_aside[0]


def test_the_step_counts_and_not_the_job() -> None:
    step = slurm_step(rank=1, tasks=2, local_rank=1, node=0, nodes=1, per_node="2")
    assert detect(step | {"SLURM_NTASKS": "8"} | MASTER).world_size == 2


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "x"},
            r"torchrun variables are partial: found only leftovers; missing RANK, WORLD_SIZE, LOCAL_RANK",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, r"missing OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK"),
        ({"MPI_LOCALRANKID": "0"}, r"missing PMI_RANK, PMI_SIZE"),
        ({"PARALLEL_RUNTIME_RANK": "0"}, r"missing PARALLEL_RUNTIME_WORLD_SIZE, PARALLEL_RUNTIME_LOCAL_RANK"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, r"partial: missing SLURM_NTASKS, SLURM_LOCALID"),
        ({"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"RANK='' must be a whole number, 0 or more"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"RANK='-1' must be a whole number"),
        ({"RANK": "1.0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"RANK='1\.0' must be a whole number"),
        ({"RANK": "²", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, r"RANK=2 with WORLD_SIZE=2: a position must be below"),
        ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, r"RANK=0 with WORLD_SIZE=0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, r"LOCAL_RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "b"}, r"MASTER_PORT='b'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, r"master_port=0 is not a"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, r"but MASTER_ADDR and MASTER_PORT are not set"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
            r"SLURM_PROCID=4 SLURM_LOCALID=0 with SLURM_NTASKS=4",
        ),
        (
            slurm_step(rank=0, tasks=2, local_rank=0, node=0, nodes=1, per_node="two"),
            r"SLURM_STEP_TASKS_PER_NODE='two' is not a list of counts",
        ),
        (
            slurm_step(rank=0, tasks=2, local_rank=0, node=0, nodes=1, per_node="1(x99999999999)"),
            r"SLURM_STEP_TASKS_PER_NODE='1\(x99999999999\)' is not a list of counts",
        ),
        (
            slurm_step(rank=0, tasks=2, local_rank=0, node=0, nodes=1, per_node="1(x999999999)"),
            r"SLURM_STEP_TASKS_PER_NODE='1\(x999999999\)' speaks of more than 1000000 nodes",
        ),
        (
            {"RANK": "1" * 5000, "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            r"^RANK='1{99}\.\.\. must be at most 2\*\*31 - 1 = 2147483647$",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2147483648", "LOCAL_RANK": "0"}, r"WORLD_SIZE='2147483648' must be at most"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": " ", "MASTER_PORT": "1"},
            r"MASTER_ADDR=' ' holds a blank; use a bare host name",
        ),
    ],
)
def test_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4, "world_size": 4}, r"rank=4 must be in 0\.\.3, because world_size=4"),
        ({"rank": 0, "world_size": 0}, r"world_size=0 must be 1 or more"),
        ({"rank": 0, "world_size": 2, "local_rank": 1, "local_world_size": 1}, r"local_rank=1 must be in 0\.\.0"),
        ({"rank": 0, "world_size": 2, "local_world_size": 3}, r"local_world_size=3 is larger than world_size=2"),
        ({"rank": 0, "world_size": 2, "host_rank": 2, "num_hosts": 2}, r"host_rank=2 must be in 0\.\.1"),
        ({"rank": 0, "world_size": 2, "master_port": 70000}, r"master_port=70000 is not a TCP port"),
        ({"rank": 0.5, "world_size": 2}, r"^rank=0\.5 is of type float, but must be an integer$"),
        ({"rank": True, "world_size": 2}, r"rank=True is of type bool"),
        ({"rank": "0", "world_size": 2}, r"rank='0' is of type str"),
        ({"rank": 0, "world_size": None}, r"world_size=None is of type NoneType"),
        ({"rank": 0, "world_size": 2, "num_hosts": "1"}, r"num_hosts='1' is of type str, but must be an integer or None$"),
        ({"rank": 0, "world_size": 2, "master_port": 1.0}, r"master_port=1\.0 is of type float"),
        ({"rank": 0, "world_size": 2, "master_host": " "}, r"master_host=' ' must be the bare name or address"),
        ({"rank": 0, "world_size": 2, "host": 5}, r"host=5 must be the bare name or address"),
    ],
)
def test_an_identity_written_down_is_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=message):
        Identity(**fields)  # type: ignore[arg-type]  # the table mixes field types on purpose


def test_current_environ_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_RUNTIME_RANK", "3")
    before = current_environ()
    monkeypatch.setenv("PARALLEL_RUNTIME_RANK", "4")
    assert before["PARALLEL_RUNTIME_RANK"] == "3"
