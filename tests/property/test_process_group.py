"""Every collective of ``torch.distributed`` on ``group.process_group``, against the reference computed in one place."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from tests.property.test_collectives import LAYOUTS, MOVED, PHASES, SUMMED, Step, combined, holdings, joined, laid_out, same
from tests.spmd.worlds import EVERY_MAKER, World

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch renames its functions
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@st.composite
def steps(draw: st.DrawFn, world_size: int) -> Step:
    operation = draw(st.sampled_from(sorted(CALLS)))
    dtype = draw(st.sampled_from(SUMMED if "reduce" in operation else MOVED))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    if operation in ("reduce_scatter_tensor", "all_to_all_single"):
        shape = (shape[0] * world_size, *shape[1:])
    sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size)))
    op = draw(st.sampled_from([op for op in OPS if op != "avg" or dtype.is_floating_point]))
    layout, peer = draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, world_size - 1))
    return Step(operation, dtype, shape, layout, 0, 0, op, peer, sizes, draw(st.booleans()), draw(st.integers(0, 2**16)))


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    world_size = draw(st.integers(1, 4))
    order = tuple(draw(st.permutations(range(world_size))))
    return order, draw(st.lists(steps(world_size), min_size=12, max_size=12))


def blank(like: Tensor, layout: str = "plain") -> Tensor:
    """Room for a result, in a memory layout that can be written."""
    return laid_out(torch.zeros(like.shape, dtype=torch.uint8).to(like.dtype), "plain" if layout == "expanded" else layout)


def call_all_reduce(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    tensor = blank(parts[0], step.layout).copy_(parts[group.rank_in_group])
    dist.all_reduce(tensor, OPS[step.op], group=group.process_group)
    assert same(tensor, combined(parts, step.op))


def call_reduce(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    mine = parts[group.rank_in_group]
    tensor = blank(mine, step.layout).copy_(mine)
    dist.reduce(tensor, op=OPS[step.op], group=group.process_group, group_dst=step.peer)
    assert same(tensor, combined(parts, step.op) if group.rank_in_group == step.peer else mine)


def call_broadcast(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    tensor = blank(parts[0], step.layout).copy_(parts[group.rank_in_group])
    dist.broadcast(tensor, group=group.process_group, group_src=step.peer)
    assert same(tensor, parts[step.peer])


def call_all_gather(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    rows = [blank(part, step.layout) for part in parts]
    dist.all_gather(rows, laid_out(parts[group.rank_in_group], step.layout), group=group.process_group)
    assert all(map(same, rows, parts))


def call_all_gather_into_tensor(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    want = joined(parts, 0)
    output = blank(want)
    dist.all_gather_into_tensor(output, parts[group.rank_in_group], group=group.process_group)
    assert same(output, want)


def call_reduce_scatter_tensor(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    want = combined(parts, step.op).chunk(group.world_size)[group.rank_in_group].clone()
    output = blank(want)
    dist.reduce_scatter_tensor(output, parts[group.rank_in_group], OPS[step.op], group=group.process_group)
    assert same(output, want)


def call_all_to_all_single(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    me = group.rank_in_group
    want = joined([part.chunk(group.world_size)[me].clone() for part in parts], 0)
    output = blank(want)
    dist.all_to_all_single(output, parts[me], group=group.process_group)
    assert same(output, want)


def call_all_to_all(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    """Member i sends ``sizes[i]`` elements of its tensor, as far as it goes, to everybody."""
    flat = [part.flatten()[: step.sizes[member]] for member, part in enumerate(parts)]
    outputs = [blank(part) for part in flat]
    dist.all_to_all(outputs, [flat[group.rank_in_group]] * group.world_size, group=group.process_group)
    assert all(map(same, outputs, flat))


def call_gather(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    rows = [blank(part, step.layout) for part in parts] if group.rank_in_group == step.peer else None
    mine = laid_out(parts[group.rank_in_group], step.layout)
    dist.gather(mine, rows, group=group.process_group, group_dst=step.peer)
    assert rows is None or all(map(same, rows, parts))


def call_scatter(group: GroupCoordinator, step: Step, parts: list[Tensor]) -> None:
    output = blank(parts[0], step.layout)
    rows = [laid_out(part, step.layout) for part in parts] if group.rank_in_group == step.peer else None
    dist.scatter(output, rows, group=group.process_group, group_src=step.peer)
    assert same(output, parts[group.rank_in_group])


CALLS: dict[str, Callable[[GroupCoordinator, Step, list[Tensor]], None]] = {
    name.removeprefix("call_"): call for name, call in list(globals().items()) if name.startswith("call_")
}


@pytest.mark.parametrize("kind", sorted(EVERY_MAKER))
@settings(max_examples=30, phases=PHASES)
@given(program=programs())
def test_process_groups_equal_the_reference(kind: str, program: tuple[tuple[int, ...], list[Step]]) -> None:
    order, drawn = program

    def body(group: GroupCoordinator) -> None:
        for step in drawn:
            CALLS[step.operation](group, step, holdings(step, group.world_size))

    World(kind)(len(order), body, ranks=order)
