"""Moves between placements, against a reference that looks at every element."""

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.interop.moves import Box, Placement, TensorPlacement, bytes_lacking, plan_moves
from parallel_runtime.terms import Rank
from parallel_runtime.topology.shards import split_even

Element = tuple[int, ...]


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """A tensor of up to three dims, cut along one of them, or two, over ranks in any order, some parts held twice."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))

    def cut(first_rank: int) -> TensorPlacement:
        dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
        parts = [split_even(shape[dim], parts=draw(st.integers(1, 4))) for dim in dims]
        boxes = [
            tuple(dict(zip(dims, choice, strict=True)).get(dim, range(size)) for dim, size in enumerate(shape))
            for choice in product(*parts)
        ]
        boxes += draw(st.lists(st.sampled_from(boxes), max_size=3))
        ranks = draw(st.permutations(range(first_rank, first_rank + len(boxes))))
        return TensorPlacement(shape, 2, {Rank(rank): box for rank, box in zip(ranks, boxes, strict=True)})

    return {"w": cut(0)}, {"w": cut(draw(st.integers(0, 5)))}


def elements(box: Box) -> set[Element]:
    return set(product(*box))


@given(placements())
def test_every_rank_gets_what_it_lacks_once_from_one_that_has_it(both: tuple[Placement, Placement]) -> None:
    source, target = both[0]["w"], both[1]["w"]
    arrived: dict[Rank, Counter[Element]] = {rank: Counter() for rank in target.boxes}
    for move in plan_moves(*both):
        assert elements(move.box) <= elements(source.boxes[move.src])
        assert move.num_bytes == 2 * len(elements(move.box)) > 0
        arrived[move.dst].update(elements(move.box))
    for rank, box in target.boxes.items():
        lacking = elements(box) - (elements(source.boxes[rank]) if rank in source.boxes else set())
        assert arrived[rank] == Counter(lacking)


@given(placements())
def test_the_bytes_are_the_fewest_possible(both: tuple[Placement, Placement]) -> None:
    source, target = both[0]["w"], both[1]["w"]
    lacking = sum(
        len(elements(box) - (elements(source.boxes[rank]) if rank in source.boxes else set()))
        for rank, box in target.boxes.items()
    )
    assert sum(move.num_bytes for move in plan_moves(*both)) == bytes_lacking(*both) == 2 * lacking


@given(placements())
def test_a_pair_sends_no_two_parts_that_could_be_one(both: tuple[Placement, Placement]) -> None:
    moves = plan_moves(*both)
    for one, other in product(moves, moves):
        if one is not other and (one.src, one.dst) == (other.src, other.dst):
            differing = [dim for dim in range(len(one.box)) if one.box[dim] != other.box[dim]]
            assert len(differing) > 1 or one.box[differing[0]].stop != other.box[differing[0]].start


def test_copies_share_the_sending() -> None:
    whole = (range(8), range(4))
    source = {"w": TensorPlacement((8, 4), 4, {Rank(rank): whole for rank in range(4)})}
    target = {
        "w": TensorPlacement((8, 4), 4, {Rank(4 + rank): (part, range(4)) for rank, part in enumerate(split_even(8, parts=4))})
    }
    sent = Counter({move.src: move.num_bytes for move in plan_moves(source, target)})
    assert sent == Counter(dict.fromkeys(map(Rank, range(4)), 32))
