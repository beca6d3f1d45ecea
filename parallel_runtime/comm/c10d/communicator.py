"""Groups of ``torch.distributed`` built straight from a store.

No default process group, no entry in torch's tables: ``torch.distributed.is_initialized()`` stays as it was. What the backends
raise is translated here.
"""

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Final, final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.c10d.arithmetic import from_gloo, to_gloo
from parallel_runtime.comm.c10d.backends import open_backend
from parallel_runtime.comm.c10d.stores import Store
from parallel_runtime.comm.c10d.waiting import Backend, BackendWork
from parallel_runtime.comm.communicator import Bytes, Operation, ReduceOp, Work
from parallel_runtime.comm.frames import raw_tensor
from parallel_runtime.comm.roll_call import Entered, RollCall
from parallel_runtime.comm.tensors import fold
from parallel_runtime.errors import ArgumentError

__all__ = ["C10dCommunicator"]

_LENGTH_BYTES: Final = 8
_GLOO_SUMS: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)


@final
class C10dCommunicator(Backend):
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
        checked: Whether members of a gloo group compare what they enter before anything moves: a ``RollCall`` that moves what is
            small along. Equal on all of them. Without it gloo aborts the process that gets more than it expects.

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
        checked: bool = True,
    ) -> None:
        if not 0 <= rank_in_group < world_size or world_size < 2:
            raise ArgumentError(f"group {key}: member {rank_in_group} of {world_size}; a c10d group has at least 2 members")
        super().__init__()
        self.kind = "c10d"
        self.rank_in_group = rank_in_group
        self.world_size = world_size
        self.backend = backend
        self._is_gloo = backend == "gloo"
        self._device = device or torch.device("cpu")
        self.key = key
        limit = timedelta(seconds=timeout_s)
        self._ranks = table = list(range(world_size)) if ranks is None else [int(rank) for rank in ranks]
        self._roll = RollCall(rank_in_group, table) if checked and self._is_gloo else None
        prefix = c10d.PrefixStore(key, store)
        prefix.set_timeout(limit)
        try:
            self._group = open_backend(
                backend, prefix, rank_in_group, world_size, limit=limit, name=key, ranks=table, transport=transport
            )
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
        """Reduced by the backend; avg is a sum that is divided."""
        rows = self._called("all_reduce", tensor, timeout_s, op)
        if rows is None:
            self._reduce_all(tensor, op, timeout_s)
        else:
            tensor.copy_(fold(rows, op))

    def _reduce_all(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        work = self._reducible(tensor, op)
        options = self._options(c10d.AllreduceOptions, timeout_s, op=op)
        self._finish(lambda group: group.allreduce([work], options), "its peers", timeout_s)
        from_gloo(work, tensor, op, self.world_size)

    def _reducible(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """What the backend is handed to reduce: the tensor itself, or a new one."""
        if self._is_gloo:
            return to_gloo(tensor, op)
        return tensor.int() if tensor.dtype is torch.int16 else tensor

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """One all-gather of the backend; gloo is given a list of rows, nccl would copy such a list once more."""
        rows = self._called("all_gather", tensor, timeout_s)
        if rows is not None:
            output.copy_(rows)
            return
        options = self._options(c10d.AllgatherOptions, timeout_s)
        if self._is_gloo:
            self._finish(lambda group: group.allgather([list(output)], [tensor], options), "its peers", timeout_s)
        else:
            self._finish(lambda group: group._allgather_base(output, tensor, options), "its peers", timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """An all-to-all in which everybody sends the same to everyone."""
        self._move_all("all_gatherv", outputs, [tensor] * self.world_size, timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """One reduce-scatter of the backend; on gloo, and for int16, an all-reduce of which one row is kept."""
        rows = self._called("reduce_scatter", tensor, timeout_s, op)
        if rows is not None:
            output.copy_(fold(rows[:, self.rank_in_group], op))
            return
        if self._is_gloo or tensor.dtype is torch.int16:
            work = tensor.clone()
            self._reduce_all(work, op, timeout_s)
            output.copy_(work[self.rank_in_group])
            return
        options = self._options(c10d.ReduceScatterOptions, timeout_s, op=op)
        self._finish(lambda group: group._reduce_scatter_base(output, tensor, options), "its peers", timeout_s)
        if op is ReduceOp.AVG:
            output.div_(self.world_size)

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """One all-to-all of the backend over flat copies."""
        self._move_all("all_to_all", outputs, inputs, timeout_s)

    def _move_all(self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
        received = sent.new_empty(sum(tensor.numel() for tensor in outputs))
        sizes = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        self._compare_sizes(operation, sent.dtype, sizes, timeout_s)
        options = self._options(c10d.AllToAllOptions, timeout_s)
        self._finish(lambda group: group.alltoall_base(received, sent, *sizes, options), "its peers", timeout_s)
        for target, piece in zip(outputs, torch.split(received, sizes[0]), strict=True):
            target.copy_(piece.view(target.shape))

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """One broadcast of the backend."""
        rows = self._called("broadcast", tensor, timeout_s, root=src)
        if rows is not None:
            tensor.copy_(rows[src])
            return
        self._broadcast(tensor, src, timeout_s)

    def _broadcast(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        options = self._options(c10d.BroadcastOptions, timeout_s, root=src)
        self._finish(lambda group: group.broadcast([tensor], options), f"member {src} or its peers", timeout_s)

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """One reduce of the backend, over a copy since some backends scribble on their input."""
        rows = self._called("reduce", tensor, timeout_s, op, root=dst)
        if rows is not None:
            if output is not None:
                output.copy_(fold(rows, op))
            return
        work = self._reducible(tensor, op)
        work = tensor.clone() if work is tensor else work
        options = self._options(c10d.ReduceOptions, timeout_s, op=op, root=dst)
        self._finish(lambda group: group.reduce([work], options), f"member {dst} or its peers", timeout_s)
        if output is not None:
            from_gloo(work, output, op, self.world_size)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """One gather of the backend."""
        rows = self._called("gather", tensor, timeout_s, root=dst)
        if rows is not None:
            for target, row in zip(outputs or (), rows, strict=outputs is not None):
                target.copy_(row)
            return
        options = self._options(c10d.GatherOptions, timeout_s, root=dst)
        targets = [] if outputs is None else [list(outputs)]
        self._finish(lambda group: group.gather(targets, [tensor], options), f"member {dst} or its peers", timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """One scatter of the backend."""
        self._call_roll(Entered("scatter", output.dtype, output.shape, root=src), None, timeout_s)
        options = self._options(c10d.ScatterOptions, timeout_s, root=src)
        sources = [] if inputs is None else [list(inputs)]
        self._finish(lambda group: group.scatter([output], sources, options), f"member {src} or its peers", timeout_s)

    def barrier(self, timeout_s: float) -> None:
        """One barrier of the backend; a roll call is one, too."""
        self._call_roll(Entered("barrier"), None, timeout_s)
        if self._roll is not None:
            self._deadline = 0.0
            self.traffic.steps += 1
            return
        options = self._options(c10d.BarrierOptions, timeout_s)
        self._finish(lambda group: group.barrier(options), "its peers", timeout_s)

    def broadcast_bytes(self, data: Bytes | None, src: int, timeout_s: float) -> Bytes:
        """As everywhere; in a roll call, their number and what is small come along with it."""
        roll = self._roll
        if roll is None:
            return super().broadcast_bytes(data, src, timeout_s)
        first = bytearray(roll.room)
        if data is not None and src == self.rank_in_group:
            first[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
            if len(data) <= roll.room - _LENGTH_BYTES:
                first[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        self._call_roll(Entered("broadcast_bytes", root=src), raw_tensor(first), timeout_s)
        taken = roll.taken(src)
        length = int.from_bytes(taken[:_LENGTH_BYTES], "little")
        if length <= roll.room - _LENGTH_BYTES:
            return bytearray(taken[_LENGTH_BYTES : _LENGTH_BYTES + length]) if data is None else data
        body = bytearray(length) if data is None else data if isinstance(data, bytearray) else bytearray(data)
        self._broadcast(raw_tensor(body), src, timeout_s)
        return body if data is None else data

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start one send of the backend."""
        return BackendWork(self, self._start(lambda group: group.send([tensor], dst, tag), f"member {dst}"), tensor, dst)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Start one receive of the backend."""
        return BackendWork(self, self._start(lambda group: group.recv([tensor], src, tag), f"member {src}"), tensor, src)

    def close(self) -> None:
        """Drop the backend: its threads and descriptors go with the last reference, and waiting peers learn of it."""
        self._group = None

    def _called(
        self, operation: str, tensor: Tensor, timeout_s: float, op: ReduceOp | None = None, root: int | None = None
    ) -> Tensor | None:
        """Call the roll for a tensor that is alike on all members; those of all, where that is all there is to do."""
        if self._roll is None:
            return None
        return self._call_roll(Entered(operation, tensor.dtype, tensor.shape, op, root), tensor, timeout_s)

    def _call_roll(self, entered: Entered, payload: Tensor | None, timeout_s: float) -> Tensor | None:
        roll = self._roll
        if roll is None:
            return None
        self._deadline = monotonic() + timeout_s
        options = self._options(c10d.AllToAllOptions, timeout_s)
        rows = roll.call(
            entered,
            self.traffic.steps,
            payload,
            lambda rows, mine: self._wait(
                lambda group: group.alltoall_base(rows.view(-1), mine.view(-1), [], [], options), "its peers", timeout_s
            ),
        )
        if rows is not None:
            self._deadline = 0.0
            self.traffic.steps += 1
        return rows

    def _compare_sizes(self, operation: str, dtype: torch.dtype, sizes: tuple[list[int], list[int]], timeout_s: float) -> None:
        """Whether every member takes what the others send it, each size in elements: first those taken, then those sent."""
        roll = self._roll
        if roll is None:
            return
        mine = torch.tensor([*sizes[1], *sizes[0]])
        table = self._call_roll(Entered(f"{operation} of {str(dtype).removeprefix('torch.')}"), mine, timeout_s)
        if table is None:
            table = mine.new_empty((self.world_size, len(mine)))
            options = self._options(c10d.AllgatherOptions, timeout_s)
            self._wait(lambda group: group.allgather([list(table)], [mine], options), "its peers", timeout_s)
        roll.compare_sizes(table.tolist(), operation)
