"""Every collective, on every communicator, against a reference computed in one place.

One group is opened per example and runs a drawn list of operations, each over tensors of a drawn dtype, shape and memory layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from tests.spmd.worlds import EVERY_MAKER, World

MOVED = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SUMMED = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.bfloat16,
)
PHASES = (Phase.explicit, Phase.generate)  # a program that fails is worth reading as it is; shrinking takes minutes
LAYOUTS = ("plain", "transposed", "strided", "offset", "expanded")


@dataclass(frozen=True)
class Step:
    """One drawn operation."""

    operation: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    dim: int
    other_dim: int
    op: str
    peer: int
    sizes: tuple[int, ...]
    with_out: bool
    seed: int


@st.composite
def steps(draw: st.DrawFn, world_size: int) -> Step:
    operation = draw(st.sampled_from(sorted(CHECKS)))
    reduces = "reduce" in operation
    dtype = draw(st.sampled_from(SUMMED if reduces else MOVED))
    splits = operation in ("reduce_scatter", "all_to_all", "scatter")
    needs_dim = splits or operation in ("all_gatherv", "reduce_scatterv", "all_to_allv")
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1 if needs_dim else 0, max_size=3)))
    dim = draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    if splits:
        shape = tuple(size * world_size if axis == dim % len(shape) else size for axis, size in enumerate(shape))
    op = draw(st.sampled_from(("sum", "max", "min", "product") + (("avg",) if dtype.is_floating_point else ())))
    return Step(
        operation,
        dtype,
        shape,
        draw(st.sampled_from(LAYOUTS)),
        dim,
        draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1)),
        op,
        draw(st.integers(0, world_size - 1)),
        tuple(draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    world_size = draw(st.integers(1, 4))
    order = tuple(draw(st.permutations(range(world_size))))
    return order, draw(st.lists(steps(world_size), min_size=12, max_size=12))


def values(step: Step, member: int, shape: tuple[int, ...]) -> Tensor:
    """What ``member`` holds; small numbers, so that every order of summing gives the same."""
    numbers = torch.arange(int(torch.Size(shape).numel())) * 7 + step.seed + member * 3
    if step.dtype is torch.bool:
        return (numbers % 3 == 0).view(shape)
    if step.dtype.is_floating_point and step.dtype.itemsize == 1:
        return (numbers % 64).to(torch.uint8).view(shape).view(step.dtype)
    return (numbers % 4).to(step.dtype).view(shape)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if not tensor.dim() or layout == "plain":
        return tensor.clone()
    raw = tensor if tensor.dtype.itemsize > 1 or tensor.dtype is torch.uint8 else tensor.view(torch.uint8)
    if layout == "transposed":
        moved = raw.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    elif layout == "strided":
        holder = torch.zeros(*raw.shape[:-1], raw.shape[-1] * 2, dtype=raw.dtype)
        moved = holder[..., ::2].copy_(raw)
    elif layout == "offset":
        holder = torch.zeros(raw.shape[0] + 2, *raw.shape[1:], dtype=raw.dtype)
        moved = holder.narrow(0, 2, raw.shape[0]).copy_(raw)
    else:
        moved = raw[:1].clone().expand(raw.shape)
    return moved.view(tensor.dtype) if moved.dtype is not tensor.dtype else moved


def holdings(step: Step, world_size: int, shapes: list[tuple[int, ...]] | None = None) -> list[Tensor]:
    """What every member hands over, as contiguous copies."""
    shapes = shapes or [step.shape] * world_size
    return [_plain(laid_out(values(step, member, shapes[member]), step.layout)) for member in range(world_size)]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.contiguous().clone()


def combined(parts: list[Tensor], op: str) -> Tensor:
    if parts[0].dtype is torch.bool:
        return reduce(torch.logical_or if op in ("sum", "max") else torch.logical_and, parts)
    wide = [part.double() if part.dtype.is_floating_point else part for part in parts]
    folds: dict[str, Callable[[Any, Any], Any]] = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    total = reduce(folds.get(op, torch.add), wide)
    return (total / len(parts) if op == "avg" else total).to(parts[0].dtype)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    if not parts[0].dim():
        return torch.stack(parts)
    if parts[0].dtype.itemsize == 1:
        return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)
    return torch.cat(parts, dim)


def same(got: Tensor, want: Tensor) -> bool:
    if got.dtype is not want.dtype or got.shape != want.shape:
        return False
    return bytes_of(got) == bytes_of(want)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def room(step: Step, want: Tensor) -> Tensor | None:
    """An output that is not contiguous, with a guard around it."""
    if not step.with_out or not want.dim():
        return None
    return torch.full((*want.shape[:-1], want.shape[-1] * 2 + 2), 1, dtype=torch.uint8).to(want.dtype)


def view_of(holder: Tensor | None, want: Tensor) -> Tensor | None:
    return None if holder is None else holder[..., 1 : 1 + 2 * want.shape[-1] : 2]


def guard_intact(holder: Tensor | None, want: Tensor) -> bool:
    if holder is None:
        return True
    mask = torch.ones(holder.shape, dtype=torch.bool)
    mask[..., 1 : 1 + 2 * want.shape[-1] : 2] = False
    fresh = torch.full(holder.shape, 1, dtype=torch.uint8).to(holder.dtype)
    return same(holder[mask], fresh[mask])


def run(step: Step, mine: Tensor, want: Tensor, call: Callable[[Tensor, Tensor | None], Tensor | None]) -> None:
    """Run one operation with and without ``out=`` and compare everything that a caller can see."""
    handed = laid_out(mine, step.layout)
    holder = room(step, want)
    out = view_of(holder, want)
    got = call(handed, out)
    assert got is not None
    assert out is None or got is out
    assert same(got, want), (step, got, want)
    assert same(handed, mine), f"{step.operation} changed its input"
    assert guard_intact(holder, want), f"{step.operation} wrote beside its output"
    if out is None:
        assert got.is_contiguous()
        assert not got.numel() or got.untyped_storage().data_ptr() != handed.untyped_storage().data_ptr()


def check_all_reduce(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    want = combined(parts, step.op)
    run(step, parts[group.rank_in_group], want, lambda tensor, out: group.all_reduce(tensor, step.op, out=out))


def check_all_reduce_(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    mine = parts[group.rank_in_group]
    tensor = laid_out(mine, "plain" if step.layout == "expanded" else step.layout)
    assert group.all_reduce_(tensor, step.op) is tensor
    assert same(tensor, combined(parts, step.op))


def check_reduce(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    want, mine = combined(parts, step.op), parts[group.rank_in_group]
    if group.rank_in_group == step.peer:
        run(step, mine, want, lambda tensor, out: group.reduce(tensor, step.peer, step.op, out=out))
    else:
        assert group.reduce(laid_out(mine, step.layout), step.peer, step.op) is None


def check_all_gather(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    want = joined(parts, step.dim)
    run(step, parts[group.rank_in_group], want, lambda tensor, out: group.all_gather(tensor, step.dim, out=out))


def check_all_gatherv(group: GroupCoordinator, step: Step) -> None:
    dim = step.dim % len(step.shape)
    shapes = [(*step.shape[:dim], size, *step.shape[dim + 1 :]) for size in step.sizes]
    parts = holdings(step, group.world_size, shapes)
    want = joined(parts, dim)
    sizes = step.sizes if step.seed % 2 else None
    run(step, parts[group.rank_in_group], want, lambda tensor, out: group.all_gatherv(tensor, sizes, step.dim, out=out))


def check_reduce_scatter(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    want = _plain(combined(parts, step.op).chunk(group.world_size, step.dim)[group.rank_in_group])
    run(step, parts[group.rank_in_group], want, lambda tensor, out: group.reduce_scatter(tensor, step.dim, step.op, out=out))


def check_reduce_scatterv(group: GroupCoordinator, step: Step) -> None:
    dim = step.dim % len(step.shape)
    shape = (*step.shape[:dim], sum(step.sizes), *step.shape[dim + 1 :])
    parts = holdings(step, group.world_size, [shape] * group.world_size)
    shards = torch.split(combined(parts, step.op), list(step.sizes), dim)
    want, mine = _plain(shards[group.rank_in_group]), parts[group.rank_in_group]
    run(step, mine, want, lambda tensor, out: group.reduce_scatterv(tensor, step.sizes, step.dim, step.op, out=out))


def check_all_to_all(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    me = group.rank_in_group
    want = joined([_plain(part.chunk(group.world_size, step.dim)[me]) for part in parts], step.other_dim)
    run(step, parts[me], want, lambda tensor, out: group.all_to_all(tensor, step.dim, step.other_dim, out=out))


def check_all_to_allv(group: GroupCoordinator, step: Step) -> None:
    dim = step.dim % len(step.shape)
    me = group.rank_in_group
    splits = [[(size + member) % 4 for size in step.sizes] for member in range(group.world_size)]
    shapes = [(*step.shape[:dim], sum(row), *step.shape[dim + 1 :]) for row in splits]
    parts = holdings(step, group.world_size, shapes)
    want = joined([_plain(torch.split(part, row, dim)[me]) for part, row in zip(parts, splits, strict=True)], dim)
    arriving = [row[me] for row in splits] if step.seed % 2 else None
    run(step, parts[me], want, lambda tensor, out: group.all_to_allv(tensor, splits[me], dim, output_splits=arriving, out=out))


def check_broadcast(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    run(
        replace(step, with_out=False),
        parts[group.rank_in_group],
        parts[step.peer],
        lambda tensor, out: group.broadcast(tensor, step.peer),
    )


def check_broadcast_(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    tensor = laid_out(parts[group.rank_in_group], "plain" if step.layout == "expanded" else step.layout)
    assert group.broadcast_(tensor, step.peer) is tensor
    assert same(tensor, parts[step.peer])


def check_gather(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    mine = parts[group.rank_in_group]
    if group.rank_in_group == step.peer:
        run(step, mine, joined(parts, step.dim), lambda tensor, out: group.gather(tensor, step.peer, step.dim, out=out))
    else:
        assert group.gather(laid_out(mine, step.layout), step.peer, step.dim) is None


def check_scatter(group: GroupCoordinator, step: Step) -> None:
    source = holdings(step, group.world_size)[step.peer]
    want = _plain(source.chunk(group.world_size, step.dim)[group.rank_in_group])
    handed = laid_out(source, step.layout) if group.rank_in_group == step.peer else None
    holder = room(step, want)
    assert same(group.scatter(handed, step.peer, step.dim, out=view_of(holder, want)), want)
    assert guard_intact(holder, want)


def check_exchange(group: GroupCoordinator, step: Step) -> None:
    if group.world_size == 1:
        return
    parts = holdings(step, group.world_size)
    want = parts[(group.rank_in_group - 1) % group.world_size]
    run(step, parts[group.rank_in_group], want, lambda tensor, out: group.exchange(tensor, tag=step.seed % 5, out=out))


def check_tensor_dict(group: GroupCoordinator, step: Step) -> None:
    parts = holdings(step, group.world_size)
    mine = {"x": {"y": [laid_out(parts[group.rank_in_group], step.layout), step.seed]}}
    got = group.broadcast_tensor_dict(mine, step.peer)
    assert same(got["x"]["y"][0], parts[step.peer])
    assert got["x"]["y"][1] == step.seed


CHECKS: dict[str, Callable[[GroupCoordinator, Step], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def compare(kind: str, order: tuple[int, ...], drawn: list[Step]) -> None:
    def body(group: GroupCoordinator) -> None:
        assert group.ranks == order
        for step in drawn:
            CHECKS[step.operation](group, step)

    World(kind)(len(order), body, ranks=order)


@settings(max_examples=120, phases=PHASES)
@given(program=programs())
def test_local_collectives_equal_the_reference(program: tuple[tuple[int, ...], list[Step]]) -> None:
    compare("local", *program)


@pytest.mark.parametrize("kind", sorted(set(EVERY_MAKER) - {"local"}))
@settings(max_examples=30, phases=PHASES)
@given(program=programs())
def test_collectives_equal_the_reference(kind: str, program: tuple[tuple[int, ...], list[Step]]) -> None:
    compare(kind, *program)
