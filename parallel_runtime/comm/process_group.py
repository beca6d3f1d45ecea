"""A group in the clothes of a ``torch.distributed`` process group.

For code that calls ``torch.distributed.*(group=...)``, functional collectives or DTensor. Every call goes through the group's own
communicators, with its checks, its records and its typed errors. Torch knows it by a name that is never used again.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.p2p import PointToPoint, RecvHandle, SendHandle
from parallel_runtime.errors import ArgumentError, ContextStateError

__all__ = ["RoutedProcessGroup", "find", "register", "unregister"]

_ProcessGroup: Any = c10d.ProcessGroup  # torch's stubs fit no class written in Python
_Work: Any = c10d.Work
_registry: Any = c10d  # its stub wants a NewType that torch does not export
_OPS: Final = (
    (c10d.ReduceOp.SUM, ReduceOp.SUM),
    (c10d.ReduceOp.AVG, ReduceOp.AVG),
    (c10d.ReduceOp.MAX, ReduceOp.MAX),
    (c10d.ReduceOp.MIN, ReduceOp.MIN),
    (c10d.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
)


def register(group: "RoutedProcessGroup") -> None:
    """Let torch find ``group`` by its name. Torch keeps no reference to it."""
    _registry._register_process_group(group.group_name, group)


def unregister(group: "RoutedProcessGroup") -> None:
    """Let torch forget its name."""
    _registry._unregister_process_group(group.group_name)


def find(name: str) -> "RoutedProcessGroup":
    """The open group of a name, as compiled code asks for it.

    Raises:
        ContextStateError: It is closed.
    """
    try:
        group: RoutedProcessGroup = _registry._resolve_process_group(name)
    except RuntimeError as exc:
        raise ContextStateError(f"compiled code calls group {name}: the group is closed; call it with an open one") from exc
    return group


@final
class _Done(_Work):  # type: ignore[misc]  # see above
    """Work that is done: every operation waits for its peers itself."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(self._tensors)

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always; a failure was raised by the call itself."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done."""
        return self._future


@final
class _UnderWay(_Work):  # type: ignore[misc]  # see above
    """Sends or receives under way, which the group keeps until they are done."""

    def __init__(self, handles: Sequence[SendHandle | RecvHandle], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._handles = handles
        self._tensors = list(tensors)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once, as far as is known."""
        return all(handle.is_done() for handle in self._handles)

    def is_success(self) -> bool:
        """As ``is_completed``; a failure is raised by ``wait``."""
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them, by default as long as the group waits for a peer; a second wait returns at once."""
        seconds = timeout.total_seconds() if timeout else 0.0
        for handle in self._handles:
            handle.wait(seconds if seconds > 0 else None)
        return True

    def result(self) -> list[Tensor]:
        """The tensors that are moved."""
        return self._tensors


@final
class RoutedProcessGroup(_ProcessGroup):  # type: ignore[misc]  # see above
    """What torch calls. Peers are group-local, so use ``group_src`` and ``group_dst``.

    Args:
        name: Never used before by any group of this process.
        collectives: Of the group.
        p2p: Of the group.

    Raises:
        ArgumentError: A reduction that the group does not have, or a splitting that does not fit.
    """

    def __init__(self, name: str, collectives: Collectives, p2p: PointToPoint) -> None:
        super().__init__(collectives.rank_in_group, collectives.world_size)
        self._name = name
        self._collectives = collectives
        self._p2p = p2p

    @property
    def group_name(self) -> str:
        """The name that torch knows it by."""
        return self._name

    @property
    def collectives(self) -> Collectives:
        """What its collectives go through."""
        return self._collectives

    @property
    def pg_name(self) -> str:
        """As ``group_name``."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """For torch's messages."""
        return "parallel_runtime"

    def allreduce(self, tensors: Any, opts: Any = None) -> "_Done":
        """Combine in place."""
        tensors = _listed(tensors)
        for tensor in tensors:
            self._collectives.all_reduce_(tensor, _op(opts), _seconds(opts))
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> "_Done":
        """Combine several, one after the other."""
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Gather into lists."""
        for rows, tensor in zip(outputs, tensors, strict=True):
            joined = self._collectives.all_gather(tensor.reshape(-1), 0, None, _seconds(opts))
            for row, part in zip(rows, joined.chunk(self.size()), strict=True):
                row.copy_(part.view(row.shape))
        return _Done([row for rows in outputs for row in rows])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> "_Done":
        """Gather into one tensor, stacked or joined along the first dim."""
        out = output.view(-1)
        self._collectives.all_gather(tensor.reshape(-1), 0, out, _seconds(opts))
        return _Done([output])

    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Gather several, one after the other."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor, opts)
        return _Done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> "_Done":
        """Combine and keep this member's part of the first dim."""
        self._collectives.reduce_scatter(tensor.reshape(-1), 0, _op(opts), output.view(-1), _seconds(opts))
        return _Done([output])

    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Combine several, one after the other."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _Done(outputs)

    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Combine lists of equal parts and keep this member's."""
        for output, parts in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, torch.stack(list(parts)), opts)
        return _Done(outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any = None, splits: Any = None, opts: Any = None
    ) -> "_Done":
        """Exchange parts along the first dim."""
        size = self.size()
        sent = list(splits) if splits else [tensor.shape[0] // size] * size
        received = list(output_splits) if output_splits else [output.shape[0] // size] * size
        self._collectives.all_to_allv(tensor, sent, received, 0, output, _seconds(opts))
        return _Done([output])

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Exchange lists of tensors."""
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = [tensor.numel() for tensor in outputs]
        joined = self._collectives.all_to_allv(sent, [tensor.numel() for tensor in tensors], sizes, 0, None, _seconds(opts))
        for output, part in zip(outputs, torch.split(joined, sizes), strict=True):
            output.copy_(part.view(output.shape))
        return _Done(outputs)

    def broadcast(self, tensors: Any, opts: Any = None) -> "_Done":
        """Overwrite with that of the root."""
        tensors = _listed(tensors)
        for tensor in tensors:
            self._collectives.broadcast_(tensor, opts.rootRank, _seconds(opts))
        return _Done(tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> "_Done":
        """Combine on the root, in place there."""
        for tensor in _listed(tensors):
            out = tensor if opts.rootRank == self.rank() else None
            self._collectives.reduce(tensor, opts.rootRank, _op(opts), out, _seconds(opts))
        return _Done(tensors)

    def gather(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Gather into lists on the root."""
        for position, tensor in enumerate(tensors):
            joined = self._collectives.gather(tensor.reshape(-1), opts.rootRank, 0, None, _seconds(opts))
            if joined is not None:
                for row, part in zip(outputs[position], joined.chunk(self.size()), strict=True):
                    row.copy_(part.view(row.shape))
        return _Done([row for rows in outputs for row in rows])

    def scatter(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Deal out the root's list."""
        for position, output in enumerate(outputs):
            parts = tensors[position] if opts.rootRank == self.rank() else None
            self._collectives.scatter_parts(output, parts, opts.rootRank, _seconds(opts))
        return _Done(outputs)

    def barrier(self, opts: Any = None) -> "_Done":
        """Wait for every member."""
        self._collectives.barrier(_seconds(opts))
        return _Done()

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> "_UnderWay":
        """Start a send; the tensors may be changed at once."""
        return _UnderWay([self._p2p.isend(tensor, dst, tag, True) for tensor in tensors], tensors)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> "_UnderWay":
        """Start a receive into ``tensors``, of the shape and dtype that was sent."""
        return _UnderWay([self._p2p.irecv(src, tag, tensor) for tensor in tensors], tensors)

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> "_Done":
        """Gather several into one list of tensors per member."""
        for position, tensor in enumerate(tensors):
            self.allgather([[rows[position] for rows in outputs]], [tensor], opts)
        return _Done([row for rows in outputs for row in rows])

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _op(opts: Any) -> ReduceOp:
    if opts is None:
        return ReduceOp.SUM
    wanted = getattr(opts, "reduceOp", opts)
    for theirs, ours in _OPS:
        if wanted == theirs:
            return ours
    raise ArgumentError(f"a process group of parallel_runtime has no reduction {wanted}; use SUM, AVG, MAX, MIN or PRODUCT")


def _seconds(opts: Any) -> float | None:
    """The deadline in ``opts``; ``None`` for the group's own."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
