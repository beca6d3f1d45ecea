"""Every collective against a reference in one process, over drawn sizes, dtypes and members."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm.communicator import Operation, ReduceOp
from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.comm.shm.reductions import ARITHMETIC_DTYPES
from parallel_runtime.errors import CollectiveMismatchError, DtypeError
from tests.unit.comm.shm.members import MemoryStore, Threads, open_member

TIMEOUT_S = 20.0
MOVED = (torch.uint8, torch.bool, torch.int16, torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16)
EDGES = (1, 3, 4095, 4096, 4097, 16385, 65536, 65537, 262144, 300001, 524289)
sizes = st.one_of(st.integers(1, 300), st.sampled_from(EDGES))


@pytest.fixture(scope="module", params=[True, False], ids=["in place", "in pieces"])
def worlds(request: pytest.FixtureRequest) -> Iterator[dict[int, Threads]]:
    """Groups of 2, 3 and 4, kept for the whole module; what is large is read in place, or moved in pieces."""
    groups = {world_size: Threads(world_size, direct=request.param) for world_size in (2, 3, 4)}
    yield groups
    for group in groups.values():
        group.__exit__(None, None, None)


def draw(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The values of one member: equal for equal arguments, small enough for products."""
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    values = torch.randint(1, 4, shape, generator=generator)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (values + torch.rand(shape, generator=generator)).to(dtype)
    return values.to(dtype) if dtype.itemsize > 1 or dtype is not torch.float8_e4m3fn else values.float().to(dtype)


def in_order(tensors: list[Tensor], op: ReduceOp) -> Tensor:
    """The members' tensors combined one after the other, low precision in float32."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        other = tensor.to(wide)
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total = total + other
        elif op is ReduceOp.PRODUCT:
            total = total * other
        else:
            total = torch.maximum(total, other) if op is ReduceOp.MAX else torch.minimum(total, other)
    if op is ReduceOp.AVG:
        total = torch.div(total, len(tensors), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


@settings(max_examples=60)
@given(
    world_size=st.sampled_from((2, 3, 4)),
    size=sizes,
    dtype=st.sampled_from((*FLOATS, *INTEGERS[:5])),
    op=st.sampled_from(list(ReduceOp)),
    seed=st.integers(0, 99),
)
def test_all_reduce_combines_in_rank_order_bit_for_bit(
    worlds: dict[int, Threads], world_size: int, size: int, dtype: torch.dtype, op: ReduceOp, seed: int
) -> None:
    inputs = [draw(rank, (size,), dtype, seed) for rank in range(world_size)]
    expected = in_order(inputs, op)

    def body(comm: ShmCommunicator) -> Tensor:
        mine = inputs[comm.rank_in_group].clone()
        comm.all_reduce_(mine, op, TIMEOUT_S)
        return mine

    for result in worlds[world_size].run(body):
        assert torch.equal(result, expected)


@settings(max_examples=40)
@given(world_size=st.sampled_from((2, 3, 4)), size=sizes, dtype=st.sampled_from(MOVED), seed=st.integers(0, 99), data=st.data())
def test_movements_deliver_every_byte(
    worlds: dict[int, Threads], world_size: int, size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    lengths = [data.draw(st.integers(0, 200_000)) for _ in range(world_size)]
    parts = [
        [draw(src * 10 + dst, (lengths[(src + dst) % world_size],), dtype, seed) for dst in range(world_size)]
        for src in range(world_size)
    ]
    inputs = [draw(rank, (size,), dtype, seed) for rank in range(world_size)]

    def body(comm: ShmCommunicator) -> dict[str, Any]:
        rank = comm.rank_in_group
        mine = inputs[rank]
        got: dict[str, Any] = {"all_gather": torch.empty((world_size, size), dtype=dtype)}
        comm.all_gather(got["all_gather"], mine, TIMEOUT_S)
        got["broadcast"] = mine.clone()
        comm.broadcast_(got["broadcast"], root, TIMEOUT_S)
        got["gatherv"] = [torch.empty(lengths[(member + root) % world_size], dtype=dtype) for member in range(world_size)]
        comm.all_gatherv(got["gatherv"], parts[rank][root], TIMEOUT_S)
        got["exchange"] = [torch.empty(lengths[(src + rank) % world_size], dtype=dtype) for src in range(world_size)]
        comm.all_to_allv(got["exchange"], parts[rank], TIMEOUT_S)
        got["gather"] = [torch.empty_like(mine) for _ in inputs] if rank == root else None
        comm.gather(got["gather"], mine, root, TIMEOUT_S)
        got["scatter"] = torch.empty_like(mine)
        comm.scatter(got["scatter"], inputs if rank == root else None, root, TIMEOUT_S)
        return got

    for rank, got in enumerate(worlds[world_size].run(body)):
        assert same(got["all_gather"], torch.stack(inputs))
        assert same(got["broadcast"], inputs[root])
        assert all(same(mine, parts[src][root]) for src, mine in enumerate(got["gatherv"]))
        assert all(same(mine, parts[src][rank]) for src, mine in enumerate(got["exchange"]))
        assert got["gather"] is None if rank != root else all(map(same, got["gather"], inputs))
        assert same(got["scatter"], inputs[rank])


def test_a_member_with_little_to_exchange_stays_for_those_with_much(worlds: dict[int, Threads]) -> None:
    def size(src: int, dst: int) -> int:
        return 3_000_001 if (src, dst) == (0, 1) else 5

    def body(comm: ShmCommunicator) -> bool:
        rank = comm.rank_in_group
        for step in range(3):
            inputs = [torch.full((size(rank, dst),), 10 * rank + dst + step, dtype=torch.uint8) for dst in range(3)]
            outputs = [torch.empty(size(src, rank), dtype=torch.uint8) for src in range(3)]
            comm.all_to_allv(outputs, inputs, TIMEOUT_S)
            if not all(bool((output == 10 * src + rank + step).all()) for src, output in enumerate(outputs)):
                return False
        return True

    assert worlds[3].run(body) == [True] * 3


@settings(max_examples=30)
@given(
    world_size=st.sampled_from((2, 3, 4)),
    size=sizes,
    dtype=st.sampled_from((*FLOATS, torch.int32)),
    op=st.sampled_from(list(ReduceOp)),
    root=st.integers(0, 1),
)
def test_reduce_and_reduce_scatter(
    worlds: dict[int, Threads], world_size: int, size: int, dtype: torch.dtype, op: ReduceOp, root: int
) -> None:
    inputs = [draw(rank, (world_size, size), dtype, size) for rank in range(world_size)]
    expected = in_order(inputs, op)

    def body(comm: ShmCommunicator) -> tuple[Tensor, Tensor | None]:
        mine = inputs[comm.rank_in_group]
        row = torch.empty(size, dtype=dtype)
        comm.reduce_scatter(row, mine, op, TIMEOUT_S)
        total = torch.empty_like(mine) if comm.rank_in_group == root else None
        comm.reduce(total, mine, root, op, TIMEOUT_S)
        return row, total

    untouched = [tensor.clone() for tensor in inputs]
    for rank, (row, total) in enumerate(worlds[world_size].run(body)):
        assert torch.equal(row, expected[rank])
        assert total is None if rank != root else total is not None and torch.equal(total, expected)
    assert all(map(torch.equal, inputs, untouched))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, ReduceOp.SUM), (torch.bfloat16, ReduceOp.AVG)])
def test_what_is_combined_in_place_has_the_same_bits(
    worlds: dict[int, Threads], world_size: int, dtype: torch.dtype, op: ReduceOp
) -> None:
    """Above 4 MiB each member reads a part of all tensors where they lie."""
    count = (4 << 20) // dtype.itemsize // world_size + 1001
    inputs = [draw(rank, (world_size, count), dtype, 5) for rank in range(world_size)]
    expected, kept = in_order(inputs, op), [tensor.clone() for tensor in inputs]

    def body(comm: ShmCommunicator) -> list[Tensor]:
        rank = comm.rank_in_group
        row, whole, summed = torch.empty(count, dtype=dtype), torch.empty_like(expected), inputs[rank].clone()
        comm.reduce_scatter(row, inputs[rank], op, TIMEOUT_S)
        comm.reduce(whole if rank == world_size - 1 else None, inputs[rank], world_size - 1, op, TIMEOUT_S)
        comm.all_reduce_(summed, op, TIMEOUT_S)
        return [row, whole, summed]

    results = worlds[world_size].run(body)
    for rank, (row, _, summed) in enumerate(results):
        assert torch.equal(row, expected[rank])
        assert torch.equal(summed, expected)
        assert torch.equal(inputs[rank], kept[rank])
    assert torch.equal(results[-1][1], expected)


@pytest.mark.parametrize("size", [5, 4096, 70_000, 300_001])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_symmetric_buffers_give_the_same_bits(worlds: dict[int, Threads], world_size: int, size: int) -> None:
    inputs = [draw(rank, (world_size, size), torch.float32, size) for rank in range(world_size)]

    def body(comm: ShmCommunicator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shared = comm.symmetric_empty((world_size, size), torch.float32, TIMEOUT_S)
        shared.copy_(inputs[comm.rank_in_group])
        gathered = torch.empty((world_size, world_size, size))
        comm.all_gather(gathered, shared, TIMEOUT_S)
        row = torch.empty(size)
        comm.reduce_scatter(row, shared, ReduceOp.SUM, TIMEOUT_S)
        comm.all_reduce_(shared[1:], ReduceOp.MAX, TIMEOUT_S)
        maximum = shared[1:].clone()
        shared.copy_(inputs[comm.rank_in_group])
        for _ in range(3):
            comm.all_reduce_(shared, ReduceOp.SUM, TIMEOUT_S)
        return gathered, row, maximum, shared

    once = in_order(inputs, ReduceOp.SUM)
    thrice = in_order([in_order([once] * world_size, ReduceOp.SUM)] * world_size, ReduceOp.SUM)
    for rank, (gathered, row, maximum, shared) in enumerate(worlds[world_size].run(body)):
        assert torch.equal(gathered, torch.stack(inputs))
        assert torch.equal(row, once[rank])
        assert torch.equal(maximum, in_order(inputs, ReduceOp.MAX)[1:])
        assert torch.equal(shared, thrice)


@pytest.mark.parametrize("nbytes", [0, 1, 65536, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_001])
@pytest.mark.parametrize("world_size", [2, 3])
def test_broadcast_bytes(worlds: dict[int, Threads], world_size: int, nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)

    def body(comm: ShmCommunicator) -> list[bytes]:
        return [bytes(comm.broadcast_bytes(data if comm.rank_in_group == src else None, src, TIMEOUT_S)) for src in (0, 1, 1)]

    assert worlds[world_size].run(body) == [[data] * 3] * world_size


def test_a_source_runs_ahead_of_its_readers_without_overwriting(worlds: dict[int, Threads]) -> None:
    def body(comm: ShmCommunicator) -> list[float]:
        seen = []
        for step in range(200):
            tensor = torch.full((1000,), float(step if comm.rank_in_group == 1 else -1))
            comm.broadcast_(tensor, 1, TIMEOUT_S)
            seen.append(tensor.mean().item())
        return seen

    assert worlds[3].run(body) == [[float(step) for step in range(200)]] * 3


def test_a_plan_never_serves_a_tensor_that_moved(worlds: dict[int, Threads]) -> None:
    def body(comm: ShmCommunicator) -> bool:
        right = True
        for step in range(700):  # more than plans are kept
            tensor = torch.full((7 + step,), float(step))
            comm.all_reduce_(tensor, ReduceOp.SUM, TIMEOUT_S)
            right = right and bool((tensor == 2 * step).all())
        return right

    assert all(worlds[2].run(body))


def test_low_precision_is_rounded_once(worlds: dict[int, Threads]) -> None:
    tiny = [256.0, 1.0, 1.0, 1.0]  # in bfloat16, 256 + 1 rounds back to 256 each time

    def body(comm: ShmCommunicator) -> tuple[float, float]:
        small = torch.full((3,), tiny[comm.rank_in_group], dtype=torch.bfloat16)
        large = torch.full((99_999,), tiny[comm.rank_in_group], dtype=torch.bfloat16)
        comm.all_reduce_(small, ReduceOp.SUM, TIMEOUT_S)
        comm.all_reduce_(large, ReduceOp.SUM, TIMEOUT_S)
        return small[1].item(), large[-1].item()

    exact = torch.tensor(259.0).bfloat16().item()
    assert exact != 256.0
    assert worlds[4].run(body) == [(exact, exact)] * 4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [3, 600_000])
def test_what_overflows_is_infinite_without_a_warning(
    worlds: dict[int, Threads], world_size: int, dtype: torch.dtype, size: int
) -> None:
    def body(comm: ShmCommunicator) -> bool:
        large = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
        comm.all_reduce_(large, ReduceOp.SUM, TIMEOUT_S)
        return bool(large.isinf().all())

    assert all(worlds[world_size].run(body))


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        (ReduceOp.SUM, (True, False), True),
        (ReduceOp.MAX, (False, False), False),
        (ReduceOp.MIN, (True, False), False),
        (ReduceOp.PRODUCT, (True, True), True),
    ],
)
def test_booleans(worlds: dict[int, Threads], op: ReduceOp, values: tuple[bool, bool], expected: bool) -> None:
    def body(comm: ShmCommunicator) -> bool:
        tensor = torch.tensor([values[comm.rank_in_group]])
        comm.all_reduce_(tensor, op, TIMEOUT_S)
        return bool(tensor.item())

    assert worlds[2].run(body) == [expected, expected]


def test_average_of_integers_rounds_towards_zero(worlds: dict[int, Threads]) -> None:
    def body(comm: ShmCommunicator) -> list[int]:
        tensor = torch.tensor([-3, 3, -4, 7]) if comm.rank_in_group == 0 else torch.tensor([0, 0, 0, 0])
        comm.all_reduce_(tensor, ReduceOp.AVG, TIMEOUT_S)
        return tensor.tolist()

    assert worlds[2].run(body) == [[-1, 1, -2, 3]] * 2


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        (ReduceOp.SUM, torch.float8_e4m3fn, "only moves torch.float8_e4m3fn"),
        (ReduceOp.MAX, torch.complex64, "complex numbers have no order"),
        (ReduceOp.AVG, torch.bool, "avg of torch.bool is not a bool"),
    ],
)
def test_arithmetic_that_makes_no_sense_is_refused_and_breaks_nothing(
    worlds: dict[int, Threads], op: ReduceOp, dtype: torch.dtype, message: str
) -> None:
    def body(comm: ShmCommunicator) -> float:
        with pytest.raises(DtypeError, match=message):
            comm.all_reduce_(torch.zeros(4).to(dtype), op, TIMEOUT_S)
        after = torch.ones(1)
        comm.all_reduce_(after, ReduceOp.SUM, TIMEOUT_S)
        return after.item()

    assert worlds[2].run(body) == [2.0, 2.0]


def test_supports_every_movement_and_what_has_arithmetic(worlds: dict[int, Threads]) -> None:
    comm = worlds[2].members[0]
    assert comm.supports(Operation.BROADCAST, torch.float8_e5m2, 8)
    assert not comm.supports(Operation.ALL_REDUCE, torch.float8_e5m2, 8)
    assert all(comm.supports(Operation.REDUCE_SCATTER, dtype, 8) for dtype in ARITHMETIC_DTYPES)
    assert "attached by proc" in comm.describe()


def same(left: Tensor, right: Tensor) -> bool:
    """Equal as bytes."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("pinned_on", [(), (1,), (0, 1, 2)])
def test_memory_that_no_other_process_can_read_moves_in_pieces(
    monkeypatch: pytest.MonkeyPatch, pinned_on: tuple[int, ...]
) -> None:
    """One member's tensors are pinned, the others cannot know: all of them move in pieces, and the results are the same."""
    count = 6 << 20
    mine = threading.local()
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, device=None: getattr(mine, "is_pinned", False))

    def body(comm: ShmCommunicator) -> list[Tensor]:
        rank = comm.rank_in_group
        mine.is_pinned = rank in pinned_on
        data = draw(rank, (count,), torch.uint8, 1)
        rows = torch.zeros(3, count, dtype=torch.uint8)
        comm.all_gather(rows, data, TIMEOUT_S)
        parts = [torch.zeros(count // 3, dtype=torch.uint8) for _ in range(3)]
        comm.all_to_allv(parts, list(data.view(3, -1)), TIMEOUT_S)
        part = torch.zeros(count // 3, dtype=torch.uint8)
        comm.reduce_scatter(part, data.view(3, -1), ReduceOp.SUM, TIMEOUT_S)
        comm.broadcast_(data, 2, TIMEOUT_S)
        return [rows, torch.stack(parts), part, data]

    with Threads(3) as group:
        inputs = torch.stack([draw(rank, (count,), torch.uint8, 1) for rank in range(3)])
        for rank, (rows, parts, part, data) in enumerate(group.run(body)):
            assert torch.equal(rows, inputs)
            assert torch.equal(parts, inputs.view(3, 3, -1)[:, rank])
            assert torch.equal(part, inputs.view(3, 3, -1)[:, rank].sum(0, dtype=torch.uint8))
            assert torch.equal(data, inputs[2])


def test_large_parts_of_another_size_than_expected_are_an_error() -> None:
    """Read in place, the size of what is offered is known."""

    def body(comm: ShmCommunicator) -> None:
        count = (3_000_000, 2_000_000)[comm.rank_in_group]
        parts = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
        comm.all_to_allv(parts, [part.clone() for part in parts], TIMEOUT_S)

    with Threads(2) as group:
        errors = group.outcomes(body)
    assert any(isinstance(error, CollectiveMismatchError) for error in errors)
    assert any("where 3000000 were to be received" in str(error) or "where 2000000 were" in str(error) for error in errors)


def test_one_member_that_must_not_read_sends_all_into_pieces() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(lambda rank: open_member(store, rank, 2, direct=rank == 0), range(2)))
    assert ["large tensors in pieces" in member.describe() for member in members] == [True, True]
    for member in members:
        member.close()
