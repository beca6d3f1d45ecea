"""How the peers of ``bench_messages`` send an object from one rank to the others; each opener returns the call that does it."""

import importlib
import os
import pickle
import struct
from collections.abc import Callable
from multiprocessing import shared_memory
from multiprocessing.connection import Client, Listener
from typing import Any

import torch

from benchmarks.collectives_torch import dist, open_gloo, open_shm
from parallel_runtime.comm import GroupSpec, open_coordinator
from parallel_runtime.terms import Rank

__all__ = ["BYTES", "MANY", "OPENERS", "OURS", "THREADED", "Speak"]

OURS = "parallel_runtime, broadcast_object"
BYTES = "parallel_runtime, broadcast_bytes of a pickle"
TIMEOUT_S = 60.0
RING_CHUNKS = 10
RING_BYTES = 2 << 20
Speak = Callable[[object, int], object]


def ours(path: str, rank: int, ranks: int) -> Speak:
    """Broadcast through a coordinator on shared memory.

    Args:
        path: Of a file store.
        rank: This one.
        ranks: How many.

    Returns:
        The broadcast, called with the value and the source.
    """
    spec = GroupSpec(name="bench#0", key="bench", ranks=tuple(map(Rank, range(ranks))), rank=Rank(rank))
    group = open_coordinator(spec, open_shm(path, rank, ranks))
    return lambda value, src: group.broadcast_object(value if src == rank else None, src)


def ours_as_bytes(path: str, rank: int, ranks: int) -> Speak:
    """Broadcast pickles through the communicator, without the coordinator.

    Args:
        path: Of a file store.
        rank: This one.
        ranks: How many.

    Returns:
        The broadcast.
    """
    comm = open_shm(path, rank, ranks)

    def speak(value: object, src: int) -> object:
        if src == rank:
            return comm.broadcast_bytes(pickle.dumps(value, 5), src, TIMEOUT_S)
        return pickle.loads(comm.broadcast_bytes(None, src, TIMEOUT_S))

    return speak


def gloo(path: str, rank: int, ranks: int) -> Speak:
    """Broadcast size, then pickle, as torch does for objects.

    Args:
        path: Of a file store.
        rank: This one.
        ranks: How many.

    Returns:
        The broadcast.
    """
    group = open_gloo(path, rank, ranks)

    def speak(value: object, src: int) -> object:
        if src == rank:
            data = torch.frombuffer(bytearray(pickle.dumps(value, 5)), dtype=torch.uint8)
            group.broadcast(torch.tensor([len(data)]), src).wait()
            group.broadcast(data, src).wait()
            return value
        size = torch.empty(1, dtype=torch.int64)
        group.broadcast(size, src).wait()
        received = torch.empty(int(size), dtype=torch.uint8)
        group.broadcast(received, src).wait()
        return pickle.loads(received.numpy().data)

    return speak


def pipe(path: str, rank: int, ranks: int) -> Speak:
    """Send over a Unix socket of multiprocessing.

    Args:
        path: Of the socket.
        rank: This one.
        ranks: Two.

    Returns:
        The send or receive.
    """
    store = dist.FileStore(path, ranks)
    if rank == 0:
        listener = Listener(f"{path}.socket", "AF_UNIX")
        store.set("ready", b"1")
        end = listener.accept()
    else:
        store.wait(["ready"])
        end = Client(f"{path}.socket", "AF_UNIX")
    return lambda value, src: end.send(value) if src == rank else end.recv()


def zmq_ipc(path: str, rank: int, ranks: int) -> Speak:
    """Send over a pyzmq pair.

    Args:
        path: Of the socket.
        rank: This one.
        ranks: Two.

    Returns:
        The send or receive.
    """
    return _zmq_pair(f"ipc://{path}.zmq", path, rank, ranks)


def zmq_inproc(path: str, rank: int, ranks: int) -> Speak:
    """Send over a pyzmq pair between threads of one process.

    Args:
        path: Of the store.
        rank: This one.
        ranks: Two.

    Returns:
        The send or receive.
    """
    return _zmq_pair("inproc://bench", path, rank, ranks)


def _zmq_pair(address: str, path: str, rank: int, ranks: int) -> Speak:
    zmq = importlib.import_module("zmq")
    end = zmq.Context.instance().socket(zmq.PAIR)
    store = dist.FileStore(path, ranks)
    if rank == 0:
        end.bind(address)
        store.set("ready", b"1")
    else:
        store.wait(["ready"])
        end.connect(address)
    return lambda value, src: end.send_pyobj(value, protocol=5) if src == rank else end.recv_pyobj()


class Ring:
    """A ring of chunks in shared memory from one writer to several readers, with one flag per reader and chunk.

    What serving engines use between their processes: pickles, chunks of fixed size, waiting by yielding the core.

    Args:
        memory: Equal for all; zeros at first.
        readers: How many read.
        reader: Which of them this is; ``None`` for the writer.
    """

    def __init__(self, memory: Any, readers: int, reader: int | None) -> None:
        self._memory = memory
        self._readers = readers
        self._reader = reader
        self._next = 0

    def write(self, data: bytes) -> None:
        """Wait until all readers have left the next chunk, and fill it.

        Args:
            data: At most ``RING_BYTES``.
        """
        flags, body = self._chunk()
        while self._memory[flags] and bytes(self._memory[flags + 1 : flags + 1 + self._readers]) != b"\1" * self._readers:
            os.sched_yield()
        self._memory[flags] = 0
        self._memory[body : body + 8] = struct.pack("<Q", len(data))
        self._memory[body + 8 : body + 8 + len(data)] = data
        self._memory[flags + 1 : flags + 1 + self._readers] = bytes(self._readers)
        self._memory[flags] = 1

    def read(self) -> object:
        """Wait for the next chunk.

        Returns:
            Its object.
        """
        flags, body = self._chunk()
        assert self._reader is not None
        mine = flags + 1 + self._reader
        while not self._memory[flags] or self._memory[mine]:
            os.sched_yield()
        (length,) = struct.unpack("<Q", self._memory[body : body + 8])
        value: object = pickle.loads(self._memory[body + 8 : body + 8 + length])
        self._memory[mine] = 1
        return value

    def _chunk(self) -> tuple[int, int]:
        flags = self._next * (RING_BYTES + 64)
        self._next = (self._next + 1) % RING_CHUNKS
        return flags, flags + 64


def ring(path: str, rank: int, ranks: int) -> Speak:
    """Broadcast over one ring per source.

    Args:
        path: Of a file store.
        rank: This one.
        ranks: How many.

    Returns:
        The broadcast.
    """
    store: Any = dist.FileStore(path, ranks)
    size = RING_CHUNKS * (RING_BYTES + 64)
    if rank == 0:
        blocks = [shared_memory.SharedMemory(create=True, size=size) for _ in range(ranks)]
        store.set("names", " ".join(block.name for block in blocks))
    else:
        blocks = [shared_memory.SharedMemory(name) for name in store.get("names").decode().split()]
    store.add("opened", 1)
    while store.add("opened", 0) < ranks:
        os.sched_yield()
    if rank == 0:
        for block in blocks:
            block.unlink()
    rings = [
        Ring(block.buf, ranks - 1, None if src == rank else rank - (rank > src))  # readers are numbered without the source
        for src, block in enumerate(blocks)
    ]

    def speak(value: object, src: int) -> object:
        if src != rank:
            return rings[src].read()
        rings[src].write(pickle.dumps(value, 5))
        return blocks and value

    return speak


OPENERS = {
    OURS: ours,
    BYTES: ours_as_bytes,
    "shared-memory ring": ring,
    "gloo": gloo,
    "pipe": pipe,
    "pyzmq ipc": zmq_ipc,
    "pyzmq inproc (threads)": zmq_inproc,
}
MANY = tuple(OPENERS)[:4]
"""Those that reach more than one reader."""
THREADED = "pyzmq inproc (threads)"
