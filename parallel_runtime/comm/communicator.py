"""The seam below a group: what moves bytes between its members.

A communicator is handed tensors that are contiguous, on its device and not empty, in a group of at least two members; arguments
were checked and are equal on every member. Everything a user may hand over beyond that (strided views, zero sizes, dims, dtypes
that only travel as bytes, groups of one, defaults) is the coordinator's work, done once for all communicators.

Every call takes ``timeout_s``, the seconds it may wait for its peers. A communicator raises ``PeerTimeoutError``,
``PeerLostError`` or ``CollectiveMismatchError`` whose text says which group-local ranks it waited for; the coordinator adds the
group, the sequence number and the operation.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from parallel_runtime.comm.frames import blank_frame, pack_frame, raw_tensor, read_frame
from parallel_runtime.comm.traffic import Traffic

__all__ = ["Bytes", "Communicator", "Operation", "ReduceOp", "Work"]

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What a message is handed over in."""


class ReduceOp(StrEnum):
    """How a reduction combines the members' elements."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


class Operation(StrEnum):
    """Every primitive a communicator may support."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_GATHERV = "all_gatherv"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALLV = "all_to_allv"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"


class Work(ABC):
    """One operation under way. It keeps its tensors alive until it is done."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks, never raises."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until done; a second wait returns at once, or raises the same error again."""


class Communicator(ABC):
    """Moves tensors between the members of one group. Peers (``src``, ``dst``) are group-local.

    Attributes:
        kind: ``"c10d"``, ``"local"``, ``"shm"``, ``"symm_mem"`` or ``"fake"``.
        world_size: Number of members, at least 2.
        rank_in_group: This member's position.
        reason: Why it was chosen, for people.
        key: Equal on its members and never reused, where it has one.
    """

    kind: str
    world_size: int
    rank_in_group: int
    reason: str = ""
    key: str = ""

    @cached_property
    def traffic(self) -> Traffic:
        """The lock, the sequence number and the recorder of everything that runs over this communicator."""
        return Traffic()

    def join_traffic(self, traffic: Traffic) -> None:
        """Become a part of another communicator: what ends its waits ends the waits of this one, too."""
        self.traffic = traffic

    def paths(self) -> str:
        """Which way which sizes take within it, for people; ``""`` where there is one way only."""
        return ""

    @abstractmethod
    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether it can run ``operation`` on ``nbytes`` of ``dtype``. Equal on every member; asked before each plan is made.

        For ``SEND``: whether messages with different tags are kept apart.
        """

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Combine ``tensor`` (same shape and dtype everywhere) in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """Fill ``output`` ``(world_size, *tensor.shape)`` with every member's ``tensor``, in group order."""

    @abstractmethod
    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Like all_gather with sizes that differ; ``outputs[i]`` is shaped like member i's tensor and may be empty."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Combine ``tensor`` ``(world_size, *output.shape)`` over the members and keep this member's row in ``output``."""

    @abstractmethod
    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Send ``inputs[i]`` to member i and fill ``outputs[i]`` from member i. Any of them may be empty."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """Overwrite ``tensor`` with that of ``src``."""

    @abstractmethod
    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """Combine ``tensor`` into ``output`` on ``dst``, where alone ``output`` is given. ``tensor`` is left as it is."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """Fill ``outputs`` on ``dst``, where alone they are given, with every member's ``tensor``."""

    @abstractmethod
    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Fill ``output`` from ``inputs[rank_in_group]`` of ``src``, where alone ``inputs`` are given."""

    @abstractmethod
    def barrier(self, timeout_s: float) -> None:
        """Return once every member has entered."""

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start sending ``tensor``; messages of one (pair, tag) arrive in order.

        The caller leaves ``tensor`` alone until done.
        """

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Start filling ``tensor``, which has exactly the size that was sent."""

    def broadcast_bytes(self, data: Bytes | None, src: int, timeout_s: float) -> Bytes:
        """Hand bytes whose number only ``src`` knows to every member; a frame, and the rest where it does not fit.

        Args:
            data: What to send; only read on ``src``.
            src: Group-local.
            timeout_s: Seconds.

        Returns:
            The bytes; ``data`` itself on ``src``.
        """
        if data is not None and src == self.rank_in_group:
            body = data if isinstance(data, bytearray) else bytearray(data)
            frame, follows = pack_frame(body)
            self.broadcast_(frame, src, timeout_s)
            if follows:
                self.broadcast_(raw_tensor(body), src, timeout_s)
            return data
        blank = blank_frame()
        self.broadcast_(blank, src, timeout_s)
        arrived = read_frame(blank)
        if arrived.inline is not None:
            return arrived.inline
        body = bytearray(arrived.length)
        self.broadcast_(raw_tensor(body), src, timeout_s)
        return body

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor | None:
        """A tensor that all members can reach; ``None`` on all of them where there is no such memory."""
        del shape, dtype, timeout_s
        return None

    def symmetric_views(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Every member's counterpart of a part of a symmetric tensor, to be read by this one; ``None`` where it cannot. Local."""
        del tensor
        return None

    def publish(self, tensor: Tensor, timeout_s: float) -> None:
        """Return once what every member has written to its counterpart of ``tensor`` can be read by all."""
        del tensor
        self.barrier(timeout_s)

    @property
    def is_capturable(self) -> bool:
        """Whether its collectives on tensors may become part of a device graph. Not where the CPU takes part in them."""
        return False

    def enter_capture(self) -> None:
        """Graphs are going to be captured: begin to note the buffers that have to be known to the other members. Local."""
        return

    def leave_capture(self) -> None:
        """No more graphs are captured. Local; called also after an error, and before ``register_captured``."""
        return

    def register_captured(self, timeout_s: float) -> None:
        """Make known to all members what was noted; only called once every member has left its capture without an error.

        Args:
            timeout_s: Seconds to wait for the others.

        Collective: all members, in an order of communicators that is equal on all of them.
        """
        del timeout_s

    def end_vain_wait(self) -> None:
        """End a wait for a peer that will not come, where nothing else does. A thread at the side asks a few times per second."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free everything. Never communicates, never waits for a peer; twice is nothing."""
