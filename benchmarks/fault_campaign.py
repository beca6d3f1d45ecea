"""Break one rank of many small worlds, each in its own way, and count what the others are told.

``python -m benchmarks.fault_campaign --trials 1000 --seed 1 --write benchmarks/fault_campaign.md``

Every trial follows from the seed and its number alone; ``--only N`` plays one again and prints what each rank said.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fault_trials import DEADLINES, GRACE_S, PATIENT, Outcome, Trial, Verdict, draw, judge
from benchmarks.fault_workers import WorkerPool, run_in_threads

__all__ = ["Result", "campaign", "main"]


_CHUNK = 100
"""Trials after which the file is written anew, so that a run that is ended leaves what it found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One trial that was run.

    Attributes:
        trial: What was done.
        outcomes: What the ranks reported.
        verdict: What was wrong with it.
    """

    trial: Trial
    outcomes: dict[int, Outcome]
    verdict: Verdict


def campaign(seed: int, numbers: Iterable[int], *, is_loud: bool = False) -> list[Result]:
    """Run trials.

    Args:
        seed: Of the campaign.
        numbers: Which trials.
        is_loud: Whether to write down each trial that does not meet the bar as it ends.

    Returns:
        Their results.
    """
    pool, results = WorkerPool(), []
    try:
        for number in numbers:
            trial = draw(seed, number)
            outcomes, leaks = run_in_threads(trial) if trial.uses_threads else pool.run(trial)
            results.append(Result(trial=trial, outcomes=outcomes, verdict=judge(trial, outcomes, leaks)))
            if is_loud and not results[-1].verdict.is_good:
                sys.stdout.write(describe(results[-1]))
                sys.stdout.flush()
    finally:
        pool.close()
    return results


def describe(result: Result) -> str:
    """A trial in full, for people."""
    lines = [str(result.trial), f"  {result.verdict}"]
    for rank, outcome in sorted(result.outcomes.items()):
        said = outcome.text.replace("\n", "\n      ")
        lines.append(f"  rank {rank} after {outcome.seconds:.2f} s: {outcome.error or 'fine'} blames {outcome.ranks} {said}")
    return "\n".join(lines) + "\n"


def table(results: Sequence[Result], seed: int, seconds: float) -> str:
    """The figures as a Markdown page."""
    by_kind: dict[str, list[Result]] = {}
    for result in results:
        by_kind.setdefault(str(result.trial.fault.kind), []).append(result)
    late = sorted(result.verdict.late_s for result in results if result.verdict.late_s is not None)
    in_time = sum(value <= GRACE_S for value in late) / max(1, len(late))
    backends = Counter(result.trial.backend for result in results)
    worlds = ", ".join(f"{count} {name}" for name, count in sorted(backends.items()))
    num_cores = len(os.sched_getaffinity(0))
    lines = [
        "# Fault campaign",
        "",
        f"`python -m benchmarks.fault_campaign --trials {len(results)} --seed {seed}`: "
        f"{seconds:.0f} s, {num_cores} cores, torch {torch.__version__}.",
        "",
        f"{len(results)} worlds of 2 to 4 ranks ({worlds}); in each, one rank goes wrong at one point. Deadlines: "
        f"{DEADLINES.join_s:g} s to meet, {DEADLINES.collective_s:g} s per operation. What is counted, over the other ranks:",
        "",
        "| fault | trials | hangs | wrong blame | untyped | unnoticed | false alarms | with leaks | late: median | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(kind, found) for kind, found in sorted(by_kind.items())]
    lines += [_row("all", results), ""]
    lines += [
        f"*late*: seconds from the deadline that applies to the last rank's error; negative where the error came before it. "
        f"{in_time:.1%} of the trials with an error were within {GRACE_S:g} s beyond the deadline (the bar: 99%).",
        "",
        f"Where the rank is gone in the middle, the deadline is {PATIENT.collective_s:g} s, and the others must not wait for it. "
        "Seconds from the first operation of such a trial to the last rank's error, its story included:",
        "",
        "| backend | trials | let go: median | 99% | worst |",
        "|---|---|---|---|---|",
        *(_releases(name, [r for r in results if r.trial.backend == name]) for name in sorted(backends)),
        "",
        "*wrong blame*: trials in which a rank's error does not name the rank that went wrong; in a wrong order of two groups, "
        "where two ranks wait for each other, one of the two. *leaks*: descriptors and threads of the ranks that live on, files "
        "in shared memory. A fault while closing may go unnoticed: nobody has to wait for that rank. A quarter of the "
        "worlds has `checked=True`, the others the default, with which gloo groups compare what their members enter, too.",
    ]
    return "\n".join(lines) + "\n"


def _releases(name: str, results: Sequence[Result]) -> str:
    times = sorted(result.verdict.release_s for result in results if result.verdict.release_s is not None)
    if not times:
        return f"| {name} | 0 | | | |"
    most = times[max(0, math.ceil(0.99 * len(times)) - 1)]
    return f"| {name} | {len(times)} | {statistics.median(times):.2f} | {most:.2f} | {times[-1]:.2f} |"


def _row(kind: str, results: Sequence[Result]) -> str:
    verdicts = [result.verdict for result in results]
    late = [verdict.late_s for verdict in verdicts if verdict.late_s is not None]
    times = (f"{statistics.median(late):.2f}", f"{max(late):.2f}") if late else ("", "")
    counts = [
        len(results),
        sum(bool(verdict.hangs) for verdict in verdicts),
        sum(bool(verdict.wrong_blame) for verdict in verdicts),
        sum(bool(verdict.untyped) for verdict in verdicts),
        sum(verdict.unnoticed for verdict in verdicts),
        sum(bool(verdict.false_alarms) for verdict in verdicts),
        sum(bool(verdict.leaks) for verdict in verdicts),
    ]
    return f"| {' | '.join([kind, *map(str, counts), *times])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign from the command line.

    Args:
        arguments: By default those of the process.

    Returns:
        0 if every trial met the bar, else 1.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", type=int, help="play one trial and print everything")
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    chosen = parser.parse_args(arguments)
    if chosen.only is not None:
        (result,) = campaign(chosen.seed, [chosen.only])
        sys.stdout.write(describe(result))
        return 0 if result.verdict.is_good else 1
    start = time.monotonic()
    last = chosen.first + chosen.trials
    results: list[Result] = []
    for first in range(chosen.first, last, _CHUNK):
        results += campaign(chosen.seed, range(first, min(first + _CHUNK, last)), is_loud=True)
        text = table(results, chosen.seed, time.monotonic() - start)
        if chosen.write:
            chosen.write.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0 if all(result.verdict.is_good for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
