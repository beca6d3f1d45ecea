"""What one launcher's variables say about a process: read, checked for completeness, not yet compared with anyone else's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from parallel_runtime.errors import LauncherEnvironmentError
from parallel_runtime.values import shown

__all__ = ["Claim", "ClaimSource", "read_explicit", "read_host", "read_integer", "read_mpich", "read_openmpi", "read_torchrun"]

ClaimSource: TypeAlias = Literal["explicit", "torchrun", "openmpi", "mpich", "slurm"]
"""A launcher that leaves variables behind."""

_LARGEST: Final = 2**31 - 1
_MOST_DIGITS: Final = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One launcher's word about this process.

    Attributes:
        source: Which launcher.
        variables: The variables it was read from, ``(name, value)``, rank first, then world size.
        rank: Position in the world it speaks of.
        world_size: Size of that world.
        local_rank: Position on this host.
        local_world_size: Ranks on this host, where known.
        host_rank: Position of this host, where known.
        num_hosts: Number of hosts, where known.
        num_agents: Number of launcher agents, for a launcher that starts one agent and lets it start the ranks.
        master_host: ``MASTER_ADDR``, where set.
        master_port: ``MASTER_PORT``, where set.
    """

    source: ClaimSource
    variables: tuple[tuple[str, str], ...]
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None
    host_rank: int | None = None
    num_hosts: int | None = None
    num_agents: int | None = None
    master_host: str | None = None
    master_port: int | None = None

    def describe(self) -> str:
        """The launcher and the variables behind the claim, as they were found."""
        return f"{self.source} ({' '.join(f'{name}={value}' for name, value in self.variables)})"

    def agrees_with(self, other: "Claim") -> bool:
        """Whether both may be true of one process: what both know is equal.

        Args:
            other: Another launcher's claim.

        Returns:
            ``False`` where rank, world size, local rank or local world size differ.
        """
        if (self.rank, self.world_size, self.local_rank) != (other.rank, other.world_size, other.local_rank):
            return False
        sizes = {self.local_world_size, other.local_world_size} - {None}
        return len(sizes) < 2


def read_integer(environ: Mapping[str, str], name: str) -> int | None:
    """A variable that holds a count or a position.

    Args:
        environ: Variables of the process.
        name: Which one.

    Returns:
        Its value, 0 or more; ``None`` where it is not set.

    Raises:
        LauncherEnvironmentError: It is empty, negative, not a whole number, or above 2**31 - 1.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise LauncherEnvironmentError(f"{name}={shown(text)} must be a whole number, 0 or more")
    if len(text.lstrip("0")) > _MOST_DIGITS or int(text) > _LARGEST:
        raise LauncherEnvironmentError(f"{name}={shown(text)} must be at most 2**31 - 1 = {_LARGEST}")
    return int(text)


def read_host(environ: Mapping[str, str], *names: str) -> str | None:
    """The host of rank 0, as a launcher wrote it.

    Args:
        environ: Variables of the process.
        names: Where it may stand; the first that is not empty counts.

    Returns:
        The host; ``None`` where none is set.

    Raises:
        LauncherEnvironmentError: It holds a blank.
    """
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    if any(character.isspace() for character in environ[name]):
        raise LauncherEnvironmentError(f"{name}={shown(environ[name])} holds a blank; use a bare host name or address")
    return environ[name]


def read_explicit(environ: Mapping[str, str]) -> Claim | None:
    """The claim of this library's own variables.

    Args:
        environ: Variables of the process.

    Returns:
        The claim; ``None`` where none of the variables is set. A world of one may leave the local rank out.

    Raises:
        LauncherEnvironmentError: Only some are set, or a value is not a number in range.
    """
    names = [f"PARALLEL_RUNTIME_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    own_master = ("PARALLEL_RUNTIME_MASTER_ADDR", "PARALLEL_RUNTIME_MASTER_PORT")
    if not any(name in environ for name in (*names, *own_master)):
        return None
    if environ.get(names[1]) == "1":
        environ = {names[2]: "0", **environ}
    return _claim("explicit", environ, names[:3], local_world_size=names[3], master=own_master)


def read_torchrun(environ: Mapping[str, str]) -> Claim | None:
    """The claim of torchrun's variables, or of anything that sets the same names.

    Args:
        environ: Variables of the process.

    Returns:
        The claim; ``None`` where none of the variables is set. ``num_agents`` only where a torchrun agent really started this
        process (``TORCHELASTIC_RUN_ID``).

    Raises:
        LauncherEnvironmentError: Only some are set, or a value is not a number in range.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in environ for name in (*names, "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")):
        return None
    agents = read_integer(environ, "GROUP_WORLD_SIZE")
    return _claim(
        "torchrun",
        environ,
        names,
        local_world_size="LOCAL_WORLD_SIZE",
        host_rank=read_integer(environ, "GROUP_RANK"),
        num_hosts=agents,
        num_agents=agents if "TORCHELASTIC_RUN_ID" in environ else None,
    )


def read_openmpi(environ: Mapping[str, str]) -> Claim | None:
    """The claim of Open MPI's variables.

    Args:
        environ: Variables of the process.

    Returns:
        The claim; ``None`` where none of the variables is set.

    Raises:
        LauncherEnvironmentError: Only some are set, or a value is not a number in range.
    """
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not any(name in environ for name in names):
        return None
    return _claim("openmpi", environ, names[:3], local_world_size=names[3])


def read_mpich(environ: Mapping[str, str]) -> Claim | None:
    """The claim of the PMI variables that MPICH, Intel MPI, Cray MPICH and MVAPICH set.

    Args:
        environ: Variables of the process.

    Returns:
        The claim; ``None`` where none of the variables is set, or where they repeat a Slurm step (``srun --mpi=pmi2``), which
        says more. The local rank comes from the first of ``MPI_LOCALRANKID``, ``PMI_LOCAL_RANK``, ``PALS_LOCAL_RANKID`` or
        ``MV2_COMM_WORLD_LOCAL_RANK``.

    Raises:
        LauncherEnvironmentError: Only some are set, or a value is not a number in range.
    """
    if not any(name in environ for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")):
        return None
    local_names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK")
    local_name = next((name for name in local_names if name in environ), None)
    if local_name is None:
        pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
        if all(own in environ and environ[own] == environ.get(of_step) for own, of_step in pairs):
            return None
        local_name = local_names[0]
    if environ.get("PMI_SIZE") == "1":
        environ = {local_name: "0", **environ}
    size_names = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
    size_name = next((name for name in size_names if name in environ), size_names[0])
    return _claim("mpich", environ, ("PMI_RANK", "PMI_SIZE", local_name), local_world_size=size_name)


def _claim(
    source: ClaimSource,
    environ: Mapping[str, str],
    names: Sequence[str],
    *,
    local_world_size: str,
    host_rank: int | None = None,
    num_hosts: int | None = None,
    num_agents: int | None = None,
    master: tuple[str, str] | None = None,
) -> Claim:
    values = {name: read_integer(environ, name) for name in (*names, local_world_size)}
    rank, size, local_rank = (values[name] for name in names)
    if rank is None or size is None or local_rank is None:
        found = [f"{name}={environ[name]}" for name in values if name in environ]
        missing = [name for name in names if values[name] is None]
        raise LauncherEnvironmentError(
            f"the {source} variables are partial: found {', '.join(found) or 'only leftovers'}; missing {', '.join(missing)}. "
            f"Set the missing ones on every rank, or unset the others"
        )
    _check_positions(names, local_world_size, rank, size, local_rank, values[local_world_size])
    host_names = ("MASTER_ADDR",) if master is None else (master[0], "MASTER_ADDR")
    port_names = ("MASTER_PORT",) if master is None else (master[1], "MASTER_PORT")
    return Claim(
        source=source,
        variables=tuple((name, environ[name]) for name in values if name in environ),
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=values[local_world_size],
        host_rank=host_rank,
        num_hosts=num_hosts,
        num_agents=num_agents,
        master_host=read_host(environ, *host_names),
        master_port=next((read_integer(environ, name) for name in port_names if name in environ), None),
    )


def _check_positions(
    names: Sequence[str], local_size_name: str, rank: int, size: int, local_rank: int, local_size: int | None
) -> None:
    bounds = [(names[0], rank, names[1], size), (names[2], local_rank, names[1], size)]
    if local_size is not None:
        bounds.append((names[2], local_rank, local_size_name, local_size))
    for name, value, size_name, limit in bounds:
        if value >= limit:
            raise LauncherEnvironmentError(
                f"{name}={value} with {size_name}={limit}: a position must be below its size; "
                f"these variables are left over from another start or were set by hand"
            )
