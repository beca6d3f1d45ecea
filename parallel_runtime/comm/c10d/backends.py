"""The backends of ``torch.distributed``, made straight from a store, and the words they use."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.c10d.stores import Store
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.errors import ArgumentError

__all__ = ["gloo_device", "open_backend", "torch_op"]


def open_backend(
    backend: str,
    store: Store,
    rank: int,
    size: int,
    *,
    limit: timedelta,
    name: str,
    ranks: list[int],
    transport: object | None,
) -> object:
    """Connect to the other members of a group.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: Of the group alone.
        rank: This member.
        size: Members.
        limit: Longest wait for the others.
        name: Of the group.
        ranks: World ranks in group order, for torch's own records.
        transport: From ``gloo_device``, for gloo; a loopback one by default.

    Returns:
        A backend of torch.

    Raises:
        ArgumentError: The backend is unknown, or not in this build of torch.
        RuntimeError: A member did not come.

    Collective: all members; they meet in the store.
    """
    if backend == "gloo":
        return _gloo(store, rank, size, limit, name, ranks, transport)
    if backend == "nccl":
        return _nccl(store, rank, size, limit, name, ranks)
    raise ArgumentError(f"group {name}: unknown backend {backend!r}; use gloo or nccl")


def torch_op(op: ReduceOp) -> Any:
    """Torch's name of a reduction; a mean is a sum to it."""
    table = {ReduceOp.MAX: c10d.ReduceOp.MAX, ReduceOp.MIN: c10d.ReduceOp.MIN, ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT}
    return table.get(op, c10d.ReduceOp.SUM)


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
