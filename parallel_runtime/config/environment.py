"""Who am I? The identity of this process, read from the variables its launcher left behind.

``detect`` is a pure function of the mapping it is handed. Precedence, innermost launcher first:

1. ``explicit``: ``PARALLEL_RUNTIME_RANK`` and friends. They decide alone; nothing else is compared.
2. ``torchrun``: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and friends.
3. ``openmpi``: ``OMPI_COMM_WORLD_RANK`` and friends.
4. ``mpich``: ``PMI_RANK`` and friends (MPICH, Intel MPI, Cray, MVAPICH under Hydra).
5. ``slurm``: ``SLURM_PROCID`` of a step with at least two tasks.
6. ``single``: none of these.

Every set that is present must be complete and agree with the one that wins. An outer launcher that only started one agent per
host (``srun torchrun``, ``mpirun`` on top of ``srun`` daemons) speaks about agents, not about ranks, and is set aside by name.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final

from parallel_runtime.config.claims import Claim, read_explicit, read_mpich, read_openmpi, read_torchrun
from parallel_runtime.config.slurm import first_host, read_slurm
from parallel_runtime.errors import LauncherEnvironmentError
from parallel_runtime.terms import Rank
from parallel_runtime.values import shown

__all__ = ["Identity", "IdentitySource", "adopt_environ", "current_environ", "detect", "variables_of"]

IdentitySource: TypeAlias = Literal["explicit", "torchrun", "openmpi", "mpich", "slurm", "single", "argument"]
"""Where an identity came from; ``argument`` is one that a caller wrote down."""

_NEEDED: Final = ("rank", "world_size", "local_rank")
_NUMBERS: Final = (*_NEEDED, "local_world_size", "host_rank", "num_hosts", "master_port")
_READERS: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (read_torchrun, read_openmpi, read_mpich)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which rank this process is, and where the world meets.

    Attributes:
        rank: Position in the world.
        world_size: Number of ranks.
        local_rank: Position on this host.
        local_world_size: Ranks on this host, where the launcher said so.
        host_rank: Position of this host, where the launcher said so.
        num_hosts: Number of hosts, where the launcher said so.
        source: Which launcher's variables were believed.
        master_host: Host of rank 0, as the launcher wrote it; ``None`` in a world of one.
        master_port: TCP port that rank 0 listens on; ``None`` in a world of one.
        host: Name of this host, where it is not to be what the system calls it: ranks with one name are taken to share memory.
        set_aside: One line for each set of variables that was seen and not believed, with the reason.

    Raises:
        LauncherEnvironmentError: A field has another type, a position is not inside its size, or a size or port is out of range.
    """

    rank: Rank
    world_size: int
    local_rank: int = 0
    local_world_size: int | None = None
    host_rank: int | None = None
    num_hosts: int | None = None
    source: IdentitySource = "argument"
    master_host: str | None = None
    master_port: int | None = None
    host: str | None = None
    set_aside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            _check_number(name, getattr(self, name), is_needed=name in _NEEDED)
        for name, text in (("master_host", self.master_host), ("host", self.host)):
            if text is not None and (not isinstance(text, str) or not text or any(map(str.isspace, text))):
                raise LauncherEnvironmentError(f"{name}={shown(text)} must be the bare name or address of a host, or None")
        _check_inside("rank", self.rank, "world_size", self.world_size)
        _check_inside("local_rank", self.local_rank, "local_world_size", self.local_world_size or self.world_size)
        if self.host_rank is not None and self.num_hosts is not None:
            _check_inside("host_rank", self.host_rank, "num_hosts", self.num_hosts)
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise LauncherEnvironmentError(
                f"local_world_size={self.local_world_size} is larger than world_size={self.world_size}; "
                f"a host cannot hold more ranks than there are"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise LauncherEnvironmentError(f"master_port={self.master_port} is not a TCP port; use 1 to 65535")


def current_environ() -> Mapping[str, str]:
    """This process's variables, copied at the call: the one place in the library that reads them.

    Returns:
        A read-only copy; later changes to the process's variables do not show in it.
    """
    return MappingProxyType(dict(os.environ))


def adopt_environ(environ: Mapping[str, str]) -> None:
    """Make these this process's variables, and no others: for a process that a launcher has just started for one rank.

    Args:
        environ: All variables from here on.
    """
    os.environ.clear()
    os.environ.update(environ)


def variables_of(identity: Identity) -> dict[str, str]:
    """What tells all code of a rank who it is, so that ``detect`` and further contexts find it as under torchrun.

    Args:
        identity: Of the rank. Whoever started it serves the store at its meeting point.

    Returns:
        Variables, for ``adopt_environ``.
    """
    numbers = {
        "RANK": identity.rank,
        "WORLD_SIZE": identity.world_size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_WORLD_SIZE": identity.local_world_size,
        "MASTER_ADDR": identity.master_host,
        "MASTER_PORT": identity.master_port,
    }
    named = {f"PARALLEL_RUNTIME_{name}": str(value) for name, value in numbers.items() if value is not None}
    return {**named, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def detect(environ: Mapping[str, str], *, needs_master: bool = True) -> Identity:
    """Find out which rank a process with these variables is.

    Args:
        environ: Variables of the process, usually ``current_environ()``. Nothing else is read.
        needs_master: Whether a world of several ranks must say where it meets. ``False`` for a caller that brings its own store.

    Returns:
        The identity; ``source="single"`` where no launcher spoke.

    Raises:
        LauncherEnvironmentError: A set is partial, is not made of numbers in range, contradicts another one, belongs to a shell
            of an allocation and not to a rank, or does not say where the ranks meet.
    """
    if claim := read_explicit(environ):
        return _identity(claim, environ, (), needs_master)
    slurm = read_slurm(environ)
    found = [claim for read in _READERS if (claim := read(environ))]
    if slurm.claim:
        found.append(slurm.claim)
    set_aside: tuple[str, ...] = (slurm.look_alike,) if slurm.look_alike else ()
    if not found:
        if slurm.is_refused:
            raise LauncherEnvironmentError(
                f"{slurm.look_alike}. Start the ranks with srun (or mpirun, torchrun), or, to be one rank on your own, "
                f"set PARALLEL_RUNTIME_RANK=0 PARALLEL_RUNTIME_WORLD_SIZE=1"
            )
        return Identity(rank=Rank(0), world_size=1, local_world_size=1, source="single", set_aside=set_aside)
    winner, *others = found
    for other in others:
        if _started_the_agents(other, winner):
            set_aside += (f"{other.describe()} counts agents, one per host, and was set aside for {winner.source}",)
        elif not winner.agrees_with(other):
            raise _contradiction(found)
    return _identity(winner, environ, set_aside, needs_master)


def _started_the_agents(outer: Claim, inner: Claim) -> bool:
    if inner.num_agents is not None:
        return outer.world_size == inner.num_agents
    is_one_per_host = outer.source == "slurm" and outer.num_hosts == outer.world_size
    return is_one_per_host and inner.source in ("openmpi", "mpich") and inner.world_size > outer.world_size


def _contradiction(found: list[Claim]) -> LauncherEnvironmentError:
    said = "; ".join(claim.describe() for claim in found)
    return LauncherEnvironmentError(
        f"launchers contradict each other: {said}. Unset the variables of the launchers that did not start this process, "
        f"or decide with PARALLEL_RUNTIME_RANK, PARALLEL_RUNTIME_WORLD_SIZE and PARALLEL_RUNTIME_LOCAL_RANK"
    )


def _identity(claim: Claim, environ: Mapping[str, str], set_aside: tuple[str, ...], needs_master: bool) -> Identity:
    host, port = claim.master_host, claim.master_port
    if claim.source == "slurm" and host is None:
        host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    if claim.world_size > 1 and needs_master:
        missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None]
        if missing:
            raise LauncherEnvironmentError(
                f"{claim.describe()} is a world of {claim.world_size}, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set; export the host of rank 0 and a free port on it to every rank"
            )
    return Identity(
        rank=Rank(claim.rank),
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        local_world_size=claim.local_world_size,
        host_rank=claim.host_rank,
        num_hosts=claim.num_hosts,
        source=claim.source,
        master_host=host,
        master_port=port,
        set_aside=set_aside,
    )


def _check_number(name: str, value: object, *, is_needed: bool) -> None:
    if type(value) is not int and (value is not None or is_needed):
        raise LauncherEnvironmentError(
            f"{name}={shown(value)} is of type {type(value).__name__}, but must be an integer{'' if is_needed else ' or None'}"
        )


def _check_inside(name: str, value: int, size_name: str, size: int) -> None:
    if size < 1:
        raise LauncherEnvironmentError(f"{size_name}={size} must be 1 or more")
    if not 0 <= value < size:
        raise LauncherEnvironmentError(f"{name}={value} must be in 0..{size - 1}, because {size_name}={size}")
