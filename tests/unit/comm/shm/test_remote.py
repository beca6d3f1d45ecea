"""Reaching into the memory of other members: who may touch what, and when no longer."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from parallel_runtime.comm.shm import ShmCommunicator
from parallel_runtime.comm.shm.remote import RemoteMemory
from parallel_runtime.errors import PeerLostError, PeerTimeoutError
from tests.unit.comm.shm.members import Threads

TIMEOUT_S = 20.0
COUNT = 1 << 20


def memory_of(member: ShmCommunicator) -> RemoteMemory:
    """What it reaches the others through."""
    assert member._parts is not None
    remote = member._parts.planner.remote
    assert remote is not None
    return remote


def test_a_writer_writes_nothing_into_a_member_that_gave_up() -> None:
    with Threads(2) as group:
        reader, source = group.members
        target, values = torch.zeros(100), torch.ones(100)
        write = memory_of(source).writer(0)
        write(target.data_ptr(), values.data_ptr(), 200)
        assert target.sum().item() == 50
        with pytest.raises(PeerTimeoutError, match="member 1 did not take part"):
            reader.broadcast_(torch.zeros(COUNT, dtype=torch.uint8), 1, 0.02)
        with pytest.raises(PeerLostError, match="waited for member 0: member 0 gave up"):
            write(target.data_ptr(), values.data_ptr(), 400)
        assert target.sum().item() == 50


def test_a_reader_that_gives_up_waits_until_nobody_writes_any_more() -> None:
    with Threads(2) as group:
        reader, source = group.members
        assert source._parts is not None
        liveness = source._parts.liveness
        liveness.set_writing(True)
        raised = threading.Event()

        def give_up() -> None:
            with pytest.raises(PeerTimeoutError):
                reader.broadcast_(torch.zeros(COUNT, dtype=torch.uint8), 1, 0.5)
            raised.set()

        thread = threading.Thread(target=give_up)
        thread.start()
        while not liveness.is_out(0):
            threading.Event().wait(0.001)
        assert not raised.is_set()
        liveness.set_writing(False)
        thread.join(TIMEOUT_S)
        assert raised.is_set()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_memory_that_may_still_be_written_is_never_given_back(is_stopped: bool) -> None:
    with Threads(2) as group:
        reader, source = group.members
        assert source._parts is not None
        source._parts.liveness.set_writing(is_stopped)
        target = torch.zeros(COUNT, dtype=torch.uint8)
        seen = weakref.ref(target)
        with contextlib.suppress(PeerTimeoutError):
            reader.broadcast_(target, 1, 0.02)
        del target
        gc.collect()
        assert (seen() is not None) == is_stopped


def test_a_member_that_is_gone_is_not_read() -> None:
    with Threads(2) as group:
        first, second = group.members
        values, target = torch.ones(4), torch.zeros(4)
        read = memory_of(first).reader(1)
        read(values.data_ptr(), target.data_ptr(), 16)
        assert torch.equal(target, values)
        with pytest.raises(PeerLostError, match=r"does not let its memory be reached: .*copying 16 bytes of member 1"):
            read(8, target.data_ptr(), 16)
        second.close()
        with pytest.raises(PeerLostError, match="while its memory was read, member 1 left"):
            read(values.data_ptr(), target.data_ptr(), 16)


def test_every_tensor_gets_its_own_bytes_by_halves() -> None:
    """The reader reads the first half, the source writes the second."""
    with Threads(2) as group:
        for nbytes in (16385, 20_000, 70_001, 3_000_000):
            values = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)

            def body(comm: ShmCommunicator, values: torch.Tensor = values) -> torch.Tensor:
                tensor = values.clone() if comm.rank_in_group == 1 else torch.zeros_like(values)
                comm.broadcast_(tensor, 1, TIMEOUT_S)
                return tensor

            assert all(torch.equal(got, values) for got in group.run(body))
