"""Objects between ranks of one host: ours beside a shared-memory ring, gloo's object broadcast, a pipe and pyzmq.

Every rank is a process pinned to a core. Ranks take turns as the source: rank 0 broadcasts, then rank 1, and so on, so a time is
what it takes until the next one can speak: the way to all readers and the decoding. Pipe and pyzmq join two ranks only. All peers
but ours pickle their objects; pyzmq inproc joins threads of one process. All peers run one after the other in every round; a cell
is the median over the rounds.

Last, what a rank burns of a core while it waits a second for a late peer.

Run ``python -m benchmarks.bench_messages [--ranks 2 4] [--rounds N] [--write FILE]``. pyzmq is left out where it is missing.
"""

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.collectives_torch import open_shm
from benchmarks.measuring import machine, pin, table, time_calls, write_page
from benchmarks.message_peers import BYTES, MANY, OPENERS, OURS, THREADED

__all__ = ["main"]

PAYLOADS: dict[str, object] = {
    "256 B": {"request": 17, "text": "x" * 200, "flags": [True, False]},
    "8 KB list": [number * 31 % 251 + 1000 for number in range(2700)],
    "1 MB bytes": bytes(range(256)) * 3906,
}
LIMIT_S = 0.5
LATE_S = 1.0


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


def work_as_threads(peer: str, path: str, ranks: int, fastest: bool, results: "multiprocessing.Queue[dict[int, float]]") -> None:
    """All ranks of one peer, as threads of this process.

    Args:
        peer: Its name.
        path: For stores and sockets.
        ranks: How many.
        fastest: The fastest turn instead of the median.
        results: Takes microseconds per payload from rank 0.
    """
    threads = [threading.Thread(target=work, args=(peer, path, rank, ranks, fastest, results)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
        path = f"{folder}/meet"
        if peer == THREADED:
            workers = [context.Process(target=work_as_threads, args=(peer, path, ranks, fastest, results))]
        else:
            workers = [context.Process(target=work, args=(peer, path, rank, ranks, fastest, results)) for rank in range(ranks)]
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
    comm.barrier(60.0)
    if rank == 1:
        time.sleep(LATE_S)
    start, burned = time.perf_counter(), time.process_time()
    comm.barrier(60.0)
    waited, burned = time.perf_counter() - start, time.process_time() - burned
    if rank == 0:
        burnt.put(burned / waited)
    comm.barrier(60.0)


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
    has_zmq = importlib.util.find_spec("zmq") is not None
    peers = [peer for peer in OPENERS if has_zmq or not peer.startswith("pyzmq")]
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
            for peer in peers if ranks == 2 else MANY:
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
