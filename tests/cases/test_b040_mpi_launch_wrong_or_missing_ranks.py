"""B040: MPI, torch-style and Slurm variables disagree, or some are missing."""

import pytest

from parallel_runtime.config.environment import detect
from parallel_runtime.errors import LauncherEnvironmentError
from tests.unit.config.recorded import MASTER, openmpi


def test_b040_openmpi_gives_rank_and_local_rank() -> None:
    identity = detect(openmpi(rank=3, size=4, local_rank=1, local_size=2) | MASTER)
    assert (identity.rank, identity.world_size, identity.local_rank, identity.local_world_size) == (3, 4, 1, 2)


def test_b040_pmi_without_a_local_rank_names_what_is_missing() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"found PMI_RANK=1, PMI_SIZE=2; missing MPI_LOCALRANKID"):
        detect({"PMI_RANK": "1", "PMI_SIZE": "2", **MASTER})


def test_b040_disagreeing_launchers_are_listed_with_their_values() -> None:
    environ = openmpi(rank=9, size=16, local_rank=1, local_size=8) | {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", **MASTER}
    with pytest.raises(LauncherEnvironmentError, match="contradict each other") as caught:
        detect(environ)
    for part in ("RANK=0", "WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=9", "OMPI_COMM_WORLD_SIZE=16", "torchrun", "openmpi"):
        assert part in str(caught.value)


def test_b040_openmpi_without_a_master_asks_for_it() -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"world of 4, but MASTER_ADDR and MASTER_PORT are not set"):
        detect(openmpi(rank=3, size=4, local_rank=1, local_size=2))


@pytest.mark.parametrize(
    "given",
    [
        *(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
        *(("RANK", "WORLD_SIZE"), ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_RANK")),
    ],
)
def test_b040_partial_torch_variables_name_the_missing_ones(given: tuple[str, ...]) -> None:
    missing = ", ".join(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in given)
    with pytest.raises(LauncherEnvironmentError, match=rf"torchrun variables are partial: .*missing {missing}\."):
        detect(dict.fromkeys(given, "1"))
