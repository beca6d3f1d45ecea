"""Groups of ``torch.distributed`` built straight from a store.

No default process group, no entry in torch's tables: ``torch.distributed.is_initialized()`` stays as it was. What the backends
raise is translated here.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Final, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.c10d.stores import Store
from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.errors import ArgumentError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["C10dCommunicator", "gloo_device"]

_SLICE_S: Final = 0.25
_SLICE: Final = timedelta(seconds=_SLICE_S)
"""How long a gloo collective waits between two looks at what has become of its peers."""
_SLICE_IS_OVER: Final = "Operation timed out!"
_SUSPICIOUS_S: Final = 1.0
"""A slice that ends so much too late tells that this process did not run. A machine's sleep does not count: clocks stop, too."""
_STANDSTILL_S: Final = 60.0
"""So long a standstill of this process is made up for: gloo's own clock, which cannot be stopped, is set later by this much."""
_MOST_KEPT: Final = 256
"""Options that are kept: one per operation, deadline and root."""
_BREAK_TAG: Final = 2**31 - 1
"""Of a message that nobody sends."""
_TIMED_OUT: Final = re.compile(r"[Tt]im(ed|e) ?out|[Tt]imeout")
_LOST: Final = re.compile(r"closed by peer|reset by peer|[Bb]roken pipe|pair closure|refused|not connected|closed|[Ss]hutdown")
_GLOO_SUMS: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)


@final
class C10dCommunicator(Communicator):
    """One member of a group of a ``torch.distributed`` backend.

    Args:
        store: Reached by every member.
        key: Prefix of the group in the store; equal on its members, never reused.
        rank_in_group: This member.
        world_size: Members of the group, at least 2.
        backend: ``"gloo"``, or ``"nccl"`` for CUDA.
        timeout_s: How long opening may wait for the other members, in seconds.
        device: Where the tensors live.
        ranks: World ranks in group order, for torch's own records.
        transport: From ``gloo_device``; groups that share one open fewer threads and descriptors. A loopback one by default.

    Raises:
        ArgumentError: The backend is unknown, or the member does not fit.
        PeerTimeoutError: Not every member came within ``timeout_s``.
        PeerLostError: A member, or the store, went away while opening.

    Collective: all members open it; they meet in the store.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank_in_group: int,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        device: torch.device | None = None,
        ranks: Sequence[int] | None = None,
        transport: object | None = None,
    ) -> None:
        if not 0 <= rank_in_group < world_size or world_size < 2:
            raise ArgumentError(f"group {key}: member {rank_in_group} of {world_size}; a c10d group has at least 2 members")
        self.kind = "c10d"
        self.rank_in_group = rank_in_group
        self.world_size = world_size
        self.backend = backend
        self._is_gloo = backend == "gloo"
        self._device = device or torch.device("cpu")
        self.key = key
        self._broken = ""
        self._still_s = 0.0
        self._waits_for: tuple[int, float] | None = None
        self._cut_off: PeerError | None = None
        self._kept: dict[tuple[Any, float, int, int], Any] = {}
        limit = timedelta(seconds=timeout_s)
        self._ranks = table = list(range(world_size)) if ranks is None else [int(rank) for rank in ranks]
        prefix = c10d.PrefixStore(key, store)
        prefix.set_timeout(limit)
        try:
            if backend == "gloo":
                self._group: Any = _gloo(prefix, rank_in_group, world_size, limit, key, table, transport)
            elif backend == "nccl":
                self._group = _nccl(prefix, rank_in_group, world_size, limit, key, table)
            else:
                raise ArgumentError(f"group {key}: unknown backend {backend!r}; use gloo or nccl")
        except RuntimeError as exc:
            raise self._translated(exc, "its other members", timeout_s) from exc

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """Arithmetic on the dtypes that gloo and nccl share, and int16; moves of everything the coordinator hands over.

        Sends only where tags are kept apart: nccl matches them in the order in which both sides start them, whatever their tags.
        """
        del nbytes
        if operation in (Operation.SEND, Operation.RECV):
            return self.backend == "gloo"
        return dtype in _GLOO_SUMS or dtype is torch.int16

    @property
    def is_capturable(self) -> bool:
        """Nccl only: its kernels run on streams, and waiting for one there holds up no CPU."""
        return self.backend == "nccl"

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Reduced by the backend; avg is a sum that is divided, int16 travels as int32."""
        work = tensor.int() if tensor.dtype is torch.int16 else tensor
        options = self._options(c10d.AllreduceOptions, timeout_s, op=op)
        self._finish(lambda group: group.allreduce([work], options), "its peers", timeout_s)
        if op is ReduceOp.AVG:
            work.div_(self.world_size)
        if work is not tensor:
            tensor.copy_(work)

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """One all-gather of the backend; gloo is given a list of rows, nccl would copy such a list once more."""
        options = self._options(c10d.AllgatherOptions, timeout_s)
        if self.backend == "gloo":
            self._finish(lambda group: group.allgather([list(output)], [tensor], options), "its peers", timeout_s)
        else:
            self._finish(lambda group: group._allgather_base(output, tensor, options), "its peers", timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """An all-to-all in which everybody sends the same to everyone."""
        self.all_to_allv(outputs, [tensor] * self.world_size, timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """One reduce-scatter of the backend; on gloo, and for int16, an all-reduce of which one row is kept."""
        if self.backend == "gloo" or tensor.dtype is torch.int16:
            work = tensor.clone()
            self.all_reduce_(work, op, timeout_s)
            output.copy_(work[self.rank_in_group])
            return
        options = self._options(c10d.ReduceScatterOptions, timeout_s, op=op)
        self._finish(lambda group: group._reduce_scatter_base(output, tensor, options), "its peers", timeout_s)
        if op is ReduceOp.AVG:
            output.div_(self.world_size)

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """One all-to-all of the backend over flat copies."""
        sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
        received = sent.new_empty(sum(tensor.numel() for tensor in outputs))
        sizes = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        options = self._options(c10d.AllToAllOptions, timeout_s)
        self._finish(lambda group: group.alltoall_base(received, sent, *sizes, options), "its peers", timeout_s)
        for target, piece in zip(outputs, torch.split(received, sizes[0]), strict=True):
            target.copy_(piece.view(target.shape))

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """One broadcast of the backend."""
        options = self._options(c10d.BroadcastOptions, timeout_s, root=src)
        self._finish(lambda group: group.broadcast([tensor], options), f"member {src} or its peers", timeout_s)

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """One reduce of the backend, over a copy since some backends scribble on their input."""
        work = tensor.int() if tensor.dtype is torch.int16 else tensor.clone()
        options = self._options(c10d.ReduceOptions, timeout_s, op=op, root=dst)
        self._finish(lambda group: group.reduce([work], options), f"member {dst} or its peers", timeout_s)
        if output is not None:
            output.copy_(work.div_(self.world_size) if op is ReduceOp.AVG else work)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """One gather of the backend."""
        options = self._options(c10d.GatherOptions, timeout_s, root=dst)
        targets = [] if outputs is None else [list(outputs)]
        self._finish(lambda group: group.gather(targets, [tensor], options), f"member {dst} or its peers", timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """One scatter of the backend."""
        options = self._options(c10d.ScatterOptions, timeout_s, root=src)
        sources = [] if inputs is None else [list(inputs)]
        self._finish(lambda group: group.scatter([output], sources, options), f"member {src} or its peers", timeout_s)

    def barrier(self, timeout_s: float) -> None:
        """One barrier of the backend."""
        options = self._options(c10d.BarrierOptions, timeout_s)
        self._finish(lambda group: group.barrier(options), "its peers", timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start one send of the backend."""
        return _C10dWork(self, self._start(lambda group: group.send([tensor], dst, tag), f"member {dst}"), tensor, dst)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Start one receive of the backend."""
        return _C10dWork(self, self._start(lambda group: group.recv([tensor], src, tag), f"member {src}"), tensor, src)

    def end_vain_wait(self) -> None:
        """Break a send or receive off that waits for a peer which is gone, though the connection to it is still there."""
        waits_for, diagnostician = self._waits_for, self.traffic.diagnostician
        if waits_for is None or diagnostician is None or monotonic() - waits_for[1] < _SLICE_S:
            return
        error = diagnostician.interruption((self._ranks[waits_for[0]],), self.key, sys.maxsize)
        if error and self._waits_for is waits_for:
            self._cut_off = error
            self._break_off(error)

    def close(self) -> None:
        """Drop the backend: its threads and descriptors go with the last reference, and waiting peers learn of it."""
        self._group = None

    def _options(self, kind: Any, timeout_s: float, *, op: ReduceOp | None = None, root: int = 0) -> Any:
        """Torch's options of one operation; making them takes longer than the call itself, so they are kept."""
        key = (kind, timeout_s, id(op), root)  # hashing an enum member runs Python code
        options = self._kept.get(key)
        if options is None:
            options = kind()
            options.timeout = self._limit(timeout_s)
            if op is not None:
                options.reduceOp = _op(op)
            if hasattr(options, "rootRank"):
                options.rootRank = root
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = options
        return options

    def _limit(self, timeout_s: float) -> timedelta:
        """What the backend is told. The deadline of a collective of gloo is kept here, where a standstill can be made up for."""
        return timedelta(seconds=timeout_s + (_STANDSTILL_S if self.backend == "gloo" else 0.0))

    def _refuse(self) -> NoReturn:
        why = f"this group can no longer be used: {self._broken}" if self._broken else "this communicator is closed"
        raise PeerLostError(why)

    def _start(self, call: Callable[[Any], c10d.Work], whom: str) -> c10d.Work:
        if self._group is None or self._broken:
            self._refuse()
        try:
            return call(self._group)
        except RuntimeError as exc:
            raise self._translated(exc, whom, 0.0) from exc

    def _finish(self, call: Callable[[Any], c10d.Work], whom: str, timeout_s: float) -> None:
        group = self._group
        if group is None or self._broken:
            self._refuse()
        try:
            if self._is_gloo:
                self._wait_in_slices(call(group), whom, timeout_s)
            else:
                call(group).wait()
        except RuntimeError as exc:
            if isinstance(exc, PeerError):
                raise
            raise self._translated(exc, whom, timeout_s) from exc
        self.traffic.steps += 1

    def _wait_in_slices(self, work: c10d.Work, whom: str, timeout_s: float) -> None:
        """Wait for a collective until the deadline; a peer that is gone ends it sooner, a standstill of this process later."""
        self._still_s = 0.0
        start = monotonic()
        deadline = start + timeout_s
        slice_s = _SLICE_S if timeout_s >= _SLICE_S else timeout_s
        while True:
            try:
                work.wait(_SLICE if slice_s == _SLICE_S else timedelta(seconds=slice_s))
                return
            except RuntimeError as exc:
                still_s = monotonic() - start - slice_s
                if still_s > _SUSPICIOUS_S:
                    self._still_s += still_s
                    deadline += still_s  # stopped itself, so nobody else is late
                if _SLICE_IS_OVER not in str(exc):
                    raise
            diagnostician = self.traffic.diagnostician
            error = diagnostician and diagnostician.interruption(self._ranks, self.key, self.traffic.steps + 1)
            if error is None and monotonic() >= deadline:
                error = PeerTimeoutError(f"waited {timeout_s:.3g} s for {whom}")
            if error:
                self._break_off(error)
                raise error
            start = monotonic()
            slice_s = min(_SLICE_S, max(deadline - start, 0.001))

    def _break_off(self, error: PeerError) -> None:
        """End what is under way in the group, and the group with it; its peers learn of it at once.

        Gloo has nothing that ends an operation, but a receive that times out closes every connection of its group. One from a
        peer whose connection is closed already fails at once and closes nothing.
        """
        self._broken = self._broken or str(error)
        group, self._group = self._group, None
        if group is None or self.backend != "gloo":
            return
        for peer in range(self.world_size):
            if peer != self.rank_in_group:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))

    def _translated(self, exc: RuntimeError, whom: str, timeout_s: float) -> PeerError:
        """The typed error for what a backend raised.

        It leaves the group unusable, as the backend does; its connections close at once, so that no peer waits for this member.
        """
        text = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        error: PeerError
        if _TIMED_OUT.search(text):
            error = PeerTimeoutError(f"waited {timeout_s:.3g} s for {whom}")
            if self._still_s > _SUSPICIOUS_S:
                error.add_note(
                    f"this process itself stood still for {self._still_s:.1f} s of that: stopped, or on an overloaded machine"
                )
        elif _LOST.search(text):
            error = PeerLostError(f"lost the connection to {whom} ({text})")
        else:
            error = PeerError(f"{self.backend} failed while waiting for {whom}: {text}")
        self._broken = self._broken or str(error)
        self._group = None
        return error


@final
class _C10dWork(Work):
    """A send or receive of the backend. A second wait on gloo's own would block, so the outcome is kept."""

    def __init__(self, communicator: C10dCommunicator, work: c10d.Work, tensor: Tensor, peer: int) -> None:
        self._communicator = communicator
        self._work: c10d.Work | None = work
        self._tensor: Tensor | None = tensor
        self._peer = peer
        self._error: PeerError | None = None

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            communicator = self._communicator
            communicator._waits_for = (self._peer, monotonic())
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as exc:
                self._error = communicator._cut_off or communicator._translated(exc, f"member {self._peer}", timeout_s)
                self._error.members = (self._peer,)
            finally:
                communicator._waits_for = None
            self._tensor = None
        if self._error is not None:
            raise self._error


def _op(op: ReduceOp) -> Any:
    table = {ReduceOp.MAX: c10d.ReduceOp.MAX, ReduceOp.MIN: c10d.ReduceOp.MIN, ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT}
    return table.get(op, c10d.ReduceOp.SUM)


def _gloo(store: Store, rank: int, size: int, limit: timedelta, name: str, ranks: list[int], transport: object | None) -> object:
    options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = [gloo_device() if transport is None else transport]
    options._threads = 1
    options._timeout = limit
    options.global_ranks_in_group = ranks
    options.group_name = name
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta, name: str, ranks: list[int]) -> object:
    if not dist.is_nccl_available():
        raise ArgumentError(f"group {name}: this build of torch has no nccl; use backend='gloo'")
    options: Any = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.global_ranks_in_group = ranks
    options.group_name = name
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def gloo_device(hostname: str = "127.0.0.1") -> object:
    """The listening end that gloo groups of one process may share.

    Args:
        hostname: Address of the interface to listen on; the loopback one serves a single host.

    Returns:
        An opaque handle for ``C10dCommunicator(transport=...)``.

    Raises:
        ArgumentError: The address is not one of this host.
    """
    try:
        return c10d.ProcessGroupGloo.create_device(hostname=hostname)
    except RuntimeError as exc:
        raise ArgumentError(f"gloo cannot listen on {hostname!r}: {str(exc).splitlines()[0]}") from exc
