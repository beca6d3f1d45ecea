"""What the communication benchmarks share: sizes, timing, tables. Standard library only: it also runs beside MPI."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SIZES", "Case", "Row", "emit", "human", "machine", "pin", "read_rows", "table", "time_calls", "write_page"]

_LEAST_CALLS = 4
_MOST_CALLS = 400
SIZES = (8, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True, order=True)
class Case:
    """One measured operation.

    Attributes:
        operation: Its name.
        dtype: Of the elements.
        nbytes: Per rank: of the tensor; of all rows together where there is one per rank.
    """

    operation: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Row:
    """One result of one run.

    Attributes:
        case: What was measured.
        median_us: Median of the calls, microseconds.
        minimum_us: Fastest call, microseconds.
    """

    case: Case
    median_us: float
    minimum_us: float


def pin(rank: int) -> None:
    """Give a rank a core, in the same way for every peer.

    Args:
        rank: Ranks beyond the number of cores share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def time_calls(
    call: Callable[[], object],
    agree: Callable[[int], int],
    limit_s: float,
    prepare: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Time a collective call.

    Args:
        call: Made by every rank.
        agree: The least of the numbers that the ranks pass; collective.
        limit_s: About how long all calls together may take.
        prepare: Called before every call and not timed.

    Returns:
        Median and minimum in microseconds.
    """
    for _ in range(2):
        call()
    agree(0)
    start = time.perf_counter()
    for _ in range(2):
        call()
    took_s = (time.perf_counter() - start) / 2
    count = agree(max(_LEAST_CALLS, min(_MOST_CALLS, int(limit_s / took_s))))
    spent = []
    for number in range(count + count // 4):
        if prepare is not None:
            prepare()
        start = time.perf_counter()
        call()
        if number >= count // 4:
            spent.append(time.perf_counter() - start)
    agree(0)
    return statistics.median(spent) * 1e6, min(spent) * 1e6


def emit(case: Case, times: tuple[float, float]) -> None:
    """Hand one result to the parent process.

    Args:
        case: What was measured.
        times: Median and minimum.
    """
    sys.stdout.write("ROW " + json.dumps([case.operation, case.dtype, case.nbytes, *times]) + "\n")
    sys.stdout.flush()


def read_rows(output: str) -> list[Row]:
    """Read what a worker emitted.

    Args:
        output: Its standard output.

    Returns:
        The results in it.
    """
    values = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    return [Row(Case(operation, dtype, nbytes), median, least) for operation, dtype, nbytes, median, least in values]


def human(nbytes: int) -> str:
    """A size for a table.

    Args:
        nbytes: Bytes.

    Returns:
        Like ``"64 KiB"``.
    """
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def table(
    title: str,
    sizes: Sequence[int],
    lines: Mapping[str, Mapping[int, Sequence[float]]],
    ours: str,
    rivals: Sequence[str],
    heads: Sequence[str] = (),
    goals: Mapping[int, float] | None = None,
) -> str:
    """A markdown table of medians over the rounds, with the ratio of the best rival to ours.

    Args:
        title: Heading.
        sizes: Columns, bytes.
        lines: Per peer and size, the median of every round in microseconds.
        ours: The line the others are compared with.
        rivals: The lines it is compared with; the best of them at each size counts.
        heads: Heads of the columns; the sizes where there are none.
        goals: Per size, the least ratio that is wanted; a line says where it was met.

    Returns:
        Markdown.
    """
    text = [f"**{title}**, us", "", "| | " + " | ".join(heads or map(human, sizes)) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, values in lines.items():
        cells = [f"{statistics.median(values[size]):.1f}" if values.get(size) else "" for size in sizes]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios, spreads = [], []
    for size in sizes:
        mine = lines[ours].get(size, ())
        best = [
            min(values)
            for values in zip(*(lines[rival][size] for rival in rivals if lines.get(rival, {}).get(size)), strict=False)
        ]
        per_round = [theirs / own for theirs, own in zip(best, mine, strict=False)]
        ratios.append(f"{statistics.median(per_round):.2f}" if per_round else "")
        spreads.append(f"{min(per_round):.2f} to {max(per_round):.2f}" if per_round else "")
    text.append(f"| *best of the others / {ours}* | " + " | ".join(ratios) + " |")
    text.append("| *spread over the rounds* | " + " | ".join(spreads) + " |")
    if goals is not None:
        text.append(
            "| *goal* | " + " | ".join(_verdict(ratio, goals.get(size)) for size, ratio in zip(sizes, ratios, strict=True)) + " |"
        )
    return "\n".join(text) + "\n"


def _verdict(ratio: str, goal: float | None) -> str:
    if goal is None or not ratio:
        return ""
    return f"{goal:g} {'met' if float(ratio) >= goal else '**missed**'}"


def write_page(path: Path, title: str, text: str) -> None:
    """Write a markdown page of results.

    Args:
        path: The file; replaced.
        title: Its heading.
        text: Everything below.
    """
    path.write_text(f"# {title}\n\n{text.strip()}\n", encoding="utf-8")


def machine() -> str:
    """What the figures were taken on.

    Returns:
        One line.
    """
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory_kb = int(file.readline().split()[1])
    load = os.getloadavg()[0]
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_kb / 2**20:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}; load before the run {load:.1f}"
    )
