"""Shared memory as a communicator: CPU tensors of ranks on one host, at the speed of memory."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Bytes, Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.shm.geometry import MAX_MEMBERS, Geometry, choose_geometries
from parallel_runtime.comm.shm.memory import keep_for_ever
from parallel_runtime.comm.shm.p2p import Mailbox
from parallel_runtime.comm.shm.planner import Planner
from parallel_runtime.comm.shm.plans import Plan
from parallel_runtime.comm.shm.reductions import ARITHMETIC_DTYPES
from parallel_runtime.comm.shm.remote import RemoteMemory, can_reach_all
from parallel_runtime.comm.shm.segment import KeyValueStore, Segment, SegmentWay, Unavailable, open_segment
from parallel_runtime.comm.shm.steps import Steps, fingerprint
from parallel_runtime.comm.shm.symmetric import SymmetricBuffer
from parallel_runtime.comm.shm.waiting import Bells, Errands, Liveness, Waiter
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.errors import (
    ArgumentError,
    ContextStateError,
    EarlierFailureError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
)

__all__ = ["ShmCommunicator"]

_MAX_PLANS: Final = 512
_PAGE: Final = 4096
_REDUCTIONS: Final = frozenset((Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.REDUCE))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Everything that refers to the segment; dropped as one."""

    steps: Steps
    planner: Planner
    mailbox: Mailbox
    bells: Bells
    liveness: Liveness


@final
class ShmCommunicator(Communicator):
    """Moves CPU tensors between processes (or threads) of one host and one user through memory they share.

    Made by ``create``. An operation that fails half-way leaves the group unusable: this member then counts as gone, so that no
    peer waits for it, and every later call says what broke it.
    """

    kind = "shm"

    def __init__(
        self, segment: Segment, geometry: Geometry, rank_in_group: int, store: KeyValueStore, key: str, errands: Errands
    ) -> None:
        self.world_size = geometry.world_size
        self.rank_in_group = rank_in_group
        self._store = store
        self._key = key
        self._segment_way = segment.way
        self._geometry = geometry
        self._broken = ""
        self._plans: dict[Hashable, Plan] = {}
        self._num_buffers = 0
        self._pid = os.getpid()
        self._byte_texts = tuple(f"broadcast_bytes(src {src})" for src in range(self.world_size))
        self._byte_prints = tuple(map(fingerprint, self._byte_texts))
        memory = segment.memory
        bells = Bells(memory, geometry, rank_in_group)
        liveness = Liveness(memoryview(memory).cast("q"), geometry, segment.pids, rank_in_group)
        shares_process = segment.pids.count(os.getpid()) > 1
        is_crowded = shares_process or segment.num_cores < self.world_size
        waiter = Waiter(bells, liveness, is_crowded=is_crowded, shares_process=shares_process, errands=errands)
        waiter.traffic = self.traffic
        self._waiter = waiter
        self._steps = steps = Steps(memory, geometry, rank_in_group, waiter, bells)
        mailbox = Mailbox(memory, geometry, rank_in_group, waiter, bells)
        mailbox.on_break = self._break
        self._parts: _Parts | None = _Parts(steps=steps, planner=Planner(steps), mailbox=mailbox, bells=bells, liveness=liveness)

    @classmethod
    def create(
        cls,
        store: KeyValueStore,
        key: str,
        rank_in_group: int,
        world_size: int,
        timeout_s: float,
        *,
        ways: Sequence[SegmentWay] = ("proc", "socket"),
        errands: Errands | None = None,
        direct: bool = True,
    ) -> Self | Unavailable:
        """Open the shared memory of one group.

        Args:
            store: Reaches all members; used again by ``symmetric_empty``.
            key: Prefix of its keys in the store, never used before.
            rank_in_group: This member's position.
            world_size: Number of members, at least 2.
            timeout_s: Seconds to wait for the other members.
            ways: How this member may get at the memory.
            errands: Shared by all groups of this rank, so that a wait in one of them moves the messages of all.
            direct: Let the members read large tensors where they lie, if the system allows it to all of them.

        Returns:
            The communicator; or, on all members alike, why they cannot share memory.

        Raises:
            RendezvousError: A member did not take part in time.

        Collective: all members.
        """
        if world_size > MAX_MEMBERS:
            return Unavailable(reason=f"{world_size} members; a group that shares memory has at most {MAX_MEMBERS}")
        geometries = choose_geometries(world_size)
        sizes = [geometry.nbytes for geometry in geometries]
        segment = open_segment(store, key, rank_in_group, world_size, sizes, timeout_s, ways)
        if isinstance(segment, Unavailable):
            return segment
        geometry = geometries[sizes.index(segment.nbytes)]
        made = cls(segment, geometry, rank_in_group, store, key, Errands() if errands is None else errands)
        try:
            made._try_remote(segment, timeout_s, is_wanted=direct)
        except BaseException as exc:
            made.close()
            if isinstance(exc, PeerError):
                raise RendezvousError(f"shared memory {key}: {exc}") from exc
            raise
        return made

    def _try_remote(self, segment: Segment, timeout_s: float, *, is_wanted: bool) -> None:
        parts = self._open()
        remote = RemoteMemory(segment.pids if is_wanted else [None] * self.world_size, parts.liveness)
        if can_reach_all(self._steps, remote, timeout_s):
            parts.planner.remote = remote
            parts.mailbox.read_from(remote)

    def join_traffic(self, traffic: Traffic) -> None:
        """Become a part of another communicator."""
        super().join_traffic(traffic)
        self._waiter.traffic = traffic

    def describe(self) -> str:
        """One line for people: the memory it has, how it got it, how it waits."""
        parts = self._open()
        geometry = self._geometry
        return (
            f"shm: {geometry.nbytes / 2**20:.1f} MiB for {self.world_size} members, slots of {geometry.slot_bytes >> 10} KiB, "
            f"rings of {geometry.ring_bytes >> 10} KiB, attached by {self._segment_way}, "
            f"sleeps {'fenced' if parts.bells.is_fenced else 'in milliseconds'}, "
            f"large tensors {'in place' if parts.planner.remote is not None else 'in pieces'}"
        )

    def paths(self) -> str:
        """One shot or two, slots or in place, by size."""
        planner = self._open().planner
        return planner.limits.describe(reads_in_place=planner.remote is not None)

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """Every movement of every dtype; reductions of what has arithmetic."""
        return operation not in _REDUCTIONS or dtype in ARITHMETIC_DTYPES

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Combine in place, in rank order; equal bits on every member."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, id(op))  # hashing an enum member runs Python code
        plan = self._plans.get(key) or self._plan(key, Planner.all_reduce, tensor, op)
        try:
            plan.run(self._steps, timeout_s)
        except BaseException as exc:
            self._break(exc)
            raise

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """Copy every member's tensor."""
        key = (output.data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype)
        self._run(self._plans.get(key) or self._plan(key, Planner.all_gather, output, tensor), timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Copy every member's tensor; sizes differ."""
        key = ("all_gatherv", *map(_where, outputs), *_where(tensor))
        self._run(self._plans.get(key) or self._plan(key, Planner.all_gatherv, outputs, tensor), timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Combine this member's row, in rank order."""
        key = ("reduce_scatter", output.data_ptr(), *_where(tensor), op)
        self._run(self._plans.get(key) or self._plan(key, Planner.reduce_scatter, output, tensor, op), timeout_s)

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Exchange parts of any size."""
        address, numel = Tensor.data_ptr, Tensor.numel
        places = (*map(address, outputs), *map(numel, outputs), *map(address, inputs), *map(numel, inputs))
        key = ("all_to_allv", outputs[0].dtype, inputs[0].dtype, *places)
        self._run(self._plans.get(key) or self._plan(key, Planner.all_to_allv, outputs, inputs), timeout_s)

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """Copy the tensor of ``src``, which waits for its readers where it is large, or where it is several operations ahead."""
        key = ("broadcast", *_where(tensor), src)
        plan = self._plans.get(key) or self._plan(key, Planner.broadcast, tensor, src)
        try:
            self._run(plan, timeout_s)
        except BaseException:
            if plan.is_exposed:
                keep_for_ever(tensor)
            raise

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """Combine on ``dst``, in rank order."""
        key = ("reduce", output is not None and output.data_ptr(), *_where(tensor), dst, op)
        self._run(self._plans.get(key) or self._plan(key, Planner.reduce, output, tensor, dst, op), timeout_s)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """Copy every member's tensor on ``dst``."""
        key = ("gather", *map(_where, outputs or ()), *_where(tensor), dst)
        self._run(self._plans.get(key) or self._plan(key, Planner.gather, outputs, tensor, dst), timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Copy this member's part from ``src``."""
        key = ("scatter", *_where(output), *map(_where, inputs or ()), src)
        self._run(self._plans.get(key) or self._plan(key, Planner.scatter, output, inputs, src), timeout_s)

    def barrier(self, timeout_s: float) -> None:
        """Wait until every member is here."""
        self._run(self._plans.get("barrier") or self._plan("barrier", Planner.barrier), timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start sending; done when all bytes are in the ring, so at once for what fits it."""
        mailbox = self._open().mailbox
        try:
            return mailbox.isend(tensor, dst, tag)
        except BaseException as exc:
            self._break(exc)
            raise

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Start receiving."""
        mailbox = self._open().mailbox
        try:
            return mailbox.irecv(tensor, src, tag)
        except BaseException as exc:
            self._break(exc)
            raise

    def broadcast_bytes(self, data: Bytes | None, src: int, timeout_s: float) -> Bytes:
        """Hand bytes whose number only ``src`` knows to every member.

        Args:
            data: What to send; only read on ``src``.
            src: Group-local.
            timeout_s: Seconds.

        Returns:
            The bytes, on every member; ``data`` itself on ``src``.

        Raises:
            ArgumentError: ``src`` has nothing to send.
            PeerTimeoutError: ``src``, or a reader that is several operations behind, did not come in time.
            PeerLostError: It is gone.
            CollectiveMismatchError: Members are in different operations.

        Collective: one step per slot of bytes.
        """
        steps, print_ = self._open().steps, self._byte_prints[src]
        if src == self.rank_in_group and data is None:
            raise ArgumentError(f"broadcast_bytes: this member, {src}, is the source and has nothing to send; pass the bytes")
        try:
            if data is not None and src == self.rank_in_group:
                steps.send_bytes(data, print_, timeout_s)
                return data
            return steps.receive_bytes(src, print_, self._byte_texts[src], timeout_s)
        except BaseException as exc:
            self._break(exc)
            raise

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor:
        """A tensor that lives in memory of all members: ``all_reduce_``, ``all_gather`` and ``reduce_scatter`` copy nothing in.

        The fast way is taken where every member passes the same part of the same allocation; an operation that only some
        members enter with symmetric memory is a mismatch. The memory stays until the communicator is closed and the tensor gone.

        Args:
            shape: Equal on every member.
            dtype: Equal on every member.
            timeout_s: Seconds to wait for the others.

        Returns:
            This member's tensor, uninitialised, on CPU.

        Raises:
            PeerFailedError: The memory could not be had; raised on all members.
            RendezvousError: A member did not take part in time.

        Collective: all members, same order.
        """
        parts = self._open()
        self._num_buffers += 1
        nbytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        size = -(-nbytes // _PAGE) * _PAGE * self.world_size
        key = f"{self._key}/symmetric/{self._num_buffers}"
        segment = open_segment(self._store, key, self.rank_in_group, self.world_size, [size], timeout_s)
        if isinstance(segment, Unavailable):
            raise PeerFailedError(f"no symmetric memory of {self.world_size} x {nbytes} bytes: {segment.reason}")
        buffer = SymmetricBuffer(segment, self._num_buffers, self.world_size, self.rank_in_group)
        parts.planner.buffers.append(buffer)
        self._plans.clear()  # one of them may stand for an ordinary tensor that lay where the buffer lies now
        return buffer.tensor(tuple(shape), dtype)

    def symmetric_views(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """The same elements of every member's part of the allocation."""
        views = (buffer.tensors(tensor) for buffer in self._open().planner.buffers)
        return next((found for found in views if found is not None), None)

    def publish(self, tensor: Tensor, timeout_s: float) -> None:
        """Wait until every member is here; its stores come before."""
        key = ("publish", tensor.numel(), tensor.dtype)
        self._run(self._plans.get(key) or self._plan(key, Planner.publish, tensor), timeout_s)

    def close(self) -> None:
        """Leave: peers that wait for this member learn it at once. Memory goes with the last tensor that lies in it.

        In a forked child it only lets go: the member is the parent.
        """
        parts = self._parts
        if parts is None:
            return
        self._parts = None
        del self._steps, self._waiter  # no plan is left that could ask for them
        self._plans.clear()
        if os.getpid() == self._pid:
            parts.liveness.leave(gave_up=False)
            parts.bells.ring()
        parts.mailbox.fail(ContextStateError("the communicator was closed before this message was done"))
        parts.liveness.close()

    def _run(self, plan: Plan, timeout_s: float) -> None:
        try:
            plan.run(self._steps, timeout_s)
        except BaseException as exc:
            self._break(exc)
            raise

    def _plan(self, key: Hashable, make: Callable[..., Plan], *args: object) -> Plan:
        planner = self._open().planner
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
            planner.forget()
        plan = self._plans[key] = make(planner, *args)
        return plan

    def _open(self) -> _Parts:
        if self._broken:
            raise EarlierFailureError(f"this group takes part in nothing since an operation failed: {self._broken}")
        if self._parts is None:
            raise ContextStateError("the shared memory of this group is closed")
        return self._parts

    def _break(self, exc: BaseException) -> None:
        parts = self._parts if os.getpid() == self._pid else None
        self._broken = f"{type(exc).__name__}: {exc}"
        self._plans.clear()
        if parts is not None:
            parts.liveness.leave(gave_up=True)
            parts.bells.ring()
            parts.mailbox.fail(PeerLostError(f"given up because an operation failed: {self._broken}"))


def _where(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
