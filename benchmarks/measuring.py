"""What the communication benchmarks share: sizes, timing, tables. Standard library only: it also runs beside MPI."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SIZES", "Case", "Row", "emit", "human", "pin", "read_rows", "replace_section", "table", "time_calls"]

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


def time_calls(call: Callable[[], object], barrier: Callable[[], object], nbytes: int, world_size: int) -> tuple[float, float]:
    """Time a collective call.

    Args:
        call: Made by every rank.
        barrier: Of all ranks.
        nbytes: Decides how often: about the same traffic for every size.
        world_size: Number of ranks.

    Returns:
        Median and minimum in microseconds.
    """
    count = max(8, min(400, int(3e8 / nbytes / world_size)))
    for _ in range(3 + count // 10):
        call()
    barrier()
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    barrier()
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
) -> str:
    """A markdown table of medians over the rounds, with the ratio of the best rival to ours.

    Args:
        title: Heading.
        sizes: Columns, bytes.
        lines: Per peer and size, the median of every round in microseconds.
        ours: The line the others are compared with.
        rivals: The lines it is compared with; the best of them at each size counts.
        heads: Heads of the columns; the sizes where there are none.

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
    return "\n".join(text) + "\n"


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name`` of a markdown file, at its end where there are none.

    Args:
        path: The file; made where it is missing.
        name: Of the section.
        text: Its new content.
    """
    start, stop = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{start}\n{text}\n{stop}"
    if start in before:
        head, _, rest = before.partition(start)
        after = head + section + rest.partition(stop)[2]
    else:
        after = (before.rstrip() + "\n\n" if before else "") + section + "\n"
    path.write_text(after, encoding="utf-8")
