"""Tensors that every member can read and write: operations on them copy nothing in.

A symmetric buffer is a segment of its own with one part per member. A collective on it is two steps without data: one to know
that every member's input is ready, one to know that nobody reads or writes it any more.
"""

from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.shm.plans import Plan
from parallel_runtime.comm.shm.reductions import Reducer, Vector
from parallel_runtime.comm.shm.segment import Segment
from parallel_runtime.comm.shm.steps import Steps

__all__ = ["SymmetricAllGather", "SymmetricAllReduce", "SymmetricBuffer", "SymmetricReduceScatter"]

_PIECE_BYTES = 256 << 10
_ALIGNMENT = 64


@final
class SymmetricBuffer:
    """One allocation of all members.

    Args:
        segment: Its memory, ``world_size`` parts of equal size.
        index: Number of this allocation in its group.
        world_size: Number of members.
        rank_in_group: This member.
    """

    def __init__(self, segment: Segment, index: int, world_size: int, rank_in_group: int) -> None:
        self._memory = segment.memory
        self._part_bytes = segment.nbytes // world_size
        self._rank = rank_in_group
        whole = memoryview(segment.memory)
        self._parts = tuple(whole[part * self._part_bytes : (part + 1) * self._part_bytes] for part in range(world_size))
        self.index = index
        self.start = torch.frombuffer(self._parts[rank_in_group], dtype=torch.uint8).data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This member's part as a tensor; it keeps the memory mapped. One without elements needs none."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        offset = self._rank * self._part_bytes
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def tensors(self, like: Tensor) -> tuple[Tensor, ...] | None:
        """Every member's counterpart of a contiguous tensor in this member's part; ``None`` where it does not lie there."""
        offset = self.offset(like)
        if offset is None or not like.numel():
            return None
        return tuple(
            torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start + offset).view(like.shape)
            for start in range(0, self._part_bytes * len(self._parts), self._part_bytes)
        )

    def offset(self, tensor: Tensor) -> int | None:
        """Where in this member's part ``tensor`` lies; ``None`` where it does not."""
        offset = tensor.data_ptr() - self.start
        return offset if 0 <= offset <= self._part_bytes - tensor.nbytes else None

    def views(self, offset: int, nbytes: int) -> tuple[memoryview, ...]:
        """The same bytes of every member's part."""
        return tuple(part[offset : offset + nbytes] for part in self._parts)


class _SymmetricPlan(Plan):
    """Between two steps, every member's input may be read."""

    def run(self, steps: Steps, timeout_s: float) -> None:
        """A step to begin, the work, a step to end."""
        steps.begin(timeout_s)
        steps.announce(self.print)
        steps.collect(steps.peers, steps.sequence, self.print, self.text)
        self.work()
        steps.announce(self.print)
        steps.collect(steps.peers, steps.sequence, self.print, self.text)

    def work(self) -> None:
        """Everything this member reads and writes."""
        raise NotImplementedError


@final
class SymmetricAllReduce(_SymmetricPlan):
    """Each member reduces one part of all inputs and writes it into all of them."""

    def __init__(self, text: str, views: tuple[memoryview, ...], rank_in_group: int, reducer: Reducer) -> None:
        super().__init__(text)
        world_size = len(views)
        part = -(-len(views[0]) // world_size // _ALIGNMENT) * _ALIGNMENT
        parts = [view[rank_in_group * part : (rank_in_group + 1) * part] for view in views]
        nbytes = len(parts[0])
        in_place = rank_in_group < 2  # one of the first two operands may be the result as well
        scratch = memoryview(bytearray(0 if in_place else min(_PIECE_BYTES, nbytes)))
        self._reducer = reducer
        self._pieces: list[tuple[list[Vector], Vector, memoryview, list[memoryview]]] = []
        for start in range(0, nbytes, _PIECE_BYTES):
            pieces = [part[start : start + _PIECE_BYTES] for part in parts]
            result = pieces[rank_in_group] if in_place else scratch[: len(pieces[0])]
            targets = [piece for member, piece in enumerate(pieces) if not in_place or member != rank_in_group]
            self._pieces.append(([reducer.vector(piece) for piece in pieces], reducer.vector(result), result, targets))

    def work(self) -> None:
        combine = self._reducer.combine
        for sources, out, result, targets in self._pieces:
            combine(sources, out)
            for target in targets:
                target[:] = result


@final
class SymmetricAllGather(_SymmetricPlan):
    """Everybody copies every member's input."""

    def __init__(self, text: str, views: tuple[memoryview, ...], outputs: tuple[memoryview, ...]) -> None:
        super().__init__(text)
        self._pairs = tuple(zip(outputs, views, strict=True))

    def work(self) -> None:
        for output, view in self._pairs:
            output[:] = view


@final
class SymmetricReduceScatter(_SymmetricPlan):
    """Everybody reduces its row of every member's input."""

    def __init__(self, text: str, rows: tuple[memoryview, ...], output: memoryview, reducer: Reducer) -> None:
        super().__init__(text)
        self._rows = rows
        self._output = output
        self._reducer = reducer

    def work(self) -> None:
        reducer = self._reducer
        for start in range(0, len(self._output), _PIECE_BYTES):
            stop = start + _PIECE_BYTES
            sources = [reducer.vector(row[start:stop]) for row in self._rows]
            reducer.combine(sources, reducer.vector(self._output[start:stop]))
