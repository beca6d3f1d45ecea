"""What communicators cost their members, as measured on torch 2.13 (CPU).

All gloo groups of a rank share one listening device. For groups of ``n1, n2, ...`` members a rank pays

- threads: 1 per group, and 1 for the device;
- sockets: ``n - 1`` connections per group, and 1 that listens;
- descriptors: ``n - 1`` per group, and 4 for the device (the listening socket, two to wake its loop, one to wait on);
- bytes: about 60 KB of resident memory per group, and for a same-host group the shared memory set aside for each member.

NCCL's own threads and device buffers depend on the device and its version and are not counted. Ranks as threads and fake worlds
cost nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from parallel_runtime.config.plan_text import format_bytes

__all__ = ["SHM_BYTES", "Budget", "Budgets", "CommunicatorKind", "PlannedCommunicator", "gloo_device_cost"]

CommunicatorKind: TypeAlias = Literal["c10d", "shm", "local", "fake"]
"""What moves the bytes: torch's own backends, shared memory, threads, or nothing at all."""

SHM_BYTES = 4 << 20
"""Bytes of shared memory set aside for each member of a same-host group."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What communicators cost, for one rank or for a world. Budgets add up, and ``budget * 3`` is three times as much.

    Attributes:
        communicators: How many are opened, counted once by each member.
        sockets: Connections and listening sockets.
        threads: Operating-system threads.
        descriptors: File descriptors, sockets included.
        bytes: Resident and shared memory.
    """

    communicators: int = 0
    sockets: int = 0
    threads: int = 0
    descriptors: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.communicators:,} communicators, {self.sockets:,} sockets, {self.threads:,} threads, "
            f"{self.descriptors:,} descriptors, {format_bytes(self.bytes)}"
        )

    def __add__(self, other: "Budget") -> "Budget":
        return Budget(
            communicators=self.communicators + other.communicators,
            sockets=self.sockets + other.sockets,
            threads=self.threads + other.threads,
            descriptors=self.descriptors + other.descriptors,
            bytes=self.bytes + other.bytes,
        )

    def __mul__(self, count: int) -> "Budget":
        return Budget(
            communicators=self.communicators * count,
            sockets=self.sockets * count,
            threads=self.threads * count,
            descriptors=self.descriptors * count,
            bytes=self.bytes * count,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a world costs, seen from two sides.

    Attributes:
        largest_rank: What one rank pays at most.
        world: What all ranks pay together.
    """

    largest_rank: Budget
    world: Budget


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCommunicator:
    """A communicator that a group will open.

    Attributes:
        kind: What moves the bytes.
        backend: Name of the torch backend, for kind ``c10d``; otherwise ``""``.
        plane: ``"control"`` (CPU messages), ``"data"`` (tensors), or ``"both"``.
        reason: Why this one.
    """

    kind: CommunicatorKind
    backend: str = ""
    plane: Literal["control", "data", "both"] = "both"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.backend}" if self.backend else self.kind

    def cost(self, world_size: int) -> Budget:
        """What it costs one member, the gloo device that all groups share left out.

        Args:
            world_size: Number of members, at least 2.

        Returns:
            The cost, by the formula at the top of this module.
        """
        if self.backend == "gloo":
            peers = world_size - 1
            return Budget(communicators=1, sockets=peers, threads=1, descriptors=peers, bytes=60_000)
        return Budget(communicators=1, bytes=SHM_BYTES if self.kind == "shm" else 0)


def gloo_device_cost(communicators: Iterable[PlannedCommunicator]) -> Budget:
    """What one rank pays once, however many gloo groups it is in.

    Args:
        communicators: All communicators of the rank.

    Returns:
        The cost of the listening device; nothing where no communicator is gloo's.
    """
    if any(communicator.backend == "gloo" for communicator in communicators):
        return Budget(sockets=1, threads=1, descriptors=4)
    return Budget()
