"""Resharding refuses on every rank what does not fit on one, and notices what was damaged on the way."""

import re

import pytest
import torch
from torch import Tensor

from parallel_runtime import ParallelConfig, ParallelContext, run_threads
from parallel_runtime.errors import RankFailedError
from parallel_runtime.interop import Placement, TensorPlacement, reshard
from parallel_runtime.terms import Rank
from parallel_runtime.topology.shards import split_even

WORLD = ParallelConfig(tp=2)


def _rows(*ranks: int, size: int = 8) -> Placement:
    parts = split_even(size, parts=len(ranks))
    return {"w": TensorPlacement((size, 3), 4, {Rank(rank): (part, range(3)) for rank, part in zip(ranks, parts, strict=True)})}


def _whole() -> Tensor:
    return torch.arange(24.0).view(8, 3)


def _said(body: object, *args: object) -> str:
    with pytest.raises(RankFailedError) as caught:
        run_threads(body, WORLD, *args, timeout_s=30)  # type: ignore[arg-type]  # a function of this file
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_parts_arrive_in_new_tensors_and_nothing_is_written_to_the_old(dtype: torch.dtype) -> None:
    def body(ctx: ParallelContext) -> tuple[dict[str, Tensor], Tensor]:
        mine = _whole().to(dtype)[ctx.rank * 4 : ctx.rank * 4 + 4].T.contiguous().T  # not contiguous
        return reshard({"w": mine}, _rows(0, 1), _rows(1, 0), over=ctx.world), mine

    (first, _), (second, old) = run_threads(body, WORLD, timeout_s=30)
    assert torch.equal(first["w"], _whole().to(dtype)[4:])
    assert torch.equal(second["w"], _whole().to(dtype)[:4])
    assert torch.equal(old, _whole().to(dtype)[4:])


def test_a_missing_tensor_is_named_on_every_rank() -> None:
    def body(ctx: ParallelContext) -> str:
        state = {"w": _whole()[:4]} if ctx.rank == 0 else {}
        with pytest.raises(ValueError, match="rank 1: ") as caught:
            reshard(state, _rows(0, 1), _rows(1, 0), over=ctx.world)
        return str(caught.value)

    assert set(run_threads(body, WORLD, timeout_s=30)) == {"rank 1: w is not in state, where a part of shape [4, 3] is wanted"}


def test_a_tensor_of_the_wrong_shape_is_named() -> None:
    def body(ctx: ParallelContext) -> None:
        out = {"w": torch.empty(4 + ctx.rank, 3, dtype=torch.float64 if ctx.rank else torch.float32)}
        reshard({"w": _whole()[:4]}, _rows(0, 1), _rows(1, 0), over=ctx.world, out=out)

    text = "rank 1: w in out is float64[5, 3]; the layout says a part of shape [4, 3] with 4 bytes an element"
    assert text in _said(body)


def test_dtypes_of_the_holders_agree() -> None:
    def body(ctx: ParallelContext) -> None:
        reshard({"w": _whole()[:4].to([torch.float32, torch.int32][ctx.rank])}, _rows(0, 1), _rows(1, 0), over=ctx.world)

    assert "w is float32 on rank 0 and int32 on rank 1; convert one of them first" in _said(body)


def test_an_output_of_another_dtype_is_refused() -> None:
    def body(ctx: ParallelContext) -> None:
        out = {"w": torch.empty(4, 3, dtype=torch.int32)}
        reshard({"w": _whole()[:4]}, _rows(0, 1), _rows(1, 0), over=ctx.world, out=out)

    assert "w is float32 on rank 0 and int32 in out on rank 0; convert one of them first" in _said(body)


def test_ranks_with_other_placements_are_named() -> None:
    def body(ctx: ParallelContext) -> None:
        reshard({"w": _whole()[:4]}, _rows(0, 1), [_rows(1, 0), _rows(0, 1)][ctx.rank], over=ctx.world)

    assert "ranks [1] were given other placements than rank 0; give all ranks the same" in _said(body)


def test_the_group_has_every_rank() -> None:
    def body(ctx: ParallelContext) -> None:
        reshard({"w": _whole()[:4]}, _rows(0, 1), _rows(0, 2, 3), over=ctx.world)

    assert "ranks [2, 3] of a layout are not in world#0 with ranks (0, 1)" in _said(body)


def test_what_is_damaged_on_the_way_is_noticed() -> None:
    class Damaging:
        """A group whose receives flip a bit."""

        def __init__(self, ctx: ParallelContext) -> None:
            self._group = ctx.world

        def __getattr__(self, name: str) -> object:
            return getattr(self._group, name)

        def recv(self, src: int, tag: int, *, out: Tensor, timeout_s: float | None) -> Tensor:
            self._group.recv(src, tag, out=out, timeout_s=timeout_s)
            out[5] ^= 1
            return out

    def body(ctx: ParallelContext) -> None:
        mine = {"w": _whole()[ctx.rank * 4 : ctx.rank * 4 + 4]}
        reshard(mine, _rows(0, 1), _rows(1, 0), over=Damaging(ctx))  # type: ignore[arg-type]  # it quacks

    assert re.search(r"what arrived from rank \d at rank \d is not what was sent: w", _said(body))
