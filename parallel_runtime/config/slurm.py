"""Slurm's variables: which of them belong to a rank, and which only to a shell inside an allocation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from parallel_runtime.config.claims import Claim, read_host, read_integer
from parallel_runtime.errors import LauncherEnvironmentError
from parallel_runtime.values import shown

__all__ = ["SlurmReading", "expand_counts", "first_host", "read_slurm"]

_FIRST_RESERVED_STEP = 0xFFFFFFFA
"""Slurm numbers its interactive, batch, external and pending steps from here up."""

_MOST_DIGITS: Final = 10
_MOST_NODES: Final = 1_000_000
_NAMED_STEPS = frozenset({"batch", "extern", "interactive"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmReading:
    """What Slurm's variables come to.

    Attributes:
        claim: The rank of a step with at least two tasks; ``None`` otherwise.
        look_alike: For variables that are not a rank's: what they are; otherwise ``""``.
        is_refused: Whether the look-alike was given several tasks, so that running as one rank is hardly what was meant.
    """

    claim: Claim | None = None
    look_alike: str = ""
    is_refused: bool = False


def read_slurm(environ: Mapping[str, str]) -> SlurmReading:
    """Tell a rank of a Slurm step from a shell inside an allocation.

    ``sbatch`` and ``salloc`` shells carry ``SLURM_PROCID=0`` and the job's ``SLURM_NTASKS``, and an interactive step even a step
    id; none of them is rank 0 of anything. A step of one task may be a shell, or an agent that starts the ranks itself.

    Args:
        environ: Variables of the process.

    Returns:
        A claim, a look-alike, or neither.

    Raises:
        LauncherEnvironmentError: A step's variables are partial, or a value is not a number in range.
    """
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if job is None and step is None and "SLURM_PROCID" not in environ:
        return SlurmReading()
    if step is None or _is_reserved(step):
        return _shell(environ, job, step)
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if read_integer(environ, size_name) == 1:
        return SlurmReading(look_alike=f"slurm step {step} of job {job} has one task, so it numbers no ranks")
    return SlurmReading(claim=_step(environ, size_name))


def first_host(nodelist: str) -> str | None:
    """The first host of a Slurm node list, which is where task 0 runs.

    Args:
        nodelist: As Slurm writes it, such as ``"gpu[03-05,09],login1"``.

    Returns:
        ``"gpu03"`` for the example; ``None`` for an empty list.
    """
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist.strip())
    return None if match is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])


def expand_counts(text: str) -> tuple[int, ...]:
    """Tasks of every node, from Slurm's short form.

    Args:
        text: Such as ``"4(x2),3"``.

    Returns:
        ``(4, 4, 3)`` for the example.

    Raises:
        LauncherEnvironmentError: The text has another form, or speaks of more than a million nodes.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?", part)
        if match is None:
            raise LauncherEnvironmentError(f"SLURM_STEP_TASKS_PER_NODE={shown(text)} is not a list of counts such as '4(x2),3'")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_NODES:
            raise LauncherEnvironmentError(f"SLURM_STEP_TASKS_PER_NODE={shown(text)} speaks of more than {_MOST_NODES} nodes")
        counts += [int(match[1])] * times
    return tuple(counts)


def _is_reserved(step: str) -> bool:
    return step in _NAMED_STEPS or (step.isdigit() and (len(step) > _MOST_DIGITS or int(step) >= _FIRST_RESERVED_STEP))


def _shell(environ: Mapping[str, str], job: str | None, step: str | None) -> SlurmReading:
    tasks = read_integer(environ, "SLURM_NTASKS")
    if tasks is None:
        tasks = read_integer(environ, "SLURM_NPROCS")
    where = "no SLURM_STEP_ID" if step is None else f"the reserved SLURM_STEP_ID={step}"
    given = "" if tasks is None else f" and SLURM_NTASKS={tasks}"
    text = f"slurm (SLURM_JOB_ID={job}, {where}{given}) is the shell of an sbatch or salloc allocation, not a rank of a step"
    return SlurmReading(look_alike=text, is_refused=(tasks or 1) > 1)


def _step(environ: Mapping[str, str], size_name: str) -> Claim:
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID")
    rank, size, local_rank = (read_integer(environ, name) for name in names)
    if rank is None or size is None or local_rank is None:
        missing = [name for name in names if name not in environ]
        raise LauncherEnvironmentError(f"the slurm step variables are partial: missing {', '.join(missing)}; start with srun")
    if rank >= size or local_rank >= size:
        raise LauncherEnvironmentError(
            f"SLURM_PROCID={rank} SLURM_LOCALID={local_rank} with {size_name}={size}: a position must be below its size; "
            f"these variables are left over from another step"
        )
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    host_rank = read_integer(environ, "SLURM_NODEID")
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"]) if "SLURM_STEP_TASKS_PER_NODE" in environ else ()
    return Claim(
        source="slurm",
        variables=tuple((name, environ[name]) for name in names),
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=counts[host_rank] if host_rank is not None and host_rank < len(counts) else None,
        host_rank=host_rank,
        num_hosts=read_integer(environ, nodes_name),
        master_host=read_host(environ, "MASTER_ADDR"),
        master_port=read_integer(environ, "MASTER_PORT"),
    )
