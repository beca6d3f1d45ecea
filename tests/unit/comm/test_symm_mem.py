"""Which sums go through symmetric memory, and what happens where it cannot be had; torch's operators are pretended."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import ReduceOp, Store, hash_store, open_coordinator
from parallel_runtime.comm.c10d import C10dCommunicator, SymmMemCommunicator, open_symm_mem
from parallel_runtime.comm.c10d.symm_mem import Path, TorchSymmetricMemory, choose_path
from parallel_runtime.comm.groups import GroupSpec
from parallel_runtime.comm.select import ONE_SHOT_BYTES, SYMMETRIC_BYTES, GroupFacts, choose_communicators
from parallel_runtime.errors import PeerFailedError, PeerLostError
from parallel_runtime.terms import Rank

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


class Board:
    """What the pretended devices of one host share."""

    def __init__(self, world_size: int) -> None:
        self.tensors: list[Tensor | None] = [None] * world_size
        self.meet = threading.Barrier(world_size)


class Pretended:
    """Symmetric memory of threads; checks what the operators check, and notes what was called."""

    def __init__(self, board: Board, rank: int, *, fault: str = "", multicast: bool = False) -> None:
        self.board = board
        self.rank = rank
        self.fault = fault
        self.multicast = multicast
        self.calls: list[tuple[Path, int]] = []
        self.known: list[int] = []

    def why_not(self, device: torch.device, world_size: int) -> str:
        return "it has no such memory" if self.fault == "why_not" else ""

    def has_multicast(self, device: torch.device) -> bool:
        return self.multicast

    def enter(self, group: str, rank_in_group: int, world_size: int, store: Store) -> None:
        assert (rank_in_group, world_size) == (self.rank, len(self.board.tensors))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.fault == "allocate" or (self.fault == "later" and self.known):
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(shape, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: str) -> object:
        if self.fault == "rendezvous":
            raise RuntimeError("cannot map")
        self.known.append(tensor.untyped_storage().data_ptr())
        return object()

    def all_reduce(self, path: Path, tensor: Tensor, group: str, out: Tensor) -> None:
        assert tensor.untyped_storage().data_ptr() in self.known
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.bfloat16)
        assert not tensor.nbytes % 4
        assert not tensor.storage_offset() * tensor.itemsize % 4
        assert (path == "one_shot") == (out.data_ptr() != tensor.data_ptr())
        assert path != "multimem" or self.multicast
        self.calls.append((path, tensor.nbytes))
        self.board.tensors[self.rank] = tensor
        self.board.meet.wait(20)
        total = torch.stack([each for each in self.board.tensors if each is not None]).sum(0)
        self.board.meet.wait(20)
        out.copy_(total)


def together(world_size: int, body: Callable[[int, C10dCommunicator, Store], Any]) -> list[Any]:
    """Run ``body(rank, beneath, store)`` on a thread per member of a gloo group."""
    store, results = hash_store(), [None] * world_size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            beneath = C10dCommunicator(store, "k", rank, world_size, timeout_s=20)
            results[rank] = body(rank, beneath, store)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if errors:
        raise errors[0]
    return results


def run(
    world_size: int, body: Callable[[SymmMemCommunicator, Pretended], Any], *, multicast: Sequence[bool] = (False,) * 8
) -> list[Any]:
    """Run ``body`` on every member of a group with symmetric memory."""
    board = Board(world_size)

    def main(rank: int, beneath: C10dCommunicator, store: Store) -> Any:
        memory = Pretended(board, rank, multicast=multicast[rank])
        made = open_symm_mem(beneath, store, "k", CPU, 20, memory)
        assert isinstance(made, SymmMemCommunicator)
        return body(made, memory)

    return together(world_size, main)


@pytest.mark.parametrize(
    ("op", "dtype", "nbytes", "multicast", "symmetric", "path"),
    [
        (ReduceOp.SUM, torch.float32, 4, False, False, "one_shot"),
        (ReduceOp.AVG, torch.bfloat16, ONE_SHOT_BYTES, True, True, "one_shot"),
        (ReduceOp.SUM, torch.float32, ONE_SHOT_BYTES + 4, False, False, "two_shot"),
        (ReduceOp.SUM, torch.float32, ONE_SHOT_BYTES + 4, True, False, "multimem"),
        (ReduceOp.SUM, torch.float32, SYMMETRIC_BYTES, False, False, "two_shot"),
        (ReduceOp.SUM, torch.float32, SYMMETRIC_BYTES + 4, False, False, None),
        (ReduceOp.SUM, torch.float32, SYMMETRIC_BYTES + 4, False, True, "two_shot"),
        (ReduceOp.SUM, torch.float32, SYMMETRIC_BYTES + 4, True, True, "multimem"),
        (ReduceOp.MAX, torch.float32, 64, False, False, None),
        (ReduceOp.PRODUCT, torch.float32, 64, True, True, None),
        (ReduceOp.SUM, torch.float16, 64, False, False, None),
        (ReduceOp.SUM, torch.int32, 64, False, True, None),
        (ReduceOp.SUM, torch.bfloat16, 6, False, False, None),
    ],
)
def test_paths(op: ReduceOp, dtype: torch.dtype, nbytes: int, multicast: bool, symmetric: bool, path: str | None) -> None:
    assert choose_path(op, dtype, nbytes, has_multicast=multicast, is_symmetric=symmetric) == path


def test_sums_of_any_size_and_what_serves_them() -> None:
    sizes = (1, 5, ONE_SHOT_BYTES // 4, ONE_SHOT_BYTES // 4 + 1, SYMMETRIC_BYTES // 4 + 1)

    def body(made: SymmMemCommunicator, memory: Pretended) -> list[tuple[Path, int]]:
        for count in sizes:
            x = torch.full((count,), float(made.rank_in_group + 1))
            made.all_reduce_(x, ReduceOp.SUM, 20)
            assert torch.equal(x, torch.full((count,), 6.0))
        y = torch.full((4,), float(made.rank_in_group), dtype=torch.bfloat16)
        made.all_reduce_(y, ReduceOp.AVG, 20)
        assert y.tolist() == [1.0] * 4
        z = torch.tensor([made.rank_in_group])
        made.all_reduce_(z, ReduceOp.SUM, 20)
        assert z.tolist() == [3]
        return memory.calls

    calls = [("one_shot", 4), ("one_shot", 20), ("one_shot", ONE_SHOT_BYTES), ("two_shot", ONE_SHOT_BYTES + 4), ("one_shot", 8)]
    assert run(3, body) == [calls] * 3


@pytest.mark.parametrize(("multicast", "path"), [((True, True), "multimem"), ((True, False), "two_shot")])
def test_multicast_is_used_where_all_have_it(multicast: tuple[bool, bool], path: str) -> None:
    def body(made: SymmMemCommunicator, memory: Pretended) -> str:
        memory.multicast = True  # what is chosen is what was agreed
        made.all_reduce_(torch.ones(ONE_SHOT_BYTES), ReduceOp.SUM, 20)
        assert f"by {path} to 10 MiB" in made.paths()
        return memory.calls[0][0]

    assert run(2, body, multicast=multicast) == [path] * 2


def test_symmetric_tensors_are_summed_where_they_lie() -> None:
    count = SYMMETRIC_BYTES // 4 + 8

    def body(made: SymmMemCommunicator, memory: Pretended) -> None:
        spec = GroupSpec(name="g", key="k", ranks=(Rank(0), Rank(1)), rank=Rank(made.rank_in_group))
        group = open_coordinator(spec, made)
        x = group.symmetric_empty((count,))
        x.fill_(made.rank_in_group + 1)
        assert group.all_reduce_(x) is x
        assert x[0] == x[-1] == 3
        part = x[4:12].view(2, 4)
        group.all_reduce_(part)
        assert x[3:13].tolist() == [3.0] + [6.0] * 8 + [3.0]
        odd = group.symmetric_empty((9,), torch.bfloat16).fill_(1)
        group.all_reduce_(odd[1:9])  # two bytes into its memory, which the operators do not take
        assert odd.tolist() == [1.0] + [2.0] * 8
        assert group.symmetric_empty((0, 3)).shape == (0, 3)
        assert torch.equal(group.all_gather(torch.tensor([made.rank_in_group])), torch.tensor([0, 1]))
        text = group.describe(paths=True)
        assert "tensors over symm_mem" in text
        assert "by one_shot to 256 KiB, by two_shot to 10 MiB (any size on symmetric tensors); everything else over c10d" in text
        assert memory.calls == [("two_shot", x.nbytes), ("one_shot", part.nbytes), ("one_shot", 16)]

    run(2, body)


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("why_not", ["another member cannot", "it has no such memory"]),
        (
            "allocate",
            ["another member cannot have symmetric memory", "this member cannot allocate symmetric memory for uint8["],
        ),
        ("rendezvous", ["another member cannot have symmetric memory", "this member cannot map symmetric memory for uint8["]),
    ],
)
def test_one_member_that_cannot_is_enough(fault: str, reasons: list[str]) -> None:
    board = Board(2)

    def main(rank: int, beneath: C10dCommunicator, store: Store) -> object:
        memory = Pretended(board, rank, fault=fault if rank == 1 else "")
        return open_symm_mem(beneath, store, "k", CPU, 20, memory)

    for made, reason in zip(together(2, main), reasons, strict=True):
        assert str(made).startswith(reason)


def test_memory_that_runs_out_later_is_an_error_on_all() -> None:
    def body(made: SymmMemCommunicator, memory: Pretended) -> None:
        memory.fault = "later" if made.rank_in_group == 0 else ""
        with pytest.raises(PeerFailedError, match=r"symmetric memory for float32\[7\]"):
            made.symmetric_empty((7,), torch.float32, 20)
        memory.fault = ""
        assert made.symmetric_empty((7,), torch.float32, 20) is not None

    run(2, body)


def test_a_closed_one_lets_go() -> None:
    def body(made: SymmMemCommunicator, memory: Pretended) -> None:
        x = made.symmetric_empty((4,), torch.float32, 20)
        assert x is not None
        assert made._shelf.has(x)
        made.barrier(20)
        made.close()
        made.close()
        assert not made._shelf.has(x)
        with pytest.raises(PeerLostError, match="this communicator is closed"):
            made.all_reduce_(x, ReduceOp.SUM, 20)

    run(2, body)


def test_torch_without_a_gpu_says_why_not() -> None:
    memory = TorchSymmetricMemory()
    assert memory.why_not(CPU, 2) == "tensors live on cpu, not cuda"
    if torch.cuda.device_count() < 2:
        assert "of 2 devices and cannot tell whether NVLink joins them" in memory.why_not(torch.device("cuda"), 2)


def test_the_operators_take_what_they_are_given() -> None:
    schemas = {schema.name: str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("symm_mem::")}
    assert "(Tensor input, str reduce_op, str group_name, Tensor(a!) out)" in schemas["symm_mem::one_shot_all_reduce_out"]
    for name in ("multimem_all_reduce_", "two_shot_all_reduce_"):
        assert "(Tensor(a!) input, str reduce_op, str group_name)" in schemas[f"symm_mem::{name}"]


@pytest.mark.parametrize(
    ("world_size", "num_hosts", "uses_shm", "is_planned"),
    [(2, 1, True, True), (8, 1, True, True), (9, 1, True, False), (4, 2, True, False), (4, 1, False, False)],
)
def test_where_it_is_planned(world_size: int, num_hosts: int, uses_shm: bool, is_planned: bool) -> None:
    most = world_size // num_hosts
    facts = GroupFacts(world_size=world_size, num_hosts=num_hosts, most_on_host=most, backend="nccl", uses_shm=uses_shm)
    planned = {str(one): one for one in choose_communicators(facts)}
    assert ("symm_mem" in planned) == is_planned
    if is_planned:
        assert planned["symm_mem"].reason == "sums to 10 MiB where NVLink joins all"
        assert planned["symm_mem"].paths.startswith("float32 and bfloat16 sums by one_shot to 256 KiB")
