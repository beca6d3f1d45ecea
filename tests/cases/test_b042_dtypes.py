"""B042: dtypes the backend does not know."""

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import DtypeError
from tests.spmd.worlds import EVERY_MAKER, World

KINDS = pytest.mark.parametrize("kind", sorted(set(EVERY_MAKER) - {"hosts"}))
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def pattern(dtype: torch.dtype, member: int) -> Tensor:
    """Eight elements of any bit pattern."""
    raw = (torch.arange(8 * dtype.itemsize) * 37 + 11 * member).to(torch.uint8)
    return raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@KINDS
def test_b042_every_dtype_arrives_bit_by_bit(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        me = group.rank_in_group
        for dtype in DTYPES:
            mine, peers = pattern(dtype, me), pattern(dtype, 1 - me)
            one = pattern(dtype, 1)
            assert bits(group.broadcast(mine, 1)) == bits(one), dtype
            both = group.all_gather(mine)
            assert both.dtype is dtype
            assert bits(both) == bits(pattern(dtype, 0)) + bits(one), dtype
            assert bits(group.exchange(mine)) == bits(peers), dtype
            assert bits(group.broadcast_tensor_dict({"x": mine}, 1)["x"]) == bits(one), dtype
            if group.is_first_rank:
                group.send(mine)
                group.send_tensor_dict({"x": mine})
            else:
                for got in (group.recv(), group.recv_tensor_dict()["x"]):
                    assert got.dtype is dtype
                    assert bits(got) == bits(peers), dtype

    World(kind)(2, body)


@KINDS
def test_b042_one_dict_of_many_dtypes_keeps_its_order(kind: str) -> None:
    def body(group: GroupCoordinator) -> list[str]:
        sent = {str(dtype): pattern(dtype, 0) for dtype in DTYPES}
        got = group.broadcast_tensor_dict(sent if group.is_first_rank else None)
        assert all(bits(got[key]) == bits(sent[key]) and got[key].dtype is sent[key].dtype for key in sent)
        return list(got)

    first, second = World(kind)(2, body)
    assert first == second == [str(dtype) for dtype in DTYPES]


@KINDS
def test_b042_arithmetic_without_meaning_is_refused_by_name(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16):
            tensor = pattern(dtype, 0)
            for call in (group.all_reduce, group.all_reduce_, group.reduce, group.reduce_scatter):
                with pytest.raises(DtypeError, match=str(dtype).removeprefix("torch.")) as caught:
                    call(tensor)
                assert isinstance(caught.value, TypeError)
        with pytest.raises(DtypeError, match="max of complex64"):
            group.all_reduce(pattern(torch.complex64, 0), "max")
        group.barrier()

    World(kind)(2, body)


@KINDS
def test_b042_summing_bool_is_a_logical_or(kind: str) -> None:
    def body(group: GroupCoordinator) -> None:
        mine = torch.tensor([True, True, False, False]) if group.is_first_rank else torch.tensor([True, False, True, False])
        total = group.all_reduce(mine)
        assert total.view(torch.uint8).tolist() == [1, 1, 1, 0]
        assert group.all_reduce(mine, "product").tolist() == [True, False, False, False]

    World(kind)(2, body)
