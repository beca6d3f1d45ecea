"""Who sits where: the one rule that maps ranks to coordinates and groups.

``rank = sum(coordinate[axis] * stride[axis])`` with strides from ``order``. A *stage* is all ranks with one pp index, numbered
by the dense order without pp. The expert view re-factorises that number as ``etp * ep * edp``, etp fastest. Members of a group
ascend in that numbering, and so do the groups, by their first members; only dcp groups that span tp and cp list cp fastest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import chain
from math import gcd
from typing import NamedTuple, Self, cast, final

from parallel_runtime.errors import ArgumentError
from parallel_runtime.terms import DENSE_AXES, EXPERT_AXES, DenseAxis, Rank
from parallel_runtime.topology.mesh import Mesh, shift
from parallel_runtime.topology.rules import check_dcp, check_expert_sizes, check_order, check_ranks, check_sizes
from parallel_runtime.values import type_problem

__all__ = ["Coordinate", "Layout"]

_DENSE = frozenset(DENSE_AXES)
_EXPERT = frozenset((*EXPERT_AXES, "pp"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """The index of one rank on every axis.

    Attributes:
        tp: Index on the tensor-parallel axis.
        cp: Index on the context-parallel axis.
        dp: Index on the data-parallel axis.
        pp: Pipeline stage.
        ep: Index on the expert-parallel axis.
        etp: Index on the tensor-parallel axis inside an expert.
        edp: Index among the ranks that hold copies of the same experts.
        dcp: Index in the decode-context-parallel group.
        stage_rank: Position in the stage.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int
    dcp: int
    stage_rank: int

    def __str__(self) -> str:
        names = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dcp")
        return " ".join(f"{name}={index}" for name, index in zip(names, astuple(self), strict=False))


class _Selection(NamedTuple):
    """Which axes a group spans: some axes of one view of the stage, and perhaps pp.

    ``tp_stride`` above 1 asks for members with cp fastest where tp is: that many tp indices come before the next cp index.
    """

    view: Mesh
    axes: tuple[str, ...]
    spans_pp: bool = False
    tp_stride: int = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks arranged along named axes; pure arithmetic, nothing is opened.

    A question about one rank costs as much as its answer is long, whatever the world size.

    Attributes:
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        dp: Data-parallel size.
        pp: Pipeline stages.
        ep: Expert-parallel width.
        etp: Tensor-parallel width inside an expert.
        dcp: Decode-context-parallel width.
        order: The dense axes, fastest first.
        ranks: The world: the rank at each place, a ``range`` or a tuple.

    Raises:
        ConfigError: The sizes do not fit each other. Raised by the constructor.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int
    dcp: int = 1
    order: tuple[DenseAxis, ...] = DENSE_AXES
    ranks: Sequence[int]
    _dense: Mesh = field(init=False, repr=False, compare=False)
    _expert: Mesh = field(init=False, repr=False, compare=False)
    _block: int = field(init=False, repr=False, compare=False)
    _places: dict[int, int] = field(init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        dcp: int = 1,
        order: tuple[DenseAxis, ...] = DENSE_AXES,
        ranks: Sequence[int] | None = None,
    ) -> Self:
        """Make a layout, deriving what was left out.

        Args:
            tp: Tensor-parallel size.
            cp: Context-parallel size.
            dp: Data-parallel size.
            pp: Pipeline stages.
            ep: Expert-parallel width.
            etp: Tensor-parallel width inside an expert; by default ``gcd(tp, stage_size // ep)``.
            dcp: Decode-context-parallel width.
            order: The dense axes, fastest first.
            ranks: The rank at each place; by default ``range(world_size)``.

        Returns:
            The layout.

        Raises:
            ConfigError: The sizes do not fit each other.
        """
        check_sizes(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, dcp=dcp)
        if etp is None:
            etp = gcd(tp, tp * cp * dp // ep)
        if ranks is None:
            ranks = range(tp * cp * dp * pp)
        return cls(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, dcp=dcp, order=order, ranks=ranks)

    def __post_init__(self) -> None:
        check_sizes(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp, dcp=self.dcp)
        check_order(self.order)
        check_expert_sizes(tp=self.tp, cp=self.cp, dp=self.dp, ep=self.ep, etp=self.etp)
        check_dcp(self.dcp, tp=self.tp, cp=self.cp)
        check_ranks(self.ranks, world_size=self.world_size)
        stage_axes = tuple(axis for axis in self.order if axis != "pp")
        before_pp = self.order[: self.order.index("pp")]
        derived = {
            "_dense": self._stage_view(stage_axes),
            "_expert": Mesh(EXPERT_AXES, (self.etp, self.ep, self.edp)),
            "_block": self._stage_view(before_pp).size,
            "_places": {} if isinstance(self.ranks, range) else {rank: place for place, rank in enumerate(self.ranks)},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks in one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Copies of every expert in one stage."""
        return self.stage_size // (self.etp * self.ep)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the index of a rank on every axis.

        Args:
            rank: A rank of this world.

        Returns:
            Its coordinate.

        Raises:
            ArgumentError: No such rank.
        """
        cell, pp = self._cell(rank)
        tp, cp, dp = (self._dense.index(cell, axis) for axis in ("tp", "cp", "dp"))
        etp, ep, edp = (self._expert.index(cell, axis) for axis in EXPERT_AXES)
        dcp = (tp * self.cp + cp) % self.dcp
        return Coordinate(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=edp, dcp=dcp, stage_rank=cell)

    def rank(self, **coordinate: int) -> Rank:
        """Return the rank at a coordinate.

        Args:
            **coordinate: An index on each dense axis, or on each expert axis and pp. Axes of size 1 may be left out.

        Returns:
            The rank there.

        Raises:
            ArgumentError: An axis is missing, unknown, mixed from both views, or its index is out of range.
        """
        view = self._view(coordinate)
        for axis, size in zip((*view.axes, "pp"), (*view.sizes, self.pp), strict=True):
            if axis not in coordinate and size > 1:
                raise ArgumentError(f"{axis} is missing: it has size {size}; give {axis}=0 to {axis}={size - 1}")
            index = coordinate.get(axis, 0)
            if type(index) is not int or not 0 <= index < size:
                raise ArgumentError(f"{axis}={index!r} is outside its axis: {axis} has size {size}, so 0 to {size - 1}")
        cell = sum(coordinate.get(axis, 0) * stride for axis, stride in zip(view.axes, view.strides, strict=True))
        return Rank(self.ranks[self._place(cell, coordinate.get("pp", 0))])

    def group_of(self, rank: int, *axes: str) -> tuple[Rank, ...]:
        """Return the group of a rank over some axes: the ranks that agree with it on all other axes.

        Args:
            rank: A rank of this world.
            *axes: ``"world"``, ``"stage"`` or ``"dcp"`` alone; or any dense axes; or any expert axes and pp.

        Returns:
            The members in group order, ``rank`` among them.

        Raises:
            ArgumentError: No such rank, or no such combination of axes.
        """
        selection = self._select(axes)
        cell, pp = self._cell(rank)
        return self._members(selection, selection.view.corner(cell, selection.axes), pp, selection.view.offsets(selection.axes))

    def groups(self, *axes: str) -> tuple[tuple[Rank, ...], ...]:
        """Return all groups over some axes; together they hold every rank once.

        Args:
            *axes: As in ``group_of``.

        Returns:
            The groups, ascending by the place of their first member.

        Raises:
            ArgumentError: No such combination of axes.
        """
        selection = self._select(axes)
        view = selection.view
        offsets = view.offsets(selection.axes)
        corners = view.offsets(set(view.axes) - set(selection.axes))
        stages = (0,) if selection.spans_pp else range(self.pp)
        heads = sorted((self._place(corner, pp), corner, pp) for pp in stages for corner in corners)
        return tuple(self._members(selection, corner, pp, offsets) for _, corner, pp in heads)

    def group_index(self, rank: int, *axes: str) -> int:
        """Return where the group of a rank stands in ``groups(*axes)``, without listing any group.

        Args:
            rank: A rank of this world.
            *axes: As in ``group_of``.

        Returns:
            The index, from 0.

        Raises:
            ArgumentError: No such rank, or no such combination of axes.
        """
        view, axes, spans_pp, _ = self._select(axes)
        cell, pp = self._cell(rank)
        corner = view.corner(cell, axes)
        if spans_pp:
            return view.count_corners(axes, below=corner)
        block_start = corner // self._block * self._block
        before = view.count_corners(axes, below=block_start)
        in_block = view.count_corners(axes, below=block_start + self._block) - before
        return before * self.pp + in_block * pp + view.count_corners(axes, below=corner) - before

    def _stage_view(self, axes: Sequence[str]) -> Mesh:
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp}
        return Mesh(tuple(axes), tuple(sizes[axis] for axis in axes))

    def _view(self, axes: Iterable[str]) -> Mesh:
        names = frozenset(axes)
        if names <= _DENSE:
            return self._dense
        if names <= _EXPERT:
            return self._expert
        raise ArgumentError(
            f"no group over {', '.join(sorted(names))}: name any of tp, cp, dp, pp (the dense view), or any of etp, ep, edp, pp "
            f"(the expert view), or one of world, stage, dcp alone"
        )

    def _select(self, axes: tuple[str, ...]) -> _Selection:
        for axis in axes:
            if problem := type_problem("axis", axis, str, 'name axes one by one, such as "tp", "pp"'):
                raise ArgumentError(problem)
        if axes in (("world",), ("stage",)):
            return _Selection(self._dense, self._dense.axes, spans_pp=axes == ("world",))
        if axes == ("dcp",):
            return self._select_dcp()
        view = self._view(axes)
        return _Selection(view, tuple(axis for axis in view.axes if axis in axes), spans_pp="pp" in axes)

    def _select_dcp(self) -> _Selection:
        """Cut the tp axis in two: a dcp group is a slice of it, times all of cp."""
        if self.dcp == 1:
            return _Selection(self._dense, ())
        axes, sizes = self._dense.axes, self._dense.sizes
        at = axes.index("tp")
        width = self.dcp // self.cp
        view = Mesh((*axes[:at], "dcp", *axes[at:]), (*sizes[:at], width, self.tp // width, *sizes[at + 1 :]))
        return _Selection(view, ("dcp", "cp"), tp_stride=width if at < axes.index("cp") else 1)

    def _cell(self, rank: int) -> tuple[int, int]:
        """Return where a rank sits: its number in the stage, and its stage."""
        if type(rank) is not int or (rank not in self.ranks if isinstance(self.ranks, range) else rank not in self._places):
            raise ArgumentError(f"rank {rank!r} is not in this world of {self.world_size} ranks: {_shorten(self.ranks)}")
        place = self.ranks.index(rank) if isinstance(self.ranks, range) else self._places[rank]
        blocks, in_block = divmod(place, self._block)
        block, pp = divmod(blocks, self.pp)
        return block * self._block + in_block, pp

    def _place(self, cell: int, pp: int) -> int:
        block, in_block = divmod(cell, self._block)
        return (block * self.pp + pp) * self._block + in_block

    def _members(self, selection: _Selection, corner: int, pp: int, offsets: Sequence[int]) -> tuple[Rank, ...]:
        places = self._group_places(corner, range(self.pp) if selection.spans_pp else range(pp, pp + 1), offsets)
        if isinstance(places, range):
            members = tuple(self.ranks[places.start : places.stop : places.step])
        else:
            members = tuple([self.ranks[place] for place in places])
        if selection.tp_stride > 1:
            members = tuple(chain.from_iterable(members[tp :: selection.tp_stride] for tp in range(selection.tp_stride)))
        return cast(tuple[Rank, ...], members)

    def _group_places(self, corner: int, stages: range, offsets: Sequence[int]) -> Sequence[int]:
        """Return the places of a group, ascending; a ``range`` where they are evenly spaced, so that long groups stay cheap."""
        first = self._place(corner, stages.start)
        if len(offsets) == 1:
            return range(first, first + len(stages) * self._block, self._block)
        if len(stages) > 1:
            if self._block == self.stage_size and offsets == range(self.stage_size):
                return range(self.world_size)
            return sorted(self._place(corner + offset, pp) for pp in stages for offset in offsets)
        if corner // self._block == (corner + offsets[-1]) // self._block:
            return shift(offsets, first)
        if isinstance(offsets, range) and offsets.step % self._block == 0:
            step = offsets.step * self.pp
            return range(first, first + len(offsets) * step, step)
        return [self._place(corner + offset, stages.start) for offset in offsets]


def _shorten(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"{ranks.start} to {ranks.stop - 1}"
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ..."
