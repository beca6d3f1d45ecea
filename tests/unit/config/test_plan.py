"""Plans of known worlds, to the number."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel_runtime.comm.shm.geometry import choose_geometries
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.budget import Budget
from parallel_runtime.config.plan import Plan, make_plan
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.topology import Layout


def eight() -> Plan:
    return ParallelConfig(tp=2, pp=2, dp=2).plan(hosts=2)


def test_families_join_names_with_equal_groups() -> None:
    names = [family.names for family in eight().families]
    assert names == [("world",), ("stage",), ("tp", "etp"), ("cp", "ep", "dcp"), ("dp", "edp"), ("pp",)]


def test_one_rank() -> None:
    view = eight().for_rank(6)
    assert (view.host, view.local_rank, str(view.coordinate)[:19]) == ("host1", 2, "tp=0 cp=0 dp=1 pp=1")
    assert [group.label for group in view.groups if group.opens] == ["world#0", "stage#1", "tp#3", "dp#2", "pp#2"]
    assert {group.name for group in view.groups if group.crosses_hosts} == {"world", "pp"}
    etp = next(group for group in view.groups if group.name == "etp")
    assert (etp.shares_with, etp.reason) == ("tp", "same ranks as tp, whose communicators it shares")
    assert next(group for group in view.groups if group.name == "cp").reason == "a group of one opens nothing"
    # gloo for the world of 8 and the pair across hosts: 7 + 1 connections and one listening socket; memory inside hosts
    shared = 2 * (choose_geometries(4)[0].nbytes // 4) + 2 * (choose_geometries(2)[0].nbytes // 2)
    assert view.budget == Budget(communicators=6, sockets=9, threads=3, descriptors=24, bytes=120_000 + shared)


def test_budget_text() -> None:
    assert str(eight().budgets().largest_rank) == "6 communicators, 9 sockets, 3 threads, 24 descriptors, 22.1 MB"


@pytest.mark.parametrize(
    ("backend", "uses_shm", "opened"),
    [
        ("gloo", False, ["c10d:gloo"]),
        ("gloo", True, ["shm"]),
        ("nccl", True, ["shm", "c10d:nccl", "symm_mem"]),
        ("nccl", False, ["c10d:gloo", "c10d:nccl"]),
        ("local", True, ["local"]),
        ("fake", True, ["fake"]),
    ],
)
def test_communicators(backend: str, uses_shm: bool, opened: list[str]) -> None:
    plan = make_plan(Layout.of(tp=2), backend=backend, uses_shm=uses_shm)  # type: ignore[arg-type]  # a plain string
    assert [str(communicator) for communicator in plan.group("tp", 0).communicators] == opened
    across = make_plan(Layout.of(tp=2), hosts=2, backend=backend, uses_shm=uses_shm)  # type: ignore[arg-type]  # as above
    assert "shm" not in map(str, across.group("tp", 0).communicators)


def test_threads_and_fakes_cost_no_sockets() -> None:
    for backend in ("local", "fake"):
        budget = ParallelConfig(tp=4, backend=backend).plan().budgets().world
        assert budget == Budget(communicators=4)


@pytest.mark.parametrize(
    ("settings", "backend", "uses_shm"),
    [
        ({}, "gloo", True),
        ({"device": "cuda"}, "nccl", True),
        ({"device": "cuda", "backend": "gloo"}, "gloo", True),
        ({"shm": "on"}, "gloo", True),
        ({"shm": "off"}, "gloo", False),
    ],
)
def test_a_config_says_what_its_plan_opens(settings: dict[str, str], backend: str, uses_shm: bool) -> None:
    plan = ParallelConfig(tp=2, **settings).plan()  # type: ignore[arg-type]  # plain strings
    assert (plan.backend, plan.uses_shm) == (backend, uses_shm)


def test_an_open_size_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="tp=-1 is not known yet, so there is no plan"):
        ParallelConfig(tp=-1).plan()


def test_text() -> None:
    text = eight().to_text()
    assert text.startswith("8 ranks on 2 hosts: tp=2 dp=2 pp=2\n")
    assert "pp        4 x 2           0 4; 1 5; 2 6; 3 7  4 of 4       c10d:gloo        several hosts\n" in text
    assert "Groups of one, which open nothing: cp, ep, dcp." in text
    assert "host1  4      4-7" in text
    assert "the world          48             72       24       192          177 MB" in text


def test_text_of_a_mixed_family_names_both_kinds() -> None:
    plan = make_plan(Layout.of(tp=2, pp=3), hosts=2, uses_shm=True)  # ranks 2 and 3 of the middle stage are on two hosts
    assert "1 of 3       shm / c10d:gloo  ranks of one host / several hosts" in plan.to_text()
    largest = plan.budgets().largest_rank
    assert (largest.communicators, largest.sockets) == (5, 5 + 1 + 2 + 1)  # gloo for the world, the middle stage and pp


def test_text_of_a_world_with_many_hosts_is_cut() -> None:
    text = ParallelConfig(dp=1024).plan(hosts=128).to_text()
    assert "112 more hosts, not shown." in text
    assert "0-1023" in text


def test_json_holds_groups_and_budget() -> None:
    data = json.loads(eight().to_json())
    assert data["groups"]["pp"] == {
        "group_size": 2,
        "num_groups": 4,
        "shares_with": "pp",
        "opens": ["c10d:gloo"],
        "crossing_hosts": [0, 1, 2, 3],
        "ranks": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert data["groups"]["etp"]["opens"] == []
    assert data["budget"]["largest_rank"]["sockets"] == 9
    assert data["hosts"] == 2


def test_json_of_a_big_world_lists_no_members() -> None:
    data = json.loads(make_plan(Layout.of(tp=2, dp=16384), hosts=1).to_json())
    assert "ranks" not in data["groups"]["tp"]


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"layout": {}}', '{"layout": {"ranks": [0], "ranks_are": "listed"}}'])
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the JSON of a plan"):
        Plan.from_json(text)


def test_json_with_an_impossible_range_is_refused() -> None:
    data = json.loads(eight().to_json())
    data["layout"]["ranks"] = [0, 8, 0]
    with pytest.raises(ConfigError, match="not the JSON of a plan"):
        Plan.from_json(json.dumps(data))


def test_json_with_impossible_sizes_is_refused() -> None:
    text = eight().to_json().replace('"tp": 2', '"tp": 3')
    with pytest.raises(ConfigError, match="12"):
        Plan.from_json(text)


def test_diff_of_two_orders() -> None:
    other = ParallelConfig(tp=2, pp=2, dp=2, order=("tp", "cp", "pp", "dp")).plan(hosts=2)
    assert [str(difference) for difference in eight().diff(other)] == [
        "order: tp cp dp pp -> tp cp pp dp",
        "stage groups: 2 x 4 -> 2 x 4, 2 cross hosts",
        "dp groups: 4 x 2 -> 4 x 2, 4 cross hosts",
        "edp groups: 4 x 2, same as dp -> 4 x 2, 4 cross hosts, same as dp",
        "pp groups: 4 x 2, 4 cross hosts -> 4 x 2",
        "one rank pays at most: 6 communicators, 9 sockets, 3 threads, 24 descriptors, 22.1 MB -> "
        "7 communicators, 12 sockets, 4 threads, 25 descriptors, 21.7 MB",
        "the world pays: 48 communicators, 72 sockets, 24 threads, 192 descriptors, 177 MB -> "
        "56 communicators, 96 sockets, 32 threads, 200 descriptors, 173 MB",
        "4 of 8 ranks move, first rank 2: tp=0 cp=0 dp=1 pp=0 ep=0 etp=0 edp=1 dcp=0 on host0 -> "
        "tp=0 cp=0 dp=0 pp=1 ep=0 etp=0 edp=0 dcp=0 on host0",
    ]


def test_diff_of_placements_shows_who_moves() -> None:
    there = ParallelConfig(tp=2).plan(hosts={"a": [0], "b": [1]})
    back = ParallelConfig(tp=2).plan(hosts={"b": [0], "a": [1]})
    assert [difference.what for difference in there.diff(back)] == ["2 of 2 ranks move, first rank 0"]


def test_diff_of_huge_worlds_skips_the_ranks() -> None:
    small, big = make_plan(Layout.of(dp=16384)), make_plan(Layout.of(dp=16385))
    assert not any("move" in difference.what for difference in small.diff(big))


def test_unknown_names_ranks_and_backends_are_refused() -> None:
    plan = eight()
    with pytest.raises(ArgumentError, match="no group is called 'xp'; the names are world, stage"):
        plan.family("xp")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ArgumentError, match="rank 8 is not in this world"):
        plan.for_rank(8)
    with pytest.raises(ConfigError, match="backend='mpi' is unknown; use one of gloo, nccl, local, fake"):
        make_plan(Layout.of(), backend="mpi")  # type: ignore[arg-type]  # on purpose


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_shows_every_rank_its_groups_and_a_legend() -> None:
    texts = texts_of(eight().to_svg())
    assert texts[0] == "8 ranks on 2 hosts: tp=2 dp=2 pp=2"
    assert [text for text in texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(8)]
    assert texts.count("tp#0") == 2
    assert texts.count("pp#0 ↔") == 2
    assert {"tp#0: 0 1", "pp#3: 3 7 ↔", "pipeline parallel: 4 groups of 2", "host0: ranks 0-3"} <= set(texts)
    assert not any("etp" in text for text in texts)


def test_picture_gives_equal_colors_to_equal_groups_only() -> None:
    svg = ElementTree.fromstring(eight().to_svg())
    shapes = list(svg)
    fills: dict[str, set[str]] = {}
    for box, words in pairwise(shapes):
        if words.tag.endswith("text") and "#" in (words.text or "") and box.tag.endswith("rect"):
            label = (words.text or "").split(":")[0].removesuffix(" ↔")
            fills.setdefault(label, set()).add(box.attrib["fill"])
    assert len(fills) == 12
    assert all(len(colors) == 1 for colors in fills.values())
    assert len(set.union(*fills.values())) == 12


def test_picture_of_a_big_world_says_what_is_left_out() -> None:
    texts = texts_of(ParallelConfig(tp=8, pp=8, dp=16, ep=8).plan(hosts=128).to_svg())
    assert "Abbreviated: 32 of 1,024 ranks are drawn, on 4 of 128 hosts." in texts
    assert "... 124 more hosts ..." in texts
    assert "... and 120 more groups" in texts
    assert "rank 1023" in texts
    texts = texts_of(ParallelConfig(tp=1024).plan().to_svg())
    assert "... and 1,008 more ranks on this host" in texts


def test_picture_of_one_rank() -> None:
    assert "rank 0" in texts_of(ParallelConfig().plan().to_svg())


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    eight().to_png(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'parallel-runtime\[plot\]'"):
        eight().to_png(tmp_path / "plan.png")
