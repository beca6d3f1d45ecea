"""B053: one rule for ranks, in the code, in messages between stages and in the documentation."""

import re
from itertools import chain, permutations, product
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.topology import Layout

ALL_SIZES = list(product((1, 2, 3), repeat=4))


@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_b053_coordinates_lead_back_and_groups_partition(sizes: tuple[int, int, int, int]) -> None:
    tp, cp, dp, pp = sizes
    layout = Layout.of(tp=tp, cp=cp, dp=dp, pp=pp)
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert all(rank in layout.group_of(rank, axis) for axis in ("tp", "cp", "dp", "pp"))
        assert {*layout.group_of(rank, "tp")} & {*layout.group_of(rank, "pp")} == {rank}
    for axis in ("tp", "cp", "dp", "pp"):
        assert sorted(chain.from_iterable(layout.groups(axis))) == list(range(layout.world_size))


def test_b053_the_same_place_in_the_next_stage_differs_only_in_pp() -> None:
    layout = ParallelConfig.from_sglang(tp_size=12, attn_dp_size=3, attn_cp_size=2, pp_size=3).layout
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        for stage, other in enumerate(layout.group_of(rank, "pp")):
            there = layout.coordinate(other)
            assert there.pp == stage
            assert (there.tp, there.cp, there.dp, there.stage_rank) == (at.tp, at.cp, at.dp, at.stage_rank)


@pytest.mark.parametrize("order", list(permutations(("tp", "cp", "dp", "pp"))), ids="-".join)
def test_b053_derived_groups_agree_with_the_coordinates_in_every_order(order: tuple[str, ...]) -> None:
    layout = Layout.of(tp=2, cp=2, dp=3, pp=2, ep=3, etp=2, order=order)  # type: ignore[arg-type]  # plain strings
    places = {rank: layout.coordinate(rank) for rank in layout.ranks}
    for axes, fixed in (
        (("dp", "cp"), ("tp", "pp")),
        (("tp", "dp"), ("cp", "pp")),
        (("ep",), ("etp", "edp", "pp")),
        (("edp",), ("etp", "ep", "pp")),
        (("stage",), ("pp",)),
    ):
        for rank, place in places.items():
            same = {
                other for other, there in places.items() if all(getattr(there, name) == getattr(place, name) for name in fixed)
            }
            assert set(layout.group_of(rank, *axes)) == same, axes


def test_b053_the_documentation_shows_the_groups_the_code_builds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "layout.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\[.+\]) \|$", page, flags=re.MULTILINE)
    layout = ParallelConfig(tp=2, cp=2, dp=2, pp=2, ep=2).layout
    shown = {
        name: [[int(rank) for rank in re.findall(r"\d+", group)] for group in re.findall(r"\[[^\]]+\]", row)]
        for name, row in rows
    }
    assert set(shown) == {"tp", "cp", "dp", "pp", "stage", "etp", "ep", "edp"}
    for name, groups in shown.items():
        assert groups == [list(group) for group in layout.groups(name)], name
