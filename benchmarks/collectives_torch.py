"""One rank of the torch peers of ``bench_collectives``, and of ours."""

import importlib
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Case, emit, pin, time_calls
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.comm.shm.stores import StoreAdapter

__all__ = ["dist", "main", "open_gloo", "open_shm"]

dist: Any = importlib.import_module("torch.distributed")
"""Untyped: torch's stubs lack most of what gloo's own class has."""

TIMEOUT_S = 60.0


def open_shm(path: str, rank: int, world_size: int) -> ShmCommunicator:
    """Open our communicator.

    Args:
        path: Of a file store.
        rank: This one.
        world_size: Ranks.

    Returns:
        The communicator.

    Raises:
        RuntimeError: The ranks cannot share memory.
    """
    made = ShmCommunicator.create(StoreAdapter(dist.FileStore(path, world_size)), "bench", rank, world_size, TIMEOUT_S)
    if not isinstance(made, ShmCommunicator):
        raise RuntimeError(made.reason)
    return made


def our_call(case: Case, comm: ShmCommunicator) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Prepare one operation of ours.

    Args:
        case: Which.
        comm: The communicator.

    Returns:
        The call; and what its rank does before each, untimed: a symmetric buffer is written anew by its owner, as it would be in
        use, since otherwise every rank would find its part in its own cache.

    Raises:
        ValueError: No such operation.
    """
    size, rank, dtype = comm.world_size, comm.rank_in_group, getattr(torch, case.dtype)
    count = max(case.nbytes // dtype.itemsize, 1)
    operation, _, kind = case.operation.partition(" ")
    mine = comm.symmetric_empty((count,), dtype, TIMEOUT_S).fill_(1) if kind == "symmetric" else torch.ones(count, dtype=dtype)
    other, rows = torch.zeros(count, dtype=dtype), torch.zeros((size, count), dtype=dtype)
    share = max(count // size, 1)
    shares, part = mine[: share * size].view(size, share) if count >= size else rows[:, :1], torch.zeros(share, dtype=dtype)
    if kind == "symmetric":
        return lambda: comm.all_reduce_(mine, ReduceOp.SUM, TIMEOUT_S), lambda: mine.fill_(1)
    if operation == "all_reduce":
        return lambda: comm.all_reduce_(mine, ReduceOp.SUM, TIMEOUT_S), None
    if operation == "all_gather":
        return lambda: comm.all_gather(rows, mine, TIMEOUT_S), None
    if operation == "reduce_scatter":
        return lambda: comm.reduce_scatter(part, shares, ReduceOp.SUM, TIMEOUT_S), None
    if operation == "broadcast":
        return lambda: comm.broadcast_(mine, 0, TIMEOUT_S), None
    if operation == "all_to_all":
        inputs, outputs = list(shares), list(torch.zeros_like(shares))
        return lambda: comm.all_to_allv(outputs, inputs, TIMEOUT_S), None
    if operation == "exchange":
        return lambda: exchange(comm, mine, other, (rank + 1) % size, (rank - 1) % size), None
    raise ValueError(case.operation)


def exchange(comm: ShmCommunicator, mine: Tensor, other: Tensor, right: int, left: int) -> None:
    """Send to the right and receive from the left.

    Args:
        comm: Ours.
        mine: Sent.
        other: Filled.
        right: Neighbour.
        left: Neighbour.
    """
    received, sent = comm.irecv(other, left, 0), comm.isend(mine, right, 0)
    received.wait(TIMEOUT_S)
    sent.wait(TIMEOUT_S)


def gloo_call(case: Case, group: Any, size: int, rank: int) -> Callable[[], object]:
    """Prepare one operation of gloo.

    Args:
        case: Which.
        group: The group.
        size: Ranks.
        rank: This one.

    Returns:
        The call.

    Raises:
        ValueError: No such operation.
    """
    dtype = getattr(torch, case.dtype)
    count = max(case.nbytes // dtype.itemsize, size)
    mine, other, rows = torch.ones(count, dtype=dtype), torch.zeros(count, dtype=dtype), torch.zeros((size, count), dtype=dtype)
    shares = mine[: count // size * size]
    part = torch.zeros(count // size, dtype=dtype)
    if case.operation == "all_reduce":
        return lambda: group.allreduce([mine]).wait()
    if case.operation == "all_gather":
        return lambda: group.allgather([list(rows)], [mine]).wait()
    if case.operation == "reduce_scatter":
        return lambda: group._reduce_scatter_base(part, shares).wait()
    if case.operation == "broadcast":
        return lambda: group.broadcast(mine, 0).wait()
    if case.operation == "all_to_all":
        return lambda: group.alltoall_base(other[: len(shares)], shares, [], []).wait()
    if case.operation == "exchange":
        return lambda: [
            work.wait() for work in (group.send([mine], (rank + 1) % size, 0), group.recv([other], (rank - 1) % size, 0))
        ]
    raise ValueError(case.operation)


def open_gloo(path: str, rank: int, world_size: int) -> Any:
    """Open gloo on loopback.

    Args:
        path: Of a file store.
        rank: This one.
        world_size: Ranks.

    Returns:
        The group.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(dist.FileStore(path, world_size), rank, world_size, options)


def open_deepspeed(rank: int, world_size: int) -> None:
    """Build and open DeepSpeed's shared-memory kernel.

    Args:
        rank: This one.
        world_size: Ranks.
    """
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
    builders.ShareMemCommBuilder().load(verbose=False).initialize(world_size, rank)


def main() -> None:
    """Measure: peer, rank, ranks, path of a store, cases as JSON, seconds per case."""
    peer, rank, world_size, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    pin(rank)
    group: Any = open_gloo(path, rank, world_size) if peer == "gloo" else None
    comm = None if peer == "gloo" else open_shm(path, rank, world_size)
    if peer == "DeepSpeed":
        open_deepspeed(rank, world_size)
    least = dist.AllreduceOptions()
    least.reduceOp = dist.ReduceOp.MIN

    def agree(count: int) -> int:
        number = torch.tensor([count])
        if comm is None:
            group.allreduce([number], least).wait()
        else:
            comm.all_reduce_(number, ReduceOp.MIN, TIMEOUT_S)
        return int(number)

    def make(case: Case) -> tuple[Callable[[], object], Callable[[], object] | None]:
        if comm is None:
            return gloo_call(case, group, world_size, rank), None
        return (deepspeed_call(case), None) if peer == "DeepSpeed" else our_call(case, comm)

    for values in json.loads(sys.argv[5]):
        case = Case(*values)
        call, prepare = make(case)
        times = time_calls(call, agree, float(sys.argv[6]), prepare)
        if rank == world_size - 1:
            emit(case, times)


def deepspeed_call(case: Case) -> Callable[[], object]:
    """Prepare DeepSpeed's all-reduce.

    Args:
        case: Must be an all-reduce.

    Returns:
        The call.
    """
    dtype = getattr(torch, case.dtype)
    tensor = torch.zeros(max(case.nbytes // dtype.itemsize, 1), dtype=dtype)
    reduce = torch.ops.deepspeed.inference_all_reduce_
    return lambda: reduce(tensor)


if __name__ == "__main__":
    main()
