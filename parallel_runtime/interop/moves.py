"""Which rank sends which part of which tensor to whom, so that one placement becomes another. Integers only, no torch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TypeAlias, final

from parallel_runtime.errors import ArgumentError
from parallel_runtime.terms import Rank

__all__ = ["Box", "Move", "Placement", "TensorPlacement", "bytes_lacking", "plan_moves"]

Box: TypeAlias = tuple[range, ...]
"""A part of a tensor: one range of step 1 for each dim."""


@final
@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where the parts of one tensor are.

    Attributes:
        shape: Of the whole tensor.
        itemsize: Bytes of an element.
        boxes: The part that each rank holds, by world rank; ranks that hold nothing are absent. Parts may overlap.

    Raises:
        ArgumentError: A part is no part of the tensor.
    """

    shape: tuple[int, ...]
    itemsize: int
    boxes: Mapping[Rank, Box]

    def __post_init__(self) -> None:
        for rank, box in self.boxes.items():
            inside = all(
                0 <= part.start <= part.stop <= size and part.step == 1 for part, size in zip(box, self.shape, strict=False)
            )
            if len(box) != len(self.shape) or not inside:
                raise ArgumentError(f"rank {rank} is said to hold {box}, which is no part of a tensor of shape {self.shape}")


Placement: TypeAlias = Mapping[str, TensorPlacement]
"""Where the parts of every tensor of a state are, by name."""


@final
@dataclass(frozen=True, slots=True)
class Move:
    """One part of one tensor on its way.

    Attributes:
        name: Of the tensor.
        src: World rank that sends it.
        dst: World rank that lacks it.
        box: Which part.
        num_bytes: Its size.
    """

    name: str
    src: Rank
    dst: Rank
    box: Box
    num_bytes: int


def plan_moves(source: Placement, target: Placement) -> tuple[Move, ...]:
    """Work out what has to be sent. Equal arguments give equal moves on every rank.

    What a rank holds already is not sent to it, and nothing is sent to it twice: the bytes are the fewest that these placements
    allow. Where several ranks hold a part, the one that has sent least so far sends it.

    Args:
        source: What is where.
        target: What is to be where; names that only ``source`` has are dropped.

    Returns:
        The moves, by tensor in the order of ``target``.

    Raises:
        ArgumentError: A tensor is not in ``source``, is of another shape there, or no rank holds a part of it that is wanted.
    """
    sent: dict[Rank, int] = defaultdict(int)
    moves: list[Move] = []
    for name, wanted in target.items():
        held = source.get(name)
        if held is None:
            raise ArgumentError(f"{name} is wanted by ranks {sorted(wanted.boxes)}, but the source has no tensor of that name")
        if (held.shape, held.itemsize) != (wanted.shape, wanted.itemsize):
            raise ArgumentError(
                f"{name} has shape {held.shape} with {held.itemsize} bytes an element on ranks {sorted(held.boxes)}, but "
                f"{wanted.shape} with {wanted.itemsize} on ranks {sorted(wanted.boxes)}"
            )
        moves += _moves_of(name, held, wanted, sent)
    return tuple(moves)


def bytes_lacking(source: Placement, target: Placement) -> int:
    """The fewest bytes that can make ``target`` out of ``source``: of every wanted part, what its rank does not hold already.

    Args:
        source: What is where.
        target: What is to be where.

    Returns:
        Bytes.
    """
    total = 0
    for name, wanted in target.items():
        for rank, box in wanted.boxes.items():
            own = source[name].boxes.get(rank) if name in source else None
            kept = 0 if own is None else _size(_overlap(box, own))
            total += (_size(box) - kept) * wanted.itemsize
    return total


def _moves_of(name: str, held: TensorPlacement, wanted: TensorPlacement, sent: dict[Rank, int]) -> Iterator[Move]:
    """Cut the tensor wherever any part of it begins or ends: each cell is then held, or wanted, as a whole."""
    bounds = [
        sorted({edge for box in (*held.boxes.values(), *wanted.boxes.values()) for edge in (box[dim].start, box[dim].stop)})
        for dim in range(len(held.shape))
    ]
    for dst in sorted(wanted.boxes):
        box = wanted.boxes[dst]
        found: dict[Rank, list[Box]] = defaultdict(list)
        for cell in _cells(box, bounds):
            holders = [rank for rank, own in held.boxes.items() if _overlap(cell, own) == cell]
            if not holders:
                raise ArgumentError(
                    f"no rank holds {_text(cell)} of {name} {list(held.shape)}, which rank {dst} needs; "
                    f"ranks {sorted(held.boxes)} hold {', '.join(_text(held.boxes[rank]) for rank in sorted(held.boxes))}"
                )
            if dst not in holders:
                src = min(holders, key=lambda rank: (sent[rank], rank))
                found[src].append(cell)
                sent[src] += _size(cell) * held.itemsize
        for src, cells in found.items():
            for part in _merged(cells):
                yield Move(name, src, dst, part, _size(part) * held.itemsize)


def _cells(box: Box, bounds: list[list[int]]) -> Iterable[Box]:
    if _size(box) == 0:
        return ()
    inner = [[edge for edge in edges if part.start <= edge <= part.stop] for part, edges in zip(box, bounds, strict=True)]
    return product(*([range(start, stop) for start, stop in pairwise(edges)] for edges in inner))


def _merged(cells: list[Box]) -> list[Box]:
    """Join neighbours, along every dim in turn from the last."""
    for dim in reversed(range(len(cells[0]))):
        joined: list[Box] = []
        for cell in sorted(cells, key=lambda box: ([part.start for part in (*box[:dim], *box[dim + 1 :])], box[dim].start)):
            last = joined[-1] if joined else None
            if last and last[:dim] + last[dim + 1 :] == cell[:dim] + cell[dim + 1 :] and last[dim].stop == cell[dim].start:
                joined[-1] = (*cell[:dim], range(last[dim].start, cell[dim].stop), *cell[dim + 1 :])
            else:
                joined.append(cell)
        cells = joined
    return cells


def _overlap(box: Box, other: Box) -> Box:
    return tuple(
        range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop))) for a, b in zip(box, other, strict=True)
    )


def _size(box: Box) -> int:
    return prod(len(part) for part in box)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"
