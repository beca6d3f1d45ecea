"""One rank of the MPI peers of ``bench_collectives``: started by ``mpirun``, needs numpy and mpi4py only."""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.measuring import Case, emit, pin, time_calls

__all__ = ["main"]


def make_call(case: Case, world: Any) -> Callable[[], object]:
    """Prepare one operation.

    Args:
        case: Which.
        world: The communicator.

    Returns:
        The call.

    Raises:
        ValueError: MPI has no such operation here.
    """
    size, rank = world.size, world.rank
    mine = np.ones(max(case.nbytes // 4, 1), np.float32)
    rows = np.zeros((size, mine.size), np.float32)
    part = np.zeros(max(mine.size // size, 1), np.float32)
    other = np.zeros_like(mine)
    shares = mine[: part.size * size]
    if case.operation == "all_reduce":
        return lambda: world.Allreduce(MPI.IN_PLACE, mine)
    if case.operation == "all_gather":
        return lambda: world.Allgather(mine, rows)
    if case.operation == "reduce_scatter":
        return lambda: world.Reduce_scatter_block(shares, part)
    if case.operation == "broadcast":
        return lambda: world.Bcast(mine, 0)
    if case.operation == "all_to_all":
        return lambda: world.Alltoall(shares, other[: shares.size])
    if case.operation == "exchange":
        return lambda: world.Sendrecv(mine, (rank + 1) % size, 0, other, (rank - 1) % size, 0)
    raise ValueError(case.operation)


def main() -> None:
    """Measure the cases given as JSON."""
    world = MPI.COMM_WORLD
    pin(world.rank)
    limit_s = float(sys.argv[2])
    for values in json.loads(sys.argv[1]):
        case = Case(*values)
        times = time_calls(make_call(case, world), lambda count: world.allreduce(count, MPI.MIN), limit_s)
        if world.rank == world.size - 1:
            emit(case, times)


if __name__ == "__main__":
    main()
