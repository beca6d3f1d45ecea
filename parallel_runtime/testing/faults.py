"""Break one rank on purpose, at a named point, and see what the others are told.

A ``Fault`` is plain data: it travels to every rank, and does something on one of them only. It enters a context through
``ParallelContext(probe=...)``, and nothing else knows of it; there is no global switch. Faults of the calling code
(a skipped or wrong operation) are made by changing that rank's list of ``Step``.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Event
from typing import NoReturn, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Bytes, Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.context.connectors import Connection
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.context.probe import Stage
from parallel_runtime.errors import ArgumentError
from parallel_runtime.terms import Rank
from parallel_runtime.topology.layout import Layout

__all__ = [
    "EXIT_STATUS",
    "OPERATIONS",
    "Fault",
    "FaultKind",
    "FaultProbe",
    "InjectedError",
    "Phase",
    "Step",
    "run_steps",
    "spoil",
]

EXIT_STATUS = 41
"""With which an injected exit ends its process."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "broadcast_object")
"""What a ``Step`` may do."""


class FaultKind(StrEnum):
    """What goes wrong."""

    RAISE = "raise"
    EXIT = "exit"
    OS_EXIT = "os._exit"
    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    STALL = "stall"
    SLOW = "slow"
    LOSE = "lose"
    SKIP = "skip"
    WRONG_SHAPE = "wrong shape"
    WRONG_OP = "wrong op"
    WRONG_ORDER = "wrong order"
    CLOSE_EARLY = "close early"


class Phase(StrEnum):
    """Where it goes wrong."""

    JOINING = "joining"
    OPENING = "opening groups"
    OPERATION = "operation"
    CLOSING = "closing"


_OF_THE_CALLER = frozenset(
    {FaultKind.SKIP, FaultKind.WRONG_SHAPE, FaultKind.WRONG_OP, FaultKind.WRONG_ORDER, FaultKind.CLOSE_EARLY}
)
_PAUSES = frozenset({FaultKind.STALL, FaultKind.SLOW})


class InjectedError(Exception):
    """What an injected failure raises. Not an error of this library, as a user's own would not be."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong on one rank.

    Attributes:
        kind: What.
        rank: World rank that it happens to.
        phase: Where. What the calling code does wrong, it does among its operations.
        group: Whose operations are counted, in ``Phase.OPERATION``: ``"tp"``, ``"world"`` and so on.
        number: Which of them it is, from 1. ``LOSE`` counts sends only: a message that is not sent, though the sender thinks so.
        seconds: How long ``STALL`` and ``SLOW`` last.

    Raises:
        ArgumentError: The kind cannot happen in that phase, or ``number`` is not positive.
    """

    kind: FaultKind
    rank: int
    phase: Phase = Phase.OPERATION
    group: str = "world"
    number: int = 1
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        if self.kind in _OF_THE_CALLER | {FaultKind.LOSE} and self.phase is not Phase.OPERATION:
            raise ArgumentError(f"a fault of kind {self.kind!s} happens among operations, not while {self.phase!s}")
        if self.number < 1:
            raise ArgumentError(f"operations are numbered from 1, got number={self.number}")

    @property
    def is_of_the_caller(self) -> bool:
        """Whether ``spoil`` makes it, rather than ``FaultProbe``: among operations, the calling code also stalls between them."""
        return self.kind in _OF_THE_CALLER or (self.kind in _PAUSES and self.phase is Phase.OPERATION)

    def strike(self) -> None:
        """Let it happen to the calling rank, now.

        Raises:
            InjectedError: For ``RAISE``, and once ``STALL`` is over.
            SystemExit: For ``EXIT``.
        """
        if self.kind is FaultKind.SLOW:
            Event().wait(self.seconds)
        elif self.kind is FaultKind.SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._end()

    def _end(self) -> NoReturn:
        if self.kind is FaultKind.EXIT:
            sys.exit(EXIT_STATUS)
        if self.kind is FaultKind.OS_EXIT:
            os._exit(EXIT_STATUS)
        if self.kind is FaultKind.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind is FaultKind.STALL:
            Event().wait(self.seconds)
        raise InjectedError(f"injected: {self.kind!s} while {self.phase!s}")


@final
class FaultProbe:
    """Lets one fault happen to the context it is given to, where that context is the fault's rank.

    Args:
        fault: What, where and to whom.
        layout: Of the context; tells which ranks the fault's group has.
        rank: Of the context.
    """

    def __init__(self, fault: Fault, layout: Layout, rank: int) -> None:
        is_victim = rank == fault.rank and not fault.is_of_the_caller
        self._fault = fault
        self._stage = fault.phase.value if is_victim else ""
        counts = is_victim and fault.phase is Phase.OPERATION
        self._ranks = layout.group_of(rank, fault.group) if counts else ()

    def at(self, stage: Stage) -> None:
        """Strike if the fault belongs to this stage.

        Args:
            stage: Of the context.
        """
        if stage.value == self._stage:
            self._fault.strike()

    def connected(self, ranks: tuple[Rank, ...], connection: Connection) -> Connection:
        """Count the operations of the fault's group.

        Args:
            ranks: Of a connection.
            connection: As it was opened.

        Returns:
            A connection that strikes at the fault's operation; any other group's as it is.
        """
        if ranks != self._ranks:
            return connection
        data = _Trap(connection.data, self._fault)
        return replace(connection, data=data, control=data if connection.control is connection.data else connection.control)


@final
class _Lost(Work):
    """A send that never arrives."""

    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        del timeout_s


@final
class _Trap(Communicator):
    """A communicator in which the n-th call strikes before anything moves."""

    def __init__(self, inner: Communicator, fault: Fault) -> None:
        self.kind = inner.kind
        self.reason = inner.reason
        self.key = inner.key
        self.rank_in_group = inner.rank_in_group
        self.world_size = inner.world_size
        self.__dict__["traffic"] = inner.traffic
        self._inner = inner
        self._fault = fault
        self._calls = 0

    def _count(self) -> Communicator:
        if self._fault.kind is not FaultKind.LOSE and self._is_it():
            self._fault.strike()
        return self._inner

    def _is_it(self) -> bool:
        self._calls += 1
        return self._calls == self._fault.number

    def join_traffic(self, traffic: Traffic) -> None:
        self._inner.join_traffic(traffic)
        self.__dict__["traffic"] = traffic

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        return self._inner.supports(operation, dtype, nbytes)

    def paths(self) -> str:
        return self._inner.paths()

    def enter_capture(self) -> None:
        self._inner.enter_capture()

    def leave_capture(self) -> None:
        self._inner.leave_capture()

    def register_captured(self, timeout_s: float) -> None:
        self._inner.register_captured(timeout_s)

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        self._count().all_reduce_(tensor, op, timeout_s)

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        self._count().all_gather(output, tensor, timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        self._count().all_gatherv(outputs, tensor, timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        self._count().reduce_scatter(output, tensor, op, timeout_s)

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        self._count().all_to_allv(outputs, inputs, timeout_s)

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        self._count().broadcast_(tensor, src, timeout_s)

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        self._count().reduce(output, tensor, dst, op, timeout_s)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        self._count().gather(outputs, tensor, dst, timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        self._count().scatter(output, inputs, src, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self._count().barrier(timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        if self._fault.kind is FaultKind.LOSE and self._is_it():
            return _Lost()
        return self._count().isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._count().irecv(tensor, src, tag)

    def broadcast_bytes(self, data: Bytes | None, src: int, timeout_s: float) -> Bytes:
        return self._count().broadcast_bytes(data, src, timeout_s)

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor | None:
        return self._count().symmetric_empty(shape, dtype, timeout_s)

    def symmetric_views(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        return self._inner.symmetric_views(tensor)

    def publish(self, tensor: Tensor, timeout_s: float) -> None:
        self._count().publish(tensor, timeout_s)

    def end_vain_wait(self) -> None:
        self._inner.end_vain_wait()

    def close(self) -> None:
        self._inner.close()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of a world that ``run_steps`` plays, the same on every member of its group.

    Attributes:
        group: ``"world"``, ``"tp"`` and so on.
        operation: One of ``OPERATIONS``.
        size: Elements of its float32 tensor.
        pause_s: Seconds that the rank spends elsewhere before it.
    """

    group: str
    operation: str
    size: int = 4
    pause_s: float = 0.0


def spoil(steps: Sequence[Step], fault: Fault) -> tuple[Step, ...]:
    """What the fault's rank does instead, where the fault is of the calling code.

    Args:
        steps: What every rank does.
        fault: ``fault.number`` counts the steps of ``fault.group``.

    Returns:
        The rank's own steps; ``steps`` themselves for other kinds.

    Raises:
        ArgumentError: There are not so many steps of that group, or, for ``WRONG_ORDER``, none of another group after it.
    """
    if not fault.is_of_the_caller:
        return tuple(steps)
    places = [place for place, step in enumerate(steps) if step.group == fault.group]
    if len(places) < fault.number:
        raise ArgumentError(f"there are {len(places)} steps of group {fault.group}, so number={fault.number} never comes")
    here = places[fault.number - 1]
    before, step, after = tuple(steps[:here]), steps[here], tuple(steps[here + 1 :])
    if fault.kind is FaultKind.SKIP:
        return (*before, *after)
    if fault.kind is FaultKind.CLOSE_EARLY:
        return before
    if fault.kind in _PAUSES:
        return (*before, replace(step, pause_s=fault.seconds), *after)
    if fault.kind is FaultKind.WRONG_SHAPE:
        return (*before, replace(step, size=step.size + 3), *after)
    if fault.kind is FaultKind.WRONG_OP:
        other = "barrier" if step.operation != "barrier" else "all_gather"
        return (*before, replace(step, operation=other), *after)
    if not after or after[0].group == step.group:
        raise ArgumentError(
            f"a wrong order of two groups needs a step of another group after step {fault.number} of {fault.group}"
        )
    return (*before, after[0], step, *after[1:])


def run_steps(ctx: ParallelContext, steps: Sequence[Step]) -> int:
    """Play steps on this rank's groups.

    Args:
        ctx: Open.
        steps: In order; groups of one rank are passed over.

    Returns:
        How many were played.

    Raises:
        ArgumentError: A step's operation is not one of ``OPERATIONS``.

    Collective: all ranks of the context, with equal steps where nothing is to go wrong.
    """
    for step in steps:
        if ctx.group(step.group).world_size > 1:
            _play(ctx, step)
    return len(steps)


def _play(ctx: ParallelContext, step: Step) -> None:
    group = ctx.group(step.group)
    tensor = torch.ones(step.size)
    if step.pause_s:
        Event().wait(step.pause_s)
    match step.operation:
        case "all_reduce":
            group.all_reduce(tensor)
        case "all_gather":
            group.all_gather(tensor)
        case "reduce_scatter":
            group.reduce_scatter(tensor.repeat(group.world_size))
        case "broadcast":
            group.broadcast(tensor, src=0)
        case "barrier":
            group.barrier()
        case "broadcast_object":
            group.broadcast_object({"size": step.size} if group.is_first_rank else None, src=0)
        case _:
            raise ArgumentError(f"a step cannot {step.operation!r}; use one of {', '.join(OPERATIONS)}")
