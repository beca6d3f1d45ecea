"""Which plan an operation gets: small ones in one shot, large ones in pieces, symmetric tensors in place."""

from collections.abc import Sequence
from typing import Final, TypedDict, Unpack, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.shm.direct import (
    DirectAllReduce,
    DirectBroadcast,
    DirectMove,
    DirectPlan,
    DirectReduce,
    DirectWhenLarge,
    Fetch,
    Offer,
)
from parallel_runtime.comm.shm.limits import Limits
from parallel_runtime.comm.shm.memory import view_bytes
from parallel_runtime.comm.shm.plans import (
    SIZE_BYTES,
    AgreedTransfer,
    OneShot,
    Plan,
    Put,
    Reduction,
    SlotVectors,
    Take,
    Transfer,
    TwoShot,
)
from parallel_runtime.comm.shm.reductions import LOW_PRECISION, make_reducer
from parallel_runtime.comm.shm.remote import RemoteMemory, address_of
from parallel_runtime.comm.shm.steps import Steps
from parallel_runtime.comm.shm.symmetric import SymmetricAllGather, SymmetricAllReduce, SymmetricBuffer, SymmetricReduceScatter

__all__ = ["Planner"]

_PAGE: Final = 4096
_SCRATCH_BYTES: Final = 1 << 20


class _Parts(TypedDict, total=False):
    peers: tuple[int, ...]
    puts: Sequence[Put]
    takes: Sequence[Take]
    reduction: Reduction | None


@final
class Planner:
    """Makes the plans of one member.

    Args:
        steps: Its clock.

    Attributes:
        limits: Where the ways part.
        buffers: The symmetric ones.
        remote: The peers' memory, where all members can reach each other's.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.remote: RemoteMemory | None = None
        self._rank = steps.rank_in_group
        self._world_size = steps.world_size
        self.limits = limits = Limits(world_size=steps.world_size, slot_bytes=steps.slot_bytes)
        self._piece_bytes = limits.piece
        self._share_bytes = limits.share
        self._direct_bytes = limits.direct
        self._slots: dict[tuple[int, torch.dtype, ReduceOp], SlotVectors] = {}
        self.buffers: list[SymmetricBuffer] = []
        self._blocks: tuple[memoryview, ...] = ()

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Plan:
        """Plan an all-reduce in place.

        Raises:
            DtypeError: As ``make_reducer`` says.
        """
        reducer = make_reducer(op, tensor.dtype, self._world_size)
        text = f"all_reduce({op}, {_what(tensor)})"
        local = view_bytes(tensor)
        found = self._find(tensor)
        if found is not None:
            buffer, offset = found
            views = buffer.views(offset, tensor.nbytes)
            return SymmetricAllReduce(f"{text} on symmetric buffer {buffer.index}+{offset}", views, self._rank, reducer)
        if tensor.nbytes > self.limits.one_shot(is_low_precision=tensor.dtype in LOW_PRECISION):
            two_shot = TwoShot(text, self._steps, local, reducer)
            if self.remote is None or tensor.nbytes <= self.limits.direct_reduce:
                return two_shot
            large = DirectAllReduce(text, self.remote, self._steps, self._scratch(), local, reducer)
            return _unless_pinned(large, two_shot, [tensor])
        key = (tensor.nbytes, tensor.dtype, op)
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots[key] = SlotVectors(self._steps, tensor.nbytes, reducer)
        return OneShot(text, local, slots, self._rank)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Plan:
        """Plan an all-gather of equal shapes."""
        rows = _rows(view_bytes(output), self._world_size)
        text = f"all_gather({_what(tensor)})"
        found = self._find(tensor)
        if found is not None:
            buffer, offset = found
            views = buffer.views(offset, tensor.nbytes)
            return SymmetricAllGather(f"{text} on symmetric buffer {buffer.index}+{offset}", views, rows)
        return self._gather(text, tensor, rows, tensor.nbytes)

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor) -> Plan:
        """Plan an all-gather of shapes that differ."""
        sizes = [output.nbytes for output in outputs]
        rows = tuple(view_bytes(output) for output in outputs)
        return self._gather(f"all_gatherv({tensor.dtype}, {sizes} bytes)", tensor, rows, max(sizes))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> Plan:
        """Plan a reduce-scatter.

        Raises:
            DtypeError: As ``make_reducer`` says.
        """
        reducer = make_reducer(op, tensor.dtype, self._world_size)
        text = f"reduce_scatter({op}, {_what(tensor)})"
        rank, out = self._rank, view_bytes(output)
        found = self._find(tensor)
        if found is not None:
            buffer, offset = found
            mine = tuple(_rows(view, self._world_size)[rank] for view in buffer.views(offset, tensor.nbytes))
            return SymmetricReduceScatter(f"{text} on symmetric buffer {buffer.index}+{offset}", mine, out, reducer)
        rows = _rows(view_bytes(tensor), self._world_size)
        puts = [Put(rows[peer], self._share(rank, peer)) for peer in self._steps.peers]
        offsets = tuple(0 if member == rank else self._share(member, rank) for member in range(self._world_size))
        reduction = Reduction(out, rows[rank], offsets, reducer)
        ordinary = self._pieces(text, len(out), self._share_bytes, peers=self._steps.peers, puts=puts, reduction=reduction)
        if self.remote is None or tensor.nbytes <= self.limits.direct_reduce:
            return ordinary
        offers = [Offer(peer, rows[peer]) for peer in self._steps.peers]
        large = DirectReduce(text, self.remote, rank, self._scratch(), offers, rows[rank], out, reducer)
        return _unless_pinned(large, ordinary, [tensor])

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
        """Plan an exchange of parts of any size."""
        rank, peers = self._rank, self._steps.peers
        puts = [Put(view_bytes(inputs[peer]), self._share(rank, peer)) for peer in peers]
        takes = [Take(view_bytes(outputs[peer]), peer, self._share(peer, rank)) for peer in peers]
        takes.append(Take(view_bytes(outputs[rank]), rank, source=view_bytes(inputs[rank])))
        nbytes = max(tensor.nbytes for tensor in (*inputs, *outputs))
        text = f"all_to_all({inputs[0].dtype})"
        share_bytes = self._share_bytes
        piece_bytes = share_bytes - SIZE_BYTES if self.remote is None else min(self._direct_bytes, share_bytes - SIZE_BYTES)
        is_reachable = self.remote is not None and not any(tensor.is_pinned() for tensor in inputs)
        plan = AgreedTransfer(
            text,
            share_bytes=share_bytes,
            piece_bytes=piece_bytes,
            nbytes=nbytes,
            peers=peers,
            puts=puts,
            takes=takes,
            addresses=[address_of(put.local) for put in puts] if is_reachable else (),
        )
        if self.remote is None:
            return plan
        return DirectWhenLarge(plan, DirectMove(text, self.remote, self._world_size, (), _fetches(takes)))

    def broadcast(self, tensor: Tensor, src: int) -> Plan:
        """Plan a broadcast from ``src``."""
        text = f"broadcast({_what(tensor)}, src {src})"
        local = view_bytes(tensor)
        is_source = src == self._rank
        parts: _Parts = {"puts": [Put(local)]} if is_source else {"peers": (src,), "takes": [Take(local, src)]}
        if self.remote is None or len(local) <= self.limits.direct_broadcast:  # one writes while the others read
            return self._pieces(text, len(local), self._piece_bytes, **parts)
        if self._world_size > 2:
            return self._transfer(text, len(local), [tensor] if is_source else [], **parts)
        shared = DirectBroadcast(text, self.remote, self._steps.peers[0], local, is_source=is_source)
        return _unless_pinned(shared, self._pieces(text, len(local), self._piece_bytes, **parts), [tensor])

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp) -> Plan:
        """Plan a reduction to ``dst``.

        Raises:
            DtypeError: As ``make_reducer`` says.
        """
        reducer = make_reducer(op, tensor.dtype, self._world_size)
        text = f"reduce({op}, {_what(tensor)}, dst {dst})"
        local = view_bytes(tensor)
        parts: _Parts = {"puts": [Put(local)]}
        out = None if output is None else view_bytes(output)
        if out is not None:
            parts = {"peers": self._steps.peers, "reduction": Reduction(out, local, (0,) * self._world_size, reducer)}
        ordinary = self._pieces(text, len(local), self._piece_bytes, **parts)
        if self.remote is None or tensor.nbytes <= self.limits.direct_reduce:
            return ordinary
        offers = [Offer(dst, local)] if out is None else []
        large = DirectReduce(text, self.remote, self._rank, self._scratch(), offers, local, out, reducer)
        return _unless_pinned(large, ordinary, [tensor])

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Plan:
        """Plan a gather to ``dst``."""
        text = f"gather({_what(tensor)}, dst {dst})"
        local = view_bytes(tensor)
        if outputs is None:
            return self._transfer(text, len(local), [tensor], puts=[Put(local)])
        takes = self._row_takes(local, [view_bytes(output) for output in outputs])
        return self._transfer(text, len(local), [], peers=self._steps.peers, takes=takes)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int) -> Plan:
        """Plan a scatter from ``src``."""
        text = f"scatter({_what(output)}, src {src})"
        local = view_bytes(output)
        if inputs is None:
            takes = [Take(local, src, self._share(src, self._rank))]
            return self._shares(text, len(local), [], peers=(src,), takes=takes)
        puts = [Put(view_bytes(inputs[peer]), self._share(src, peer)) for peer in self._steps.peers]
        takes = [Take(local, src, source=view_bytes(inputs[src]))]
        return self._shares(text, len(local), inputs, puts=puts, takes=takes)

    def barrier(self) -> Plan:
        """Plan a step without data."""
        return Transfer("barrier()", piece_bytes=1, nbytes=0, peers=self._steps.peers)

    def publish(self, tensor: Tensor) -> Plan:
        """Plan a step without data behind what the members have written to symmetric memory."""
        return Transfer(f"publish({_what(tensor)})", piece_bytes=1, nbytes=0, peers=self._steps.peers)

    def forget(self) -> None:
        """Drop the views of slots that plans share, and their scratch memory."""
        self._slots.clear()
        self._blocks = ()

    def _scratch(self) -> Sequence[memoryview]:
        """A block per member, for plans that read operands: together they stay in the cache."""
        if not self._blocks:
            block = _SCRATCH_BYTES // self._world_size // _PAGE * _PAGE
            memory = memoryview(bytearray(block * self._world_size + _PAGE))
            start = -address_of(memory) % _PAGE
            self._blocks = tuple(memory[start + member * block :][:block] for member in range(self._world_size))
        return self._blocks

    def _find(self, tensor: Tensor) -> tuple[SymmetricBuffer, int] | None:
        if tensor.nbytes > self.limits.symmetric:
            for buffer in self.buffers:
                offset = buffer.offset(tensor)
                if offset is not None:
                    return buffer, offset
        return None

    def _share(self, src: int, dst: int) -> int:
        """Where in a slot of ``src`` lies what it has for ``dst``."""
        return (dst - (dst > src)) * self._share_bytes

    def _transfer(self, text: str, nbytes: int, sources: Sequence[Tensor], **parts: Unpack[_Parts]) -> Plan:
        """What every reader gets whole."""
        offers = [Offer(peer, put.local) for put in parts.get("puts", ()) for peer in self._steps.peers]
        return self._move(self._pieces(text, nbytes, self._piece_bytes, **parts), nbytes, sources, offers, parts)

    def _shares(self, text: str, nbytes: int, sources: Sequence[Tensor], **parts: Unpack[_Parts]) -> Plan:
        """What every reader gets a part of; one put per peer, in order."""
        offers = [Offer(peer, put.local) for peer, put in zip(self._steps.peers, parts.get("puts", ()), strict=False)]
        return self._move(self._pieces(text, nbytes, self._share_bytes, **parts), nbytes, sources, offers, parts)

    def _pieces(self, text: str, nbytes: int, piece_bytes: int, **parts: Unpack[_Parts]) -> Plan:
        return Transfer(text, piece_bytes=piece_bytes, nbytes=nbytes, **parts)

    def _move(self, ordinary: Plan, nbytes: int, sources: Sequence[Tensor], offers: Sequence[Offer], parts: _Parts) -> Plan:
        if self.remote is None or nbytes <= self._direct_bytes:
            return ordinary
        fetches = _fetches(parts.get("takes", ()))
        return _unless_pinned(DirectMove(ordinary.text, self.remote, self._world_size, offers, fetches), ordinary, sources)

    def _gather(self, text: str, tensor: Tensor, rows: Sequence[memoryview], nbytes: int) -> Plan:
        local = view_bytes(tensor)
        takes = self._row_takes(local, rows)
        return self._transfer(text, nbytes, [tensor], peers=self._steps.peers, puts=[Put(local)], takes=takes)

    def _row_takes(self, local: memoryview, rows: Sequence[memoryview]) -> list[Take]:
        return [Take(row, member, source=local if member == self._rank else None) for member, row in enumerate(rows)]


def _unless_pinned(direct: DirectPlan, ordinary: Plan, sources: Sequence[Tensor]) -> Plan:
    """Memory that belongs to a device driver cannot be read from another process; no member knows what the others pass."""
    direct.ordinary = ordinary
    if any(tensor.is_pinned() for tensor in sources):
        direct.refuse()
    return direct


def _fetches(takes: Sequence[Take]) -> list[Fetch]:
    return [Fetch(take.local, take.member, take.source) for take in takes]


def _rows(memory: memoryview, count: int) -> tuple[memoryview, ...]:
    nbytes = len(memory) // count
    return tuple(memory[row * nbytes : (row + 1) * nbytes] for row in range(count))


def _what(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} x {tensor.numel()}"
