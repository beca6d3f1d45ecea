"""Which communicators a group opens, and why: a pure function of facts that are equal on every member.

The plan and the context both ask here, so what a plan says is what a context opens.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from parallel_runtime.comm.shm.geometry import MAX_MEMBERS
from parallel_runtime.comm.shm.limits import Limits

__all__ = [
    "ONE_SHOT_BYTES",
    "SYMMETRIC_BYTES",
    "WAY_INSIDE",
    "CommunicatorKind",
    "GroupFacts",
    "Plane",
    "PlannedBackend",
    "PlannedCommunicator",
    "choose_communicators",
]

CommunicatorKind: TypeAlias = Literal["c10d", "shm", "symm_mem", "local", "fake"]
"""What moves the bytes: torch's own backends, shared memory of hosts or of GPUs, threads, or nothing at all."""

PlannedBackend: TypeAlias = Literal["gloo", "nccl", "local", "fake"]
"""What a world's tensors travel over where its ranks cannot share memory."""

Plane: TypeAlias = Literal["control", "data", "both"]
"""CPU messages, tensors, or both."""

WAY_INSIDE: Final = "inside a host"
"""What members on several hosts do through memory, at any size."""

ONE_SHOT_BYTES: Final = 256 << 10
"""Up to here every GPU sums everything itself. Torch's own limits, this one and the next; not measured here."""

SYMMETRIC_BYTES: Final = 10 << 20
"""Up to here GPUs sum through memory that they share, copied in and out."""

_SYMMETRIC_MEMBERS: Final = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What the choice depends on.

    Attributes:
        world_size: Members of the group.
        num_hosts: Hosts that its members are on.
        most_on_host: Members on the host that has most of them.
        backend: Of the world.
        uses_shm: Whether ranks of one host may share memory.
    """

    world_size: int
    num_hosts: int
    most_on_host: int
    backend: PlannedBackend
    uses_shm: bool

    @property
    def is_mixed(self) -> bool:
        """Whether it is on several hosts, with more than one member on some."""
        return self.num_hosts > 1 and self.most_on_host > 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCommunicator:
    """One kind of communicator that a group opens.

    Attributes:
        kind: What moves the bytes.
        backend: Name of the torch backend, for kind ``c10d``; otherwise ``""``.
        plane: ``"control"`` (CPU messages), ``"data"`` (tensors), or ``"both"``.
        reason: Why this one, and for what.
        size: Members that one such communicator connects, at most.
        users: Members of the group that are in such a communicator.
    """

    kind: CommunicatorKind
    backend: str = ""
    plane: Plane = "both"
    reason: str = ""
    size: int
    users: int

    @property
    def paths(self) -> str:
        """Which way which sizes take within it, where memory is to be had; ``""`` where there is one way only."""
        if self.kind == "shm":
            return Limits.of_group(self.size).describe()
        if self.kind == "symm_mem":
            return (
                f"float32 and bfloat16 sums by one_shot to {ONE_SHOT_BYTES >> 10} KiB, by multimem or two_shot to "
                f"{SYMMETRIC_BYTES >> 20} MiB"
            )
        return ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.backend}" if self.backend else self.kind


def choose_communicators(facts: GroupFacts) -> tuple[PlannedCommunicator, ...]:
    """Choose what a group opens.

    Args:
        facts: Of the group.

    Returns:
        Nothing for a group of one; otherwise one communicator, or several that share the work as their reasons say.
    """
    size = facts.world_size
    if size == 1:
        return ()
    if facts.backend == "local":
        return (PlannedCommunicator(kind="local", reason="ranks are threads of one process", size=size, users=size),)
    if facts.backend == "fake":
        return (PlannedCommunicator(kind="fake", reason="a fake world moves nothing", size=size, users=size),)
    is_nccl = facts.backend == "nccl"
    between_cpus = _between_cpus(facts, "control" if is_nccl else "both")
    if not is_nccl:
        return between_cpus
    data = PlannedCommunicator(kind="c10d", backend="nccl", plane="data", reason="tensors on CUDA devices", size=size, users=size)
    if not facts.uses_shm or facts.num_hosts > 1 or size > _SYMMETRIC_MEMBERS:
        return (*between_cpus, data)
    reason = f"sums to {SYMMETRIC_BYTES >> 20} MiB where NVLink joins all"
    return (*between_cpus, data, PlannedCommunicator(kind="symm_mem", plane="data", reason=reason, size=size, users=size))


def _between_cpus(facts: GroupFacts, plane: Plane) -> tuple[PlannedCommunicator, ...]:
    size = facts.world_size
    if facts.uses_shm and facts.num_hosts == 1 and size <= MAX_MEMBERS:
        reason = "messages on one host" if plane == "control" else "ranks of one host"
        return (PlannedCommunicator(kind="shm", plane=plane, reason=reason, size=size, users=size),)
    if facts.uses_shm and facts.is_mixed and plane == "both" and facts.most_on_host <= MAX_MEMBERS:
        return _hierarchy(facts)
    if facts.num_hosts > 1:
        reason = "messages between hosts" if plane == "control" else "several hosts"
    elif facts.uses_shm:
        reason = f"more than {MAX_MEMBERS} members"
    else:
        reason = "messages" if plane == "control" else "shared memory is off"
    return (PlannedCommunicator(kind="c10d", backend="gloo", plane=plane, reason=reason, size=size, users=size),)


def _hierarchy(facts: GroupFacts) -> tuple[PlannedCommunicator, ...]:
    size, most = facts.world_size, facts.most_on_host
    return (
        PlannedCommunicator(kind="c10d", backend="gloo", reason="between hosts", size=size, users=size),
        PlannedCommunicator(kind="shm", reason=WAY_INSIDE, size=most, users=size),
    )
