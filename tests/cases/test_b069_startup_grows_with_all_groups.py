"""B069: what one rank does must grow with its own groups, not with all groups of the job."""

import time

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.plan import Plan
from parallel_runtime.terms import GROUP_NAMES
from parallel_runtime.topology import Layout


def thousand(device: str) -> Plan:
    return ParallelConfig(tp=8, pp=8, dp=16, ep=8, device=device, shm="off").plan(hosts=128)  # type: ignore[arg-type]  # a plain string


@pytest.mark.parametrize(("device", "per_group"), [("cpu", 1), ("cuda", 2)])
def test_b069_a_rank_opens_at_most_a_cpu_and_a_device_group_per_dimension(device: str, per_group: int) -> None:
    plan = thousand(device)
    for rank in range(0, 1024, 31):
        view = plan.for_rank(rank)
        assert {len(group.opens) for group in view.groups} == {0, per_group}
        # world, stage, tp, dp, pp, ep and edp differ; etp is tp; cp and dcp have one rank
        assert view.budget.communicators == 7 * per_group


def test_b069_one_rank_never_lists_the_groups_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    monkeypatch.setattr(Layout, "groups", lambda self, *axes: listed.append("groups"))
    monkeypatch.setattr(Layout, "group_of", lambda self, rank, *axes: listed.append("group_of"))
    plan = thousand("cpu")
    for rank in range(1024):
        plan.for_rank(rank)
    assert listed == []


def test_b069_the_whole_table_lists_each_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[tuple[str, ...]] = []
    groups = Layout.groups

    def count(self: Layout, *axes: str) -> tuple[tuple[int, ...], ...]:
        listed.append(axes)
        return groups(self, *axes)

    monkeypatch.setattr(Layout, "groups", count)
    plan = thousand("cpu")
    table = {name: plan.groups(name) for name in GROUP_NAMES}
    assert len(listed) == len(GROUP_NAMES)
    assert sum(len(found) for name, found in table.items() if found[0].opens) == 1 + 8 + 128 + 64 + 128 + 128 + 512


def test_b069_equal_rank_sets_share_and_groups_of_one_open_nothing() -> None:
    plan = ParallelConfig(tp=4, ep=4).plan()
    (opened,) = (family for family in plan.families if family.group_size > 1)
    assert opened.names == ("world", "stage", "tp", "ep")
    assert plan.budgets().world.communicators == 4
    assert all(not group.communicators for name in ("cp", "dp", "pp", "etp", "edp", "dcp") for group in plan.groups(name))


def test_b069_the_plan_of_every_rank_takes_no_time() -> None:
    start = time.monotonic()
    plan = thousand("cpu")
    assert len({plan.for_rank(rank).groups for rank in range(1024)}) > 1
    assert time.monotonic() - start < 4
