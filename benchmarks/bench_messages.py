"""Objects between ranks of one host: ours beside gloo's object broadcast, a multiprocessing pipe and pyzmq.

Every rank is a process pinned to a core. Ranks take turns as the source: rank 0 broadcasts, then rank 1, and so on, so a time is
what it takes until the next one can speak: the way to all readers and the decoding. Pipe and pyzmq join two ranks only, and
pickle their objects. All peers run one after the other in every round; a cell is the median over the rounds.

Last, what a rank burns of a core while it waits a second for a late peer.

Run ``python -m benchmarks.bench_messages [--ranks 2 4] [--rounds N] [--write FILE]``. pyzmq is left out where it is missing.
"""

import argparse
import importlib.util
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch

from benchmarks.collectives_torch import dist, open_gloo, open_shm
from benchmarks.measuring import machine, pin, table, time_calls, write_page
from parallel_runtime.comm import GroupSpec, open_coordinator
from parallel_runtime.terms import Rank

__all__ = ["main"]

PAYLOADS: dict[str, object] = {
    "256 B": {"request": 17, "text": "x" * 200, "flags": [True, False]},
    "8 KB list": [number * 31 % 251 + 1000 for number in range(2700)],
    "1 MB bytes": bytes(range(256)) * 3906,
}
OURS = "parallel_runtime, broadcast_object"
BYTES = "parallel_runtime, broadcast_bytes of a pickle"
PEERS = (OURS, BYTES, "gloo", "pipe", "pyzmq ipc")
TIMEOUT_S = 60.0
LIMIT_S = 0.5
LATE_S = 1.0
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
    zmq = importlib.import_module("zmq")
    end = zmq.Context().socket(zmq.PAIR)
    store = dist.FileStore(path, ranks)
    if rank == 0:
        end.bind(f"ipc://{path}.zmq")
        store.set("ready", b"1")
    else:
        store.wait(["ready"])
        end.connect(f"ipc://{path}.zmq")
    return lambda value, src: end.send_pyobj(value, protocol=5) if src == rank else end.recv_pyobj()


OPENERS = {OURS: ours, BYTES: ours_as_bytes, "gloo": gloo, "pipe": pipe, "pyzmq ipc": zmq_ipc}


def work(peer: str, path: str, rank: int, ranks: int, fastest: bool, results: "multiprocessing.Queue[dict[int, float]]") -> None:
    """One rank of one peer.

    Args:
        peer: Its name.
        path: For stores and sockets.
        rank: This one.
        ranks: How many.
        fastest: The fastest turn instead of the median.
        results: Takes microseconds per payload from rank 0.
    """
    torch.set_num_threads(1)
    pin(rank)
    speak = OPENERS[peer](path, rank, ranks)

    def agree(count: int) -> int:
        """Rank 0 decides."""
        said = [speak(count, src) for src in range(ranks)]
        return count if rank == 0 else int(str(said[0]))

    took = {}
    for number, value in enumerate(PAYLOADS.values()):

        def turn(value: object = value) -> None:
            for src in range(ranks):
                speak(value, src)

        times = time_calls(turn, agree, LIMIT_S)
        took[number] = times[1 if fastest else 0] / ranks
    if rank == 0:
        results.put(took)


def run_peer(peer: str, ranks: int, *, fastest: bool) -> dict[int, float]:
    """Run one peer once.

    Args:
        peer: Its name.
        ranks: How many.
        fastest: The fastest turn instead of the median.

    Returns:
        Microseconds per payload.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[dict[int, float]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(peer, f"{folder}/meet", rank, ranks, fastest, results) for rank in range(ranks)]
        workers = [context.Process(target=work, args=values) for values in arguments]
        for worker in workers:
            worker.start()
        try:
            return results.get(timeout=300)
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()


def idle(path: str, rank: int, burnt: "multiprocessing.Queue[float]") -> None:
    """Wait for a peer that is late.

    Args:
        path: Of a file store.
        rank: Rank 1 is late.
        burnt: Takes the share of a core that rank 0 burned while it waited.
    """
    torch.set_num_threads(1)
    pin(rank)
    comm = open_shm(path, rank, 2)
    comm.barrier(TIMEOUT_S)
    if rank == 1:
        time.sleep(LATE_S)
    start, burned = time.perf_counter(), time.process_time()
    comm.barrier(TIMEOUT_S)
    waited, burned = time.perf_counter() - start, time.process_time() - burned
    if rank == 0:
        burnt.put(burned / waited)
    comm.barrier(TIMEOUT_S)


def run_idle() -> float:
    """Measure the idle waiter once.

    Returns:
        Share of a core, the first milliseconds included.
    """
    context = multiprocessing.get_context("spawn")
    burnt: multiprocessing.Queue[float] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=idle, args=(f"{folder}/meet", rank, burnt)) for rank in range(2)]
        for worker in workers:
            worker.start()
        try:
            return burnt.get(timeout=60)
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()


def main() -> None:
    """Measure, show, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks; readers are one less")
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer runs")
    parser.add_argument("--fastest", action="store_true", help="the fastest turn instead of the median: for a busy machine")
    parser.add_argument("--write", type=Path, help="also write a page with the tables into this markdown file")
    arguments = parser.parse_args()
    peers = PEERS if importlib.util.find_spec("zmq") else PEERS[:-1]
    call = "fastest turn" if arguments.fastest else "median turn"
    text = [
        f"{machine()}.\n",
        f"{arguments.rounds} rounds; in each, all peers run one after the other, ranks pinned to cores alike. Ranks take turns "
        f"as source. A cell is the median over the rounds of the {call}, per object, in microseconds. The ratio is the best "
        "peer of a round over ours, above 1 where ours is faster: its median and its range over the rounds. Ours encodes without "
        "pickle.\n",
    ]
    for ranks in arguments.ranks:
        lines: dict[str, dict[int, list[float]]] = {}
        for _ in range(arguments.rounds):
            for peer in peers if ranks == 2 else PEERS[:3]:
                sys.stderr.write(f"{ranks} ranks: {peer}\n")
                for number, microseconds in run_peer(peer, ranks, fastest=arguments.fastest).items():
                    lines.setdefault(peer, {}).setdefault(number, []).append(microseconds)
        title = f"object broadcast to {ranks - 1} reader(s) on {len(os.sched_getaffinity(0))} cores"
        rivals = [peer for peer in lines if peer not in (OURS, BYTES)]
        text.append(table(title, range(len(PAYLOADS)), lines, OURS, rivals, list(PAYLOADS)))
    burned = [run_idle() for _ in range(arguments.rounds)]
    text.append(
        f"A rank that waits {LATE_S:g} s for a late peer burns {statistics.median(burned):.2%} of a core "
        f"({min(burned):.2%} to {max(burned):.2%}), its first milliseconds of spinning included.\n"
    )
    sys.stdout.write("\n".join(text))
    if arguments.write:
        write_page(arguments.write, "Messages between ranks of one host", "\n".join(text))


if __name__ == "__main__":
    main()
