"""Layouts: what the questions answer, what they refuse, and that one rank's answer does not cost the world."""

import pickle
from functools import partial

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.terms import GROUP_NAMES
from parallel_runtime.topology.layout import Coordinate, Layout


def test_a_coordinate_reads_well_and_travels() -> None:
    at = Layout.of(tp=2, cp=2, dp=2, pp=2, ep=2, dcp=4).coordinate(13)
    assert at == Coordinate(tp=1, cp=0, dp=1, pp=1, ep=0, etp=1, edp=1, dcp=2, stage_rank=5)
    assert str(at) == "tp=1 cp=0 dp=1 pp=1 ep=0 etp=1 edp=1 dcp=2"
    assert pickle.loads(pickle.dumps(at)) == at


def test_left_out_values_are_derived() -> None:
    layout = Layout.of(tp=4, dp=3, ep=6)
    assert (layout.etp, layout.edp, layout.stage_size, layout.world_size) == (2, 1, 12, 12)
    assert layout.ranks == range(12)


def test_a_layout_can_be_hashed_compared_and_pickled() -> None:
    layout = Layout.of(tp=2, pp=2, ranks=(7, 3, 5, 1))
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.group_of(5, "tp") == (5, 1)
    assert layout != Layout.of(tp=2, pp=2)


def test_dcp_beside_cp_lists_cp_fastest() -> None:
    assert Layout.of(tp=2, cp=2, dcp=4).groups("dcp") == ((0, 2, 1, 3),)
    assert Layout.of(tp=2, cp=2, dcp=2).groups("dcp") == ((0, 2), (1, 3))
    assert Layout.of(tp=4, cp=2, dcp=4).groups("dcp") == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert Layout.of(tp=2, cp=2, dcp=4, order=("cp", "tp", "dp", "pp")).groups("dcp") == ((0, 1, 2, 3),)
    assert Layout.of(tp=4, dcp=2).groups("dcp") == ((0, 1), (2, 3))


def test_pp_in_the_middle_keeps_the_stage_numbering() -> None:
    layout = Layout.of(tp=2, pp=2, dp=2, etp=4, order=("tp", "cp", "pp", "dp"))
    assert layout.groups("stage") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.groups("etp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.groups("etp", "pp") == ((0, 1, 2, 3, 4, 5, 6, 7),)


class CountingRanks(tuple[int, ...]):
    """A world that counts how often it is read, place by place."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        CountingRanks.reads += 1
        return super().__getitem__(place)


def test_a_question_about_one_rank_reads_only_its_groups() -> None:
    layout = Layout.of(tp=8, pp=16, dp=64, ep=64, ranks=CountingRanks(range(8192)))
    CountingRanks.reads = 0
    layout.coordinate(5000)
    indices = [layout.group_index(5000, name) for name in GROUP_NAMES]
    assert CountingRanks.reads == 0
    layout.group_of(5000, "tp", "pp")
    assert CountingRanks.reads <= 8 * 16
    assert [layout.groups(name)[index] for name, index in zip(GROUP_NAMES, indices, strict=True)] == [
        layout.group_of(5000, name) for name in GROUP_NAMES
    ]


def test_a_world_too_large_to_list_is_no_obstacle() -> None:
    config = ParallelConfig(tp=8, pp=16, dp=2**23, ep=64, rank_offset=5)
    layout, rank = config.layout, 2**29
    for name in ("tp", "pp", "ep", "etp", "cp", "dcp"):
        assert rank in layout.group_of(rank, name)
    assert layout.group_index(rank, "tp") == (rank - 5) // 8
    assert layout.group_index(rank, "stage") == layout.coordinate(rank).pp
    assert len(config.digest()) == 64


def test_a_million_ranks_are_not_listed() -> None:
    layout = Layout.of(tp=8, pp=16, dp=8192, ep=64)
    assert layout.world_size == 1_048_576
    assert layout.ranks == range(1_048_576)
    assert layout.group_of(777_777, "ep") == tuple(range(777_729, 778_240, 8))[:64]
    assert layout.coordinate(777_777).pp == 777_777 // 65_536


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (("tp", "ep"), "no group over ep, tp"),
        (("world", "tp"), "no group over tp, world"),
        (("dcp", "tp"), "no group over dcp, tp"),
        (("rows",), "no group over rows"),
    ],
)
def test_axes_that_do_not_go_together_are_refused(axes: tuple[str, ...], text: str) -> None:
    layout = Layout.of(tp=2)
    for ask in (lambda: layout.groups(*axes), lambda: layout.group_of(0, *axes), lambda: layout.group_index(0, *axes)):
        with pytest.raises(ArgumentError, match=f"{text}: name any of tp, cp, dp, pp"):
            ask()


@pytest.mark.parametrize("rank", [-1, 4, True, "0"])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    layout = Layout.of(tp=2, pp=2)
    for ask in (layout.coordinate, lambda rank: layout.group_of(rank, "tp"), lambda rank: layout.group_index(rank, "tp")):
        with pytest.raises(ArgumentError, match=rf"rank {rank!r} is not in this world of 4 ranks: 0 to 3"):
            ask(rank)


def test_the_ranks_of_a_scattered_world_are_shown() -> None:
    with pytest.raises(ArgumentError, match="rank 0 is not in this world of 2 ranks: 7, 9"):
        Layout.of(tp=2, ranks=(7, 9)).coordinate(0)
    with pytest.raises(ArgumentError, match=r"rank 0 is not in this world of 9 ranks: 9, 8, 7, 6, 5, 4, 3, 2, \.\.\."):
        Layout.of(tp=9, ranks=tuple(range(9, 0, -1))).coordinate(0)


@pytest.mark.parametrize(
    ("coordinate", "text"),
    [
        ({"tp": 1}, "pp is missing: it has size 2; give pp=0 to pp=1"),
        ({"tp": 2, "pp": 0}, "tp=2 is outside its axis: tp has size 2, so 0 to 1"),
        ({"tp": -1, "pp": 0}, "tp=-1 is outside its axis"),
        ({"tp": True, "pp": 0}, "tp=True is outside its axis"),
        ({"cp": 1, "tp": 0, "pp": 0}, "cp=1 is outside its axis: cp has size 1, so 0 to 0"),
        ({"tp": 0, "ep": 0, "pp": 0}, "no group over ep, pp, tp"),
        ({"dcp": 0}, "no group over dcp"),
    ],
)
def test_a_coordinate_that_names_no_rank_is_refused(coordinate: dict[str, int], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Layout.of(tp=2, pp=2).rank(**coordinate)


def test_axes_of_size_one_may_be_left_out() -> None:
    layout = Layout.of(tp=2, pp=2)
    assert layout.rank(tp=1, pp=1) == 3
    assert layout.rank(etp=1, pp=1) == 3
    assert Layout.of(ranks=(5,)).rank() == 5


def test_a_layout_checks_its_sizes_itself() -> None:
    with pytest.raises(ConfigError, match="etp=3 does not divide"):
        Layout(tp=2, etp=3, ranks=range(2))


@pytest.mark.parametrize("axis", [1, None, ["tp"]])
def test_axes_that_are_no_names_are_refused(axis: str) -> None:
    layout = Layout.of(tp=2)
    for ask in (layout.groups, partial(layout.group_of, 0), partial(layout.group_index, 0)):
        with pytest.raises(ArgumentError, match=r'axis must be a str, got .*; name axes one by one, such as "tp", "pp"'):
            ask(axis)
