"""Shared memory between real processes: same bits, more ranks than cores, sudden death, nothing left behind."""

import gc
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.errors import PeerLostError
from tests.unit.comm.shm.members import MemoryStore, Processes, Threads, open_member

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

TIMEOUT_S = 30.0


def mixed_work(store: Any, rank: int, world_size: int) -> list[float]:
    """A bit of everything, many times; returns checksums that have to be equal on all members."""
    torch.set_num_threads(1)
    comm = open_member(store, rank, world_size)
    sums = []
    try:
        shared = comm.symmetric_empty((40_000,), torch.float32, TIMEOUT_S)
        for step in range(40):
            for size in (1, 1000, 70_001, 600_000):
                generator = torch.Generator().manual_seed(step * 10 + rank)
                values = torch.rand(size, generator=generator)
                comm.all_reduce_(values, ReduceOp.SUM, TIMEOUT_S)
                sums.append(values.double().sum().item())
            shared.fill_(rank + step)
            comm.all_reduce_(shared, ReduceOp.SUM, TIMEOUT_S)
            sums.append(shared.double().sum().item())
            right, left = (rank + 1) % world_size, (rank - 1) % world_size
            token, arrived = torch.full((300_000,), float(rank)), torch.empty(300_000)
            sent, received = comm.isend(token, right, step), comm.irecv(arrived, left, step)
            received.wait(TIMEOUT_S)
            sent.wait(TIMEOUT_S)
            assert bool((arrived == left).all())
            data = comm.broadcast_bytes(bytes([step]) * 3000 if rank == step % world_size else None, step % world_size, TIMEOUT_S)
            assert data == bytes([step]) * 3000
        comm.barrier(TIMEOUT_S)
    finally:
        comm.close()
    return sums


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_members_compute_the_same_bits(tmp_path: Path, world_size: int) -> None:
    """Four ranks here have two cores or fewer to themselves: waiting must let the others work."""
    with Processes(tmp_path, world_size, mixed_work) as members:
        results = members.results()
    assert results == [results[0]] * world_size
    expected = [torch.rand(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    assert results[0][1] == pytest.approx(torch.stack(expected).double().sum().item())


def dies_in_the_middle(store: Any, rank: int, world_size: int) -> str:
    """Member 1 is killed between two operations of a long run; everybody else waits for it."""
    comm = open_member(store, rank, world_size)
    values = torch.ones(300_000)
    for step in range(1_000_000):
        try:
            comm.all_reduce_(values, ReduceOp.AVG, TIMEOUT_S)
        except PeerLostError as exc:
            return str(exc)
        if step == 5:
            store.set(f"running/{rank}", b"")
    return "nobody died"


def test_a_killed_member_ends_every_wait(tmp_path: Path) -> None:
    with Processes(tmp_path, 3, dies_in_the_middle) as members:
        while not (tmp_path / "running~1").exists():
            time.sleep(0.01)
        victim = members.processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        first, third = members.result(0), members.result(2)
    assert "the process of member 1 ended" in first + third
    for text in (first, third):
        assert re.search("the process of member 1 ended|gave up after an error", text)


def dies_among_large_ones(store: Any, rank: int, world_size: int) -> str:
    """Member 1 is killed while the members reach into each other's memory; member 0 hears of it, whatever it was in."""
    torch.set_num_threads(1)
    comm = open_member(store, rank, world_size)
    values, rows = torch.ones(2 << 20), torch.empty(2, 2 << 20)
    for step in range(1_000_000):
        try:
            comm.broadcast_(values, step % 2, TIMEOUT_S)
            comm.all_reduce_(values, ReduceOp.AVG, TIMEOUT_S)
            comm.all_gather(rows, values, TIMEOUT_S)
        except PeerLostError as exc:
            return str(exc)
        assert bool((rows == 1).all())
        if step == 5:
            store.set(f"running/{rank}", b"")
    return "nobody died"


def test_a_member_killed_while_its_memory_is_in_use_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path, 2, dies_among_large_ones) as members:
        while not (tmp_path / "running~1").exists():
            time.sleep(0.01)
        victim = members.processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert "the process of member 1 ended" in members.result(0)


def dies_while_sending(store: Any, rank: int, world_size: int) -> str:
    """Member 1 is killed with half a message in the ring."""
    comm = open_member(store, rank, world_size)
    target = torch.empty(8 << 20, dtype=torch.uint8)
    if rank == 1:
        comm.isend(target, 0, 0)
        comm.broadcast_bytes(b"sent", 1, TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.broadcast_bytes(None, 1, TIMEOUT_S)
    with pytest.raises(PeerLostError, match="the process of member 1 ended") as caught:
        comm.irecv(target, 1, 0).wait(TIMEOUT_S)
    return str(caught.value)


def test_half_a_message_is_an_error(tmp_path: Path) -> None:
    with Processes(tmp_path, 2, dies_while_sending) as members:
        assert "waited for member 1" in members.result(0)


def traces() -> tuple[int, int, list[str]]:
    """Descriptors and mappings of this process, and what lies in ``/dev/shm``."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:parallel_runtime" in line]
    return len(os.listdir("/proc/self/fd")), len(maps), sorted(os.listdir("/dev/shm"))


def opens_and_closes(store: Any, rank: int, world_size: int) -> tuple[Any, Any, int, float]:
    """What is left after ten groups; and after a tensor in symmetric memory is gone too."""
    torch.ones(1).add_(1)
    before = traces()
    kept = None
    for number in range(10):
        comm = open_member(store, rank, world_size, key=f"group{number}")
        kept = comm.symmetric_empty((5000,), torch.float32, TIMEOUT_S).fill_(number)
        comm.all_reduce_(torch.ones(1000), ReduceOp.SUM, TIMEOUT_S)
        comm.all_reduce_(kept, ReduceOp.SUM, TIMEOUT_S)
        comm.barrier(TIMEOUT_S)
        comm.isend(torch.ones(1 << 20), 1 - rank, 0)
        comm.close()
    mappings_with_tensor = traces()[1]
    assert kept is not None
    value = kept.sum().item()
    del kept, comm
    return before, traces(), mappings_with_tensor, value


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with Processes(tmp_path, 2, opens_and_closes) as members:
        for before, after, mappings_with_tensor, value in members.results():
            assert after == before
            assert mappings_with_tensor == 1
            assert value == 2 * 9 * 5000


def test_memory_goes_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        before = traces()[:2]
        with Threads(2) as group:
            group.run(lambda comm: comm.all_reduce_(torch.ones(9), ReduceOp.SUM, TIMEOUT_S))
            opened = traces()[:2]
        del group
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:parallel_runtime" in line]
        assert opened[1] == 2
        assert len(lines) == before[1] == 0
    finally:
        gc.enable()


def inherits(store: Any, rank: int, world_size: int) -> bool:
    """A forked child that ends does not count as the member that forked it."""
    comm = open_member(store, rank, world_size)
    child = os.fork()
    if child == 0:
        comm.close()
        os._exit(0)
    os.waitpid(child, 0)
    total = torch.ones(1)
    comm.all_reduce_(total, ReduceOp.SUM, TIMEOUT_S)
    comm.barrier(TIMEOUT_S)
    comm.close()
    return total.item() == world_size


def test_a_forked_child_is_not_a_member(tmp_path: Path) -> None:
    with Processes(tmp_path, 2, inherits) as members:
        assert members.results() == [True, True]


def test_groups_of_one_process_do_not_meet() -> None:
    store = MemoryStore()
    with Threads(2) as first, Threads(2) as second:
        del store
        for number, group in enumerate((first, second, first)):
            tensors = [torch.full((5,), float(number)) for _ in range(2)]
            group.run(lambda comm, tensors=tensors: comm.all_reduce_(tensors[comm.rank_in_group], ReduceOp.SUM, TIMEOUT_S))  # type: ignore[misc]
            assert tensors[0].tolist() == tensors[1].tolist() == [2.0 * number] * 5
