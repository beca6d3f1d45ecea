"""What communicators cost their members, as measured on torch 2.13 (CPU).

All gloo groups of a rank share one listening device. For groups of ``n1, n2, ...`` members a rank pays

- threads: 1 per gloo group, and 1 for the device;
- sockets: ``n - 1`` connections per gloo group, and 1 that listens;
- descriptors: ``n - 1`` per gloo group, and 4 for the device (the listening socket, two to wake its loop, one to wait on);
  ``n`` per group that shares memory (the memory, and one to notice the end of each peer's process, if it is not this one);
- bytes: about 60 KB of resident memory per gloo group; for a group that shares memory, its share of the segment.

The monitor of a context, one listening socket and one thread, comes on top.

NCCL's own threads and device buffers depend on the device and its version and are not counted. Ranks that are threads
and talk through a hub, and fake worlds, cost nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import final

from parallel_runtime.comm.select import PlannedCommunicator
from parallel_runtime.comm.shm.geometry import choose_geometries
from parallel_runtime.config.plan_text import format_bytes, format_count

__all__ = ["Budget", "Budgets", "communicator_cost", "gloo_device_cost", "most_of_each"]


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
        nouns = ("communicator", "socket", "thread", "descriptor")
        return ", ".join([*(format_count(getattr(self, f"{noun}s"), noun) for noun in nouns), format_bytes(self.bytes)])

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


def communicator_cost(communicator: PlannedCommunicator) -> Budget:
    """What a communicator costs one of its members, the gloo device that all groups share left out.

    Args:
        communicator: As chosen.

    Returns:
        The cost, by the formula at the top of this module.
    """
    peers = communicator.size - 1
    if communicator.backend == "gloo":
        return Budget(communicators=1, sockets=peers, threads=1, descriptors=peers, bytes=60_000)
    if communicator.kind == "shm":
        return Budget(communicators=1, descriptors=peers + 1, bytes=choose_geometries(communicator.size)[0].nbytes // (peers + 1))
    return Budget(communicators=1)


def most_of_each(budgets: Sequence[Budget]) -> Budget:
    """What is never exceeded by any of some budgets.

    Args:
        budgets: At least one.

    Returns:
        The largest value of each field.
    """
    return Budget(**{field.name: max(getattr(budget, field.name) for budget in budgets) for field in fields(Budget)})


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
