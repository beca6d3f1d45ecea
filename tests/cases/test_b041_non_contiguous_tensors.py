"""B041: views give wrong numbers, or are not reduced at all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from tests.spmd.worlds import EVERY_MAKER, World

KINDS = pytest.mark.parametrize("kind", sorted(set(EVERY_MAKER) - {"hosts"}))

VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(8.0).reshape(2, 4).t(),
    "strided": lambda: torch.arange(16.0).reshape(4, 4)[:, ::2],
    "expanded": lambda: torch.arange(4.0).view(4, 1).expand(4, 2),
    "narrow": lambda: torch.arange(16.0).reshape(8, 2).narrow(0, 3, 4),
}


def passed_on(group: GroupCoordinator, tensor: Tensor) -> list[Tensor]:
    """What the first member sends in every way, as the second one receives it."""
    if group.is_first_rank:
        group.isend(tensor)
        group.isend(tensor, copy=False)
        group.send_tensor_dict({"x": [tensor]})
        group.send_object(tensor)
        group.send(tensor, tag=1)
        return []
    got = [group.recv(), group.recv(), group.recv_tensor_dict()["x"][0], group.recv_object()]
    out = torch.zeros(2 * tensor.shape[0], tensor.shape[1])[::2]
    return [*got, group.recv(tag=1, out=out)]


def results(group: GroupCoordinator, tensor: Tensor) -> list[Tensor]:
    got = [
        group.all_reduce(tensor),
        group.broadcast(tensor, 1),
        group.all_gather(tensor, 0),
        group.all_gather(tensor, 1),
        group.reduce_scatter(tensor),
        group.reduce_scatterv(tensor, [1, 3]),
        group.all_to_all(tensor, 0, 1),
        group.all_to_allv(tensor, [3, 1]),
        group.all_gatherv(tensor, [4, 4]),
        group.exchange(tensor),
        *passed_on(group, tensor),
        group.scatter(tensor, 0),
        group.broadcast_tensor_dict({"x": tensor}, 1)["x"],
    ]
    got += [part for part in (group.gather(tensor, 1), group.reduce(tensor, 1)) if part is not None]
    return got


@KINDS
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_b041_a_view_gives_what_its_copy_gives(kind: str, view: str) -> None:
    def body(group: GroupCoordinator) -> None:
        tensor = VIEWS[view]()
        offset = 100 * group.rank_in_group
        scaled = tensor.add(offset).contiguous()
        if view != "expanded":
            tensor.add_(offset)
        else:
            tensor = (torch.arange(4.0) + offset).view(4, 1).expand(4, 2)
        assert torch.equal(tensor, scaled)
        for got, want in zip(results(group, tensor), results(group, scaled), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(tensor, scaled)

    World(kind)(2, body)


@KINDS
def test_b041_an_output_view_is_filled_and_its_neighbours_are_not(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        holder = torch.full((4, 6), -1.0)
        out = holder[:, 1:5:2]
        assert group.all_reduce(torch.arange(8.0).view(4, 2), out=out) is out
        assert torch.equal(out, 2 * torch.arange(8.0).view(4, 2))
        assert bool((holder[:, ::2] == -1).all())
        assert bool((holder[:, 5] == -1).all())
        group.all_gather(torch.full((2, 2), float(group.rank_in_group)), out=out)
        assert out.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
        assert bool((holder[:, ::2] == -1).all())

    World(kind)(2, body)


@KINDS
def test_b041_every_output_may_be_a_view(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        rows = torch.arange(8.0).view(4, 2) + 100 * me
        calls: list[Callable[[Tensor | None], Tensor | None]] = [
            lambda out: group.reduce_scatter(rows, out=out),
            lambda out: group.reduce_scatterv(rows, [2, 2], out=out),
            lambda out: group.all_to_all(rows, out=out),
            lambda out: group.all_to_allv(rows, [2, 2], output_splits=[2, 2], out=out),
            lambda out: group.all_gather(rows, 1, out=out),
            lambda out: group.all_gatherv(rows, [4, 4], out=out),
            lambda out: group.scatter(rows, 1, out=out),
            lambda out: group.reduce(rows, 1, out=out if me == 1 else None),
            lambda out: group.gather(rows, 1, out=out if me == 1 else None),
            lambda out: group.exchange(rows, out=out),
        ]
        for number, call in enumerate(calls):
            want = call(None)
            if want is None:
                assert call(None) is None
                continue
            holder = torch.full((want.shape[1] * 2, want.shape[0] + 2), -1.0)
            out = holder[::2, 1:-1].t()
            assert call(out) is out
            assert torch.equal(out, want), number
            out.fill_(-1)
            assert bool((holder == -1).all()), number

    World(kind)(2, body)


@KINDS
def test_b041_in_place_changes_exactly_the_view(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        holder = torch.zeros(4, 4)
        view = holder[:, ::2]
        view.fill_(group.rank_in_group + 1)
        assert group.all_reduce_(view) is view
        assert holder.tolist() == [[3, 0, 3, 0]] * 4
        view.fill_(group.rank_in_group)
        assert group.broadcast_(view, 1) is view
        assert holder.tolist() == [[1, 0, 1, 0]] * 4

    World(kind)(2, body)


@KINDS
def test_b041_an_expanded_tensor_cannot_be_written(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        tensor = torch.zeros(1).expand(3)
        for call in (group.all_reduce_, group.broadcast_):
            with pytest.raises(ArgumentError, match="cannot write into an expanded tensor"):
                call(tensor)
        with pytest.raises(ArgumentError, match="cannot write into an expanded tensor"):
            group.all_reduce(torch.zeros(3), out=tensor)
        with pytest.raises(ArgumentError, match="out has shape"):
            group.all_reduce(torch.zeros(3), out=torch.zeros(4))
        with pytest.raises(TypeError, match=r"out is torch.float64"):
            group.all_reduce(torch.zeros(3), out=torch.zeros(3, dtype=torch.float64))
        with pytest.raises(ArgumentError, match="out is on meta, the input on cpu"):
            group.all_reduce(torch.zeros(3), out=torch.zeros(3, device="meta"))
        group.barrier()

    World(kind)(2, body)
