"""All-reduce over memory that the GPUs of one host share: torch's symmetric-memory operators, with nccl beneath.

Reviewed against torch 2.13 (operator schemas, Python module) and the CUDA sources of its operators. It has not run on a GPU.

What the operators need, all of them: CUDA tensors, contiguous, float32 or bfloat16, sums, in memory that every member
allocated alike and made known to the others (*rendezvous*); offset and size a multiple of four bytes. Members synchronise
inside the kernels through memory of their peers, so the devices have to be joined by NVLink.

======================== ================================================================ =====================================
path                     operator                                                         besides
======================== ================================================================ =====================================
``one_shot``             ``one_shot_all_reduce_out``: every member reads all inputs       the output is other memory
``multimem``             ``multimem_all_reduce_``: the switch sums and spreads            multicast (NVSwitch, Hopper or later)
``two_shot``             ``two_shot_all_reduce_``: each member reduces a part for all     nothing
======================== ================================================================ =====================================

In ``one_shot`` every member adds in rank order, in the other two one member's result is handed to all: sums are equal on every
member. bfloat16 is rounded after every addition, except by ``multimem``, which adds in float32 in an order of its own.

*Deadlines.* A kernel that waits for a peer cannot be broken off: a member that never comes leaves the others' streams waiting,
and ``timeout_s`` is not kept. *Streams.* The kernels of one group share their flags: one stream per group at a time.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from parallel_runtime.comm.c10d.stores import Store
from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.select import ONE_SHOT_BYTES, SYMMETRIC_BYTES
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.errors import PeerFailedError

__all__ = ["Path", "SymmMemCommunicator", "SymmetricMemory", "TorchSymmetricMemory", "choose_path", "open_symm_mem"]

Path: TypeAlias = Literal["one_shot", "two_shot", "multimem"]
"""Which operator sums."""

_DTYPES: Final = frozenset({torch.float32, torch.bfloat16})
_UNIT: Final = 4
_NVLINK: Final = "nvlink"


def choose_path(op: ReduceOp, dtype: torch.dtype, nbytes: int, *, has_multicast: bool, is_symmetric: bool) -> Path | None:
    """Choose how to all-reduce, from facts that are equal on every member.

    Args:
        op: The reduction.
        dtype: Of the tensor.
        nbytes: Its size.
        has_multicast: Whether every member's device can multicast.
        is_symmetric: Whether the tensor lies in symmetric memory, so that it need not be copied there.

    Returns:
        The path; ``None`` where the communicator beneath has to do it.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG) or dtype not in _DTYPES or nbytes % _UNIT:
        return None
    if nbytes <= ONE_SHOT_BYTES:
        return "one_shot"
    if nbytes > SYMMETRIC_BYTES and not is_symmetric:
        return None
    return "multimem" if has_multicast else "two_shot"


class SymmetricMemory(Protocol):
    """What a communicator needs of torch."""

    def why_not(self, device: torch.device, world_size: int) -> str:
        """Why this process cannot take part; ``""`` where it can."""

    def has_multicast(self, device: torch.device) -> bool:
        """Whether the device can write to all members at once."""

    def enter(self, group: str, rank_in_group: int, world_size: int, store: Store) -> None:
        """Tell torch about a group, under a name that is never used again."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that can be made known to others."""

    def rendezvous(self, tensor: Tensor, group: str) -> object:
        """Make it known to all members, which do the same; the handle keeps their memory mapped."""

    def all_reduce(self, path: Path, tensor: Tensor, group: str, out: Tensor) -> None:
        """Sum ``tensor`` over the members: into ``out`` by ``one_shot``, else in place."""


@final
class TorchSymmetricMemory:
    """Torch's own operators, on CUDA."""

    def why_not(self, device: torch.device, world_size: int) -> str:
        """Whether torch has the operators, and this process sees a device for every member, all joined by NVLink."""
        if device.type != "cuda":
            return f"tensors live on {device.type}, not cuda"
        if not hasattr(torch.ops.symm_mem, "two_shot_all_reduce_"):
            return f"torch {torch.__version__} has no symmetric memory"
        count = torch.cuda.device_count()
        if count < world_size:
            return f"this process sees {count} of {world_size} devices and cannot tell whether NVLink joins them"
        links = _links()
        if any(not links[one][other] for one in range(count) for other in range(count) if one != other):
            return f"not every pair of the {count} devices is joined by NVLink"
        return ""

    def has_multicast(self, device: torch.device) -> bool:
        """As torch says."""
        kind: Any = torch._C._autograd.DeviceType.CUDA
        return c10d._SymmetricMemory.has_multicast_support(kind, _index(device))

    def enter(self, group: str, rank_in_group: int, world_size: int, store: Store) -> None:
        """Torch keeps the entry until the process ends: a name, three numbers and a reference to the store."""
        c10d._SymmetricMemory.set_group_info(group, rank_in_group, world_size, store)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor with a storage of its own."""
        strides = torch.empty(shape, device="meta").stride()
        return c10d._SymmetricMemory.empty_strided_p2p(shape, strides, dtype, torch.device("cuda", _index(device)))

    def rendezvous(self, tensor: Tensor, group: str) -> object:
        """Handles travel through the store, memory is mapped."""
        return c10d._SymmetricMemory.rendezvous(tensor, group)

    def all_reduce(self, path: Path, tensor: Tensor, group: str, out: Tensor) -> None:
        """On the current stream."""
        if path == "one_shot":
            torch.ops.symm_mem.one_shot_all_reduce_out(tensor, "sum", group, out)
        elif path == "multimem":
            torch.ops.symm_mem.multimem_all_reduce_(tensor, "sum", group)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group)


def open_symm_mem(
    beneath: Communicator,
    store: Store,
    key: str,
    device: torch.device,
    timeout_s: float,
    memory: SymmetricMemory | None = None,
) -> "SymmMemCommunicator | str":
    """Open symmetric memory for a group, if every member can.

    Args:
        beneath: Connects the same members; moves all that the operators do not.
        store: Reached by every member.
        key: Of the group; never reused.
        device: Where this member's tensors live.
        timeout_s: How long each step may wait for the others, in seconds.
        memory: Torch's own by default.

    Returns:
        The communicator; or, on all members alike, why there is none.

    Raises:
        PeerError: A member did not take part.

    Collective: all members.
    """
    memory = memory or TorchSymmetricMemory()
    agree = _Agreement(beneath, device, timeout_s)
    why_not = memory.why_not(device, beneath.world_size)
    if not agree(not why_not):
        return why_not or "another member cannot"
    has_multicast = agree(memory.has_multicast(device))
    prefix = c10d.PrefixStore(f"{key}/symm_mem", store)
    prefix.set_timeout(timedelta(seconds=timeout_s))
    memory.enter(key, beneath.rank_in_group, beneath.world_size, prefix)
    shelf = _Shelf(memory, key, device, agree)
    try:
        staging = shelf.add((SYMMETRIC_BYTES,), torch.uint8)
    except PeerFailedError as exc:
        return str(exc)
    return SymmMemCommunicator(beneath, shelf, staging, has_multicast=has_multicast)


@final
class SymmMemCommunicator(Communicator):
    """Sums of float32 and bfloat16 through memory that all devices share; everything else through the communicator beneath.

    Made by ``open_symm_mem``. Has not run on a GPU: see the module for what was checked and what is not kept.
    """

    kind = "symm_mem"

    def __init__(self, beneath: Communicator, shelf: "_Shelf", staging: Tensor, *, has_multicast: bool) -> None:
        self.world_size = beneath.world_size
        self.rank_in_group = beneath.rank_in_group
        self.key = beneath.key
        self._beneath = beneath
        self._shelf = shelf
        self._staging: Tensor | None = staging
        self._has_multicast = has_multicast
        beneath.join_traffic(self.traffic)

    def join_traffic(self, traffic: Traffic) -> None:
        """Become a part of another communicator."""
        super().join_traffic(traffic)
        self._beneath.join_traffic(traffic)

    def paths(self) -> str:
        """Which operator serves which sizes."""
        large = "multimem" if self._has_multicast else "two_shot"
        return (
            f"float32 and bfloat16 sums by one_shot to {ONE_SHOT_BYTES >> 10} KiB, by {large} to {SYMMETRIC_BYTES >> 20} MiB "
            f"(any size on symmetric tensors); everything else over {self._beneath.kind}"
        )

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """What the communicator beneath supports: it serves whatever the operators do not."""
        return self._beneath.supports(operation, dtype, nbytes)

    @property
    def is_capturable(self) -> bool:
        """As beneath. The operators run on the current stream, in memory that all members know already."""
        return self._beneath.is_capturable

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Through the operators where they can; a tensor that is not symmetric is copied in and out."""
        is_symmetric = self._shelf.has(tensor)
        path = choose_path(op, tensor.dtype, tensor.nbytes, has_multicast=self._has_multicast, is_symmetric=is_symmetric)
        if path is None or self._staging is None:
            self._beneath.all_reduce_(tensor, op, timeout_s)
            return
        work = tensor if is_symmetric else self._staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        result = torch.empty_like(tensor) if path == "one_shot" else work
        self._shelf.memory.all_reduce(path, work, self._shelf.group, result)
        if result is not tensor:
            tensor.copy_(result)
        if op is ReduceOp.AVG:
            tensor.div_(self.world_size)

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor | None:
        """A tensor that ``all_reduce_`` sums without copying it first. Its memory stays until the group is closed.

        Every member passes the same part of the same allocation, or no member a symmetric tensor: who does not leaves the others
        waiting on their device.

        Args:
            shape: Equal on every member.
            dtype: Equal on every member.
            timeout_s: Seconds to wait for the others.

        Returns:
            This member's tensor; ``None`` where it has no elements, on all members.

        Raises:
            PeerFailedError: The memory could not be had; raised on all members.

        Collective: all members, same order.
        """
        self._shelf.agree.timeout_s = timeout_s
        return self._shelf.add(tuple(shape), dtype) if torch.Size(shape).numel() else None

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.all_gather(output, tensor, timeout_s)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.all_gatherv(outputs, tensor, timeout_s)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.reduce_scatter(output, tensor, op, timeout_s)

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Beneath."""
        self._beneath.all_to_allv(outputs, inputs, timeout_s)

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.broadcast_(tensor, src, timeout_s)

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.reduce(output, tensor, dst, op, timeout_s)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.gather(outputs, tensor, dst, timeout_s)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.scatter(output, inputs, src, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        """Beneath."""
        self._beneath.barrier(timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Beneath."""
        return self._beneath.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Beneath."""
        return self._beneath.irecv(tensor, src, tag)

    def end_vain_wait(self) -> None:
        """Beneath."""
        self._beneath.end_vain_wait()

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last tensor that lies in it."""
        self._staging = None
        self._shelf.clear()
        self._beneath.close()


@final
class _Shelf:
    """The symmetric allocations of one group, and what keeps them mapped."""

    def __init__(self, memory: SymmetricMemory, group: str, device: torch.device, agree: "_Agreement") -> None:
        self.memory = memory
        self.group = group
        self.agree = agree
        self._device = device
        self._kept: dict[int, tuple[Tensor, object]] = {}

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate on all members, or on none.

        Raises:
            PeerFailedError: A member could not.
        """
        tensor: Tensor | None = None
        with suppress(RuntimeError):  # out of memory is one, too
            tensor = self.memory.allocate(shape, dtype, self._device)
        if not self.agree(tensor is not None):
            self._refuse(shape, dtype, "allocate" if tensor is None else "")
        assert tensor is not None
        handle: object = None
        with suppress(RuntimeError):
            handle = self.memory.rendezvous(tensor, self.group)
        if not self.agree(handle is not None):
            self._refuse(shape, dtype, "map" if handle is None else "")
        self._kept[tensor.untyped_storage().data_ptr()] = tensor, handle
        return tensor

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in one of them, at an offset that the operators take."""
        kept = tensor.untyped_storage().data_ptr() in self._kept
        return kept and tensor.storage_offset() * tensor.itemsize % _UNIT == 0

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()

    def _refuse(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
        who = f"this member cannot {what}" if what else "another member cannot have"
        raise PeerFailedError(f"{who} symmetric memory for {str(dtype).removeprefix('torch.')}{list(shape)}")


@final
class _Agreement:
    """Whether all members say yes."""

    def __init__(self, beneath: Communicator, device: torch.device, timeout_s: float) -> None:
        self._beneath = beneath
        self._device = device
        self.timeout_s = timeout_s

    def __call__(self, is_so: bool) -> bool:
        flag = torch.tensor([is_so], dtype=torch.uint8, device=self._device)
        self._beneath.all_reduce_(flag, ReduceOp.MIN, self.timeout_s)
        return bool(flag.item())


def _links() -> list[list[int]]:
    """Per pair of visible devices, how many NVLink connections join them."""
    detect: Any = c10d
    cuda: Any = torch._C._autograd.DeviceType.CUDA
    matrix: list[list[int]] = detect._detect_dma_connectivity(cuda, _NVLINK).matrix
    return matrix


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
