"""What a plan says without listing groups equals what the listed groups say."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.budget import Budget
from parallel_runtime.config.plan import Plan, make_plan
from parallel_runtime.terms import GROUP_NAMES
from parallel_runtime.testing.strategies import configs, layouts
from parallel_runtime.topology import Layout
from parallel_runtime.topology.hosts import Hosts
from parallel_runtime.topology.shapes import group_ends, group_shape
from parallel_runtime.topology.sizes import divisors


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = draw(layouts(max_world_size=32))
    names = draw(st.lists(st.sampled_from("abc"), min_size=layout.world_size, max_size=layout.world_size))
    hosts: Hosts = draw(st.sampled_from(divisors(layout.world_size)) | st.just(names))
    return make_plan(layout, hosts=hosts, uses_shm=draw(st.booleans()), backend=draw(st.sampled_from(["gloo", "nccl"])))


@given(layouts())
def test_names_share_a_shape_exactly_when_their_groups_are_equal(layout: Layout) -> None:
    for one, other in combinations(GROUP_NAMES, 2):
        same_shape = group_shape(layout, one) == group_shape(layout, other)
        assert same_shape == (layout.groups(one) == layout.groups(other)), (one, other)


@given(layouts())
def test_ends_are_the_first_and_the_last_member(layout: Layout) -> None:
    for name in GROUP_NAMES:
        for group in layout.groups(name):
            shape = group_shape(layout, name)
            assert shape.world_size == len(group)
            assert {group_ends(layout, rank, shape) for rank in group} == {(group[0], group[-1])}


@given(plans())
def test_groups_of_a_rank_are_the_groups_of_the_world(plan: Plan) -> None:
    for name in GROUP_NAMES:
        groups = plan.groups(name)
        for rank in plan.layout.ranks:
            assert plan.group(name, rank) == groups[plan.layout.group_index(rank, name)]
        crossing = [len({plan.hosts.host_of(rank) for rank in members}) > 1 for members in plan.layout.groups(name)]
        assert [group.crosses_hosts for group in groups] == crossing
        assert plan.count_crossing(name) == sum(crossing) == len(plan.crossing(name))


@given(plans())
def test_ranks_pay_what_the_world_pays(plan: Plan) -> None:
    budgets = [plan.for_rank(rank).budget for rank in plan.layout.ranks]
    assert sum(budgets, Budget()) == plan.budgets().world
    largest = plan.budgets().largest_rank
    assert all(budget.communicators <= largest.communicators and budget.bytes <= largest.bytes for budget in budgets)


@given(plans())
def test_json_round_trip_and_no_difference_to_itself(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert plan.diff(again) == ()


@given(configs(max_world_size=32))
def test_every_config_has_a_plan_that_can_be_read_and_drawn(config: ParallelConfig) -> None:
    plan = config.plan()
    assert plan.to_text().startswith(f"{config.world_size} rank")
    assert plan.to_svg().count("rank ") >= config.world_size


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("pp", "dp", "cp", "tp"), ("tp", "pp", "cp", "dp")])
def test_first_groups_of_a_big_world_are_the_first(order: tuple[str, ...]) -> None:
    layout = Layout.of(tp=2, cp=2, dp=8192, pp=2, order=order)  # type: ignore[arg-type]  # plain strings read better
    plan = make_plan(layout, hosts=2)
    for name in ("tp", "dp", "pp"):
        assert plan.some_groups(name, most=5) == plan.groups(name)[:5]
